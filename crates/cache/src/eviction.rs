//! Eviction: which pages leave the cache when frames are needed.
//!
//! The choice (`AgedSweep`) and its execution (`evict`) are apart. The choice sees the table through `Residents`: which entries
//! hold clean pages that no thread uses, their reference ages, and the current epoch. It names entries. The execution removes
//! each named page under the slice's lock, unless the page was used or changed since the choice.
//!
//! Replacement is LRU with coarse ages: the policy samples ages, derives a threshold from the sample, and names clean pages of
//! at least that age in a sweep.

use std::sync::atomic::Ordering::Relaxed;

use jericho_shm::{Flags, SliceMemory, State as Word};

use crate::context::SliceContext;
use crate::effects::Effects;
use crate::get;
use crate::state::SliceState;

/// Entries visited for one sample of ages, and in one step of the sweep.
const SAMPLE: u32 = 512;
/// Maximum number of pages evicted in one critical section.
pub(crate) const EVICTED_AT_ONCE: usize = 32;
/// Older entries are set back to this age, before their age wraps around to a young one.
const AGE_MAX: u8 = 200;

/// A page chosen for eviction: its entry, and the state in which the choice saw it.
pub(crate) type Victim = (u32, Word);

/// What a choice sees of the table. It needs no lock.
pub(crate) struct Residents<'a>(&'a SliceMemory);

impl<'a> Residents<'a> {
    pub fn new(memory: &'a SliceMemory) -> Residents<'a> {
        Residents(memory)
    }

    /// Returns the number of entries of the table.
    pub fn entries(&self) -> u32 {
        self.0.geometry().entries()
    }

    /// Returns the current epoch.
    pub fn epoch(&self) -> u8 {
        self.0.epoch()
    }

    /// Returns the state of an entry whose page is clean and in no thread's hands.
    pub fn idle(&self, entry: u32) -> Option<Word> {
        let word = self.0.entry(entry).state();
        let busy = Flags::DIRTY.with(Flags::LATCH).with(Flags::WRITE_BACK);
        (word.has(Flags::VALID) && !word.any(busy)).then_some(word)
    }

    /// Returns the number of epochs since the last use of an entry's page.
    pub fn age(&self, entry: u32, epoch: u8) -> u8 {
        self.0.age(entry, epoch)
    }

    /// Limits the age of an entry.
    fn limit_age(&self, entry: u32, epoch: u8) {
        self.0.set_age(entry, epoch, AGE_MAX);
    }
}

/// The policy: a sweep over the table that names pages of at least a sampled age.
#[derive(Default)]
pub(crate) struct AgedSweep {
    /// Entry where the sweep continues.
    hand: u32,
    /// Entry where the next sample begins.
    sample: u32,
    /// Minimum age of the pages that this round names.
    age_min: u8,
    /// Entries visited in this round since `age_min` was set.
    visited: u32,
}

impl AgedSweep {
    /// Begins a round that is to name `wanted` of the slice's `resident` pages.
    pub fn begin(&mut self, residents: &Residents, wanted: u32, resident: u32) {
        // Chooses the threshold so that a sweep of a quarter of the table finds enough pages.
        let of_256 = (u64::from(wanted) * 4 * 256 / u64::from(resident.max(1))).min(256);
        self.age_min = self.sampled_age(residents, of_256 as u32);
        self.visited = 0;
    }

    /// Appends pages to evict, until `victims` has `EVICTED_AT_ONCE` or enough entries were visited for one call. Returns false
    /// when the round has visited the whole table and named every page that it could.
    pub fn choose(&mut self, residents: &Residents, victims: &mut Vec<Victim>) -> bool {
        let (entries, epoch) = (residents.entries(), residents.epoch());
        for _ in 0..SAMPLE {
            let index = self.hand;
            self.hand = if index + 1 == entries { 0 } else { index + 1 };
            self.visited += 1;
            let Some(word) = residents.idle(index) else {
                continue;
            };
            let age = residents.age(index, epoch);
            if age >= self.age_min {
                victims.push((index, word));
                if victims.len() == EVICTED_AT_ONCE {
                    break;
                }
            } else if age > AGE_MAX {
                residents.limit_age(index, epoch);
            }
        }
        if self.visited < entries {
            return true;
        }
        // The second sweep of a round names pages of any age.
        let is_first = self.age_min > 0;
        (self.age_min, self.visited) = (0, 0);
        is_first
    }

    /// Returns the minimum age of the oldest `of_256` of every 256 clean pages, estimated from a sample.
    fn sampled_age(&mut self, residents: &Residents, of_256: u32) -> u8 {
        let (entries, epoch) = (residents.entries(), residents.epoch());
        let mut ages = Vec::with_capacity(SAMPLE as usize);
        // A large odd stride visits distant lines. The table has many times more entries than the sample.
        for _ in 0..SAMPLE {
            self.sample = ((u64::from(self.sample) + 10_007) % u64::from(entries)) as u32;
            if residents.idle(self.sample).is_some() {
                ages.push(residents.age(self.sample, epoch));
            }
        }
        ages.sort_unstable_by(|a, b| b.cmp(a));
        let at = (ages.len() * of_256 as usize / 256).min(ages.len().saturating_sub(1));
        ages.get(at).copied().unwrap_or(0)
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
