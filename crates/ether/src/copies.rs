//! Copies of payloads that threads make without the lock of the protocol.
//!
//! A copy may be late: its thread is preempted, and meanwhile the request is repeated, or its pages belong to another one. So a thread that copies to the same bytes later waits for
//! the earlier copies.

use std::collections::BTreeMap;
use std::ops::Range;

/// The copies in progress, by the order in which they began. Behind the lock of the protocol. `K` names the memory.
#[derive(Debug)]
pub(crate) struct Copies<K> {
    batches: BTreeMap<u64, Vec<(K, Range<usize>)>>,
    begun: u64,
}

impl<K> Default for Copies<K> {
    fn default() -> Copies<K> {
        Copies {
            batches: BTreeMap::new(),
            begun: 0,
        }
    }
}

impl<K: Copy + Eq> Copies<K> {
    /// Returns whether a copy to some bytes is in progress.
    pub fn overlap(&self, memory: K, bytes: &Range<usize>) -> bool {
        let is_same = |(other, range): &(K, Range<usize>)| {
            *other == memory && range.start < bytes.end && bytes.start < range.end
        };
        self.batches.values().flatten().any(is_same)
    }

    /// Notes copies that a thread begins together. Returns their number.
    pub fn begin(&mut self, copies: Vec<(K, Range<usize>)>) -> u64 {
        self.begun += 1;
        self.batches.insert(self.begun, copies);
        self.begun
    }

    /// Returns whether copies that began before `number` are in progress.
    pub fn has_earlier(&self, number: u64) -> bool {
        self.batches.range(..number).next().is_some()
    }

    /// Notes that copies have ended.
    pub fn end(&mut self, number: u64) {
        self.batches.remove(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_copy_to_the_same_bytes_sees_the_earlier_one_until_it_ends() {
        let mut copies = Copies::default();
        let first = copies.begin(vec![('a', 0..10), ('b', 20..30)]);
        assert!(copies.overlap('b', &(29..40)));
        assert!(!copies.overlap('b', &(30..40)));
        assert!(!copies.overlap('a', &(20..30)));
        let second = copies.begin(vec![('b', 25..26)]);
        assert!(copies.has_earlier(second) && !copies.has_earlier(first));
        copies.end(first);
        assert!(!copies.has_earlier(second));
        assert!(!copies.overlap('b', &(29..40)) && copies.overlap('b', &(0..40)));
    }
}
