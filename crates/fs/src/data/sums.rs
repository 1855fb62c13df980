//! Checksums of a file's pages that are newer than the store's.
//!
//! A page is here from the moment at which its data has the checksum until the store has it. `take_changes` gives the changes to a batch,
//! and `settle` drops what is durable. docs/internals/checksums.md has the rules.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

use jericho_format::sums::{GROUP_PAGES, Sum, WHOLE_GONE, encode, place_of};
use jericho_metadata::store::Change;

use crate::data::ranges::Ranges;
use crate::types::Ino;

/// What memory has of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    /// Nothing: ask the store.
    Unknown,
    /// The next batch has it.
    Changed(Sum),
    /// This batch has it.
    Sealed(Sum, u64),
}

type Slots = Box<[Slot; GROUP_PAGES as usize]>;

/// The newer checksums of a file.
#[derive(Default)]
pub struct NewSums {
    groups: BTreeMap<u64, Slots>,
    /// Pages that are data in the last batch, and not in the next one.
    gone: Ranges,
    /// Pages that were data and are unwritten now, in the same blocks, but in no batch so far.
    zeroed: Ranges,
    /// Pages that became unwritten in a batch that is not durable, with its number.
    zeroed_in: Vec<(u64, Ranges)>,
}

impl NewSums {
    /// Returns the checksum of a page with data, or `None` if the store has it.
    pub fn get(&self, page: u64) -> Option<Sum> {
        let (group, at) = place_of(page);
        match self.groups.get(&group)?[at] {
            Slot::Unknown => None,
            Slot::Changed(sum) | Slot::Sealed(sum, _) => Some(sum),
        }
    }

    /// Sets the checksum of a page. The caller marks the page, so that the next batch includes the file.
    pub fn set(&mut self, page: u64, sum: Sum) {
        let (group, at) = place_of(page);
        let slots = self.groups.entry(group);
        slots.or_insert_with(|| Box::new([Slot::Unknown; GROUP_PAGES as usize]))[at] =
            Slot::Changed(sum);
    }

    /// Makes a page bare, unless the next batch or one that is not durable does so already. The caller marks the page.
    pub fn give_up(&mut self, page: u64) {
        if self.get(page) != Some(Sum::Bare) {
            self.set(page, Sum::Bare);
        }
    }

    /// Drops what is here about pages that are data no more.
    pub fn forget(&mut self, pages: Range<u64>) {
        if pages.is_empty() {
            return;
        }
        let mut empty = Vec::new();
        for (group, slots) in self.groups.range_mut(groups_of(&pages)) {
            slots[places_in(*group, &pages)].fill(Slot::Unknown);
            if is_empty(slots) {
                empty.push(*group);
            }
        }
        for group in empty {
            self.groups.remove(&group);
        }
    }

    /// Records pages that are data in the last batch, and not in the next one.
    pub fn note_gone(&mut self, pages: Range<u64>) {
        self.gone.insert(pages);
    }

    /// Records pages that were data and are unwritten from now on, in the same blocks.
    pub fn note_zeroed(&mut self, pages: Range<u64>) {
        self.zeroed.insert(pages);
    }

    /// Returns the end of the part of `pages`, from its start on, that is as its first page: zeroed without a durable batch that says so,
    /// or not. Returns whether it is.
    pub fn zeroed_until(&self, pages: Range<u64>, durable: u64) -> (bool, u64) {
        let sealed = self.zeroed_in.iter().filter(|(seq, _)| *seq > durable);
        let mut end = pages.end;
        for zeroed in [&self.zeroed].into_iter().chain(sealed.map(|(_, set)| set)) {
            if let Some(range) = zeroed.containing(pages.start) {
                return (true, range.end.min(pages.end));
            }
            end = zeroed.first_from(pages.start).unwrap_or(end).min(end);
        }
        (false, end)
    }

    /// Returns whether a durable batch says that a page is bare.
    pub fn is_durably_bare(&self, page: u64, durable: u64) -> bool {
        let (group, at) = place_of(page);
        let slot = self.groups.get(&group).map(|slots| slots[at]);
        matches!(slot, Some(Slot::Sealed(Sum::Bare, seq)) if seq <= durable)
    }

