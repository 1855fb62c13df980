//! How far spill ranges have been given back. See `ranges` for the steps.

use std::time::{Duration, Instant};

use foldhash::HashMap;
use jericho_shm::SPILL_FRAMES;

/// Time between two searches of the whole table for pages in the same ranges. The first search finds all pages, because no page enters a leaving
/// range. Only a client that changes the table makes a second one necessary.
const SEARCH_PERIOD: Duration = Duration::from_secs(1);

/// Spill ranges that are given back, and how far their pages have left. Only the thread that gives them back locks it.
#[derive(Default)]
pub(crate) struct GivingBack {
    /// The leaving ranges.
    pub ranges: HashMap<u32, Partly>,
    /// The entry where the search of the table goes on. The search goes round the table, until it has been once round for each leaving range.
    pub next: u32,
    /// When the last search for the pages of a range ended.
    pub searched: Option<Instant>,
    /// Entries that were found and are to be visited, without a pause.
    pub unvisited: Vec<u32>,
    /// Entries whose pages could not leave at the last visit: they are in use, or have no other frame to go to.
    pub left_behind: Vec<u32>,
    /// The last attempt to free memory failed. The log tells only the first failure in a row.
    pub has_failed: bool,
}

/// How far a leaving range has been searched for, and what of it has lost its memory.
#[derive(Default)]
pub(crate) struct Partly {
    /// The entry where the search for its pages began; `None` after its end.
    pub from: Option<u32>,
    /// How many frames were used when others last lost their memory; `None` before the first time.
    pub used: Option<u32>,
    /// Frames that have lost it, counted from the first of the range.
    pub released: [u64; SPILL_FRAMES as usize / 64],
}

impl Partly {
    /// Returns whether a frame has not lost its memory yet, and notes that it does now.
    pub fn lose(&mut self, at: u32) -> bool {
        let (word, bit) = (&mut self.released[at as usize / 64], 1 << (at % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    /// Returns whether a frame has lost its memory.
    pub fn has_lost(&self, at: u32) -> bool {
        self.released[at as usize / 64] & 1 << (at % 64) != 0
    }

    /// Returns how many frames have lost their memory.
    pub fn lost_frames(&self) -> u64 {
        self.released
            .iter()
            .map(|word| u64::from(word.count_ones()))
            .sum()
    }
}

impl GivingBack {
    /// Adds a range that begins to leave. The search for its pages begins where the search for those of other ranges goes on. So a range that leaves
    /// delays no other one.
    pub fn begin(&mut self, range: u32) {
        let from = Some(self.next);
        let partly = Partly {
            from,
            ..Partly::default()
        };
        self.ranges.insert(range, partly);
    }

    /// Begins another search for the pages of all ranges.
    pub fn search_again(&mut self) {
        for partly in self.ranges.values_mut() {
            partly.from = Some(self.next);
        }
    }

    /// Returns whether the search for the pages of a range goes on.
    pub fn is_searched_for(&self, range: u32) -> bool {
        let partly = self.ranges.get(&range);
        partly.is_some_and(|partly| partly.from.is_some())
    }

    /// Returns whether the search goes on.
    pub fn is_searching(&self) -> bool {
        self.ranges.values().any(|partly| partly.from.is_some())
    }

    /// Notes that the search has come to the entry `next`. Returns whether it has been once round for a range.
    pub fn advance(&mut self, next: u32) -> bool {
        self.next = next;
        let mut has_ended = false;
        for partly in self.ranges.values_mut() {
            if partly.from == Some(next) {
                partly.from = None;
                has_ended = true;
            }
        }
        if has_ended {
            self.searched = Some(Instant::now());
        }
        has_ended
    }

    /// Has the entries that were left behind visited again, each once.
    pub fn visit_left_behind(&mut self) {
        let mut left_behind = std::mem::take(&mut self.left_behind);
        left_behind.sort_unstable();
        left_behind.dedup();
        self.unvisited.extend(left_behind);
    }

    /// Returns whether all pages that were found have left.
    pub fn have_all_left(&self) -> bool {
        self.unvisited.is_empty() && self.left_behind.is_empty()
    }

    /// Returns whether another search may begin.
    pub fn is_search_due(&self) -> bool {
        self.searched
            .is_none_or(|searched| searched.elapsed() >= SEARCH_PERIOD)
    }
}
