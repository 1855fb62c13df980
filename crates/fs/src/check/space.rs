//! Compares extents with the slices, with each other, with the metadata chunks and with the bitmaps.

use std::collections::BTreeMap;

use jericho_format::PAGE_MAX;
use jericho_format::superblock::CHUNK_BY_FORMAT;

use super::{Pass, Severity};
use crate::alloc::Blocks;
use crate::error::Result;
use crate::store::codec;
use crate::store::tables::Row;
use crate::store::tables::{Table, container_key};
use crate::types::{Ino, Kind, SliceId};

/// The owner of a range of blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    Metadata,
    /// Inode and first page.
    File(Ino, u64),
}

/// A range with its owner, ordered by location.
type Owned = (SliceId, u64, u64, Owner);

type Bitmaps = BTreeMap<(SliceId, u32), Box<[u64]>>;

impl Pass<'_> {
    pub(super) fn space(&mut self) -> Result<()> {
        let mut owned = self.extents()?;
        self.volume.superblocks().with(|s| {
            let blocks = u64::from(s.head.chunk_blocks.get());
            for chunk in &s.chunks {
                let slice = chunk.slice.get();
                if chunk.slice_first.get() != CHUNK_BY_FORMAT {
                    owned.push((slice, chunk.slice_first.get(), blocks, Owner::Metadata));
                }
            }
        });
        self.overlaps(&mut owned);
        self.bitmaps(&owned)?;
        self.images()
    }

    /// Checks the form of images. An image of a free block is no damage (`LoggedPages::drop_orphan`).
    fn images(&mut self) -> Result<()> {
        let slices = self.volume.slices();
        let exists = |(slice, block): (SliceId, u64)| {
            let slice = slices.get(usize::from(slice));
            slice.is_some_and(|slice| block < slice.blocks)
        };
        let stores = self.stores;
        stores.scan(Table::Logged, |shard, key, value| {
            let wrong = match codec::image_of_row(key, value) {
                Ok((block, _)) if exists(block) => return,
                Ok(((slice, block), _)) => {
                    format!(
                        "a logged page is of block {block} of slice {slice}, which does not exist"
                    )
                }
                Err(_) => format!("a logged page is invalid: key {key:02x?}"),
            };
            self.damage(wrong);
            self.remove_from(shard, Table::Logged, key);
        })
    }

    fn extents(&mut self) -> Result<Vec<Owned>> {
        let mut owned = Vec::new();
        // The file, and the page after its last extent.
        let mut last = (0, 0);
        let stores = self.stores;
        stores.scan(Table::Extents, |shard, key, value| {
            let Ok((ino, extent)) = codec::extent_of_row(key, value) else {
                self.damage(format!("an extent is invalid: key {key:02x?}"));
                self.remove_from(shard, Table::Extents, key);
                return;
            };
            let Blocks {
                slice,
                first,
                count,
            } = extent.blocks;
            let capacity = self
                .volume
                .slices()
                .get(usize::from(slice))
                .map_or(0, |s| s.blocks);
            let what = format!("extent of inode {ino} at page {}", extent.page);
            let pages_end = extent.page.checked_add(u64::from(count));
            let wrong = if self
                .inodes
                .get(&ino)
                .is_none_or(|s| s.record.kind != Kind::File)
            {
                Some("belongs to no file".to_owned())
            } else if count == 0 {
                Some("is empty".to_owned())
            } else if first
                .checked_add(count.into())
                .is_none_or(|end| end > capacity)
            {
                Some(format!("ends beyond slice {slice}"))
            } else if pages_end.is_none_or(|end| end > PAGE_MAX + 1) {
                Some("ends beyond the largest file".to_owned())
            } else if last.0 == ino && last.1 > extent.page {
                Some("overlaps the one before it".to_owned())
            } else {
                None
            };
            match wrong {
                Some(wrong) => {
                    self.damage(format!("{what} {wrong}"));
                    self.remove_from(shard, Table::Extents, key);
                }
                None => {
                    last = (ino, pages_end.unwrap_or_default());
                    if let Some(seen) = self.inodes.get_mut(&ino) {
                        seen.blocks += u64::from(count);
                    }
                    owned.push((slice, first, count.into(), Owner::File(ino, extent.page)));
                }
            }
        })?;
        Ok(owned)
    }

    /// Finds blocks with two owners. Removes an extent that overlaps metadata or an earlier extent of the slice. Leaves only the
    /// other extents in `owned`.
    fn overlaps(&mut self, owned: &mut Vec<Owned>) {
        // In order of location, it suffices to compare each extent with the last kept extent and with the first chunk that ends
        // after its start.
        owned.sort_unstable();
        let chunks: Vec<Owned> = owned
            .iter()
            .filter(|o| o.3 == Owner::Metadata)
            .copied()
            .collect();
        let mut kept: Vec<Owned> = Vec::with_capacity(owned.len());
        for range in owned.drain(..) {
            let (slice, first, count, owner) = range;
            let Owner::File(ino, page) = owner else {
                continue;
            };
            let at = chunks.partition_point(|c| (c.0, c.1 + c.2) <= (slice, first));
            let in_metadata = chunks
                .get(at)
                .is_some_and(|c| c.0 == slice && c.1 < first + count);
            let other = kept
                .last()
                .filter(|last| last.0 == slice && last.1 + last.2 > first)
                .map(|last| last.3);
            let shared = match other {
                _ if in_metadata => "metadata".to_owned(),
                Some(Owner::File(other, _)) => format!("inode {other}"),
                _ => {
                    kept.push(range);
                    continue;
                }
            };
            self.damage(format!(
                "blocks {first}..{} of slice {slice} belong to inode {ino} (page {page}) and to {shared}",
                first + count
            ));
            self.remove(
                Table::Extents,
                &jericho_format::record::extent_key(ino, page),
            );
            if let Some(seen) = self.inodes.get_mut(&ino) {
                seen.blocks -= count;
            }
        }
        *owned = kept;
    }

    fn bitmaps(&mut self, owned: &[Owned]) -> Result<()> {
        let container_blocks = u64::from(self.stores.all[0].container_blocks());
        let words = (container_blocks / 64) as usize;
        let expected = self.expected_bitmaps(owned, container_blocks);
        let found = self.stored_bitmaps(words)?;
        let counts = self.stored_counts()?;
        let mut all: Vec<(SliceId, u32)> = expected
            .keys()
            .chain(found.keys())
            .chain(counts.keys())
            .copied()
            .collect();
        all.sort_unstable();
        all.dedup();
        let none = vec![0; words].into_boxed_slice();
        for at in all {
            let want = expected.get(&at).unwrap_or(&none);
            let have = found.get(&at).unwrap_or(&none);
            self.compare_bitmaps(at, want, have, counts.get(&at).copied().unwrap_or(0));
        }
        Ok(())
    }

    /// Returns the bitmaps that the owned blocks need. Counts the blocks.
    fn expected_bitmaps(&mut self, owned: &[Owned], container_blocks: u64) -> Bitmaps {
        let words = (container_blocks / 64) as usize;
        let mut expected: Bitmaps = BTreeMap::new();
        let mut used = 0;
        for (slice, first, count, _) in owned {
            used += count;
            for block in *first..first + count {
                let container = (block / container_blocks) as u32;
                let bitmap = expected
                    .entry((*slice, container))
                    .or_insert_with(|| vec![0; words].into_boxed_slice());
                let bit = (block % container_blocks) as usize;
                bitmap[bit / 64] |= 1 << (bit % 64);
            }
        }
        self.report.used_bytes = used * jericho_format::PAGE_BYTES;
        expected
    }

    /// Reads the bitmaps of the store. Removes those that make no sense.
    fn stored_bitmaps(&mut self, words: usize) -> Result<Bitmaps> {
        let mut found: Bitmaps = BTreeMap::new();
        let stores = self.stores;
        stores.scan(Table::Bitmaps, |shard, key, value| {
            let row = codec::container_of_key(key)
                .and_then(|at| Ok((at, codec::bitmap_from_bytes(value, words)?)));
            match row {
                Ok((at, bitmap)) => drop(found.insert(at, bitmap)),
                Err(_) => {
                    self.damage(format!("a bitmap is invalid: key {key:02x?}"));
                    self.remove_from(shard, Table::Bitmaps, key);
                }
            }
        })?;
        Ok(found)
    }

    /// Reads the counts of used blocks of the store. Removes those that make no sense.
    fn stored_counts(&mut self) -> Result<BTreeMap<(SliceId, u32), u32>> {
        let mut counts = BTreeMap::new();
        let stores = self.stores;
        stores.scan(Table::Used, |shard, key, value| {
            let row =
                codec::container_of_key(key).and_then(|at| Ok((at, codec::count_of_value(value)?)));
            match row {
                Ok((at, count)) => drop(counts.insert(at, count)),
                Err(_) => {
                    self.damage(format!("a count of used blocks is invalid: key {key:02x?}"));
                    self.remove_from(shard, Table::Used, key);
                }
            }
        })?;
        Ok(counts)
    }

    /// Compares the bitmap of a container, and the number of bits that the store counts in it, with the bitmap that the owned
    /// blocks need.
    fn compare_bitmaps(&mut self, at: (SliceId, u32), want: &[u64], have: &[u64], counted: u32) {
        let both = || want.iter().zip(have.iter());
        let leaked: u32 = both().map(|(w, h)| (h & !w).count_ones()).sum();
        let missing: u32 = both().map(|(w, h)| (w & !h).count_ones()).sum();
        let count: u32 = want.iter().map(|w| w.count_ones()).sum();
        let place = format!("container {} of slice {}", at.1, at.0);
        if leaked > 0 {
            self.find(
                Severity::Leak,
                format!("{leaked} blocks in {place} are marked as used but belong to nothing"),
            );
        }
        if missing > 0 {
            self.damage(format!(
                "{missing} blocks in {place} are in use but marked as free"
            ));
        }
        let held: u32 = have.iter().map(|w| w.count_ones()).sum();
        if counted != held {
            self.damage(format!(
                "{place} has {held} used blocks but counts {counted}"
            ));
        }
        if leaked > 0 || missing > 0 || counted != count {
            let key = container_key(at.0, at.1).to_vec();
            let bitmap = (count > 0).then(|| codec::bitmap_to_bytes(want));
            let total = (count > 0).then(|| count.to_le_bytes().to_vec());
            self.fix(Row {
                table: Table::Bitmaps,
                key: key.clone(),
                value: bitmap,
            });
            self.fix(Row {
                table: Table::Used,
                key,
                value: total,
            });
        }
    }
}