    /// Appends the changes for batch `seq`, which takes the extents of these pages, in order: the new checksums of these pages, and all pages
    /// that are gone.
    pub fn take_changes(
        &mut self,
        (ino, seq): (Ino, u64),
        taken: &[Range<u64>],
        changes: &mut Vec<Change>,
    ) {
        let mut rows = Rows::new(ino, changes);
        for pages in std::mem::take(&mut self.gone).iter() {
            let mut page = pages.start;
            while page < pages.end {
                let (group, at) = place_of(page);
                let count = (GROUP_PAGES - at as u64).min(pages.end - page);
                if count == GROUP_PAGES {
                    rows.push(group, WHOLE_GONE.to_vec());
                } else {
                    (at..at + count as usize).for_each(|at| rows.put(group, at, Sum::None));
                }
                page += count;
            }
        }
        // After what is gone: a page may have been data, then a hole, and data again.
        rows.end_group();
        for pages in taken.iter().filter(|pages| !pages.is_empty()) {
            for (group, slots) in self.groups.range_mut(groups_of(pages)) {
                for at in places_in(*group, pages) {
                    if let Slot::Changed(sum) = slots[at] {
                        slots[at] = Slot::Sealed(sum, seq);
                        rows.put(*group, at, sum);
                    }
                }
            }
        }
        rows.end_group();
        let mut zeroed = Ranges::default();
        for pages in taken {
            let found = self.zeroed.take(pages.clone());
            found.into_iter().for_each(|pages| zeroed.insert(pages));
        }
        if !zeroed.is_empty() {
            self.zeroed_in.push((seq, zeroed));
        }
    }

    /// Drops what the store has, now that batch `durable` is durable. Keeps bare pages, for `is_durably_bare`.
    pub fn settle(&mut self, durable: u64) {
        for slot in self.groups.values_mut().flat_map(|slots| slots.iter_mut()) {
            if matches!(*slot, Slot::Sealed(Sum::Of(_), seq) if seq <= durable) {
                *slot = Slot::Unknown;
            }
        }
        self.zeroed_in.retain(|(seq, _)| *seq > durable);
        self.groups.retain(|_, slots| !is_empty(slots));
    }
}

fn is_empty(slots: &Slots) -> bool {
    slots.iter().all(|slot| *slot == Slot::Unknown)
}

/// Returns the groups of a range of pages that is not empty.
fn groups_of(pages: &Range<u64>) -> RangeInclusive<u64> {
    pages.start / GROUP_PAGES..=(pages.end - 1) / GROUP_PAGES
}

/// Returns the places in a group of the pages of a range that has some of the group.
fn places_in(group: u64, pages: &Range<u64>) -> Range<usize> {
    let first = group * GROUP_PAGES;
    let place = |page: u64| page.saturating_sub(first).min(GROUP_PAGES) as usize;
    place(pages.start)..place(pages.end)
}

/// Collects the changes of pages into one change for each group.
struct Rows<'a> {
    ino: Ino,
    changes: &'a mut Vec<Change>,
    group: u64,
    /// The pages of the group so far, in order.
    pages: Vec<(usize, Sum)>,
}

