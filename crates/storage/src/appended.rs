//! A list that threads read without a lock while another thread appends to it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Entries of the first segment. Each further segment is twice as long.
const FIRST: usize = 8;
/// Most segments: room for 2^34 entries.
const SEGMENTS: usize = 32;

type Segment<T> = Box<[OnceLock<T>]>;

/// A list that only grows. Its entries never move, so that references to them stay valid while it grows.
pub struct Appended<T> {
    segments: [OnceLock<Segment<T>>; SEGMENTS],
    /// Entries that readers may see.
    len: AtomicUsize,
    appending: Mutex<()>,
}

impl<T> Default for Appended<T> {
    fn default() -> Appended<T> {
        Appended {
            segments: [const { OnceLock::new() }; SEGMENTS],
            len: AtomicUsize::new(0),
            appending: Mutex::new(()),
        }
    }
}

/// Returns the segment of an entry, and the entry's place in it.
fn place(index: usize) -> (usize, usize) {
    let segment = (index / FIRST + 1).ilog2() as usize;
    (segment, index - FIRST * ((1 << segment) - 1))
}

impl<T> Appended<T> {
    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Returns whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns an entry.
    pub fn get(&self, index: usize) -> Option<&T> {
        if index >= self.len() {
            return None;
        }
        let (segment, at) = place(index);
        self.segments.get(segment)?.get()?.get(at)?.get()
    }

    /// Returns the newest entry.
    pub fn last(&self) -> Option<&T> {
        self.get(self.len().checked_sub(1)?)
    }

    /// Returns the entries in order, without those appended later.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    /// Appends entries. Readers see all of them at once.
    pub fn append(&self, entries: impl IntoIterator<Item = T>) {
        // A panic of an earlier thread changed nothing that a reader sees.
        let _alone = self
            .appending
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut len = self.len();
        for entry in entries {
            let (segment, at) = place(len);
            let entries = self.segments[segment]
                .get_or_init(|| (0..FIRST << segment).map(|_| OnceLock::new()).collect());
            // No reader looks at places from `len` on, and no other thread appends: the place is empty.
            let _ = entries[at].set(entry);
            len += 1;
        }
        self.len.store(len, Ordering::Release);
    }
}

impl<T> FromIterator<T> for Appended<T> {
    fn from_iter<I: IntoIterator<Item = T>>(entries: I) -> Appended<T> {
        let list = Appended::default();
        list.append(entries);
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_keep_their_order_and_place_while_the_list_grows() {
        let list: Appended<usize> = (0..5).collect();
        let third: *const usize = list.get(3).unwrap();
        for first in (5..1000).step_by(5) {
            list.append(first..first + 5);
            assert_eq!(list.last(), Some(&(first + 4)));
        }
        assert_eq!(
            list.iter().copied().collect::<Vec<_>>(),
            (0..1000).collect::<Vec<_>>()
        );
        assert!(std::ptr::eq(third, list.get(3).unwrap()));
        assert_eq!(list.get(1000), None);
        assert!(Appended::<u8>::default().last().is_none());
    }

    #[test]
    fn a_reader_never_sees_a_part_of_what_is_appended() {
        let list = Appended::default();
        std::thread::scope(|scope| {
            scope.spawn(|| (0..3000).for_each(|n| list.append([n, n, n])));
            let mut seen = 0;
            while seen < 9000 {
                seen = list.len();
                assert!(seen.is_multiple_of(3));
                if seen > 0 {
                    assert_eq!(list.get(seen - 1), Some(&(seen / 3 - 1)));
                }
            }
        });
    }
}
