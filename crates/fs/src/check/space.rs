//! Compares the bitmaps with the extents and the metadata chunks, and finds blocks with two owners.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use jericho_format::record;
use jericho_format::superblock::CHUNK_BY_FORMAT;
use jericho_metadata::alloc::Blocks;
use jericho_metadata::store::codec;
use jericho_metadata::store::tables::{Table, container_key};
use parking_lot::Mutex;

use super::extents::possible;
use super::findings::{FIXES_MAX, Found, Severity, show_key};
use super::parallel::in_parallel;
use super::stores::{Range, Subject};
use super::window::{Piece, Window, pieces};
use crate::error::Result;
use crate::types::{Ino, SliceId};

/// A range of blocks: slice, first block, block after the last one.
type Stretch = (SliceId, u64, u64);

/// The comparison of the space.
struct Space<'a> {
    subject: Subject<'a>,
    /// The metadata chunks, in order.
    chunks: Vec<Stretch>,
    /// Extents that do not count, by inode and page.
    refused: BTreeSet<(Ino, u64)>,
    found: Found,
}

/// Compares the bitmaps of the volume with its extents. `refused` has extents that do not count. Returns the number of the files' blocks.
pub(super) fn space(
    subject: Subject,
    refused: BTreeSet<(Ino, u64)>,
    found: &mut Found,
) -> Result<u64> {
    let container_blocks = u64::from(subject.stores.all[0].container_blocks());
    let mut space = Space {
        subject,
        chunks: chunks(subject),
        refused,
        found: Found::default(),
    };
    let (all, window_max) = pieces(subject, container_blocks);
    let mut left = &all[..];
    let mut used = 0;
    while !left.is_empty() {
        let (window, rest) = Window::over(left, window_max, container_blocks);
        left = rest;
        space.mark(&window)?;
        let compared = in_parallel(window.pieces, |piece| {
            Containers::new(subject, &window, piece).compare()
        })?;
        for (one, blocks) in compared {
            space.found.extend(one);
            used += blocks;
        }
    }
    found.extend(space.found);
    Ok(used)
}

/// Returns the metadata chunks that are in slices, in order.
fn chunks(subject: Subject) -> Vec<Stretch> {
    let mut chunks: Vec<Stretch> = subject.volume.superblocks().with(|s| {
        let blocks = u64::from(s.head.chunk_blocks.get());
        let in_slices = s
            .chunks
            .iter()
            .filter(|chunk| chunk.slice_first.get() != CHUNK_BY_FORMAT);
        let stretch = |first: u64| (first, first.saturating_add(blocks));
        in_slices
            .map(|chunk| {
                let (first, end) = stretch(chunk.slice_first.get());
                (chunk.slice.get(), first, end)
            })
            .collect()
    });
    chunks.sort_unstable();
    chunks
}

/// Returns whether some of the blocks are in a stretch. The stretches are in order and do not overlap.
fn touches(stretches: &[Stretch], blocks: &Blocks) -> bool {
    let (slice, end) = (blocks.slice, blocks.first + u64::from(blocks.count));
    let at = stretches.partition_point(|s| (s.0, s.2) <= (slice, blocks.first));
    stretches.get(at).is_some_and(|s| s.0 == slice && s.1 < end)
}

