//! Read-ahead: notices a sequential reader of a descriptor and asks for what it will want next.
//!
//! Plain atomics without order among them: two threads that read through one descriptor at once may spoil
//! each other's window, which costs a prefetch and nothing else.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// First window in pages; it doubles from there.
const WINDOW_MIN: u32 = 16;

/// The reading position of one descriptor.
#[derive(Debug, Default)]
pub struct ReadAhead {
    /// Page that a sequential reader reads next.
    next: AtomicU64,
    /// Page up to which was read ahead.
    ahead: AtomicU64,
    /// Pages to keep ahead of the reader; zero while it is not sequential.
    window: AtomicU32,
    /// Up to this page there is enough ahead of a sequential reader.
    quiet: AtomicU64,
}

impl ReadAhead {
    /// Of a descriptor that was not read yet.
    pub const fn new() -> ReadAhead {
        ReadAhead {
            next: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
            window: AtomicU32::new(0),
            quiet: AtomicU64::new(0),
        }
    }

    /// Whether a read that begins at page `first` goes on where the last one ended. Writes nothing: random
    /// readers of one descriptor on many CPUs share this.
    #[inline]
    pub fn goes_on(&self, first: u64) -> bool {
        let next = self.next.load(Relaxed);
        // Small reads come several times to the page that the last one ended in.
        first == next || (next > 0 && first + 1 == next)
    }

    /// Forgets the position.
    pub fn reset(&self) {
        self.next.store(0, Relaxed);
        self.ahead.store(0, Relaxed);
        self.window.store(0, Relaxed);
        self.quiet.store(0, Relaxed);
    }

    /// Whether a read of pages `[first, end)` that hits needs no `advance`: it goes not on from where the last one ended,
    /// or there is enough ahead of it. Moves the reader on in the latter case.
    #[inline]
    pub fn is_quiet(&self, first: u64, end: u64) -> bool {
        if !self.goes_on(first) {
            return true;
        }
        let is_quiet = end <= self.quiet.load(Relaxed);
        if is_quiet && self.next.load(Relaxed) != end {
            self.next.store(end, Relaxed);
        }
        is_quiet
    }

    /// The reader reads pages `[first, end)` of a file of `file_pages`. Returns pages to prefetch, at most
    /// `window_max` beyond the reader.
    pub fn advance(
        &self,
        first: u64,
        end: u64,
        file_pages: u64,
        window_max: u32,
    ) -> Option<Range<u64>> {
        let sequential = self.goes_on(first);
        if self.next.load(Relaxed) != end {
            self.next.store(end, Relaxed);
        }
        let window = self.window.load(Relaxed);
        if !sequential {
            if window != 0 {
                self.window.store(0, Relaxed);
            }
            self.ahead.store(0, Relaxed);
            self.quiet.store(0, Relaxed);
            return None;
        }
        let ahead = self.ahead.load(Relaxed).max(end);
        if window > 0 && ahead > end + u64::from(window / 2) {
            return None;
        }
        let window = (window * 2)
            .max((end - first) as u32 * 2)
            .clamp(WINDOW_MIN, window_max.max(WINDOW_MIN));
        let until = (end + u64::from(window)).min(file_pages);
        let enough = match until {
            // There is no more to be asked for.
            until if until == file_pages => until,
            until => until - u64::from(window / 2) - 1,
        };
        self.quiet.store(enough, Relaxed);
        if ahead >= until {
            return None;
        }
        self.window.store(window, Relaxed);
        self.ahead.store(until, Relaxed);
        Some(ahead..until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequential_reader_has_every_page_asked_for_once_and_before_it_comes() {
        let (reader, mut asked) = (ReadAhead::default(), 0..0);
        for page in 0..10_000 {
            if let Some(range) = reader.advance(page, page + 1, 10_000, 512) {
                assert!(
                    range.start == asked.end || page < 2,
                    "{range:?} after {asked:?}"
                );
                asked = range;
            }
            assert!(
                page == 0 || asked.end > page,
                "page {page} was not asked for"
            );
        }
        assert_eq!(asked.end, 10_000);
    }

    #[test]
    fn a_random_reader_gets_nothing() {
        let reader = ReadAhead::default();
        for page in [50, 10, 900, 333, 7, 1200] {
            assert_eq!(reader.advance(page, page + 1, 10_000, 512), None);
        }
    }
}
