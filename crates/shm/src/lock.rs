//! Locks in shared memory among processes that may die, stop, or be malicious.
//!
//! A lock word holds the owner number in the low 16 bits (0: free), then a 15-bit count of how often it was taken, and bit 31
//! when a waiter sleeps. Waiting is bounded: a waiter continues while the lock changes hands, and gives up when one holder has
//! kept it for a second (`Patience`). The daemon opens the lock of a dead owner, and takes away one that a living client has kept
//! that long. A holder that lost its lock learns it from the count.
//!
//! A holder that releases a lock wakes one sleeper. The woken sleeper takes the lock with the sleepers bit set, because others may
//! still sleep; so each release wakes the next.

use std::time::{Duration, Instant};

use crate::sync::{AtomicU32, Ordering, fence, futex, spin_loop, yield_now};

const OWNER: u32 = 0xffff;
const COUNT_ONE: u32 = 1 << 16;
const SLEEPERS: u32 = 1 << 31;
// The model checker runs every poll.
const SPINS: u32 = if cfg!(loom) { 1 } else { 64 };
const YIELDS: u32 = if cfg!(loom) { 0 } else { 64 };
/// Compare-and-swap attempts of `take_over` before it stores unconditionally.
const TAKE_OVER_TRIES: u32 = if cfg!(loom) { 8 } else { 1000 };
/// A sleeper checks again after this time, because the sleeper that was woken instead may have died.
const SLEEP: Duration = Duration::from_millis(20);
/// A holder that keeps a lock this long is stopped or malicious: work under a lock takes milliseconds.
pub const HELD_MAX: Duration = Duration::from_secs(1);
/// Longest wait in all. A client can change the word again and again, so that the lock seems to change hands.
pub const WAIT_MAX: Duration = Duration::from_secs(5);

/// A lock word.
#[derive(Debug)]
#[repr(transparent)]
pub struct Lock(AtomicU32);

/// How a waiter sleeps, and when it gives up.
pub(crate) trait Wait {
    /// Returns whether the waiter gives up. `seen` is the lock's word now, without the sleepers bit.
    fn is_over(&mut self, seen: u32) -> bool;
    /// Sleeps while the word is `seen`; may return early.
    fn wait(&mut self, word: &AtomicU32, seen: u32);
}

/// Waits while the lock changes hands.
pub(crate) struct Patience {
    begun: Instant,
    seen: u32,
    since: Instant,
    polls: u32,
}

impl Patience {
    pub(crate) fn new(lock: &Lock) -> Patience {
        Patience::since(Instant::now(), lock.seen())
    }

    /// Creates the patience of a waiter that first saw the word at `begun`.
    pub(crate) fn since(begun: Instant, seen: u32) -> Patience {
        Patience {
            begun,
            seen,
            since: begun,
            polls: 0,
        }
    }
}

impl Wait for Patience {
    fn is_over(&mut self, seen: u32) -> bool {
        if cfg!(loom) {
            self.polls += 1;
            return self.polls > 1;
        }
        let now = Instant::now();
        if seen != self.seen {
            (self.seen, self.since) = (seen, now);
        }
        now - self.since >= HELD_MAX || now - self.begun >= WAIT_MAX
    }

    fn wait(&mut self, word: &AtomicU32, seen: u32) {
        futex::wait(word, seen, SLEEP);
    }
}

/// Waits as `Patience` does, and gives up when the holder lends the lock.
pub(crate) struct Borrower<'a, L> {
    pub patience: &'a mut Patience,
    pub lends: L,
    /// The holding that is lent.
    pub lent: Option<Holding>,
}

impl<L: FnMut(Holding) -> bool> Wait for Borrower<'_, L> {
    fn is_over(&mut self, seen: u32) -> bool {
        if (self.lends)(Holding(seen)) {
            self.lent = Some(Holding(seen));
        }
        self.lent.is_some() || self.patience.is_over(seen)
    }

    fn wait(&mut self, word: &AtomicU32, seen: u32) {
        self.patience.wait(word, seen);
    }
}

/// One holding of a lock: the word without the sleepers bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a lock is given back with it"]
pub struct Holding(pub(crate) u32);

