//! Pages that the daemon has reserved beyond the end of a file, as its writers tell each other.
//!
//! All values are hints. The daemon reads nothing here. A writer that trusts a wrong hint finds a page missing and asks for it.

use crate::lock::{Holding, Lock};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Pages reserved beyond the end of a file.
#[derive(Debug)]
#[repr(C)]
pub struct Ahead {
    /// Held by a writer that found no page and asks for some, so that other writers do not ask for the same pages.
    lock: Lock,
    /// Number of pages that were reserved last.
    pages: AtomicU32,
    /// One more than the last page that a writer asked for; 0: unknown.
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

    /// Returns one more than the last page that a writer asked for; 0: unknown.
    #[inline]
    pub fn to(&self) -> u64 {
        self.to.load(Ordering::Relaxed)
    }

    /// Returns the number of pages that were reserved last.
    #[inline]
    pub fn pages(&self) -> u32 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Claims the pages from `from` up to `to`, for which the caller then asks. Of several writers that claim from the same page,
    /// one succeeds.
    pub fn claim(&self, from: u64, to: u64) -> bool {
        self.to
            .compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }

    /// Stores that `pages` pages were reserved, up to `to`.
    pub fn tell(&self, to: u64, pages: u32) {
        self.pages.store(pages, Ordering::Relaxed);
        self.to.store(to, Ordering::Relaxed);
    }

    /// Stores the number of pages that were reserved last.
    pub fn tell_pages(&self, pages: u32) {
        self.pages.store(pages, Ordering::Relaxed);
    }

    /// Forgets which pages were reserved, and keeps their number: a truncated file grows on as before.
    pub fn forget_where(&self) {
        self.to.store(0, Ordering::Relaxed);
    }

    /// Forgets the pages and their number.
    pub fn forget(&self) {
        self.tell(0, 0);
    }

    /// Waits until no other writer asks because of a missing page. Waits no longer than for any lock, and then takes the lock
    /// over: two writers that ask at once do no harm.
    pub fn begin_asking(&self, owner: u16) -> Holding {
        let held = self.lock.lock_for_long(owner);
        held.unwrap_or_else(|| self.lock.take_over(owner))
    }

    /// Ends the request, so that the next writer may ask.
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
    fn pages_are_claimed_from_the_end_of_the_last_request() {
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
    fn a_truncation_forgets_the_reserved_pages_and_refuses_earlier_claims() {
        let ahead = Ahead::new();
        ahead.tell(20, 16);
        ahead.forget_where();
        assert_eq!((ahead.to(), ahead.pages()), (0, 16));
        assert!(!ahead.claim(20, 52));
        ahead.forget();
        assert_eq!((ahead.to(), ahead.pages()), (0, 0));
    }

    #[test]
    fn a_writer_that_waits_in_vain_for_an_answer_asks_too() {
        let ahead = Ahead::new();
        let begun = Instant::now();
        let stopped = ahead.begin_asking(7);
        let other = ahead.begin_asking(8);
        assert!(begun.elapsed() >= HELD_MAX, "the writer waited");
        assert!(ahead.lock().is_held(other) && !ahead.lock().is_held(stopped));
        // The first writer goes on, and does not open the lock of the second.
        ahead.end_asking(stopped);
        assert!(ahead.lock().try_lock(9).is_none());
        ahead.end_asking(other);
        let next = ahead.begin_asking(7);
        assert!(ahead.lock().is_held(next));
    }
}
