//! Keeps changes of the same blocks apart.
//!
//! A request that changes a part of a block reads the block, changes it and writes it back. A second change of the block between the
//! read and the write would be lost, so such a request is alone on its blocks (`Use::Alone`). Changes of whole blocks may overlap
//! each other (`Use::Shared`): the protocol does not order them.
//!
//! # Invariants
//! - Entries are in the order of their arrival. A request proceeds when no earlier entry conflicts with its own. So requests do not
//!   overtake each other on the same block, and no circle of requests waits for itself.
//! - A thread holds at most one range.

use std::ops::Range;

use parking_lot::{Condvar, Mutex};

/// How a request uses its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Beside other changes of whole blocks.
    Shared,
    /// With no other change.
    Alone,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    bytes: Range<u64>,
    how: Use,
}

impl Entry {
    fn conflicts(&self, bytes: &Range<u64>, how: Use) -> bool {
        let overlap = self.bytes.start < bytes.end && bytes.start < self.bytes.end;
        overlap && (self.how == Use::Alone || how == Use::Alone)
    }
}

#[derive(Debug, Default)]
struct Entries {
    /// Held ranges and ranges that requests wait for.
    list: Vec<Entry>,
    last_id: u64,
}

/// The ranges of a device that requests change.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    entries: Mutex<Entries>,
    released: Condvar,
}

/// A held range. Dropping it releases the range.
pub(crate) struct Held<'r> {
    ranges: &'r Ranges,
    id: u64,
}

impl Ranges {
    /// Waits until no earlier request conflicts, and holds the range. The caller passes whole blocks.
    pub fn hold(&self, bytes: Range<u64>, how: Use) -> Held<'_> {
        let mut entries = self.entries.lock();
        entries.last_id += 1;
        let id = entries.last_id;
        entries.list.push(Entry {
            id,
            bytes: bytes.clone(),
            how,
        });
        let must_wait = |entries: &mut Entries| {
            let mut earlier = entries.list.iter().take_while(|entry| entry.id != id);
            earlier.any(|entry| entry.conflicts(&bytes, how))
        };
        self.released.wait_while(&mut entries, must_wait);
        Held { ranges: self, id }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut entries = self.ranges.entries.lock();
        entries.list.retain(|entry| entry.id != self.id);
        let others_wait = !entries.list.is_empty();
        drop(entries);
        if others_wait {
            self.ranges.released.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    /// Returns whether a request proceeds beside those that are held.
    fn proceeds(ranges: &Ranges, bytes: Range<u64>, how: Use) -> bool {
        let entries = ranges.entries.lock();
        !(entries.list.iter()).any(|entry| entry.conflicts(&bytes, how))
    }

    #[test]
    fn only_overlapping_ranges_of_which_one_is_alone_conflict() {
        let ranges = Ranges::default();
        let _shared = ranges.hold(0..8, Use::Shared);
        let _alone = ranges.hold(8..12, Use::Alone);
        assert!(proceeds(&ranges, 4..8, Use::Shared));
        assert!(!proceeds(&ranges, 4..8, Use::Alone));
        assert!(!proceeds(&ranges, 4..9, Use::Shared));
        assert!(proceeds(&ranges, 12..99, Use::Alone));
    }

    #[test]
    fn a_later_request_does_not_overtake_one_that_waits() {
        let ranges = Ranges::default();
        let first = ranges.hold(0..8, Use::Shared);
        let (send, order) = channel();
        std::thread::scope(|scope| {
            let waiting = send.clone();
            let ranges = &ranges;
            scope.spawn(move || {
                let _held = ranges.hold(0..8, Use::Alone);
                waiting.send("alone").unwrap();
            });
            while ranges.entries.lock().list.len() < 2 {
                std::thread::yield_now();
            }
            scope.spawn(move || {
                let _held = ranges.hold(0..8, Use::Shared);
                send.send("shared").unwrap();
            });
            while ranges.entries.lock().list.len() < 3 {
                std::thread::yield_now();
            }
            assert!(order.recv_timeout(Duration::from_millis(20)).is_err());
            drop(first);
            assert_eq!(order.recv().unwrap(), "alone");
            assert_eq!(order.recv().unwrap(), "shared");
        });
        assert!(ranges.entries.lock().list.is_empty());
    }
}
