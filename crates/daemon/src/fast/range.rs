//! The range lock of a slot as threads of the daemon take it: for writes over several pages, and for reads that writers keep
//! interrupting.

use std::sync::atomic::{AtomicU32, Ordering};

use jericho_cache::OWNER_DAEMON;
use jericho_shm::{Kept, RangeHeld, Segments, Slot, Turns, WORDS};

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
    fn has(&self, word: usize) -> bool {
        self.0[word].load(Ordering::Acquire) > 0
    }

    /// Takes the words that a write covers. Waits for words that other writes of the daemon hold. Takes a word away from a client that
    /// has kept it too long, because no write may proceed without its words.
    pub fn lock(&self, slot: &Slot, segments: Segments) -> RangeHeld {
        let kept = |word| match self.has(word) {
            true => Kept::WaitOn,
            false => Kept::TakeAway,
        };
        let held = slot.lock_range_or(segments, OWNER_DAEMON, kept);
        let held = held.expect("only a waiter that gives up gets none");
        for word in held.segments().words() {
            self.0[word].fetch_add(1, Ordering::AcqRel);
        }
        held
    }

    /// Releases what `lock` took. Any thread may call it.
    pub fn unlock(&self, slot: &Slot, held: &RangeHeld) {
        for word in held.segments().words() {
            self.0[word].fetch_sub(1, Ordering::AcqRel);
        }
        slot.unlock_range(held);
    }

    /// Calls `read` until it observed no half-done write over several pages. The returned turns tell whether that still holds for
    /// bytes read later. Returns `None` when writers interfered every time or hold the words. Never waits.
    pub fn try_read_whole<T>(
        &self,
        slot: &Slot,
        segments: Segments,
        mut read: impl FnMut() -> T,
    ) -> Option<(T, Turns)> {
        for _ in 0..READ_TRIES {
            let Some(turns) = slot.turns(segments) else {
                std::thread::yield_now();
                continue;
            };
            let result = read();
            if slot.is_turn(&turns) {
                return Some((result, turns));
            }
        }
        None
    }

    /// Calls `read` while writers over several pages are locked out. May wait one second for a writer that was
    /// stopped.
    pub fn read_alone<T>(&self, slot: &Slot, segments: Segments, read: impl FnOnce() -> T) -> T {
        // A daemon thread that holds a word this long is waiting for a device, and perhaps for this thread.
        let kept = |word| match self.has(word) {
            true => Kept::GiveUp,
            false => Kept::TakeAway,
        };
        let held = slot.lock_range_or(segments, OWNER_DAEMON, kept);
        let result = read();
        if let Some(held) = held {
            slot.unlock_range(&held);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use jericho_shm::Slots;

    use super::*;

    #[test]
    fn the_daemon_waits_for_its_own_writes_and_not_for_a_client_that_says_it_is_the_daemon() {
        let slots = Slots::create("test", 1).unwrap();
        let slot = slots.slot(0).unwrap();
        let (holders, segments) = (RangeHolders::default(), Segments::of(0, 1 << 17));
        let own = holders.lock(slot, segments);
        let other = std::thread::scope(|scope| {
            let waiter = scope.spawn(|| holders.lock(slot, segments));
            std::thread::sleep(jericho_shm::HELD_MAX * 3 / 2);
            assert!(!waiter.is_finished(), "it wrote beside another");
            assert!(slot.holds(&own, 0));
            holders.unlock(slot, &own);
            waiter.join().unwrap()
        });
        holders.unlock(slot, &other);
        let lie = slot.lock_range(segments, OWNER_DAEMON).unwrap();
        let held = holders.lock(slot, segments);
        assert!(!slot.holds(&lie, 0));
        holders.unlock(slot, &held);
    }

    #[test]
    fn a_read_among_writers_that_never_pause_comes_to_an_end() {
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
                        let held = slot.lock_range(segments, owner).expect("nobody keeps it");
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
                let (a, b) = seen.map_or_else(
                    || holders.read_alone(slot, segments, read),
                    |(seen, _)| seen,
                );
                assert_eq!(a, b, "half of a write");
            }
            stop.store(1, Ordering::Relaxed);
        });
    }
}
