//! File handles of the kernel: a number for each open file.
//!
//! Every read and write of every worker looks its handle up, so a lookup takes no lock and writes to no shared line. Only opening
//! and closing take a lock, for the list of free numbers.

use std::sync::{Arc, OnceLock};

use arc_swap::{ArcSwapOption, Guard};
use parking_lot::Mutex;

const SEGMENT_SLOTS: usize = 1024;
const SEGMENTS: usize = 4096;

type Segment<T> = Box<[ArcSwapOption<T>]>;

/// Open files by number.
pub(crate) struct Handles<T> {
    /// Grows by whole segments, which never move, so a lookup needs no lock against growth.
    segments: Box<[OnceLock<Segment<T>>]>,
    free: Mutex<Free>,
}

struct Free {
    /// Numbers that were returned.
    reusable: Vec<u64>,
    /// The lowest number that was never used.
    next: u64,
}

impl<T> Handles<T> {
    pub(crate) fn new() -> Handles<T> {
        Handles {
            segments: (0..SEGMENTS).map(|_| OnceLock::new()).collect(),
            free: Mutex::new(Free {
                reusable: Vec::new(),
                next: 0,
            }),
        }
    }

    /// Assigns a number to `value`. Returns `None` when all four million numbers are in use.
    pub(crate) fn insert(&self, value: Arc<T>) -> Option<u64> {
        let number = {
            let mut free = self.free.lock();
            match free.reusable.pop() {
                Some(number) => number,
                None if free.next < (SEGMENT_SLOTS * SEGMENTS) as u64 => {
                    free.next += 1;
                    free.next - 1
                }
                None => return None,
            }
        };
        let segment = self.segments[number as usize / SEGMENT_SLOTS]
            .get_or_init(|| (0..SEGMENT_SLOTS).map(|_| ArcSwapOption::empty()).collect());
        segment[number as usize % SEGMENT_SLOTS].store(Some(value));
        Some(number)
    }

    fn slot(&self, number: u64) -> Option<&ArcSwapOption<T>> {
        let number = usize::try_from(number).ok()?;
        self.segments
            .get(number / SEGMENT_SLOTS)?
            .get()?
            .get(number % SEGMENT_SLOTS)
    }

    /// Returns the value with this number without counting a reference. Returns an empty guard when there is none.
    pub(crate) fn get(&self, number: u64) -> Guard<Option<Arc<T>>> {
        match self.slot(number) {
            Some(slot) => slot.load(),
            None => Guard::from_inner(None),
        }
    }

    /// Releases the number. Returns its value.
    pub(crate) fn remove(&self, number: u64) -> Option<Arc<T>> {
        let value = self.slot(number)?.swap(None)?;
        self.free.lock().reusable.push(number);
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_finds_its_value_until_it_is_removed() {
        let handles = Handles::new();
        let numbers: Vec<u64> = (0..3000u32)
            .map(|i| handles.insert(Arc::new(i)).unwrap())
            .collect();
        for (i, number) in numbers.iter().enumerate() {
            assert_eq!(handles.get(*number).as_deref(), Some(&(i as u32)));
        }
        assert_eq!(handles.remove(numbers[7]).as_deref(), Some(&7));
        assert!(handles.get(numbers[7]).is_none());
        assert!(
            handles.remove(numbers[7]).is_none(),
            "the second removal finds nothing"
        );
        assert_eq!(
            handles.insert(Arc::new(9)),
            Some(numbers[7]),
            "numbers are used again"
        );
    }

    #[test]
    fn a_number_that_was_never_used_finds_nothing() {
        let handles: Handles<u32> = Handles::new();
        assert!(handles.get(0).is_none());
        assert!(handles.get(u64::MAX).is_none());
        assert!(handles.remove(12_345_678_901).is_none());
    }
}