impl Holding {
    /// Returns the owner number of the holder.
    pub fn owner(self) -> u16 {
        (self.0 & OWNER) as u16
    }

    /// Returns the holding of `owner` that comes after a word.
    #[inline]
    fn after(word: u32, owner: u16) -> Holding {
        Holding(word.wrapping_add(COUNT_ONE) & !(SLEEPERS | OWNER) | u32::from(owner))
    }
}

impl Lock {
    #[cfg(test)]
    pub(crate) fn new() -> Lock {
        Lock(AtomicU32::new(0))
    }

    /// Takes the lock for `owner` (not 0), if it is free.
    #[inline]
    pub fn try_lock(&self, owner: u16) -> Option<Holding> {
        self.try_lock_marked(owner, 0)
    }

    #[inline]
    fn try_lock_marked(&self, owner: u16, mark: u32) -> Option<Holding> {
        let word = self.0.load(Ordering::Relaxed);
        if word & OWNER != 0 {
            return None;
        }
        let mine = Holding::after(word, owner);
        self.0
            .compare_exchange(word, mine.0 | mark, Ordering::Acquire, Ordering::Relaxed)
            .ok()?;
        Some(mine)
    }

    /// Takes the lock for `owner` (not 0). Returns `None` when one holder has kept it for `HELD_MAX`, or after
    /// `WAIT_MAX`.
    #[inline]
    pub fn lock(&self, owner: u16) -> Option<Holding> {
        self.try_lock(owner)
            .or_else(|| self.lock_slowly(owner, &mut Patience::new(self)))
    }

    /// Takes the lock for `owner`, or borrows it from a holder that lends it, according to `lends`. Returns the holding, and the
    /// lender's if the lock is borrowed. Returns `None` when one holder has kept the lock for `HELD_MAX`, or after `WAIT_MAX`.
    pub(crate) fn lock_or_borrow(
        &self,
        owner: u16,
        patience: &mut Patience,
        lends: &mut impl FnMut(Holding) -> bool,
    ) -> Option<(Holding, Option<Holding>)> {
        loop {
            let mut borrower = Borrower {
                patience: &mut *patience,
                lends: &mut *lends,
                lent: None,
            };
            let taken = self.try_lock(owner);
            if let Some(held) = taken.or_else(|| self.lock_slowly(owner, &mut borrower)) {
                return Some((held, None));
            }
            let lent = borrower.lent?;
            if let Some(held) = self.borrow(lent, owner) {
                return Some((held, Some(lent)));
            }
            if patience.is_over(self.seen()) {
                return None;
            }
        }
    }

    /// Takes the lock for `owner` if it is free now or within a moment.
    pub(crate) fn lock_briefly(&self, owner: u16) -> Option<Holding> {
        (0..SPINS).find_map(|_| {
            spin_loop();
            self.try_lock(owner)
        })
    }

    /// Does the same as `lock` when the lock is held. The waiter may have waited for other locks before.
    #[cold]
    pub(crate) fn lock_slowly(&self, owner: u16, waiter: &mut impl Wait) -> Option<Holding> {
        let yielding = || {
            (0..YIELDS).find_map(|_| {
                yield_now();
                self.try_lock(owner)
            })
        };
        self.lock_briefly(owner)
            .or_else(yielding)
            .or_else(|| self.lock_asleep(owner, waiter))
    }

    /// Does the same as `lock`, for work so long that a waiter should sleep at once.
    #[cold]
    pub(crate) fn lock_for_long(&self, owner: u16) -> Option<Holding> {
        self.try_lock(owner)
            .or_else(|| self.lock_asleep(owner, &mut Patience::new(self)))
    }

    fn lock_asleep(&self, owner: u16, waiter: &mut impl Wait) -> Option<Holding> {
        loop {
            let word = self.0.load(Ordering::Relaxed);
            if word & OWNER != 0 {
                if waiter.is_over(word & !SLEEPERS) {
                    return None;
                }
                let marked = word | SLEEPERS;
                if word == marked
                    || self
                        .0
                        .compare_exchange(word, marked, Ordering::Relaxed, Ordering::Relaxed)
                        .is_ok()
                {
                    waiter.wait(&self.0, marked);
                }
            }
            // Others may still sleep, so the bit stays set, at the cost of one needless wake-up.
            if let Some(held) = self.try_lock_marked(owner, SLEEPERS) {
                return Some(held);
            }
        }
    }

