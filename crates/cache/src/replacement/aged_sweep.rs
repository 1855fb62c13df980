//! LRU with coarse ages: samples ages, derives a threshold from the sample, and names clean pages of at least that age in a sweep.

use jericho_shm::Key;

use super::kind::{Replacement, Residents, VICTIMS_AT_ONCE, VISITED_AT_ONCE};

/// Entries visited for one sample of ages.
const SAMPLE: u32 = 512;
/// Older entries are set back to this age, before their age wraps around to a young one.
const AGE_MAX: u8 = 200;

/// A sweep over the table that names pages of at least a sampled age. It needs no memory for each page.
#[derive(Default)]
pub struct AgedSweep {
    /// Entry where the sweep continues.
    hand: u32,
    /// Entry where the next sample begins.
    sample: u32,
    /// Minimum age of the pages that this round names.
    age_min: u8,
    /// Entries visited in this round since `age_min` was set.
    visited: u32,
}

impl<R: Residents> Replacement<R> for AgedSweep {
    fn filled(&mut self, _: &R, _: u32, _: Key) {}

    fn removed(&mut self, _: u32, _: Key, _: bool) {}

    fn begin(&mut self, residents: &R, wanted: u32, resident: u32) {
        // Chooses the threshold so that a sweep of a quarter of the table finds enough pages.
        let of_256 = (u64::from(wanted) * 4 * 256 / u64::from(resident.max(1))).min(256);
        self.age_min = self.sampled_age(residents, of_256 as u32);
        self.visited = 0;
    }

    fn choose(&mut self, residents: &R, victims: &mut Vec<(u32, R::Seen)>) -> bool {
        let (entries, epoch) = (residents.entries(), residents.epoch());
        for _ in 0..VISITED_AT_ONCE {
            let index = self.hand;
            self.hand = if index + 1 == entries { 0 } else { index + 1 };
            self.visited += 1;
            let Some(seen) = residents.idle(index) else {
                continue;
            };
            let age = epoch.wrapping_sub(residents.last_use(index));
            if age >= self.age_min {
                victims.push((index, seen));
                if victims.len() == VICTIMS_AT_ONCE {
                    break;
                }
            } else if age > AGE_MAX {
                residents.set_last_use(index, epoch.wrapping_sub(AGE_MAX));
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
}

impl AgedSweep {
    /// Estimates from a sample the age that about `of_256` of every 256 clean pages have reached.
    fn sampled_age(&mut self, residents: &impl Residents, of_256: u32) -> u8 {
        let (entries, epoch) = (residents.entries(), residents.epoch());
        let mut ages = Vec::with_capacity(SAMPLE as usize);
        // A large odd stride visits distant lines. The table has many times more entries than the sample.
        for _ in 0..SAMPLE {
            self.sample = ((u64::from(self.sample) + 10_007) % u64::from(entries)) as u32;
            if residents.idle(self.sample).is_some() {
                ages.push(epoch.wrapping_sub(residents.last_use(self.sample)));
            }
        }
        ages.sort_unstable_by(|a, b| b.cmp(a));
        let at = (ages.len() * of_256 as usize / 256).min(ages.len().saturating_sub(1));
        ages.get(at).copied().unwrap_or(0)
    }
}
