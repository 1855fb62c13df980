//! Copies of payloads that threads make without the lock of the protocol.
//!
//! A copy may be late: its thread is preempted, and meanwhile the request is repeated, or its pages belong to another one. So a thread that copies to the same bytes later waits for
//! the earlier copies.

use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes that a thread copies while it has the lock. It releases the lock to copy more.
pub(crate) const COPIED_LOCKED: usize = 16 << 10;

/// Bytes in some memory: its number, and their range.
pub(crate) type Bytes = (u64, Range<usize>);

/// The copies in progress, by the order in which they began. Behind the lock of the protocol.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    batches: BTreeMap<u64, Vec<Bytes>>,
    begun: u64,
}

impl Copies {
    /// Notes copies that a thread is about to make together, without the lock: returns their number. Returns `None` if the thread makes them with the lock, because
    /// they are few, and no copy to the same bytes is in progress.
    pub fn begin(&mut self, copies: Vec<Bytes>) -> Option<u64> {
        let bytes: usize = copies.iter().map(|(_, range)| range.len()).sum();
        let number = self.begun + 1;
        if bytes <= COPIED_LOCKED && !self.overlap_before(number, &copies) {
            return None;
        }
        self.begun = number;
        self.batches.insert(number, copies);
        Some(number)
    }

    /// Returns whether copies to the same bytes that began earlier are in progress.
    pub fn must_wait(&self, number: u64) -> bool {
        let copies = self.batches.get(&number);
        copies.is_some_and(|copies| self.overlap_before(number, copies))
    }

    /// Notes that copies have ended.
    pub fn end(&mut self, number: u64) {
        self.batches.remove(&number);
    }

    fn overlap_before(&self, number: u64, copies: &[Bytes]) -> bool {
        let earlier = || self.batches.range(..number).flat_map(|(_, batch)| batch);
        let overlaps = |(memory, bytes): &Bytes| {
            earlier().any(|(other, range)| {
                other == memory && range.start < bytes.end && bytes.start < range.end
            })
        };
        copies.iter().any(overlaps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANY: usize = COPIED_LOCKED + 1;

    #[test]
    fn a_later_copy_to_the_same_bytes_waits_for_the_earlier_one() {
        let mut copies = Copies::default();
        let first = copies.begin(vec![(1, 0..10), (2, 20..20 + MANY)]).unwrap();
        assert!(!copies.must_wait(first));
        let second = copies.begin(vec![(2, 29..40)]).unwrap();
        assert!(copies.must_wait(second) && !copies.must_wait(first));
        // Beside the bytes, and in other memory.
        assert_eq!(
            copies.begin(vec![(2, 0..20), (2, 20 + MANY..30 + MANY)]),
            None
        );
        assert_eq!(copies.begin(vec![(1, 20..30)]), None);
        copies.end(first);
        assert!(!copies.must_wait(second));
        assert!(copies.begin(vec![(2, 0..30)]).is_some());
    }

    #[test]
    fn a_few_bytes_are_copied_with_the_lock_and_many_without() {
        let mut copies = Copies::default();
        assert_eq!(copies.begin(vec![(1, 0..COPIED_LOCKED)]), None);
        assert!(copies.begin(vec![(1, 0..MANY)]).is_some());
    }
}