    /// Releases the lock. Returns false and changes nothing when the lock was taken away meanwhile.
    #[inline]
    pub fn unlock(&self, held: Holding) -> bool {
        let free = held.0 & !OWNER;
        if self
            .0
            .compare_exchange(held.0, free, Ordering::Release, Ordering::Relaxed)
            .is_ok()
        {
            return true;
        }
        // A waiter sleeps, or the lock was taken away.
        let marked = held.0 | SLEEPERS;
        let opened = self
            .0
            .compare_exchange(marked, free, Ordering::Release, Ordering::Relaxed)
            .is_ok();
        if opened {
            futex::wake_one(&self.0);
        }
        opened
    }

    /// Returns a value that changes each time the lock is taken; `None` while it is held. Acquires the stores made under the
    /// lock.
    #[inline]
    pub(crate) fn free_count(&self) -> Option<u32> {
        let word = self.0.load(Ordering::Acquire);
        (word & OWNER == 0).then_some(word & !SLEEPERS)
    }

    /// Returns the word now, without the sleepers bit.
    #[inline]
    pub(crate) fn seen(&self) -> u32 {
        self.0.load(Ordering::Relaxed) & !SLEEPERS
    }

    /// Returns whether the lock is still held as `held`.
    #[inline]
    pub fn is_held(&self, held: Holding) -> bool {
        self.0.load(Ordering::Relaxed) & !SLEEPERS == held.0
    }

    /// Returns whether `owner` holds it. 0 asks whether no owner does.
    #[inline]
    pub fn is_held_by(&self, owner: u16) -> bool {
        self.0.load(Ordering::Relaxed) & OWNER == u32::from(owner)
    }

    /// Takes the lock for `owner`, even if another owner holds it.
    pub fn take_over(&self, owner: u16) -> Holding {
        let mut word = self.0.load(Ordering::Relaxed);
        for _ in 0..TAKE_OVER_TRIES {
            let mine = Holding::after(word, owner);
            // Keeps the sleepers bit set, because earlier waiters still sleep.
            match self.0.compare_exchange(
                word,
                mine.0 | SLEEPERS,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return mine,
                Err(now) => word = now,
            }
        }
        // A client keeps changing the word to hold the daemon up here.
        let mine = Holding::after(word, owner);
        self.0.swap(mine.0 | SLEEPERS, Ordering::AcqRel);
        mine
    }

    /// Takes the lock for `taker` if `owner` (not 0) holds it. Returns `None` and changes nothing when another owner holds it,
    /// even if it changed hands during the call.
    pub fn take_from(&self, owner: u16, taker: u16) -> Option<Holding> {
        let word = self.0.load(Ordering::Relaxed);
        if owner == 0 || word & OWNER != u32::from(owner) {
            return None;
        }
        self.take_as(word, taker)
    }

    /// Takes the lock for `taker` from a holder that lends it, if the holding is still `lent`.
    pub(crate) fn borrow(&self, lent: Holding, taker: u16) -> Option<Holding> {
        self.take_as(lent.0, taker)
    }

