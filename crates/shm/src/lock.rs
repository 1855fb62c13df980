//! Locks in shared memory among processes that may die, stop, or lie.
//!
//! A word: owner number in the low 16 bits (0: free), then 15 bits that count how often it was taken, bit 31 when
//! somebody sleeps. Waiting is bounded, and who gives up goes another way. The lock of a dead owner is opened by the
//! daemon, which may also take one from the living; who lost it finds out by the count.

use std::time::Duration;

use crate::sync::{AtomicU32, Ordering, futex, spin_loop, yield_now};

const OWNER: u32 = 0xffff;
const TURN_ONE: u32 = 1 << 16;
const SLEEPERS: u32 = 1 << 31;
// The model checker goes through every turn.
const SPINS: u32 = if cfg!(loom) { 1 } else { 64 };
const YIELDS: u32 = if cfg!(loom) { 0 } else { 64 };
const SLEEP: Duration = Duration::from_millis(20);

/// A lock word.
#[derive(Debug)]
#[repr(transparent)]
pub struct Lock(AtomicU32);

/// One time that a lock was taken: the word without the mark of sleepers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a lock is given back with it"]
pub struct Holding(u32);

impl Holding {
    /// The next after a word, whoever had it.
    #[inline]
    fn after(word: u32, owner: u16) -> Holding {
        Holding(word.wrapping_add(TURN_ONE) & !(SLEEPERS | OWNER) | u32::from(owner))
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

    /// Takes the lock for `owner` (not 0). `None` when somebody held it for some 20 ms.
    #[inline]
    pub fn lock(&self, owner: u16) -> Option<Holding> {
        self.try_lock(owner).or_else(|| self.lock_slowly(owner))
    }

    #[cold]
    fn lock_slowly(&self, owner: u16) -> Option<Holding> {
        for turn in 0..SPINS + YIELDS {
            if turn < SPINS {
                spin_loop();
            } else {
                yield_now();
            }
            if let Some(held) = self.try_lock(owner) {
                return Some(held);
            }
        }
        let word = self.0.load(Ordering::Relaxed);
        if word & OWNER != 0 {
            let marked = word | SLEEPERS;
            if word == marked
                || self
                    .0
                    .compare_exchange(word, marked, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
            {
                futex::wait(&self.0, marked, SLEEP);
            }
        }
        // Others may sleep still: whoever was woken leaves the mark, at the cost of one needless wake-up.
        self.try_lock_marked(owner, SLEEPERS)
    }

    /// Gives it back. False when it was taken away meanwhile; then nothing is changed.
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
        // Somebody sleeps, or it was taken away.
        let marked = held.0 | SLEEPERS;
        let opened = self
            .0
            .compare_exchange(marked, free, Ordering::Release, Ordering::Relaxed)
            .is_ok();
        if opened {
            futex::wake_all(&self.0);
        }
        opened
    }

    /// Whether it was not taken away meanwhile.
    #[inline]
    pub fn is_held(&self, held: Holding) -> bool {
        self.0.load(Ordering::Relaxed) & !SLEEPERS == held.0
    }

    /// Whether `owner` holds it; 0: nobody.
    #[inline]
    pub fn is_held_by(&self, owner: u16) -> bool {
        self.0.load(Ordering::Relaxed) & OWNER == u32::from(owner)
    }

    /// Takes the lock for `owner`, whoever has it.
    pub fn take_over(&self, owner: u16) -> Holding {
        loop {
            let word = self.0.load(Ordering::Relaxed);
            let mine = Holding::after(word, owner);
            // With the mark, as those that slept before sleep on.
            if self
                .0
                .compare_exchange(word, mine.0 | SLEEPERS, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                return mine;
            }
        }
    }

    /// Opens it if `owner`, who is dead, holds it.
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
        // SAFETY: the counter is touched only with the lock held; that is what is tested.
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
    fn a_lock_that_is_held_is_given_up_on_and_a_dead_owners_is_opened() {
        let lock = Lock::new();
        let held = lock.lock(7).unwrap();
        assert_eq!(lock.lock(8), None);
        lock.open_dead(9);
        assert_eq!(lock.try_lock(8), None, "not that owner's");
        assert!(lock.is_held(held));
        lock.open_dead(7);
        let other = lock.try_lock(8).unwrap();
        assert!(!lock.unlock(held), "it was taken away");
        assert!(lock.unlock(other));
    }

    #[test]
    fn who_lost_a_lock_does_not_open_it_for_its_next_holder() {
        let lock = Lock::new();
        let first = lock.lock(7).unwrap();
        let daemon = lock.take_over(1);
        assert!(!lock.is_held(first) && !lock.unlock(first));
        assert!(lock.is_held(daemon) && lock.unlock(daemon));
        // The same owner: another thread of it.
        let second = lock.lock(7).unwrap();
        assert!(!lock.unlock(first) && lock.is_held(second));
        assert!(lock.unlock(second));
    }
}
