//! The range lock of a slot, as threads of the daemon take it: for writes over several pages, and for reads that writers
//! interrupt repeatedly.

use std::sync::atomic::{AtomicU32, Ordering};

use jericho_cache::OWNER_DAEMON;
use jericho_shm::{Holding, Kept, RangeCounts, RangeTaken, Segments, Slot, WORDS};

/// Number of times a read restarts because a write over several pages interfered, before the read locks writers out.
const READ_TRIES: u32 = 3;

/// Records which words of a slot's range lock threads of the daemon hold. The words alone cannot tell, because a client can
/// lock under the daemon's owner number.
#[derive(Debug)]
pub(crate) struct RangeHolders([AtomicU32; WORDS]);

impl Default for RangeHolders {
    fn default() -> RangeHolders {
        RangeHolders([const { AtomicU32::new(0) }; WORDS])
    }
}

impl RangeHolders {
    /// Returns whether a thread of the daemon holds a word.
    pub fn has(&self, word: usize) -> bool {
        self.0[word].load(Ordering::Acquire) > 0
    }

    /// Takes the words that a write covers. Waits for words that other writes of the daemon hold. Borrows a word when `lends`
    /// says that a client lends it. Takes a word away from a client that has kept it too long, because no write may proceed
    /// without its words.
    pub fn lock(
        &self,
        slot: &Slot,
        segments: Segments,
        lends: impl FnMut(usize, Holding) -> bool,
    ) -> RangeTaken {
        let kept = |word| match self.has(word) {
            true => Kept::WaitOn,
            false => Kept::TakeAway,
        };
        slot.take_range_noted(segments, OWNER_DAEMON, lends, kept, |word| self.note(word))
    }

    /// Takes the words for a read, to lock writers out. May wait one second for a writer that was stopped. Takes only some of the
    /// words when a write of the daemon keeps one for that long.
    pub fn lock_out(
        &self,
        slot: &Slot,
        segments: Segments,
        lends: impl FnMut(usize, Holding) -> bool,
    ) -> RangeTaken {
        // A daemon thread that holds a word this long is waiting for a device, and perhaps for this thread.
        let kept = |word| match self.has(word) {
            true => Kept::GiveUp,
            false => Kept::TakeAway,
        };
        slot.take_range_noted(segments, OWNER_DAEMON, lends, kept, |word| self.note(word))
    }

    /// Records a word as soon as it is taken: another thread of the daemon that waits for the word must not take it away while
    /// its holder waits for the next one.
    pub fn note(&self, word: usize) {
        self.0[word].fetch_add(1, Ordering::AcqRel);
    }

