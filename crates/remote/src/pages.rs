//! Runs of neighbouring pages of a pool.

use std::collections::BTreeMap;
use std::ops::Range;

use jericho_format::PAGE_BYTES;

/// Neighbouring pages of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First page.
    pub page: u32,
    /// Number of pages.
    pub pages: u32,
}

impl Run {
    /// Returns the offset of the run in the pool.
    pub fn offset_bytes(&self) -> u64 {
        u64::from(self.page) * PAGE_BYTES
    }

    /// Returns the bytes of the run in the pool.
    pub fn bytes(&self) -> Range<usize> {
        let first = self.offset_bytes() as usize;
        first..first + self.pages as usize * PAGE_BYTES as usize
    }
}

/// The pages of a pool that are free.
#[derive(Debug)]
pub(crate) struct Pages {
    /// First page of each free run -> its length. Free runs are never neighbours.
    free: BTreeMap<u32, u32>,
}

impl Pages {
    /// Returns a pool of free pages.
    pub fn new(pages: u32) -> Pages {
        Pages {
            free: (pages > 0).then_some((0, pages)).into_iter().collect(),
        }
    }

    /// Takes the first run that is long enough. Returns `None` if there is none. A run of no pages always succeeds.
    pub fn take(&mut self, pages: u32) -> Option<Run> {
        if pages == 0 {
            return Some(Run { page: 0, pages });
        }
        let (&page, &length) = self.free.iter().find(|&(_, &length)| length >= pages)?;
        self.free.remove(&page);
        if length > pages {
            self.free.insert(page + pages, length - pages);
        }
        Some(Run { page, pages })
    }

    /// Gives a run back, which `take` returned.
    pub fn give_back(&mut self, run: Run) {
        if run.pages == 0 {
            return;
        }
        let Run {
            mut page,
            mut pages,
        } = run;
        if let Some((&before, &length)) = self.free.range(..page).next_back()
            && before + length == page
        {
            self.free.remove(&before);
            (page, pages) = (before, length + pages);
        }
        if let Some(length) = self.free.remove(&(page + pages)) {
            pages += length;
        }
        self.free.insert(page, pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_do_not_overlap_and_all_pages_come_back() {
        let mut pages = Pages::new(100);
        let mut taken: Vec<Run> = Vec::new();
        for round in 0..5000_u32 {
            let wanted = round * 7 % 13;
            match pages.take(wanted) {
                Some(run) => {
                    let end = run.page + run.pages;
                    assert!(end <= 100);
                    let is_apart =
                        |other: &Run| end <= other.page || other.page + other.pages <= run.page;
                    assert!(run.pages == 0 || taken.iter().all(is_apart));
                    taken.push(run);
                }
                None => pages.give_back(taken.remove(round as usize % taken.len())),
            }
        }
        taken.into_iter().for_each(|run| pages.give_back(run));
        let all = Run {
            page: 0,
            pages: 100,
        };
        assert_eq!(pages.take(100), Some(all));
    }
}
