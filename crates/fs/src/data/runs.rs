//! Runs of consecutive pages that share a state, ordered by page and without overlaps.

use std::collections::BTreeMap;
use std::ops::Range;

/// The state of a run.
pub trait Step: Copy {
    /// Returns the state of the page that is `pages` pages after a page in this state.
    fn advance(self, pages: u64) -> Self;
    /// Returns whether the next page, in state `next`, belongs to the same run as a page in this state.
    fn joins(self, next: Self) -> bool;
}

/// A run: its first page, its number of pages, and the state of the first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run<S> {
    pub page: u64,
    pub count: u32,
    pub state: S,
}

impl<S> Run<S> {
    /// Returns the page after the last one.
    pub fn end(&self) -> u64 {
        self.page + u64::from(self.count)
    }
}

/// Pages and their states. A page in no run is a hole.
#[derive(Clone, Debug)]
pub struct Runs<S> {
    map: BTreeMap<u64, (u32, S)>,
    pages: u64,
}

impl<S> Default for Runs<S> {
    fn default() -> Self {
        Runs {
            map: BTreeMap::new(),
            pages: 0,
        }
    }
}

impl<S: Step> Runs<S> {
    /// Returns the number of pages that are not holes.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the whole run that holds the page.
    pub fn containing(&self, page: u64) -> Option<Run<S>> {
        let (&first, &(count, state)) = self.map.range(..=page).next_back()?;
        let run = Run {
            page: first,
            count,
            state,
        };
        (page < run.end()).then_some(run)
    }

    /// Returns the whole runs that end after `page`, in order.
    pub fn from(&self, page: u64) -> impl Iterator<Item = Run<S>> + '_ {
        let start = self.containing(page).map_or(page, |run| run.page);
        self.map
            .range(start..)
            .map(|(&page, &(count, state))| Run { page, count, state })
    }

    /// Returns the parts of runs within a range.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = Run<S>> + '_ {
        let Range { start, end } = range;
        self.from(start)
            .take_while(move |run| run.page < end)
            .map(move |run| clip(run, start, end))
    }

    /// Returns the holes within a range as (first page, number of pages).
    pub fn holes(&self, range: Range<u64>) -> Vec<(u64, u64)> {
        let mut holes = Vec::new();
        let mut at = range.start;
        for run in self.within(range.clone()) {
            if run.page > at {
                holes.push((at, run.page - at));
            }
            at = run.end();
        }
        if at < range.end {
            holes.push((at, range.end - at));
        }
        holes
    }

    /// Returns whether the range has no hole.
    pub fn covers(&self, range: Range<u64>) -> bool {
        let mut at = range.start;
        for run in self.from(range.start) {
            if at >= range.end || run.page > at {
                break;
            }
            at = run.end();
        }
        at >= range.end
    }

    /// Removes the pages of a range. Returns their runs, clipped to the range.
    pub fn remove(&mut self, range: Range<u64>) -> Vec<Run<S>> {
        if range.is_empty() {
            return Vec::new();
        }
        let whole: Vec<_> = self
            .from(range.start)
            .take_while(|r| r.page < range.end)
            .collect();
        let mut removed = Vec::with_capacity(whole.len());
        for run in whole {
            self.map.remove(&run.page);
            let inside = clip(run, range.start, range.end);
            self.pages -= u64::from(inside.count);
            removed.push(inside);
            if run.page < inside.page {
                let count = (inside.page - run.page) as u32;
                self.map.insert(run.page, (count, run.state));
            }
            if run.end() > inside.end() {
                let state = run.state.advance(inside.end() - run.page);
                self.map
                    .insert(inside.end(), ((run.end() - inside.end()) as u32, state));
            }
        }
        removed
    }

    /// Adds a run without joining it with its neighbours. The pages must be holes.
    pub fn insert_alone(&mut self, run: Run<S>) {
        debug_assert!(self.within(run.page..run.end()).next().is_none());
        if run.count > 0 {
            self.pages += u64::from(run.count);
            self.map.insert(run.page, (run.count, run.state));
        }
    }

    /// Adds a run and joins it with its neighbours. The pages must be holes.
    pub fn insert(&mut self, run: Run<S>) {
        if run.count == 0 {
            return;
        }
        debug_assert!(self.within(run.page..run.end()).next().is_none());
        self.pages += u64::from(run.count);
        let mut run = run;
        if let Some(before) = run
            .page
            .checked_sub(1)
            .and_then(|page| self.containing(page))
            && let Some(joined) = join(before, run)
        {
            run = joined;
        }
        if let Some(&(count, state)) = self.map.get(&run.end())
            && let Some(joined) = join(
                run,
                Run {
                    page: run.end(),
                    count,
                    state,
                },
            )
        {
            self.map.remove(&run.end());
            run = joined;
        }
        self.map.insert(run.page, (run.count, run.state));
    }

    /// Replaces the pages of the run's range with the run.
    pub fn set(&mut self, run: Run<S>) {
        self.remove(run.page..run.end());
        self.insert(run);
    }

    /// Returns the end of the last run, or 0 if there is none.
    pub fn end(&self) -> u64 {
        self.map
            .last_key_value()
            .map_or(0, |(page, (count, _))| page + u64::from(*count))
    }
}

fn clip<S: Step>(run: Run<S>, start: u64, end: u64) -> Run<S> {
    let page = run.page.max(start);
    let count = (run.end().min(end) - page) as u32;
    Run {
        page,
        count,
        state: run.state.advance(page - run.page),
    }
}

/// Joins two runs, if the second continues the first and the sum of their lengths fits.
pub fn join<S: Step>(a: Run<S>, b: Run<S>) -> Option<Run<S>> {
    let continues = a.end() == b.page && a.state.advance(u64::from(a.count)).joins(b.state);
    let count = a.count.checked_add(b.count).filter(|_| continues)?;
    Some(Run {
        page: a.page,
        count,
        state: a.state,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct At(u64);
    impl Step for At {
        fn advance(self, pages: u64) -> Self {
            At(self.0 + pages)
        }
        fn joins(self, next: Self) -> bool {
            self == next
        }
    }

    fn run(page: u64, count: u32, at: u64) -> Run<At> {
        Run {
            page,
            count,
            state: At(at),
        }
    }

    #[test]
    fn runs_that_continue_each_other_become_one() {
        let mut runs = Runs::default();
        runs.insert(run(0, 4, 100));
        runs.insert(run(8, 4, 108));
        runs.insert(run(4, 4, 104));
        assert_eq!(runs.from(0).collect::<Vec<_>>(), [run(0, 12, 100)]);
        assert_eq!(runs.pages(), 12);
    }

    #[test]
    fn taking_out_of_the_middle_leaves_both_ends_in_place() {
        let mut runs = Runs::default();
        runs.insert(run(10, 10, 100));
        assert_eq!(runs.remove(13..15), [run(13, 2, 103)]);
        assert_eq!(
            runs.from(0).collect::<Vec<_>>(),
            [run(10, 3, 100), run(15, 5, 105)]
        );
        assert_eq!(runs.holes(8..22), [(8, 2), (13, 2), (20, 2)]);
        assert!(runs.covers(15..20) && !runs.covers(12..16) && !runs.covers(19..21));
        assert_eq!(runs.pages(), 8);
    }
}