    /// Releases what `lock` and `lock_out` took. Any thread may call it. `is_lent` tells whether a client still lends a word.
    pub fn unlock(
        &self,
        slot: &Slot,
        taken: &RangeTaken,
        is_lent: impl FnMut(usize, Holding) -> bool,
    ) {
        slot.give_range_back(taken, is_lent);
        // Runs last: a waiter must not take away a word that is about to be given back to its lender.
        for word in taken.held().segments().words() {
            self.0[word].fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Repeats `read` until no write over several pages interferes with it. The returned counts tell whether that still holds for
    /// bytes that are read later. Returns `None` when writers interfered every time or hold the words. Never waits.
    pub fn try_read_whole<T>(
        &self,
        slot: &Slot,
        segments: Segments,
        mut read: impl FnMut() -> T,
    ) -> Option<(T, RangeCounts)> {
        for _ in 0..READ_TRIES {
            let Some(counts) = slot.range_counts(segments) else {
                std::thread::yield_now();
                continue;
            };
            let result = read();
            if slot.has_range_counts(&counts) {
                return Some((result, counts));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use jericho_shm::Slots;

    use super::*;

    #[test]
    fn the_daemon_waits_for_its_own_writes_and_not_for_a_client_that_uses_its_owner_number() {
        let slots = Slots::create("test", 1).unwrap();
        let slot = slots.slot(0).unwrap();
        let (holders, segments) = (RangeHolders::default(), Segments::of(0, 1 << 17));
        let none = |_, _| false;
        let own = holders.lock(slot, segments, none);
        let other = std::thread::scope(|scope| {
            let waiter = scope.spawn(|| holders.lock(slot, segments, none));
            std::thread::sleep(jericho_shm::HELD_MAX * 3 / 2);
            assert!(!waiter.is_finished(), "two writes at once");
            assert!(slot.holds(own.held(), 0));
            holders.unlock(slot, &own, none);
            waiter.join().unwrap()
        });
        holders.unlock(slot, &other, none);
        let malicious = slot.lock_range(segments, OWNER_DAEMON).unwrap();
        let held = holders.lock(slot, segments, none);
        assert!(!slot.holds(&malicious, 0));
        holders.unlock(slot, &held, none);
    }

    #[test]
    fn a_word_of_a_daemons_write_that_waits_for_another_word_is_not_taken_away() {
        let slots = Slots::create("test", 1).unwrap();
        let slot = slots.slot(0).unwrap();
        let holders = RangeHolders::default();
        let (none, first) = (|_, _| false, Segments::of(0, 1 << 16));
        // A write that waits for a device, for example, keeps the second word.
        let second = holders.lock(slot, Segments::of(1 << 16, 1 << 16), none);
        std::thread::scope(|scope| {
            let both = scope.spawn(|| holders.lock(slot, Segments::of(0, 1 << 17), none));
            while !slot.has_range_of(first, OWNER_DAEMON) {
                std::thread::yield_now();
            }
            let other = scope.spawn(|| holders.lock(slot, first, none));
            std::thread::sleep(jericho_shm::HELD_MAX * 3 / 2);
            let taken_away = other.is_finished();
            holders.unlock(slot, &second, none);
            let both = both.join().unwrap();
            let is_held = slot.holds(both.held(), 0);
            holders.unlock(slot, &both, none);
            holders.unlock(slot, &other.join().unwrap(), none);
            assert!(!taken_away && is_held, "two writes have the first word");
        });
        assert!((0..WORDS).all(|word| !holders.has(word)));
    }

    #[test]
    fn a_read_among_writers_that_never_pause_ends() {
        let slots = Slots::create("test", 1).unwrap();
        let slot = slots.slot(0).unwrap();
        let (holders, segments) = (RangeHolders::default(), Segments::of(0, 1 << 17));
        let (first, second) = (AtomicU32::new(0), AtomicU32::new(0));
        let stop = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for owner in [7, 8] {
                let (first, second, stop) = (&first, &second, &stop);
                scope.spawn(move || {
                    while stop.load(Ordering::Relaxed) == 0 {
                        let held = slot
                            .lock_range(segments, owner)
                            .expect("no writer keeps it");
                        let n = first.load(Ordering::Relaxed) + 1;
                        first.store(n, Ordering::Relaxed);
                        std::hint::black_box((0..100).sum::<u32>());
                        second.store(n, Ordering::Relaxed);
                        slot.unlock_range(&held);
                    }
                });
            }
            for _ in 0..2000 {
                let read = || {
                    (
                        first.load(Ordering::Acquire),
                        second.load(Ordering::Acquire),
                    )
                };
                let seen = holders.try_read_whole(slot, segments, read);
                let alone = || {
                    let none = |_, _| false;
                    let taken = holders.lock_out(slot, segments, none);
                    assert!(
                        taken.is_all() && !taken.has_borrowed(),
                        "no other thread of the daemon takes a word, and no client lends one"
                    );
                    let seen = read();
                    holders.unlock(slot, &taken, none);
                    seen
                };
                let (a, b) = seen.map_or_else(alone, |(seen, _)| seen);
                assert_eq!(a, b, "half of a write");
            }
            stop.store(1, Ordering::Relaxed);
        });
    }
}
