//! What the writers of a file tell each other of the pages that they had the daemon reserve behind its end.
//!
//! Hints, all of them: the daemon reads nothing here, and a writer that is told too much finds a page missing and asks for it.

use crate::lock::{Holding, Lock};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Pages reserved behind the end of a file.
#[derive(Debug)]
#[repr(C)]
pub struct Ahead {
    /// Held by who has found no page and asks for some, so that others do not ask for the same.
    lock: Lock,
    /// Pages that were reserved last.
    pages: AtomicU32,
    /// One more than the last page that was asked for; 0: nothing is known.
    to: AtomicU64,
}

impl Ahead {
    #[cfg(test)]
    pub(crate) fn new() -> Ahead {
        Ahead {
            lock: Lock::new(),
            pages: AtomicU32::new(0),
            to: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(crate) fn lock(&self) -> &Lock {
        &self.lock
    }

    /// Returns one more than the last page that was asked for; 0: nothing is known.
    #[inline]
    pub fn to(&self) -> u64 {
        self.to.load(Ordering::Relaxed)
    }

    /// Returns how many pages were reserved last.
    #[inline]
    pub fn pages(&self) -> u32 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Claims the pages up to `to` for the caller to ask for, if those up to `from` were asked for. One of several gets them.
    pub fn claim(&self, from: u64, to: u64) -> bool {
        self.to
            .compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }

    /// Tells that `pages` were reserved, up to `to`.
    pub fn tell(&self, to: u64, pages: u32) {
        self.pages.store(pages, Ordering::Relaxed);
        self.to.store(to, Ordering::Relaxed);
    }

    /// Tells how many pages were reserved last.
    pub fn tell_pages(&self, pages: u32) {
        self.pages.store(pages, Ordering::Relaxed);
    }

    /// Forgets which pages were reserved, and keeps how many: a file that was truncated grows on as before.
    pub fn forget_where(&self) {
        self.to.store(0, Ordering::Relaxed);
    }

    /// Nothing is known any more.
    pub fn forget(&self) {
        self.tell(0, 0);
    }

    /// Waits until nobody else asks because a page is missing. One who does not get an answer is waited for no longer than a lock
    /// is: two who ask do no harm.
    pub fn begin_asking(&self, owner: u16) -> Holding {
        let held = self.lock.lock_for_long(owner);
        held.unwrap_or_else(|| self.lock.take_over(owner))
    }

    /// The next may ask.
    pub fn end_asking(&self, held: Holding) {
        self.lock.unlock(held);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::lock::HELD_MAX;

    #[test]
    fn pages_are_claimed_from_where_the_last_were_asked_for() {
        let ahead = Ahead::new();
        assert_eq!((ahead.to(), ahead.pages()), (0, 0));
        ahead.tell(20, 16);
        assert!(ahead.claim(20, 52));
        assert!(!ahead.claim(20, 84), "another writer asks for them");
        assert_eq!((ahead.to(), ahead.pages()), (52, 16));
        // The daemon has reserved fewer.
        ahead.tell_pages(8);
        assert!(ahead.claim(52, 28));
        assert_eq!((ahead.to(), ahead.pages()), (28, 8));
    }

    #[test]
    fn after_a_truncation_the_place_is_forgotten_and_no_claim_from_before_counts() {
        let ahead = Ahead::new();
        ahead.tell(20, 16);
        ahead.forget_where();
        assert_eq!((ahead.to(), ahead.pages()), (0, 16));
        assert!(!ahead.claim(20, 52));
        ahead.forget();
        assert_eq!((ahead.to(), ahead.pages()), (0, 0));
    }

    #[test]
    fn who_waits_for_an_answer_that_does_not_come_asks_too() {
        let ahead = Ahead::new();
        let begun = Instant::now();
        let stopped = ahead.begin_asking(7);
        let other = ahead.begin_asking(8);
        assert!(begun.elapsed() >= HELD_MAX, "it waited");
        assert!(ahead.lock().is_held(other) && !ahead.lock().is_held(stopped));
        // The first goes on, and lets nobody ask beside the other.
        ahead.end_asking(stopped);
        assert!(ahead.lock().try_lock(9).is_none());
        ahead.end_asking(other);
        let next = ahead.begin_asking(7);
        assert!(ahead.lock().is_held(next));
    }
}
