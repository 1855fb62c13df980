//! Checksums of a file's pages that are newer than the store's.
//!
//! A page is here from the moment at which its data has the checksum until the store has it. `take_changes` gives the changes to a batch,
//! and `settle` drops what is durable. docs/internals/checksums.md has the rules.

use std::collections::BTreeMap;
use std::ops::Range;

use jericho_format::sums::{GROUP_PAGES, Sum, WHOLE_GONE, encode, place_of};

use crate::store::Change;
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

/// Pages that were data and are unwritten now, in the same blocks.
struct Zeroed {
    pages: Range<u64>,
    /// The batch in which they are unwritten; `None`: the next one.
    sealed_in: Option<u64>,
}

/// The newer checksums of a file.
#[derive(Default)]
pub struct NewSums {
    groups: BTreeMap<u64, Slots>,
    /// Pages that are data in the last batch, and not in the next one.
    gone: Vec<Range<u64>>,
    zeroed: Vec<Zeroed>,
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
        let groups = pages.start / GROUP_PAGES..=(pages.end - 1) / GROUP_PAGES;
        for (group, slots) in self.groups.range_mut(groups) {
            let first = group * GROUP_PAGES;
            for (page, slot) in (first..).zip(slots.iter_mut()) {
                if pages.contains(&page) {
                    *slot = Slot::Unknown;
                }
            }
        }
        self.drop_empty();
    }

    /// Records pages that are data in the last batch, and not in the next one.
    pub fn note_gone(&mut self, pages: Range<u64>) {
        if !pages.is_empty() {
            self.gone.push(pages);
        }
    }

    /// Records pages that were data and are unwritten from now on, in the same blocks.
    pub fn note_zeroed(&mut self, pages: Range<u64>) {
        self.zeroed.push(Zeroed {
            pages,
            sealed_in: None,
        });
    }

    /// Returns the end of the part of `pages`, from its start on, that is as its first page: zeroed without a durable batch that says so,
    /// or not. Returns whether it is.
    pub fn zeroed_until(&self, pages: Range<u64>, durable: u64) -> (bool, u64) {
        let mut end = pages.end;
        for zeroed in self
            .zeroed
            .iter()
            .filter(|zeroed| !zeroed.is_durable(durable))
        {
            if zeroed.pages.contains(&pages.start) {
                return (true, zeroed.pages.end.min(pages.end));
            }
            if (pages.start..end).contains(&zeroed.pages.start) {
                end = zeroed.pages.start;
            }
        }
        (false, end)
    }

    /// Returns whether a durable batch says that a page is bare.
    pub fn is_durably_bare(&self, page: u64, durable: u64) -> bool {
        let (group, at) = place_of(page);
        let slot = self.groups.get(&group).map(|slots| slots[at]);
        matches!(slot, Some(Slot::Sealed(Sum::Bare, seq)) if seq <= durable)
    }

    /// Appends the changes for batch `seq`.
    pub fn take_changes(&mut self, ino: Ino, seq: u64, changes: &mut Vec<Change>) {
        let mut put = |group, bytes: Vec<u8>| {
            if !bytes.is_empty() {
                changes.push(Change::Sums(ino, group, bytes.into()));
            }
        };
        for pages in std::mem::take(&mut self.gone) {
            let mut page = pages.start;
            while page < pages.end {
                let (group, at) = place_of(page);
                let count = (GROUP_PAGES - at as u64).min(pages.end - page);
                put(
                    group,
                    match count {
                        GROUP_PAGES => WHOLE_GONE.to_vec(),
                        _ => encode((at..at + count as usize).map(|at| (at, Sum::None))),
                    },
                );
                page += count;
            }
        }
        for (group, slots) in &mut self.groups {
            let changed = |(at, slot): (usize, &mut Slot)| match *slot {
                Slot::Changed(sum) => {
                    *slot = Slot::Sealed(sum, seq);
                    Some((at, sum))
                }
                _ => None,
            };
            put(
                *group,
                encode(slots.iter_mut().enumerate().filter_map(changed)),
            );
        }
        for zeroed in &mut self.zeroed {
            zeroed.sealed_in.get_or_insert(seq);
        }
    }

    /// Drops what the store has, now that batch `durable` is durable. Keeps bare pages, for `is_durably_bare`.
    pub fn settle(&mut self, durable: u64) {
        for slot in self.groups.values_mut().flat_map(|slots| slots.iter_mut()) {
            if matches!(*slot, Slot::Sealed(Sum::Of(_), seq) if seq <= durable) {
                *slot = Slot::Unknown;
            }
        }
        self.zeroed.retain(|zeroed| !zeroed.is_durable(durable));
        self.drop_empty();
    }

    fn drop_empty(&mut self) {
        self.groups
            .retain(|_, slots| slots.iter().any(|slot| *slot != Slot::Unknown));
    }
}

impl Zeroed {
    fn is_durable(&self, durable: u64) -> bool {
        self.sealed_in.is_some_and(|seq| seq <= durable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_format::sums::Group;

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
        new.take_changes(7, 5, &mut changes);
        new.set(256, Sum::Of(3));
        new.settle(5);
        assert_eq!((new.get(255), new.get(256)), (None, Some(Sum::Of(3))));
        apply(&mut rows, std::mem::take(&mut changes));
        assert_eq!(rows[&0].get(255), Sum::Of(1));
        assert_eq!(rows[&1].get(0), Sum::Of(2));
        new.take_changes(7, 6, &mut changes);
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
        new.take_changes(7, 1, &mut changes);
        new.forget(200..800);
        new.note_gone(200..800);
        new.set(300, Sum::Of(1));
        new.take_changes(7, 2, &mut changes);
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
        new.take_changes(7, 3, &mut vec![]);
        assert_eq!(new.zeroed_until(12..30, 2), (true, 20));
        assert_eq!(new.zeroed_until(12..30, 3), (false, 30));
    }

    #[test]
    fn a_page_stays_bare_until_it_has_a_checksum() {
        let mut new = NewSums::default();
        new.set(3, Sum::Bare);
        assert!(!new.is_durably_bare(3, 9));
        new.take_changes(7, 4, &mut vec![]);
        assert!(!new.is_durably_bare(3, 3));
        new.settle(4);
        assert!(new.is_durably_bare(3, 4));
        new.set(3, Sum::Of(1));
        assert!(!new.is_durably_bare(3, 9));
    }
}
