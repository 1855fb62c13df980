//! Tracks the bytes in which the daemon's pages differ from the kernel's copies.
//!
//! The kernel writes a mapped page back whole, although a program has stored to only a part of it. When something else changes a
//! byte after the kernel was given the page, the page's record keeps the value that the kernel was given. A written-back byte
//! that differs from this value is a store of the program; an equal byte is not.
//!
//! Invariant: if the kernel has a copy of the page, each of its bytes without a record equals the daemon's byte or was stored by
//! a program.

use std::collections::BTreeMap;

/// The records of one file's pages. `PAGE` is the page size in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Changes<const PAGE: usize> {
    pages: BTreeMap<u64, PageRecord<PAGE>>,
    /// Pages by the age of their records.
    by_age: BTreeMap<u64, u64>,
    next: u64,
}

/// The record of a page.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PageRecord<const PAGE: usize> {
    /// Identifies this record; a later record of the same page has another id.
    id: u64,
    /// For each byte that has changed since: the value that the kernel was given.
    given: Box<[Option<u8>; PAGE]>,
}

/// Identifies a record: page and record id.
pub(crate) type Recorded = (u64, u64);

impl<const PAGE: usize> Changes<PAGE> {
    /// Returns the number of pages with a record.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Returns whether a page has a record.
    pub fn has(&self, page: u64) -> bool {
        self.pages.contains_key(&page)
    }

    /// Returns all records, ordered by page.
    pub fn all(&self) -> Vec<Recorded> {
        let name = |(page, change): (&u64, &PageRecord<PAGE>)| (*page, change.id);
        self.pages.iter().map(name).collect()
    }

    /// Records that the kernel gets the first `len` bytes of the page contents `now`, and zeros after them.
    pub fn give(&mut self, page: u64, len: usize, now: &[u8; PAGE]) {
        self.forget(page);
        self.change(page, len, &[0; PAGE][len..], &now[len..]);
    }

    /// Records that a page's bytes from `at` on changed from `old` to `new`.
    pub fn change(&mut self, page: u64, at: usize, old: &[u8], new: &[u8]) {
        if old == new {
            return;
        }
        let (next, by_age) = (&mut self.next, &mut self.by_age);
        let change = self.pages.entry(page).or_insert_with(|| {
            let id = *next;
            *next += 1;
            by_age.insert(id, page);
            let given = Box::new([None; PAGE]);
            PageRecord { id, given }
        });
        let bytes = change.given[at..].iter_mut().zip(old.iter().zip(new));
        for (given, (old, new)) in bytes {
            if old != new {
                given.get_or_insert(*old);
            }
        }
    }

    /// Merges a write-back of the kernel. `data` goes to the page from `at` on; each of its bytes that is no store is replaced by
    /// the newer byte of `now`, the page's contents.
    pub fn merge(&self, page: u64, at: usize, data: &mut [u8], now: &[u8; PAGE]) {
        let Some(change) = self.pages.get(&page) else {
            return;
        };
        let bytes = data
            .iter_mut()
            .zip(now[at..].iter().zip(&change.given[at..]));
        for (byte, (now, given)) in bytes {
            if *given == Some(*byte) {
                *byte = *now;
            }
        }
    }

    /// Records that the page now holds the result of `merge`; `data` is what the kernel wrote back.
    pub fn written_back(&mut self, page: u64, at: usize, data: &[u8]) {
        let Some(change) = self.pages.get_mut(&page) else {
            return;
        };
        for (given, byte) in change.given[at..].iter_mut().zip(data) {
            // The kernel's byte and the page's byte are equal again.
            if given.is_some_and(|given| given != *byte) {
                *given = None;
            }
        }
        self.forget_if_same(page);
    }

    /// Records that the file was truncated to `len` bytes of the page: the kernel zeroes its copies beyond that too.
    pub fn truncate(&mut self, page: u64, len: usize) {
        for page in self
            .pages
            .range(page + 1..)
            .map(|(page, _)| *page)
            .collect::<Vec<u64>>()
        {
            self.forget(page);
        }
        if let Some(change) = self.pages.get_mut(&page) {
            change.given[len..].fill(None);
            self.forget_if_same(page);
        }
    }

