//! Compares extents with the files of a window, and with the sizes of slices and files.

use std::collections::BTreeSet;
use std::fmt;

use jericho_format::PAGE_MAX;
use jericho_metadata::store::tables::Table;
use jericho_metadata::store::{Extent, codec};
use jericho_volume::Volume;

use super::findings::{FIXES_MAX, Found, show_key};
use super::index::{Index, Part};
use super::parallel::in_parallel;
use super::stores::{Range, Subject};
use crate::error::Result;
use crate::types::{Ino, Kind, SliceId};

/// Extents that the repair removes, by inode and page.
#[derive(Default)]
pub(super) struct Refused {
    pub all: BTreeSet<(Ino, u64)>,
    /// Whether there are more than are kept. The others would seem to share blocks with other files.
    pub is_cut: bool,
}

impl Refused {
    /// Adds an extent if there are fewer than `max`.
    fn add(&mut self, extent: (Ino, u64), max: usize) {
        if self.all.len() < max {
            self.all.insert(extent);
        } else {
            self.is_cut = true;
        }
    }

    /// Adds the extents of a part or a window.
    pub fn extend(&mut self, other: Refused) {
        self.is_cut |= other.is_cut;
        for extent in other.all {
            self.add(extent, FIXES_MAX);
        }
    }
}

/// Why an extent is impossible, whatever the other rows say.
enum Wrong {
    Empty,
    BeyondSlice(SliceId),
    BeyondFile,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wrong::Empty => f.write_str("is empty"),
            Wrong::BeyondSlice(slice) => write!(f, "ends beyond slice {slice}"),
            Wrong::BeyondFile => f.write_str("ends beyond the largest file"),
        }
    }
}

fn wrong(volume: &Volume, extent: &Extent) -> Option<Wrong> {
    let (slice, count) = (extent.blocks.slice, u64::from(extent.blocks.count));
    let slices = volume.slices();
    let capacity = slices.get(usize::from(slice)).map_or(0, |s| s.blocks);
    let fits = |first: u64, end: u64| first.checked_add(count).is_some_and(|last| last <= end);
    if count == 0 {
        Some(Wrong::Empty)
    } else if !fits(extent.blocks.first, capacity) {
        Some(Wrong::BeyondSlice(slice))
    } else if !fits(extent.page, PAGE_MAX + 1) {
        Some(Wrong::BeyondFile)
    } else {
        None
    }
}

/// Returns the inode and the extent of a row, if the extent is possible.
pub(super) fn possible(volume: &Volume, key: &[u8], value: &[u8]) -> Option<(Ino, Extent)> {
    let (ino, extent) = codec::extent_of_row(key, value).ok()?;
    is_possible(volume, &extent).then_some((ino, extent))
}

/// Returns whether an extent fits the slices and the largest file.
pub(crate) fn is_possible(volume: &Volume, extent: &Extent) -> bool {
    wrong(volume, extent).is_none()
}

/// Compares the extents of the files of a window, and counts their blocks in the index. Returns those that the repair removes.
pub(super) fn extents(subject: Subject, index: &Index, found: &mut Found) -> Result<Refused> {
    let each = in_parallel(&index.parts, |part| match part.is_over() {
        true => Ok((Found::default(), Refused::default())),
        false => extents_of(subject, index, part),
    })?;
    let mut refused = Refused::default();
    for (one, own) in each {
        found.extend(one);
        refused.extend(own);
    }
    Ok(refused)
}

/// Compares the flag of an extent with whether it should have checksums.
fn flag(subject: Subject, found: &mut Found, key: &[u8], (ino, extent): (Ino, &Extent)) {
    let summed = subject.volume.has_checksums() && !extent.unwritten;
    if extent.summed != summed {
        let page = extent.page;
        found.damage(format!(
            "extent of inode {ino} at page {page} has a wrong checksum flag"
        ));
        let value = codec::extent_to_bytes(&Extent { summed, ..*extent });
        let stores = subject.stores;
        stores.put(found, Table::Extents, key, value.to_vec());
    }
}

fn extents_of(subject: Subject, index: &Index, part: &Part) -> Result<(Found, Refused)> {
    let parts = index.parts.len();
    let (mut found, mut refused) = (Found::part_of(parts), Refused::default());
    let (from, to) = part.keys();
    let range = Range {
        from: &from,
        to: to.as_deref(),
        ..Range::all(part.shard, Table::Extents)
    };
    // The file of the last extent, the file's place, and the page after that extent.
    let mut last_ino = None;
    let mut file = None;
    let mut pages_end = 0;
    subject
        .stores
        .scan_all(range, &mut found, |found, key, value| {
            let Ok((ino, extent)) = codec::extent_of_row(key, value) else {
                found.damage(format!("an extent is invalid: key {}", show_key(key)));
                found.remove_from(part.shard, Table::Extents, key);
                return true;
            };
            if last_ino != Some(ino) {
                last_ino = Some(ino);
                file = index.place(ino).filter(|place| place.is(Kind::File));
                pages_end = 0;
            }
            let alone = wrong(subject.volume, &extent);
            let reason = match (&file, &alone) {
                (None, _) => "belongs to no file".to_owned(),
                (Some(_), Some(wrong)) => wrong.to_string(),
                (Some(_), None) if extent.page < pages_end => {
                    "overlaps the one before it".to_owned()
                }
                (Some(file), None) => {
                    let count = u64::from(extent.blocks.count);
                    pages_end = extent.page + count;
                    file.add_blocks(count);
                    flag(subject, found, key, (ino, &extent));
                    return true;
                }
            };
            let page = extent.page;
            found.damage(format!("extent of inode {ino} at page {page} {reason}"));
            found.remove_from(part.shard, Table::Extents, key);
            if alone.is_none() {
                refused.add((ino, page), (FIXES_MAX / parts).max(1));
            }
            true
        })?;
    Ok((found, refused))
}
