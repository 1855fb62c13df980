//! Read-ahead: detects a sequential reader of an open file and names the pages to prefetch for it.
//!
//! Plain atomics without order among them. Two threads that read through one description at once may disturb each other's window,
//! which costs only a prefetch.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// First window in pages. Each later window is twice as long, up to a maximum.
const WINDOW_MIN: u32 = 16;
/// A window is prefetched in pieces of this fraction. With halves, a device as fast as its reader would run idle between two
/// pieces, and each piece would be a transfer so long that its first page waits for many others.
const PIECES: u32 = 16;
/// Fewest pages in a piece: a request for fewer costs more than reading them.
const PIECE_MIN: u32 = 8;
/// A reader may keep several reads in flight, which several threads serve in any order. A read belongs to the stream if it begins
/// at most this many read lengths from the expected page.
const IN_FLIGHT: u32 = 16;

/// The reading position of one description.
#[derive(Debug, Default)]
pub struct ReadAhead {
    /// Page that a sequential reader reads next.
    next: AtomicU64,
    /// End of the pages that were prefetched.
    ahead: AtomicU64,
    /// Pages to keep ahead of the reader; zero while it is not sequential.
    window: AtomicU32,
    /// A sequential reader needs no further prefetch up to this page.
    quiet: AtomicU64,
    /// Page after the last read outside the stream. A new stream begins if another read continues there.
    apart: AtomicU64,
}

impl ReadAhead {
    /// Returns the state of a description that has not been read.
    pub const fn new() -> ReadAhead {
        ReadAhead {
            next: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
            window: AtomicU32::new(0),
            quiet: AtomicU64::new(0),
            apart: AtomicU64::new(0),
        }
    }

    /// Forgets the position.
    pub fn reset(&self) {
        self.next.store(0, Relaxed);
        self.ahead.store(0, Relaxed);
        self.window.store(0, Relaxed);
        self.quiet.store(0, Relaxed);
        self.apart.store(0, Relaxed);
    }

    /// Returns whether a read of pages `[first, end)` that hits needs no `advance`: it does not continue the last read, or enough
    /// pages are prefetched. Moves the position if enough pages are prefetched. Writes nothing if the read does not continue the
    /// last one, because random readers of one description on many CPUs share this cache line.
    #[inline]
    pub fn is_quiet(&self, first: u64, end: u64) -> bool {
        if !follows(first, self.next.load(Relaxed)) {
            return true;
        }
        let is_quiet = end <= self.quiet.load(Relaxed);
        if is_quiet && self.next.load(Relaxed) != end {
            self.next.store(end, Relaxed);
        }
        is_quiet
    }

    /// Records a read of pages `[first, end)` of a file of `file_pages`. Returns the pages to prefetch, at most `window_max`
    /// beyond the reader.
    pub fn advance(
        &self,
        first: u64,
        end: u64,
        file_pages: u64,
        window_max: u32,
    ) -> Option<Range<u64>> {
        let length = (end - first) as u32;
        let (mut next, mut window) = (self.next.load(Relaxed), self.window.load(Relaxed));
        let mut ahead = self.ahead.load(Relaxed);
        let near = u64::from(window).max(u64::from(length) * u64::from(IN_FLIGHT));
        let is_near = window > 0 && first + near >= next && first <= next.max(ahead) + near;
        if !follows(first, next) && !is_near {
            if !follows(first, self.apart.load(Relaxed)) {
                // One late or stray read does not end the stream. The reads of a random reader end it soon.
                self.apart.store(end, Relaxed);
                let half = window / 2;
                let window = if half < WINDOW_MIN { 0 } else { half };
                self.window.store(window, Relaxed);
                return None;
            }
            (next, window, ahead) = (0, 0, 0);
        }
        let end = end.max(next);
        if next != end {
            self.next.store(end, Relaxed);
        }
        let ahead = ahead.max(end);
        if window > 0 && ahead > end + u64::from(window - piece(window)) {
            return None;
        }
        let window = (window * 2)
            .max(length * 2)
            .clamp(WINDOW_MIN, window_max.max(WINDOW_MIN));
        let until = (end + u64::from(window)).min(file_pages);
        let enough = match until {
            // The whole rest of the file is prefetched.
            until if until == file_pages => until,
            until => until - u64::from(window - piece(window)) - 1,
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

/// Returns the number of pages to prefetch at a time.
fn piece(window: u32) -> u32 {
    (window / PIECES).max(PIECE_MIN)
}

/// Returns whether a read that begins at page `first` continues one that ended before page `next`.
#[inline]
fn follows(first: u64, next: u64) -> bool {
    // Small reads read several times from the page in which the last read ended.
    first == next || (next > 0 && first + 1 == next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_is_prefetched_once_and_before_a_sequential_reader_reads_it() {
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
    fn reads_of_a_stream_may_come_in_any_order() {
        // Eight reads of 32 pages each are in flight, and arrive in the order in which eight threads happen to serve them.
        let (reader, mut asked) = (ReadAhead::default(), 0);
        let mut random = 1u32;
        let mut coming: Vec<u64> = (0..8).collect();
        let (mut next, mut late) = (8, 0);
        while next < 3000 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let oldest = (0..8).min_by_key(|at| coming[*at]).unwrap_or(0);
            let is_overdue = coming[oldest] + 24 < next;
            let chosen = if is_overdue {
                oldest
            } else {
                random as usize >> 8 & 7
            };
            let first = 32 * coming.swap_remove(chosen);
            if next > 64 && first + 32 > asked {
                late += 1;
            }
            if let Some(range) = reader.advance(first, first + 32, 100_000, 1024) {
                assert!(range.start <= asked.max(first + 32 * 8), "{range:?}");
                asked = range.end;
            }
            coming.push(next);
            next += 1;
        }
        assert_eq!(late, 0, "reads of pages that were not prefetched");
    }

    #[test]
    fn a_window_is_prefetched_in_pieces() {
        let reader = ReadAhead::default();
        let asked: Vec<u64> = (0..10_000)
            .filter_map(|page| reader.advance(page, page + 1, 100_000, 1024))
            .map(|range| range.end - range.start)
            .collect();
        let (growing, steady) = asked.split_at(10);
        assert_eq!(steady, vec![64; steady.len()], "after {growing:?}");
    }

    #[test]
    fn a_quiet_read_prefetches_nothing() {
        let (reader, other) = (ReadAhead::default(), ReadAhead::default());
        for page in 0..10_000 {
            let quiet = reader.is_quiet(page, page + 1);
            let asked = other.advance(page, page + 1, 9000, 512);
            assert!(!(quiet && asked.is_some()), "page {page}: {asked:?}");
            if !quiet {
                reader.advance(page, page + 1, 9000, 512);
            }
        }
    }

    #[test]
    fn a_random_reader_prefetches_nothing() {
        let reader = ReadAhead::default();
        for page in [50, 10, 900, 333, 7, 1200] {
            assert_eq!(reader.advance(page, page + 1, 10_000, 512), None);
        }
    }

    #[test]
    fn a_reader_that_jumps_away_prefetches_nothing_until_it_reads_on() {
        let reader = ReadAhead::default();
        for page in 0..1000 {
            reader.advance(page, page + 1, 100_000, 512);
        }
        for page in [50_000, 90_000, 20_000] {
            assert_eq!(reader.advance(page, page + 1, 100_000, 512), None);
        }
        let range = reader.advance(20_001, 20_002, 100_000, 512);
        assert_eq!(range, Some(20_002..20_018));
    }
}
