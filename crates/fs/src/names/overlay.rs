//! Directory entries that are not durable yet, over those of the store.
//!
//! Each slot carries the sequence number of the batch that changed it. When that batch is durable
//! the store says the same, and the slot is dropped, unless a later batch changed it again.

use std::collections::BTreeMap;

use jericho_metadata::store::Entry;

use crate::types::{Ino, Kind};

struct PendingEntry {
    /// `None`: removed.
    to: Option<(Ino, Kind)>,
    /// Batch.
    seq: u64,
}

/// The entries of one directory that are newer than the store.
#[derive(Default)]
pub struct Overlay {
    slots: BTreeMap<(u64, Box<[u8]>), PendingEntry>,
}

impl Overlay {
    /// What the overlay says about a name: `None` nothing (ask the store), `Some(None)` it is gone.
    pub fn get(&self, hash: u64, name: &[u8]) -> Option<Option<(Ino, Kind)>> {
        self.slots
            .range((hash, Box::default())..)
            .take_while(|((h, _), _)| *h == hash)
            .find(|((_, n), _)| **n == *name)
            .map(|(_, slot)| slot.to)
    }

    /// The name means this from now on.
    pub fn put(&mut self, hash: u64, name: Box<[u8]>, to: Option<(Ino, Kind)>, seq: u64) {
        self.slots.insert((hash, name), PendingEntry { to, seq });
    }

    /// A batch that changed the name is durable.
    pub fn settle(&mut self, hash: u64, name: Box<[u8]>, seq: u64) {
        if let std::collections::btree_map::Entry::Occupied(slot) = self.slots.entry((hash, name))
            && slot.get().seq <= seq
        {
            slot.remove();
        }
    }

    /// Nothing is newer than the store.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The hash of the `limit`th slot from `from` on, where a reader may stop; the last hash of all when
    /// there are fewer.
    pub fn stop(&self, from: u64, limit: usize) -> u64 {
        let mut slots = self.slots.range((from, Box::default())..);
        slots.nth(limit).map_or(u64::MAX, |((hash, _), _)| *hash)
    }

    /// Merges what the store has in `[from, to]` (hashes) with what is newer, in order.
    pub fn merge(&self, stored: Vec<Entry>, from: u64, to: u64) -> Vec<Entry> {
        let newer = self
            .slots
            .range((from, Box::default())..)
            .take_while(|((h, _), _)| *h <= to);
        let mut merged = Vec::with_capacity(stored.len());
        let mut stored = stored.into_iter().peekable();
        for ((hash, name), slot) in newer {
            while let Some(entry) = stored.next_if(|e| (e.hash, &e.name) < (*hash, name)) {
                merged.push(entry);
            }
            stored.next_if(|e| (e.hash, &e.name) == (*hash, name));
            if let Some((ino, kind)) = slot.to {
                merged.push(Entry {
                    hash: *hash,
                    name: name.clone(),
                    ino,
                    kind,
                });
            }
        }
        // The store may have been asked for more than the reader takes now: it will ask again from `to` on.
        merged.extend(stored.take_while(|e| e.hash <= to));
        merged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(hash: u64, name: &str, ino: Ino) -> Entry {
        Entry {
            hash,
            name: name.as_bytes().into(),
            ino,
            kind: Kind::File,
        }
    }

    #[test]
    fn what_is_newer_replaces_hides_and_joins_what_is_stored() {
        let mut overlay = Overlay::default();
        overlay.put(5, (*b"five").into(), Some((50, Kind::File)), 1);
        overlay.put(7, (*b"seven").into(), None, 1);
        overlay.put(9, (*b"nine").into(), Some((90, Kind::File)), 1);
        let stored = vec![
            entry(4, "four", 4),
            entry(5, "five", 5),
            entry(7, "seven", 7),
        ];
        let merged = overlay.merge(stored, 3, u64::MAX);
        assert_eq!(
            merged,
            [
                entry(4, "four", 4),
                entry(5, "five", 50),
                entry(9, "nine", 90)
            ]
        );
        assert_eq!(overlay.get(7, b"seven"), Some(None));
        assert_eq!(overlay.get(4, b"four"), None);
    }

    #[test]
    fn stored_entries_beyond_the_stop_of_a_reader_wait_for_its_next_step() {
        let mut overlay = Overlay::default();
        for (hash, name) in [(2, *b"two"), (4, *b"for"), (6, *b"six")] {
            overlay.put(hash, name.into(), None, 1);
        }
        let to = overlay.stop(1, 1);
        assert_eq!(to, 4);
        let stored = || {
            vec![
                entry(3, "three", 3),
                entry(4, "for", 4),
                entry(5, "five", 5),
                entry(6, "six", 6),
            ]
        };
        assert_eq!(overlay.merge(stored(), 1, to), [entry(3, "three", 3)]);
        let rest = stored().split_off(2);
        assert_eq!(overlay.merge(rest, to + 1, u64::MAX), [entry(5, "five", 5)]);
    }

    #[test]
    fn a_name_changed_again_outlives_the_batch_that_changed_it_first() {
        let mut overlay = Overlay::default();
        overlay.put(5, (*b"a").into(), Some((1, Kind::File)), 1);
        overlay.put(5, (*b"b").into(), Some((2, Kind::File)), 1);
        overlay.put(5, (*b"a").into(), None, 2);
        overlay.settle(5, (*b"a").into(), 1);
        overlay.settle(5, (*b"b").into(), 1);
        assert_eq!(overlay.get(5, b"a"), Some(None));
        assert_eq!(overlay.get(5, b"b"), None);
        overlay.settle(5, (*b"a").into(), 2);
        assert!(overlay.is_empty());
    }
}