    /// Takes the lock for `taker` if the word still is `word`. A waiter that went to sleep meanwhile only set the sleepers bit.
    fn take_as(&self, word: u32, taker: u16) -> Option<Holding> {
        let mine = Holding::after(word, taker);
        let exchange = |seen| {
            // Keeps the sleepers bit set, because earlier waiters still sleep.
            let next = mine.0 | SLEEPERS;
            self.0
                .compare_exchange(seen, next, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        };
        (exchange(word) || exchange(word | SLEEPERS)).then_some(mine)
    }

    /// Returns a borrowed lock to its holder. Opens it instead when `is_lent` says that the holder no longer lends it: no other
    /// thread would open it then.
    pub(crate) fn give_back(&self, mine: Holding, lent: Holding, is_lent: impl FnOnce() -> bool) {
        let returned = [mine.0, mine.0 | SLEEPERS].into_iter().any(|seen| {
            let theirs = seen & SLEEPERS | lent.0;
            self.0
                .compare_exchange(seen, theirs, Ordering::Release, Ordering::Relaxed)
                .is_ok()
        });
        // Pairs with the fence in `Lent::take_back`: either the lender sees the word returned, or this thread sees that the loan
        // has ended.
        fence(Ordering::SeqCst);
        if returned && !is_lent() {
            self.unlock(lent);
        }
    }

    /// Opens the lock if the dead `owner` holds it.
    pub fn open_dead(&self, owner: u16) {
        let word = self.0.load(Ordering::Relaxed);
        if word & OWNER == u32::from(owner) {
            self.unlock(Holding(word & !SLEEPERS));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_lock_excludes_and_wakes_its_waiters() {
        let lock = Lock::new();
        let counter = std::cell::UnsafeCell::new(0u64);
        struct Share<T>(T);
        // SAFETY: only the thread that holds the lock touches the counter; the test checks that.
        unsafe impl<T> Sync for Share<T> {}
        let shared = Share((&lock, &counter));
        std::thread::scope(|scope| {
            for owner in 1..=4 {
                let shared = &shared;
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        let (lock, counter) = shared.0;
                        let held = loop {
                            if let Some(held) = lock.lock(owner) {
                                break held;
                            }
                        };
                        // SAFETY: as above.
                        unsafe { *counter.get() += 1 };
                        assert!(lock.unlock(held));
                    }
                });
            }
        });
        assert_eq!(counter.into_inner(), 80_000);
    }

    #[test]
    fn two_owners_that_hold_a_lock_for_a_while_never_give_up() {
        let lock = Lock::new();
        std::thread::scope(|scope| {
            for owner in [7, 8] {
                let lock = &lock;
                scope.spawn(move || {
                    for round in 0..5000 {
                        let held = lock
                            .lock(owner)
                            .unwrap_or_else(|| panic!("gave up in round {round}"));
                        let begun = Instant::now();
                        while begun.elapsed() < Duration::from_micros(200) {
                            spin_loop();
                        }
                        assert!(lock.unlock(held), "taken away in round {round}");
                    }
                });
            }
        });
    }

    #[test]
    fn a_waiter_gives_up_on_a_held_lock_and_a_dead_owners_lock_is_opened() {
        let lock = Lock::new();
        let held = lock.lock(7).unwrap();
        assert_eq!(lock.lock(8), None);
        lock.open_dead(9);
        assert_eq!(lock.try_lock(8), None, "another owner holds it");
        assert!(lock.is_held(held));
        lock.open_dead(7);
        let other = lock.try_lock(8).unwrap();
        assert!(!lock.unlock(held), "the lock was taken away");
        assert!(lock.unlock(other));
    }

    #[test]
    fn a_lock_is_taken_from_the_named_owner_and_from_no_other() {
        let lock = Lock::new();
        assert_eq!(lock.take_from(0, 1), None, "no owner holds it");
        let first = lock.lock(7).unwrap();
        assert_eq!(lock.take_from(8, 1), None);
        assert!(lock.is_held(first));
        let daemon = lock.take_from(7, 1).unwrap();
        assert!(!lock.is_held(first) && lock.is_held(daemon));
        assert_eq!(lock.take_from(7, 1), None, "the daemon holds it now");
        assert!(lock.unlock(daemon));
    }

    #[test]
    fn an_owner_that_lost_a_lock_does_not_open_it_for_the_next_holder() {
        let lock = Lock::new();
        let first = lock.lock(7).unwrap();
        let daemon = lock.take_over(1);
        assert!(!lock.is_held(first) && !lock.unlock(first));
        assert!(lock.is_held(daemon) && lock.unlock(daemon));
        // Another thread of the same owner.
        let second = lock.lock(7).unwrap();
        assert!(!lock.unlock(first) && lock.is_held(second));
        assert!(lock.unlock(second));
    }
}