    /// Forgets a record of a page that the kernel has dropped.
    pub fn dropped(&mut self, (page, id): Recorded) {
        // Another id means that the kernel was given the page again since.
        if self.pages.get(&page).is_some_and(|change| change.id == id) {
            self.forget(page);
        }
    }

    /// Forgets the oldest record. Returns false when there is none.
    pub fn forget_oldest(&mut self) -> bool {
        let oldest = self.by_age.first_key_value().map(|(_, page)| *page);
        oldest.is_some_and(|page| self.forget(page))
    }

    fn forget_if_same(&mut self, page: u64) {
        let is_same = |change: &PageRecord<PAGE>| change.given.iter().all(Option::is_none);
        if self.pages.get(&page).is_some_and(is_same) {
            self.forget(page);
        }
    }

    fn forget(&mut self, page: u64) -> bool {
        let change = self.pages.remove(&page);
        if let Some(change) = &change {
            self.by_age.remove(&change.id);
        }
        change.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Four = Changes<4>;

    /// Returns the page's contents after the kernel has written `data` back to a page that held `now`.
    fn back(changes: &mut Four, data: [u8; 4], now: [u8; 4]) -> [u8; 4] {
        let mut merged = data;
        changes.merge(0, 0, &mut merged, &now);
        changes.written_back(0, 0, &data);
        merged
    }

    #[test]
    fn a_byte_that_the_kernel_was_given_is_no_store() {
        let mut changes = Four::default();
        changes.change(0, 2, &[0, 0], &[5, 6]);
        let page = back(&mut changes, [1, 0, 0, 0], [0, 0, 5, 6]);
        assert_eq!(page, [1, 0, 5, 6]);
        // The kernel still has the page.
        let page = back(&mut changes, [2, 0, 0, 7], page);
        assert_eq!(page, [2, 0, 5, 7]);
        // The kernel's copy contains the store, so the next write-back repeats it, and may undo a newer write.
        let page = back(&mut changes, [2, 0, 0, 0], page);
        assert_eq!(page, [2, 0, 5, 0]);
    }

    #[test]
    fn a_byte_that_changes_twice_keeps_the_value_that_the_kernel_was_given() {
        let mut changes = Four::default();
        changes.change(0, 0, &[0], &[1]);
        changes.change(0, 0, &[1], &[2]);
        assert_eq!(back(&mut changes, [0; 4], [2, 0, 0, 0]), [2, 0, 0, 0]);
        assert_eq!(back(&mut changes, [1, 0, 0, 0], [2, 0, 0, 0]), [1, 0, 0, 0]);
        assert_eq!(changes.len(), 0);
    }

    #[test]
    fn a_page_that_is_given_again_has_records_only_beyond_the_end_of_file() {
        let mut changes = Four::default();
        changes.change(0, 0, &[0; 4], &[1; 4]);
        changes.give(0, 4, &[1; 4]);
        assert_eq!(
            changes,
            Four {
                next: 1,
                ..Four::default()
            }
        );
        // The file was extended by two bytes in between.
        changes.give(0, 2, &[1; 4]);
        assert_eq!(back(&mut changes, [7, 1, 0, 0], [1; 4]), [7, 1, 1, 1]);
    }

    #[test]
    fn a_record_that_is_newer_than_the_drop_is_kept() {
        let mut changes = Four::default();
        changes.change(0, 0, &[0], &[1]);
        let old = changes.all()[0];
        changes.give(0, 4, &[1, 0, 0, 0]);
        changes.change(0, 0, &[1], &[2]);
        changes.dropped(old);
        assert!(changes.has(0));
        changes.dropped(changes.all()[0]);
        assert!(!changes.has(0) && !changes.forget_oldest());
    }

    #[test]
    fn a_truncation_ends_records_beyond_the_new_end() {
        let mut changes = Four::default();
        for page in 0..3 {
            changes.change(page, 0, &[0; 4], &[1; 4]);
        }
        changes.truncate(1, 2);
        assert_eq!(
            changes.all().iter().map(|r| r.0).collect::<Vec<_>>(),
            [0, 1]
        );
        let mut data = [0; 4];
        changes.merge(1, 0, &mut data, &[9; 4]);
        assert_eq!(data, [9, 9, 0, 0]);
        changes.truncate(1, 0);
        assert_eq!(changes.len(), 1);
        assert!(changes.forget_oldest());
        assert_eq!(changes.len(), 0);
    }
}