impl Space<'_> {
    /// Passes the extents that count to `each`, store by store, several stores at a time.
    fn extents(&self, each: impl Fn(Ino, u64, Blocks) + Sync) -> Result<()> {
        let shards = self.subject.stores.shards();
        in_parallel(&shards, |shard| {
            let range = Range::all(*shard, Table::Extents);
            self.subject.stores.scan(range, |key, value| {
                if let Some((ino, extent)) = possible(self.subject.volume, key, value)
                    && !self.refused.contains(&(ino, extent.page))
                {
                    each(ino, extent.page, extent.blocks);
                }
                true
            })
        })
        .map(drop)
    }

    /// Marks the blocks of all extents in the window. Finds those that have two owners.
    fn mark(&mut self, window: &Window) -> Result<()> {
        let overlaps: Mutex<Vec<Stretch>> = Mutex::default();
        let chunks = &self.chunks;
        self.extents(|_, _, blocks| {
            let note = |first, end| {
                let mut overlaps = overlaps.lock();
                // Keeps one more than the maximum, which shows that there are too many.
                if overlaps.len() <= FIXES_MAX {
                    overlaps.push((blocks.slice, first, end));
                }
            };
            window.mark(&blocks, note);
            if touches(chunks, &blocks) {
                note(blocks.first, blocks.first + u64::from(blocks.count));
            }
        })?;
        let overlaps = merged(overlaps.into_inner());
        if overlaps.is_empty() {
            return Ok(());
        }
        self.found.is_cut |= overlaps.len() > FIXES_MAX;
        self.resolve(window, &overlaps)
    }

    /// Removes the extents that overlap metadata or an extent that begins earlier in the slice.
    fn resolve(&mut self, window: &Window, overlaps: &[Stretch]) -> Result<()> {
        let owners: Mutex<Vec<Owner>> = Mutex::default();
        self.extents(|ino, page, blocks| {
            if touches(overlaps, &blocks) {
                let mut owners = owners.lock();
                if owners.len() <= FIXES_MAX {
                    owners.push((blocks.slice, blocks.first, blocks.count, ino, page));
                }
            }
        })?;
        let mut owners = owners.into_inner();
        self.found.is_cut |= owners.len() > FIXES_MAX;
        owners.sort_unstable();
        // The extents are in order of location, so it suffices to compare each one with the last one that is kept.
        let mut kept: Vec<Owner> = Vec::new();
        for owner in owners {
            let blocks = blocks_of(&owner);
            window.unmark(&blocks);
            let is_behind =
                |last: &&Owner| last.0 == owner.0 && last.1 + u64::from(last.2) > owner.1;
            let other = match kept.last().filter(is_behind) {
                _ if touches(&self.chunks, &blocks) => "metadata".to_owned(),
                Some(last) => format!("inode {}", last.3),
                None => {
                    kept.push(owner);
                    continue;
                }
            };
            self.refuse(owner, &other);
        }
        for owner in kept {
            window.mark(&blocks_of(&owner), |_, _| {});
        }
        Ok(())
    }

    fn refuse(&mut self, (slice, first, count, ino, page): Owner, other: &str) {
        let end = first + u64::from(count);
        self.found.damage(format!(
            "blocks {first}..{end} of slice {slice} belong to inode {ino} (page {page}) and to {other}"
        ));
        let key = record::extent_key(ino, page);
        let stores = self.subject.stores;
        stores.remove(&mut self.found, Table::Extents, &key);
        self.refused.insert((ino, page));
    }
}

/// Slice, first block and number of blocks of an extent, its inode and its first page. Sorts by location.
type Owner = (SliceId, u64, u32, Ino, u64);

fn blocks_of(owner: &Owner) -> Blocks {
    Blocks {
        slice: owner.0,
        first: owner.1,
        count: owner.2,
    }
}

/// Sorts stretches, and joins those that touch or overlap.
fn merged(mut stretches: Vec<Stretch>) -> Vec<Stretch> {
    stretches.sort_unstable();
    let mut merged: Vec<Stretch> = Vec::new();
    for (slice, first, end) in stretches {
        match merged.last_mut() {
            Some(last) if last.0 == slice && first <= last.2 => last.2 = last.2.max(end),
            _ => merged.push((slice, first, end)),
        }
    }
    merged
}

/// The comparison of the containers of a piece.
struct Containers<'a> {
    subject: Subject<'a>,
    window: &'a Window<'a>,
    piece: &'a Piece,
    words: usize,
    /// By container: the number of used blocks that the store records.
    counts: Vec<u32>,
    found: Found,
    used: u64,
}

