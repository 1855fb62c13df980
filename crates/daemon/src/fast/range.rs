//! The range lock of a slot, as threads of the daemon take it: for writes over several pages, and for reads that writers
//! interrupt repeatedly.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use jericho_cache::OWNER_DAEMON;
use jericho_shm::{HELD_MAX, Holding, Kept, RangeTaken, Segments, Slot, SlotLock, Turns, WORDS};

use super::{Fast, SlotFile};
use crate::mounted::Mounted;

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
    fn note(&self, word: usize) {
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

    /// Calls `read` until it observed no half-done write over several pages. The returned turns tell whether that still holds for
    /// bytes that are read later. Returns `None` when writers interfered every time or hold the words. Never waits.
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
}

impl Fast {
    /// Takes the words of a file that a write of the daemon covers; see `RangeHolders::lock`.
    pub(super) fn lock_range(&self, file: &SlotFile, segments: Segments) -> RangeTaken {
        let lends = |word, held| self.lends(file, SlotLock::Word(word), held);
        let taken = file.range.lock(self.slot(file), segments, lends);
        for (word, held) in taken.borrowed() {
            self.note_borrowed(file, word, held);
        }
        taken
    }

    /// Takes the words of a file for a read; see `RangeHolders::lock_out`.
    fn lock_out(&self, file: &SlotFile, segments: Segments) -> RangeTaken {
        let lends = |word, held| self.lends(file, SlotLock::Word(word), held);
        file.range.lock_out(self.slot(file), segments, lends)
    }

    /// Releases what `lock_range` or `lock_out` took, in any thread.
    pub(super) fn unlock_range(&self, file: &SlotFile, taken: &RangeTaken) {
        let is_lent = |word, held| self.has_lent(file, SlotLock::Word(word), held);
        file.range.unlock(self.slot(file), taken, is_lent);
    }
}

/// Keeps writers over several pages out of a range while it is read; given back on drop, in any thread.
pub(crate) struct ReadGuard {
    mounted: Arc<Mounted>,
    file: Arc<SlotFile>,
    range: Box<RangeTaken>,
}

/// The result of `ReadGuard::take`.
pub(crate) enum LockedOut {
    /// Writers are locked out.
    Locked(ReadGuard),
    /// A client lends a word. A read has to wait for the request that ends the client's write; a thread that serves requests must
    /// not wait.
    Lent,
    /// A write of the daemon keeps a word, and waits for a device.
    GaveUp,
}

impl ReadGuard {
    /// Locks writers out of a range.
    pub fn take(mounted: &Arc<Mounted>, file: &Arc<SlotFile>, segments: Segments) -> LockedOut {
        let taken = mounted.fast.lock_out(file, segments);
        let (is_all, is_lent) = (taken.is_all(), taken.has_borrowed());
        let guard = ReadGuard {
            mounted: mounted.clone(),
            file: file.clone(),
            range: Box::new(taken),
        };
        // Otherwise the guard gives back the words that were taken.
        if is_lent {
            LockedOut::Lent
        } else if is_all {
            LockedOut::Locked(guard)
        } else {
            LockedOut::GaveUp
        }
    }
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        self.mounted.fast.unlock_range(&self.file, &self.range);
    }
}

/// Takes the words of a range over several polls, without blocking. Holds no word while a client lends another one: the kernel
/// may serve a request that waits for the word before the lender's request.
pub(super) struct Gathering {
    mounted: Arc<Mounted>,
    file: Arc<SlotFile>,
    segments: Segments,
    taken: Box<RangeTaken>,
    /// How each word was held at the last poll, and since when.
    seen: [Option<(Holding, Instant)>; WORDS],
}

/// The result of one poll.
pub(super) enum Gathered {
    /// All words are held.
    All(ReadGuard),
    /// Other threads hold some words.
    Some,
    /// A write of the daemon keeps a word, and waits for a device.
    GaveUp,
}

impl Gathering {
    pub fn new(mounted: &Arc<Mounted>, file: Arc<SlotFile>, segments: Segments) -> Gathering {
        Gathering {
            mounted: mounted.clone(),
            file,
            segments,
            taken: Box::new(RangeTaken::none()),
            seen: [None; WORDS],
        }
    }

    /// Returns whether the words are those of a file's slot.
    pub fn is_of(&self, file: &Arc<SlotFile>) -> bool {
        Arc::ptr_eq(&self.file, file)
    }

    /// Takes more words. Takes a word away from a client that has kept it too long and does not lend it.
    pub fn poll(&mut self) -> Gathered {
        let (mounted, file) = (self.mounted.clone(), self.file.clone());
        let slot = mounted.fast.slot(&file);
        let (now, mut is_lent) = (Instant::now(), false);
        for word in self.taken.missing(self.segments).words() {
            let held = slot.holding(word);
            is_lent |= mounted.fast.lends(&file, SlotLock::Word(word), held);
            if self.seen[word].is_none_or(|(seen, _)| seen != held) {
                self.seen[word] = Some((held, now));
            }
        }
        if is_lent {
            self.give_back();
            return Gathered::Some;
        }
        let seen = &self.seen;
        let kept = |word: usize, held: Holding| match seen[word] {
            Some((seen, since)) if seen == held && now - since >= HELD_MAX => {
                match file.range.has(word) {
                    true => Kept::GiveUp,
                    false => Kept::TakeAway,
                }
            }
            _ => Kept::WaitOn,
        };
        let note = |word| file.range.note(word);
        match slot.try_range(&mut self.taken, self.segments, OWNER_DAEMON, kept, note) {
            Ok(()) => Gathered::All(ReadGuard {
                mounted,
                file,
                range: self.take(),
            }),
            Err(Kept::GiveUp) => Gathered::GaveUp,
            Err(_) => Gathered::Some,
        }
    }

    fn take(&mut self) -> Box<RangeTaken> {
        std::mem::replace(&mut self.taken, Box::new(RangeTaken::none()))
    }

    fn give_back(&mut self) {
        let taken = self.take();
        self.mounted.fast.unlock_range(&self.file, &taken);
    }
}

impl Drop for Gathering {
    fn drop(&mut self) {
        self.give_back();
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

#[cfg(test)]
mod lending;
