//! A ghost queue: remembers the keys of the pages that left last, as hashes, without their bytes.
//!
//! The hashes are in a table of sets, so that there is nothing to unlink. A key is forgotten after `capacity` later keys (with
//! an error of a thirty-second of `capacity`), or earlier when its set is full.

use jericho_shm::Key;

/// Hashes in a set.
const WAYS: usize = 4;
/// The queue's clock ticks this many times while `capacity` keys enter.
pub(super) const TICKS: u32 = 32;

pub(super) struct Ghost {
    /// A word is 24 bits of a key's hash, then the tick at which the key entered; 0 is empty. A word that is not replaced for 256
    /// ticks looks young again. Its page then counts as one that left lately, which is harmless.
    words: Vec<u32>,
    tick: u8,
    /// Keys that enter until the next tick.
    left: u32,
    keys_per_tick: u32,
}

impl Ghost {
    /// Creates a queue of `capacity` keys. It takes five bytes for each.
    pub fn new(capacity: u32) -> Ghost {
        let sets = (capacity as usize * 5 / 4).div_ceil(WAYS).max(1);
        let keys_per_tick = capacity.div_ceil(TICKS).max(1);
        Ghost {
            words: vec![0; sets * WAYS],
            tick: 0,
            left: keys_per_tick,
            keys_per_tick,
        }
    }

    /// Adds a key.
    pub fn add(&mut self, key: Key) {
        let (set, tag) = self.place(key);
        let tick = self.tick;
        let age = |word: u32| match word {
            0 => 256,
            word if word >> 8 == tag => 257,
            word => u32::from(tick.wrapping_sub(word as u8)),
        };
        let words = &mut self.words[set..set + WAYS];
        if let Some(oldest) = words.iter_mut().max_by_key(|word| age(**word)) {
            *oldest = tag << 8 | u32::from(tick);
        }
        self.left -= 1;
        if self.left == 0 {
            (self.left, self.tick) = (self.keys_per_tick, tick.wrapping_add(1));
        }
    }

    /// Removes a key. Returns for how many ticks it was there.
    pub fn take(&mut self, key: Key) -> Option<u32> {
        let (set, tag) = self.place(key);
        let tick = self.tick;
        let words = &mut self.words[set..set + WAYS];
        let found = words.iter_mut().find(|word| **word >> 8 == tag)?;
        let age = u32::from(tick.wrapping_sub(std::mem::take(found) as u8));
        (age < TICKS).then_some(age)
    }

    /// Returns the bytes that the queue takes.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.words.len() * size_of::<u32>()
    }

    /// Returns the first word of a key's set, and the hash bits that its word keeps, which are not 0.
    fn place(&self, key: Key) -> (usize, u32) {
        let mut hash = key.object().rotate_left(40) ^ key.page();
        hash = (hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash = (hash ^ (hash >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash ^= hash >> 32;
        let sets = (self.words.len() / WAYS) as u64;
        let set = (((hash >> 32) * sets) >> 32) as usize * WAYS;
        (set, (hash as u32 >> 8).max(1))
    }
}

#[cfg(test)]
mod tests {
    use jericho_shm::Key;

    use super::Ghost;

    #[test]
    fn a_key_is_known_once_and_forgotten_after_as_many_others_as_the_queue_holds() {
        let mut ghost = Ghost::new(1000);
        let key = |n| Key::new(1 + n % 7, n);
        for n in 0..3000 {
            ghost.add(key(n));
        }
        let known = |ghost: &mut Ghost, pages: std::ops::Range<u64>| {
            pages.filter(|n| ghost.take(key(*n)).is_some()).count()
        };
        assert_eq!(known(&mut ghost, 0..1950), 0, "older than the capacity");
        // Some sets of four get five or more of the keys.
        assert_eq!(ghost.take(key(2999)), Some(0));
        let last = known(&mut ghost, 2200..3000);
        assert!(last > 700, "only {last} of the last 800 keys are known");
        assert_eq!(known(&mut ghost, 2200..3000), 0, "each was taken");
    }
}