impl<'a> Containers<'a> {
    fn new(subject: Subject<'a>, window: &'a Window<'a>, piece: &'a Piece) -> Containers<'a> {
        Containers {
            subject,
            window,
            piece,
            words: subject.stores.all[0].container_blocks() as usize / 64,
            counts: vec![0; (piece.end - piece.first) as usize],
            found: Found::part_of(window.pieces.len()),
            used: 0,
        }
    }

    fn rows(&self, table: Table) -> Range<'a> {
        Range {
            shard: self.piece.shard,
            table,
            from: &self.piece.from,
            to: self.piece.to.as_deref(),
        }
    }

    /// Returns the container of a key if the piece has it. Otherwise reports the row, and has the repair remove it.
    fn container(&self, key: &[u8], found: &mut Found, table: Table, what: &str) -> Option<u32> {
        let wrong = match codec::container_of_key(key) {
            Ok((slice, container)) => {
                let piece = self.piece;
                if slice == piece.slice && (piece.first..piece.end).contains(&container) {
                    return Some(container);
                }
                format!("is of container {container} of slice {slice}, which does not exist")
            }
            Err(_) => format!("is invalid: key {}", show_key(key)),
        };
        found.damage(format!("{what} {wrong}"));
        found.remove_from(self.piece.shard, table, key);
        None
    }

    /// Compares all containers. Returns the findings, and the number of blocks that files have in them.
    fn compare(mut self) -> Result<(Found, u64)> {
        let mut found = Found::part_of(self.window.pieces.len());
        self.read_counts(&mut found)?;
        let stores = self.subject.stores;
        let mut next = self.piece.first;
        let none = vec![0; self.words];
        stores.scan_all(
            self.rows(Table::Bitmaps),
            &mut found,
            |found, key, value| {
                let what = "a bitmap";
                let Some(container) = self.container(key, found, Table::Bitmaps, what) else {
                    return true;
                };
                let Ok(have) = codec::bitmap_from_bytes(value, self.words) else {
                    found.damage(format!("a bitmap is invalid: key {}", show_key(key)));
                    found.remove_from(self.piece.shard, Table::Bitmaps, key);
                    return true;
                };
                // The keys are in order, so the skipped containers have no row.
                (next..container).for_each(|at| self.container_is(at, &none));
                self.container_is(container, &have);
                next = container + 1;
                true
            },
        )?;
        (next..self.piece.end).for_each(|at| self.container_is(at, &none));
        found.extend(self.found);
        Ok((found, self.used))
    }

    fn read_counts(&mut self, found: &mut Found) -> Result<()> {
        let mut counts = std::mem::take(&mut self.counts);
        let rows = self.rows(Table::Used);
        let stores = self.subject.stores;
        stores.scan_all(rows, found, |found, key, value| {
            let what = "a count of used blocks";
            let Some(container) = self.container(key, found, Table::Used, what) else {
                return true;
            };
            match codec::count_of_value(value) {
                Ok(count) => counts[(container - self.piece.first) as usize] = count,
                Err(_) => {
                    found.damage(format!("{what} is invalid: key {}", show_key(key)));
                    found.remove_from(self.piece.shard, Table::Used, key);
                }
            }
            true
        })?;
        self.counts = counts;
        Ok(())
    }

    /// Compares the bitmap of a container, and the store's count of its bits, with the bitmap that the extents need.
    fn container_is(&mut self, container: u32, have: &[u64]) {
        let (slice, piece) = (self.piece.slice, self.piece);
        let counted = self.counts[(container - piece.first) as usize];
        let bits = self.window.bits(slice, container);
        let wanted = |at: usize| {
            let word: Option<&AtomicU64> = bits.and_then(|bits| bits.get(at));
            word.map_or(0, |word| word.load(Ordering::Relaxed))
        };
        let (mut leaked, mut missing, mut count, mut held) = (0, 0, 0, 0);
        for (at, has) in have.iter().enumerate() {
            let want = wanted(at);
            leaked += (has & !want).count_ones();
            missing += (want & !has).count_ones();
            count += want.count_ones();
            held += has.count_ones();
        }
        self.used += u64::from(count);
        let place = format_args!("container {container} of slice {slice}").to_string();
        if leaked > 0 {
            self.found.find(
                Severity::Leak,
                format!("{leaked} blocks in {place} are marked as used but belong to nothing"),
            );
        }
        if missing > 0 {
            self.found.damage(format!(
                "{missing} blocks in {place} are in use but marked as free"
            ));
        }
        if counted != held {
            self.found.damage(format!(
                "{place} has {held} used blocks, and its counter says {counted}"
            ));
        }
        if leaked == 0 && missing == 0 && counted == count {
            return;
        }
        let key = container_key(slice, container);
        let stores = self.subject.stores;
        if count == 0 {
            stores.remove(&mut self.found, Table::Bitmaps, &key);
            stores.remove(&mut self.found, Table::Used, &key);
        } else {
            let bitmap: Vec<u64> = (0..self.words).map(wanted).collect();
            let bytes = codec::bitmap_to_bytes(&bitmap);
            stores.put(&mut self.found, Table::Bitmaps, &key, bytes);
            let total = count.to_le_bytes().to_vec();
            stores.put(&mut self.found, Table::Used, &key, total);
        }
    }
}

/// Checks the form of images. An image of a free block is no damage (`LoggedPages::drop_orphan`).
pub(super) fn images(subject: Subject, found: &mut Found) -> Result<()> {
    let slices = subject.volume.slices();
    let exists = |(slice, block): (SliceId, u64)| {
        let slice = slices.get(usize::from(slice));
        slice.is_some_and(|slice| block < slice.blocks)
    };
    let shards = subject.stores.shards();
    let each = in_parallel(&shards, |shard| {
        let mut found = Found::part_of(shards.len());
        let range = Range::all(*shard, Table::Logged);
        subject
            .stores
            .scan_all(range, &mut found, |found, key, value| {
                let wrong = match codec::image_of_row(key, value) {
                    Ok((block, _)) if exists(block) => return true,
                    Ok(((slice, block), _)) => format!(
                        "a logged page is of block {block} of slice {slice}, which does not exist"
                    ),
                    Err(_) => format!("a logged page is invalid: key {}", show_key(key)),
                };
                found.damage(wrong);
                found.remove_from(*shard, Table::Logged, key);
                true
            })?;
        Ok(found)
    })?;
    each.into_iter().for_each(|one| found.extend(one));
    Ok(())
}
