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

    /// Takes the first run that is long enough, within `near` if there is one. Returns `None` if there is none at all. A run of no pages always
    /// succeeds.
    pub fn take(&mut self, pages: u32, near: Range<u32>) -> Option<Run> {
        if pages == 0 {
            return Some(Run { page: 0, pages });
        }
        let within = |near: &Range<u32>, page: u32, length: u32| {
            let start = page.max(near.start);
            let end = (page + length).min(near.end);
            (start <= end && end - start >= pages).then_some(start)
        };
        let mut runs = self.free.iter().map(|(&page, &length)| (page, length));
        let mut find = |range: &Range<u32>| {
            runs.find_map(|(page, length)| Some((page, length, within(range, page, length)?)))
        };
        let found = find(&near);
        let (page, length, start) = match found {
            Some(found) => found,
            None => {
                let mut runs = self.free.iter().map(|(&page, &length)| (page, length));
                let (page, length) = runs.find(|&(_, length)| length >= pages)?;
                (page, length, page)
            }
        };
        self.free.remove(&page);
        if start > page {
            self.free.insert(page, start - page);
        }
        let (end, run_end) = (page + length, start + pages);
        if end > run_end {
            self.free.insert(run_end, end - run_end);
        }
        Some(Run { page: start, pages })
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
            let near = round % 60..round % 60 + 40;
            match pages.take(wanted, near) {
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
        assert_eq!(pages.take(100, 0..0), Some(all));
    }

    #[test]
    fn a_run_is_near_if_there_is_room_there() {
        let mut pages = Pages::new(100);
        let mut page = |count| pages.take(count, 50..100).map(|run| run.page);
        assert_eq!(page(30), Some(50));
        assert_eq!(page(30), Some(0));
        assert_eq!(page(20), Some(80));
        assert_eq!((page(20), page(1)), (Some(30), None));
    }
}
