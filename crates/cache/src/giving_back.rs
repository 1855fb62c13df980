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
    /// The entry where the search of the table goes on; `None` after its end.
    pub next: Option<u32>,
    /// When the last search ended.
    pub searched: Option<Instant>,
    /// Entries that were found and are to be visited, without a pause.
    pub unvisited: Vec<u32>,
    /// Entries whose pages could not leave at the last visit: they are in use, or have no other frame to go to.
    pub left_behind: Vec<u32>,
    /// The last attempt to free memory failed. The log tells only the first failure in a row.
    pub has_failed: bool,
}

/// What of a leaving range has lost its memory.
#[derive(Default)]
pub(crate) struct Partly {
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
