//! What an initiator keeps until it is flushed: rule 7 of `docs/formats/wire.md`.

use std::collections::{HashMap, VecDeque};
use std::ops::{Range, RangeInclusive};

use crate::operation::Operation;
use crate::pages::Run;

/// Size of a region of the device, log2.
const REGION_LOG2: u32 = 20;

/// A change that completed, and is not known to be durable.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub operation: Operation,
    /// Bytes of a write.
    pub run: Option<Run>,
}

/// Changes in the order of their completion. Of overlapping changes, the later one completed after the earlier one had, because the
/// initiator does not run them at the same time.
#[derive(Debug, Default)]
pub(crate) struct Log {
    kept: VecDeque<Kept>,
    /// Number of the first one in `kept`. Numbers count from 0 over the log's life.
    first: u64,
    /// Pages of all bytes.
    pages: u32,
    /// Region of the device -> number of changes that touch it.
    regions: HashMap<u64, u32>,
}

impl Log {
    /// Returns whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Returns the number of pages with bytes.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Returns the number of the first change and the number after the last one.
    pub fn numbers(&self) -> Range<u64> {
        self.first..self.first + self.kept.len() as u64
    }

    /// Returns a change by its number.
    pub fn get(&self, number: u64) -> Option<&Kept> {
        let at = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.kept.get(at)
    }

    /// Adds a change.
    pub fn push(&mut self, kept: Kept) {
        self.pages += kept.run.map_or(0, |run| run.pages);
        for region in regions(&kept.operation.range()) {
            *self.regions.entry(region).or_default() += 1;
        }
        self.kept.push_back(kept);
    }

    /// Returns whether a change may overlap a range: it touches the same region.
    pub fn may_overlap(&self, range: &Range<u64>) -> bool {
        !self.kept.is_empty() && regions(range).any(|region| self.regions.contains_key(&region))
    }

    /// Removes all changes below a number, and returns their pages.
    pub fn remove_below(&mut self, number: u64) -> Vec<Run> {
        let count = number.saturating_sub(self.first);
        let count = usize::try_from(count).map_or(self.kept.len(), |n| n.min(self.kept.len()));
        self.first += count as u64;
        let mut runs = Vec::new();
        for kept in self.kept.drain(..count) {
            for region in regions(&kept.operation.range()) {
                if let Some(touching) = self.regions.get_mut(&region) {
                    *touching -= 1;
                    if *touching == 0 {
                        self.regions.remove(&region);
                    }
                }
            }
            runs.extend(kept.run);
        }
        self.pages -= runs.iter().map(|run| run.pages).sum::<u32>();
        runs
    }
}

/// Returns the regions that a range touches. The range is not empty.
fn regions(range: &Range<u64>) -> RangeInclusive<u64> {
    range.start >> REGION_LOG2..=range.end.saturating_sub(1) >> REGION_LOG2
}
