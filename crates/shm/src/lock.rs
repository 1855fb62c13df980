//! Locks in shared memory among processes that may die, stop, or lie.
//!
//! A word: owner number in the low 16 bits, bit 31 when somebody sleeps. Waiting is bounded, and who gives up
//! goes another way. The lock of a dead owner is opened by the daemon.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use jericho_sys::futex;

const SLEEPERS: u32 = 1 << 31;
const SPINS: u32 = 64;
const YIELDS: u32 = 64;
const SLEEP: Duration = Duration::from_millis(20);

/// A lock word.
#[derive(Debug)]
#[repr(transparent)]
pub struct Lock(AtomicU32);

impl Lock {
    /// Takes the lock for `owner` (not 0), if it is free.
    #[inline]
    pub fn try_lock(&self, owner: u16) -> bool {
        self.0
            .compare_exchange(0, u32::from(owner), Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    /// Takes the lock for `owner` (not 0). False when somebody held it for some 20 ms.
    #[inline]
    pub fn lock(&self, owner: u16) -> bool {
        self.try_lock(owner) || self.lock_slowly(owner)
    }

    #[cold]
    fn lock_slowly(&self, owner: u16) -> bool {
        for turn in 0..SPINS + YIELDS {
            if turn < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
            if self.try_lock(owner) {
                return true;
            }
        }
        let word = self.0.load(Ordering::Relaxed);
        if word != 0 {
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
        self.0
            .compare_exchange(
                0,
                u32::from(owner) | SLEEPERS,
                Ordering::Acquire,
                Ordering::Relaxed,
            )
            .is_ok()
    }

    /// Gives it back. False when it was not `owner`'s any more.
    #[inline]
    pub fn unlock(&self, owner: u16) -> bool {
        let mine = u32::from(owner);
        if self
            .0
            .compare_exchange(mine, 0, Ordering::Release, Ordering::Relaxed)
            .is_ok()
        {
            return true;
        }
        // Somebody sleeps, or it was taken away.
        let opened = self
            .0
            .compare_exchange(mine | SLEEPERS, 0, Ordering::Release, Ordering::Relaxed)
            .is_ok();
        if opened {
            futex::wake_all(&self.0);
        }
        opened
    }

    /// Opens it if `owner`, who is dead, holds it.
    pub fn open_dead(&self, owner: u16) {
        self.unlock(owner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_excludes_and_wakes_its_waiters() {
        let lock = Lock(AtomicU32::new(0));
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
                        while !lock.lock(owner) {}
                        // SAFETY: as above.
                        unsafe { *counter.get() += 1 };
                        assert!(lock.unlock(owner));
                    }
                });
            }
        });
        assert_eq!(counter.into_inner(), 80_000);
    }

    #[test]
    fn a_lock_that_is_held_is_given_up_on_and_a_dead_owners_is_opened() {
        let lock = Lock(AtomicU32::new(0));
        assert!(lock.lock(7));
        assert!(!lock.lock(8));
        lock.open_dead(9);
        assert!(!lock.try_lock(8), "not that owner's");
        lock.open_dead(7);
        assert!(lock.try_lock(8));
        assert!(!lock.unlock(7), "it was taken away");
    }
}
