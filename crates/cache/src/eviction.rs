//! Eviction: removes the pages that the replacement kind has named.
//!
//! The choice (`replacement`) and its execution (`evict`) are apart. The choice sees the slice's table as `Residents` and names
//! entries in the states that it saw. It needs no lock, because `AgedSweep` keeps no records of entries. The execution removes
//! each named page under the slice's lock, unless the page was changed since the choice or the slice holds it.

use std::sync::atomic::Ordering::Relaxed;

use jericho_shm::{Flags, PageState as Word, SliceMemory};

use crate::context::SliceContext;
use crate::effects::Effects;
use crate::get;
use crate::replacement::Residents;
use crate::state::SliceState;

/// Epochs that a page in a spill range counts as older than it is, so that it leaves before a page on the home node that is nearly as old.
const SPILLED_AGE: u8 = 2;

/// A page chosen for eviction: its entry, and the state in which the choice saw it.
pub(crate) type Victim = (u32, Word);

impl Residents for SliceMemory {
    type Seen = Word;

    fn entries(&self) -> u32 {
        self.geometry().entries()
    }

    fn epoch(&self) -> u8 {
        SliceMemory::epoch(self)
    }

    fn idle(&self, entry: u32) -> Option<Word> {
        let word = self.entry(entry).state();
        let busy = Flags::DIRTY.with(Flags::LATCH).with(Flags::WRITE_BACK);
        (word.has(Flags::VALID) && !word.any(busy)).then_some(word)
    }

    fn last_use(&self, entry: u32) -> u8 {
        let last = SliceMemory::last_use(self, entry);
        match self.is_spilled(self.entry(entry).state().frame()) {
            true => last.wrapping_sub(SPILLED_AGE),
            false => last,
        }
    }

    fn set_last_use(&self, entry: u32, epoch: u8) {
        SliceMemory::set_last_use(self, entry, epoch);
    }
}

/// Removes the chosen pages whose state is unchanged and which the slice does not hold. Lets stalled Gets continue. Returns how
/// many frames are free then.
pub(crate) fn evict(
    state: &mut SliceState,
    context: &SliceContext,
    victims: &mut Vec<Victim>,
    effects: &mut Effects,
) -> u32 {
    for (index, word) in victims.drain(..) {
        if !state.is_held(index) && state.remove(context, index, word) {
            context.counts.evictions.fetch_add(1, Relaxed);
        }
    }
    let free = state.frames.free();
    if !state.stalled.is_empty() {
        get::retry_stalled(state, context, effects);
    }
    state.frames.free().min(free)
}