impl<'a> Rows<'a> {
    fn new(ino: Ino, changes: &'a mut Vec<Change>) -> Rows<'a> {
        Rows {
            ino,
            changes,
            group: 0,
            pages: Vec::new(),
        }
    }

    /// Adds the change of a page. The pages of a group come in order, and without those of another group between them.
    fn put(&mut self, group: u64, at: usize, sum: Sum) {
        if group != self.group {
            self.end_group();
            self.group = group;
        }
        self.pages.push((at, sum));
    }

    fn end_group(&mut self) {
        if !self.pages.is_empty() {
            let bytes = encode(self.pages.drain(..));
            self.push(self.group, bytes);
        }
    }

    fn push(&mut self, group: u64, bytes: Vec<u8>) {
        let change = Change::Sums(self.ino, group, bytes.into());
        self.changes.push(change);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_format::sums::Group;

    fn all() -> [Range<u64>; 1] {
        [Range {
            start: 0,
            end: u64::MAX,
        }]
    }

    /// Returns what the changes make of the rows.
    fn apply(rows: &mut BTreeMap<u64, Group>, changes: Vec<Change>) {
        for change in changes {
            let Change::Sums(7, group, bytes) = change else {
                panic!("{change:?}");
            };
            rows.entry(group).or_default().apply(&bytes).unwrap();
        }
    }

    #[test]
    fn a_checksum_is_in_memory_until_its_batch_is_durable() {
        let (mut new, mut rows, mut changes) = (NewSums::default(), BTreeMap::new(), vec![]);
        new.set(255, Sum::Of(1));
        new.set(256, Sum::Of(2));
        new.take_changes((7, 5), &all(), &mut changes);
        new.set(256, Sum::Of(3));
        new.settle(5);
        assert_eq!((new.get(255), new.get(256)), (None, Some(Sum::Of(3))));
        apply(&mut rows, std::mem::take(&mut changes));
        assert_eq!(rows[&0].get(255), Sum::Of(1));
        assert_eq!(rows[&1].get(0), Sum::Of(2));
        new.take_changes((7, 6), &all(), &mut changes);
        new.settle(5);
        assert_eq!(new.get(256), Some(Sum::Of(3)));
        new.settle(6);
        assert!(new.groups.is_empty());
        apply(&mut rows, changes);
        assert_eq!(rows[&1].get(0), Sum::Of(3));
    }

    #[test]
    fn pages_that_are_gone_leave_their_rows() {
        let (mut new, mut rows, mut changes) = (NewSums::default(), BTreeMap::new(), vec![]);
        (100..900).for_each(|page| new.set(page, Sum::Of(page as u32)));
        new.take_changes((7, 1), &all(), &mut changes);
        new.forget(200..800);
        new.note_gone(200..800);
        new.set(300, Sum::Of(1));
        new.take_changes((7, 2), &all(), &mut changes);
        assert_eq!(new.get(400), None);
        apply(&mut rows, changes);
        let pages = rows.iter().flat_map(|(group, sums)| {
            let page = move |(at, _): (usize, Sum)| group * GROUP_PAGES + at as u64;
            sums.pages().map(page)
        });
        let expected = (100..200).chain([300]).chain(800..900);
        assert!(pages.eq(expected));
    }

    #[test]
    fn a_zeroed_page_counts_until_its_batch_is_durable() {
        let mut new = NewSums::default();
        new.note_zeroed(10..20);
        assert_eq!(new.zeroed_until(5..30, 9), (false, 10));
        assert_eq!(new.zeroed_until(12..15, 9), (true, 15));
        new.take_changes((7, 3), &all(), &mut vec![]);
        assert_eq!(new.zeroed_until(12..30, 2), (true, 20));
        assert_eq!(new.zeroed_until(12..30, 3), (false, 30));
    }

    #[test]
    fn a_page_stays_bare_until_it_has_a_checksum() {
        let mut new = NewSums::default();
        new.set(3, Sum::Bare);
        assert!(!new.is_durably_bare(3, 9));
        new.take_changes((7, 4), &all(), &mut vec![]);
        assert!(!new.is_durably_bare(3, 3));
        new.settle(4);
        assert!(new.is_durably_bare(3, 4));
        new.set(3, Sum::Of(1));
        assert!(!new.is_durably_bare(3, 9));
    }

    #[test]
    fn a_batch_has_the_checksums_of_the_pages_that_it_takes() {
        let (mut new, mut rows, mut changes) = (NewSums::default(), BTreeMap::new(), vec![]);
        (250..260).for_each(|page| new.set(page, Sum::Of(page as u32)));
        new.set(40, Sum::Bare);
        new.note_zeroed(600..700);
        let taken = [40..41, 252..254, 255..258, 650..660];
        new.take_changes((7, 5), &taken, &mut changes);
        assert_eq!(changes.len(), 2, "one for each group");
        apply(&mut rows, std::mem::take(&mut changes));
        let pages = |rows: &BTreeMap<u64, Group>| -> Vec<u64> {
            let pages = rows.iter().flat_map(|(group, sums)| {
                let page = move |(at, _): (usize, Sum)| group * GROUP_PAGES + at as u64;
                sums.pages().map(page)
            });
            pages.collect()
        };
        assert_eq!(pages(&rows), [40, 252, 253, 255, 256, 257]);
        assert_eq!(new.zeroed_until(650..700, 4), (true, 660));
        new.settle(5);
        assert!(new.is_durably_bare(40, 5));
        assert_eq!(new.get(253), None);
        assert_eq!(new.get(254), Some(Sum::Of(254)));
        assert_eq!(new.zeroed_until(600..700, 5), (true, 650));
        assert_eq!(new.zeroed_until(650..700, 5), (false, 660));
        new.take_changes((7, 6), &all(), &mut changes);
        apply(&mut rows, changes);
        let expected = [40].into_iter().chain(250..260);
        assert!(expected.eq(pages(&rows)));
    }
}
