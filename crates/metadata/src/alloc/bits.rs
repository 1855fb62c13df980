//! The bitmap of one container in memory. The allocator does not hand out blocks whose bit is set.

/// Bits of a container.
pub(super) struct Bits {
    words: Box<[u64]>,
    /// Start of the next search (next fit): the block after the last one handed out.
    next: usize,
    /// Blocks that were freed and not lent since, also those that were allocated again. `None` if there are none.
    freed: Option<Box<[u64]>>,
    /// The container is queued to be searched for freed blocks.
    pub(super) is_queued: bool,
}

impl Bits {
    /// Creates the bitmap from the words of the stored one. All-zero words mean that all blocks are free.
    pub(super) fn new(words: Box<[u64]>) -> Bits {
        Bits {
            words,
            next: 0,
            freed: None,
            is_queued: false,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.words.len() * 64
    }

    /// Returns the number of clear bits.
    pub(super) fn free(&self) -> u32 {
        self.words.iter().map(|w| w.count_zeros()).sum()
    }

    fn for_each_mask(first: usize, count: usize, mut each: impl FnMut(usize, u64)) {
        let (mut bit, end) = (first, first + count);
        while bit < end {
            let n = (64 - bit % 64).min(end - bit);
            let mask = if n == 64 {
                u64::MAX
            } else {
                ((1 << n) - 1) << (bit % 64)
            };
            each(bit / 64, mask);
            bit += n;
        }
    }

    /// Sets bits. Returns how many were clear.
    pub(super) fn set(&mut self, first: usize, count: usize) -> u32 {
        let mut changed = 0;
        Self::for_each_mask(first, count, |word, mask| {
            changed += (!self.words[word] & mask).count_ones();
            self.words[word] |= mask;
        });
        changed
    }

    /// Clears bits. Returns how many were set.
    pub(super) fn clear(&mut self, first: usize, count: usize) -> u32 {
        let mut changed = 0;
        Self::for_each_mask(first, count, |word, mask| {
            changed += (self.words[word] & mask).count_ones();
            self.words[word] &= !mask;
        });
        changed
    }

    /// Records that blocks were freed. Returns whether the caller must queue the container: false if it is queued already.
    pub(super) fn note_freed(&mut self, first: usize, count: usize) -> bool {
        let words = self.words.len();
        let freed = self.freed.get_or_insert_with(|| vec![0; words].into());
        Self::for_each_mask(first, count, |word, mask| freed[word] |= mask);
        !std::mem::replace(&mut self.is_queued, true)
    }

    /// Returns the first run of at least `least` free blocks at or after `from`, as (first, count). With `freed`,
    /// considers only blocks that were freed and not lent since.
    pub(super) fn free_run(
        &self,
        from: usize,
        freed: bool,
        least: usize,
    ) -> Option<(usize, usize)> {
        let is_wanted = |word: usize| {
            let of_those = match (&self.freed, freed) {
                (Some(freed), true) => freed[word],
                (None, true) => 0,
                (_, false) => u64::MAX,
            };
            !self.words[word] & of_those
        };
        let mut at = from;
        loop {
            let first = self.find_in(at, is_wanted);
            if first == self.len() {
                return None;
            }
            let end = self.find_in(first, |word| !is_wanted(word));
            if end - first >= least {
                return Some((first, end - first));
            }
            at = end;
        }
    }

    /// Takes free blocks for a loan. Does not move the position of the next search.
    pub(super) fn lend(&mut self, first: usize, count: usize) {
        self.set(first, count);
        if let Some(freed) = &mut self.freed {
            Self::for_each_mask(first, count, |word, mask| freed[word] &= !mask);
            if freed.iter().all(|word| *word == 0) {
                self.freed = None;
            }
        }
    }

    /// Returns the first clear bit (or, with `set`, the first set bit) at or after `from`, or `len` if there is none.
    fn find(&self, from: usize, set: bool) -> usize {
        let flip = if set { 0 } else { u64::MAX };
        self.find_in(from, |word| self.words[word] ^ flip)
    }

    /// Returns the first set bit at or after `from` in the words that `words` returns, or `len` when there is none.
    fn find_in(&self, from: usize, words: impl Fn(usize) -> u64) -> usize {
        let mut word = from / 64;
        if word >= self.words.len() {
            return self.len();
        }
        let mut bits = words(word) & (u64::MAX << (from % 64));
        while bits == 0 {
            word += 1;
            if word == self.words.len() {
                return self.len();
            }
            bits = words(word);
        }
        word * 64 + bits.trailing_zeros() as usize
    }

    /// Takes a run that starts exactly at `first`, of at most `want` blocks. Returns its length.
    pub(super) fn take_at(&mut self, first: usize, want: usize) -> usize {
        if first >= self.len() {
            return 0;
        }
        let count = self.find(first, true).min(first + want) - first;
        self.set(first, count);
        if count > 0 {
            self.next = first + count;
        }
        count
    }

    /// Takes the first run of `want` blocks after the previous allocation. If there is none, takes the longest run that has at
    /// least `least` blocks. Returns (first, count).
    pub(super) fn take(&mut self, want: usize, least: usize) -> Option<(usize, usize)> {
        let mut best: Option<(usize, usize)> = None;
        // Searches from `next` to the end, then from the start. A run that begins before `next` and ends after it is found in full
        // only by the second search.
        for (from, until) in [(self.next, self.len()), (0, self.next)] {
            let mut at = from;
            while at < until {
                let first = self.find(at, false);
                if first >= until {
                    break;
                }
                let count = self.find(first, true).min(first + want) - first;
                if best.is_none_or(|(_, c)| c < count) {
                    best = Some((first, count));
                }
                if count == want {
                    break;
                }
                at = first + count;
            }
            if best.is_some_and(|(_, count)| count == want) {
                break;
            }
        }
        let (first, count) = best.filter(|(_, count)| *count >= least)?;
        self.set(first, count);
        self.next = first + count;
        Some((first, count))
    }

    /// Takes the last run of exactly `want` blocks. Returns (first, count).
    pub(super) fn take_last(&mut self, want: usize) -> Option<(usize, usize)> {
        let (mut at, mut last) = (0, None);
        while at < self.len() {
            let first = self.find(at, false);
            let end = self.find(first, true);
            if first < end && end - first >= want {
                last = Some(end - want);
            }
            at = end;
        }
        let first = last?;
        self.set(first, want);
        Some((first, want))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_is_long_enough_is_preferred_and_the_longest_is_second_best() {
        let mut bits = Bits::new(vec![u64::MAX; 4].into());
        assert_eq!(bits.take(1, 1), None);
        bits.clear(3, 2);
        bits.clear(60, 10);
        bits.clear(200, 20);
        assert_eq!(bits.free(), 32);
        assert_eq!(bits.take(10, 1), Some((60, 10)));
        assert_eq!(bits.take(30, 1), Some((200, 20)));
        assert_eq!(bits.take(5, 3), None);
        assert_eq!(bits.take(5, 1), Some((3, 2)));
        assert_eq!(bits.free(), 0);
    }

    #[test]
    fn only_freed_blocks_that_are_still_free_are_found_as_freed() {
        let mut bits = Bits::new(vec![0; 4].into());
        assert_eq!(bits.take(150, 1), Some((0, 150)));
        assert_eq!(bits.free_run(0, true, 1), None);
        bits.clear(10, 100);
        assert!(bits.note_freed(10, 100) && !bits.note_freed(10, 100));
        assert_eq!(bits.free_run(0, true, 1), Some((10, 100)));
        assert_eq!(bits.free_run(0, true, 101), None);
        assert_eq!(bits.free_run(0, false, 101), Some((150, 106)));
        assert_eq!(bits.take_at(50, 1), 1);
        assert_eq!(bits.free_run(0, true, 50), Some((51, 59)));
        bits.lend(51, 59);
        bits.lend(10, 40);
        assert_eq!(bits.free_run(0, true, 1), None);
        // The block was allocated after it was freed. The mark stays until it is free again.
        assert_eq!(bits.clear(50, 1), 1);
        assert_eq!(bits.free_run(0, true, 1), Some((50, 1)));
        bits.lend(50, 1);
        assert!(bits.freed.is_none());
    }

    #[test]
    fn a_run_is_continued_where_it_ended() {
        let mut bits = Bits::new(vec![0; 2].into());
        assert_eq!(bits.take_at(10, 5), 5);
        assert_eq!(bits.take_at(8, 5), 2);
        assert_eq!(bits.take_at(10, 5), 0);
        assert_eq!(bits.take_at(120, 50), 8);
        assert_eq!(bits.take_at(128, 1), 0);
        assert_eq!(bits.clear(8, 7), 7);
    }
}
