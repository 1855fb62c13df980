//! Compares the rows of checksums with the extents: each page with data has a checksum or is bare, and no other page has one.
//!
//! Extents and rows are both in the order of inodes and pages. So a store is compared in windows of groups that follow one another: its
//! extents are read into a window, and then the rows of the same groups.

use std::collections::{BTreeMap, BTreeSet};

use jericho_format::record::{extent_key, sums_key};
use jericho_format::sums::{GROUP_PAGES, Group, Sum, place_of};
use jericho_metadata::shard::ShardId;
use jericho_metadata::store::codec;
use jericho_metadata::store::tables::Table;

use super::extents::possible;
use super::findings::{Found, show_key};
use super::parallel::in_parallel;
use super::stores::{Range, Subject};
use crate::error::Result;
use crate::types::Ino;

/// Memory of a group in a window.
const GROUP_BYTES: usize = 80;
/// Bytes for the groups of a window of each store.
const WINDOW_BYTES: usize = 1 << 20;

/// An inode, and the number of a group of its pages.
type Key = (Ino, u64);

/// A bit for each page of a group.
#[derive(Clone, Copy, Default)]
struct Pages([u64; GROUP_PAGES as usize / 64]);

impl Pages {
    fn fill(&mut self, places: std::ops::Range<usize>) {
        places.for_each(|at| self.0[at / 64] |= 1 << (at % 64));
    }

    fn has(&self, at: usize) -> bool {
        self.0[at / 64] & (1 << (at % 64)) != 0
    }
}

/// The groups of a window that should have rows.
struct Window {
    groups: BTreeMap<Key, Pages>,
    max: usize,
    /// The begin of the next window: an extent, by its inode and first page, and a group of it.
    next: Option<((Ino, u64), Key)>,
}

impl Window {
    /// Adds the pages of an extent from a group on. If a group does not fit, has the next window begin there and returns false.
    fn add(&mut self, ino: Ino, (first, count): (u64, u32), from: Key) -> bool {
        let end = first + u64::from(count);
        let mut page = first;
        if ino == from.0 {
            page = page.max(from.1 * GROUP_PAGES);
        }
        while page < end {
            let (group, at) = place_of(page);
            let key = (ino, group);
            if self.groups.len() >= self.max && !self.groups.contains_key(&key) {
                self.next = Some(((ino, first), key));
                return false;
            }
            let group_end = end.min((group + 1) * GROUP_PAGES);
            let pages = self.groups.entry(key).or_default();
            pages.fill(at..(group_end - group * GROUP_PAGES) as usize);
            page = group_end;
        }
        true
    }
}

/// Compares the checksums of all files. `refused` has extents that do not count.
pub(super) fn sums(
    subject: Subject,
    refused: &BTreeSet<(Ino, u64)>,
    found: &mut Found,
) -> Result<()> {
    let shards = subject.stores.shards();
    let each = in_parallel(&shards, |shard| {
        let mut comparison = Comparison {
            subject,
            shard: *shard,
            refused,
            found: Found::part_of(shards.len()),
        };
        comparison.run()?;
        Ok(comparison.found)
    })?;
    each.into_iter().for_each(|one| found.extend(one));
    Ok(())
}

/// The comparison of a store.
struct Comparison<'a> {
    subject: Subject<'a>,
    shard: ShardId,
    refused: &'a BTreeSet<(Ino, u64)>,
    found: Found,
}

impl Comparison<'_> {
    fn run(&mut self) -> Result<()> {
        let mut next = None;
        loop {
            let window = self.wanted(next)?;
            let from = next.map_or(Vec::new(), |(_, (ino, group))| {
                sums_key(ino, group).to_vec()
            });
            let to = window.next.map(|(_, (ino, group))| sums_key(ino, group));
            next = window.next;
            self.compare(window.groups, &from, to.as_ref().map(<[u8; 16]>::as_slice))?;
            if next.is_none() {
                return Ok(());
            }
        }
    }

    /// Reads extents into a window, from where the last window ended.
    fn wanted(&self, start: Option<((Ino, u64), Key)>) -> Result<Window> {
        let mut window = Window {
            groups: BTreeMap::new(),
            max: (WINDOW_BYTES.min(self.subject.limits.bitmaps_bytes) / GROUP_BYTES).max(1),
            next: None,
        };
        let (first, from_group) = start.unwrap_or_default();
        let from = extent_key(first.0, first.1);
        let range = Range {
            from: if start.is_some() { &from } else { &[] },
            ..Range::all(self.shard, Table::Extents)
        };
        if !self.subject.volume.has_checksums() {
            return Ok(window);
        }
        self.subject.stores.scan(range, |key, value| {
            match possible(self.subject.volume, key, value) {
                Some((ino, extent))
                    if !extent.unwritten && !self.refused.contains(&(ino, extent.page)) =>
                {
                    window.add(ino, (extent.page, extent.blocks.count), from_group)
                }
                _ => true,
            }
        })?;
        Ok(window)
    }

    /// Compares the rows between two keys with what they should be.
    fn compare(
        &mut self,
        wanted: BTreeMap<Key, Pages>,
        from: &[u8],
        to: Option<&[u8]>,
    ) -> Result<()> {
        let mut wanted = wanted.into_iter().peekable();
        let (subject, shard) = (self.subject, self.shard);
        let range = Range {
            from,
            to,
            ..Range::all(shard, Table::Sums)
        };
        let none = Group::default();
        subject
            .stores
            .scan_all(range, &mut self.found, |found, key, value| {
                let row = codec::group_of_key(key)
                    .and_then(|at| codec::sums_of_value(value).map(|group| (at, group)));
                let Ok((at, sums)) = row else {
                    let key_shown = show_key(key);
                    found.damage(format!("a row of checksums is invalid: key {key_shown}"));
                    found.remove_from(shard, Table::Sums, key);
                    return true;
                };
                while let Some((missing, pages)) = wanted.next_if(|(other, _)| *other < at) {
                    compare_group(subject, found, missing, &pages, &none);
                }
                let own = wanted.next_if(|(other, _)| *other == at);
                let pages = own.map_or(Pages::default(), |(_, pages)| pages);
                compare_group(subject, found, at, &pages, &sums);
                true
            })?;
        for (missing, pages) in wanted {
            compare_group(subject, &mut self.found, missing, &pages, &none);
        }
        Ok(())
    }
}

fn compare_group(
    subject: Subject,
    found: &mut Found,
    (ino, number): Key,
    pages: &Pages,
    have: &Group,
) {
    let mut right = have.clone();
    let mut first = [None; 2];
    for at in 0..GROUP_PAGES as usize {
        let page = number * GROUP_PAGES + at as u64;
        match (pages.has(at), have.get(at)) {
            (true, Sum::None) => {
                first[0].get_or_insert(page);
                right.set(at, Sum::Bare);
            }
            (false, Sum::Of(_) | Sum::Bare) => {
                first[1].get_or_insert(page);
                right.set(at, Sum::None);
            }
            _ => {}
        }
    }
    if let Some(page) = first[0] {
        found.damage(format!(
            "the data of inode {ino} at page {page} has no checksum"
        ));
    }
    if let Some(page) = first[1] {
        found.damage(format!(
            "there is a checksum of inode {ino} at page {page}, which has no data"
        ));
    }
    if first != [None; 2] {
        let key = sums_key(ino, number);
        let value = right.encode();
        match value.is_empty() {
            true => subject.stores.remove(found, Table::Sums, &key),
            false => subject.stores.put(found, Table::Sums, &key, value),
        }
    }
}
