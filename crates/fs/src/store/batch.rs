//! From a batch of changes to one transaction of redb.
//!
//! Rows are put in order of table and key first: neighbours then share a leaf that is already
//! copied and hot. Order matters only between changes of one key, where the last one wins, and
//! between `Use` and `Free` of one block, which are kept in order.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use jericho_format::record;
use jericho_volume::Blocks;
use redb::{Database, Durability, ReadableTable, Table as RedbTable};

use super::codec;
use super::records::Change;
use super::region::Region;
use super::tables::{self, Table};
use crate::error::{Error, Result};

/// Why a batch was not applied.
pub(super) enum Failure {
    /// The batch contradicts what is stored.
    Damaged(String),
    /// redb failed; its words.
    Store(String),
}

fn store_failure(error: impl std::fmt::Display) -> Failure {
    Failure::Store(error.to_string())
}

/// A row to put, or with `None` to remove.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) table: Table,
    pub(crate) key: Vec<u8>,
    pub(crate) value: Option<Vec<u8>>,
}

/// A batch in the order in which it is applied.
pub(super) struct Operations {
    rows: Vec<Row>,
    /// (blocks, used)
    blocks: Vec<(Blocks, bool)>,
}

pub(super) fn prepare(changes: &[Change]) -> Operations {
    let mut rows = Vec::with_capacity(changes.len());
    let mut blocks = Vec::new();
    for change in changes {
        let (table, key, value) = match change {
            Change::PutInode(ino, inode) => (
                Table::Inodes,
                record::ino_key(*ino).to_vec(),
                Some(codec::inode_to_bytes(inode)),
            ),
            Change::DelInode(ino) => (Table::Inodes, record::ino_key(*ino).to_vec(), None),
            Change::PutEntry {
                dir,
                hash,
                name,
                ino,
                kind,
            } => (
                Table::Entries,
                record::entry_key(*dir, *hash, name),
                Some(codec::entry_to_bytes(*ino, *kind).to_vec()),
            ),
            Change::DelEntry { dir, hash, name } => {
                (Table::Entries, record::entry_key(*dir, *hash, name), None)
            }
            Change::PutExtent(ino, extent) => (
                Table::Extents,
                record::extent_key(*ino, extent.page).to_vec(),
                Some(codec::extent_to_bytes(extent).to_vec()),
            ),
            Change::DelExtent(ino, page) => (
                Table::Extents,
                record::extent_key(*ino, *page).to_vec(),
                None,
            ),
            Change::PutXattr(ino, name, value) => (
                Table::Xattrs,
                record::xattr_key(*ino, name),
                Some(value.to_vec()),
            ),
            Change::DelXattr(ino, name) => (Table::Xattrs, record::xattr_key(*ino, name), None),
            Change::PutOrphan(ino) => (
                Table::Orphans,
                record::ino_key(*ino).to_vec(),
                Some(Vec::new()),
            ),
            Change::DelOrphan(ino) => (Table::Orphans, record::ino_key(*ino).to_vec(), None),
            Change::PutValue(name, value) => (
                Table::Values,
                name.as_bytes().to_vec(),
                Some(value.to_le_bytes().to_vec()),
            ),
            Change::Use(range) => {
                blocks.push((*range, true));
                continue;
            }
            Change::Free(range) => {
                blocks.push((*range, false));
                continue;
            }
        };
        rows.push(Row { table, key, value });
    }
    Operations::new(rows, blocks)
}

impl Operations {
    pub(super) fn new(mut rows: Vec<Row>, blocks: Vec<(Blocks, bool)>) -> Operations {
        // Stable, so that the last of equal keys is the latest change.
        rows.sort_by(|a, b| (a.table, &a.key).cmp(&(b.table, &b.key)));
        Operations { rows, blocks }
    }
}

/// An upper estimate of what a batch writes to the metadata region: its rows, leaves that are
/// copied, and the paths to them.
pub(super) fn estimate_bytes(operations: &Operations, mapped_bytes: u64) -> u64 {
    let rows: usize = operations
        .rows
        .iter()
        .map(|r| r.key.len() + r.value.as_ref().map_or(0, Vec::len))
        .sum();
    // Every row may go to a leaf of its own, which is copied; but there are no more leaves than are mapped.
    let leaves =
        (operations.rows.len() + operations.blocks.len()).min(mapped_bytes as usize / 4096);
    (rows as u64) * 2 + (leaves as u64 + 64) * 4096
}

pub(super) fn create_tables(db: &Database) -> std::result::Result<(), String> {
    let mut txn = db.begin_write().map_err(|e| e.to_string())?;
    set_durable(&mut txn).map_err(|e| e.to_string())?;
    let have = txn.list_tables().map_err(|e| e.to_string())?.count();
    if have == tables::ALL.len() {
        return txn.abort().map_err(|e| e.to_string());
    }
    for table in tables::ALL {
        txn.open_table(table).map_err(|e| e.to_string())?;
    }
    txn.commit().map_err(|e| e.to_string())
}

/// Commits of the store are durable, and save redb's allocator state so that opening the store
/// after a crash need not walk all of it.
fn set_durable(
    txn: &mut redb::WriteTransaction,
) -> std::result::Result<(), redb::SetDurabilityError> {
    txn.set_quick_repair(true);
    txn.set_durability(Durability::Immediate)
}

pub(super) fn apply(
    db: &Database,
    operations: &Operations,
    container_blocks: u32,
) -> std::result::Result<(), Failure> {
    let mut txn = db.begin_write().map_err(store_failure)?;
    set_durable(&mut txn).map_err(store_failure)?;
    // A transaction that is dropped is aborted, so every early return leaves nothing.
    for rows in operations.rows.chunk_by(|a, b| a.table == b.table) {
        let mut table = txn
            .open_table(tables::ALL[rows[0].table as usize])
            .map_err(store_failure)?;
        for same_key in rows.chunk_by(|a, b| a.key == b.key) {
            let row = &same_key[same_key.len() - 1];
            match &row.value {
                Some(value) => drop(
                    table
                        .insert(&row.key[..], &value[..])
                        .map_err(store_failure)?,
                ),
                None => drop(table.remove(&row.key[..]).map_err(store_failure)?),
            }
        }
    }
    if !operations.blocks.is_empty() {
        let mut bitmaps = txn.open_table(tables::BITMAPS).map_err(store_failure)?;
        let mut used = txn.open_table(tables::USED).map_err(store_failure)?;
        apply_blocks(
            &mut bitmaps,
            &mut used,
            &operations.blocks,
            container_blocks,
        )?;
    }
    txn.commit().map_err(store_failure)
}

type BytesTable<'t> = RedbTable<'t, &'static [u8], &'static [u8]>;

fn apply_blocks(
    bitmaps: &mut BytesTable<'_>,
    used: &mut BytesTable<'_>,
    changes: &[(Blocks, bool)],
    container_blocks: u32,
) -> std::result::Result<(), Failure> {
    let words = container_blocks as usize / 64;
    let mut touched: BTreeMap<(u16, u32), Box<[u64]>> = BTreeMap::new();
    for (range, use_them) in changes {
        let mut at = range.first;
        let end = range.first + u64::from(range.count);
        while at < end {
            let container = u32::try_from(at / u64::from(container_blocks))
                .map_err(|_| Failure::Damaged(format!("block {at} is beyond any slice")))?;
            let bitmap = match touched.entry((range.slice, container)) {
                std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::btree_map::Entry::Vacant(entry) => {
                    let key = tables::container_key(range.slice, container);
                    let row = bitmaps.get(&key[..]).map_err(store_failure)?;
                    entry.insert(match row {
                        Some(value) => codec::bitmap_from_bytes(value.value(), words)
                            .map_err(|_| Failure::Damaged("a bitmap has a wrong size".into()))?,
                        None => vec![0; words].into_boxed_slice(),
                    })
                }
            };
            let first = (at % u64::from(container_blocks)) as usize;
            let count = (end - at).min(u64::from(container_blocks) - first as u64) as usize;
            if let Some(bad) = set_bits(bitmap, first, count, *use_them) {
                let block = at - first as u64 + bad as u64;
                let state = if *use_them {
                    "used already"
                } else {
                    "free already"
                };
                return Err(Failure::Damaged(format!(
                    "block {block} of slice {} is {state}",
                    range.slice
                )));
            }
            at += count as u64;
        }
    }
    for ((slice, container), bitmap) in touched {
        let key = tables::container_key(slice, container);
        let count: u32 = bitmap.iter().map(|w| w.count_ones()).sum();
        if count == 0 {
            bitmaps.remove(&key[..]).map_err(store_failure)?;
            used.remove(&key[..]).map_err(store_failure)?;
        } else {
            let bytes = codec::bitmap_to_bytes(&bitmap);
            bitmaps
                .insert(&key[..], &bytes[..])
                .map_err(store_failure)?;
            used.insert(&key[..], &count.to_le_bytes()[..])
                .map_err(store_failure)?;
        }
    }
    Ok(())
}

/// Sets or clears bits; gives the first that was so already, with nothing promised about the rest.
fn set_bits(bitmap: &mut [u64], first: usize, count: usize, value: bool) -> Option<usize> {
    let mut bit = first;
    let end = first + count;
    while bit < end {
        let n = (64 - bit % 64).min(end - bit);
        let mask = if n == 64 {
            u64::MAX
        } else {
            ((1 << n) - 1) << (bit % 64)
        };
        let word = &mut bitmap[bit / 64];
        let wrong = if value { *word & mask } else { !*word & mask };
        if wrong != 0 {
            return Some(bit - bit % 64 + wrong.trailing_zeros() as usize);
        }
        *word ^= mask;
        bit += n;
    }
    None
}

/// Whether things may still be created. The store cannot tell cheaply how much is free inside of
/// redb's pages, so once the region was found full, what is created must be paid by removals.
#[derive(Default)]
pub(super) struct Room {
    full: AtomicBool,
    removed: AtomicI64,
}

impl Room {
    pub(super) fn none_left(&self) {
        if !self.full.swap(true, Ordering::Relaxed) {
            self.removed.store(0, Ordering::Relaxed);
        }
    }

    /// Counts what a committed batch added and removed.
    pub(super) fn account(&self, changes: &[Change]) {
        if !self.full.load(Ordering::Relaxed) {
            return;
        }
        let balance: i64 = changes
            .iter()
            .map(|change| match change {
                Change::DelInode(_) | Change::DelEntry { .. } => 1,
                Change::PutEntry { .. } => -1,
                _ => 0,
            })
            .sum();
        self.removed.fetch_add(balance, Ordering::Relaxed);
    }

    pub(super) fn check(&self, region: &Region) -> Result<()> {
        if region.has_reserve() {
            self.full.store(false, Ordering::Relaxed);
            return Ok(());
        }
        self.none_left();
        // Half of what was removed may be used again: leaves are not packed full.
        if self.removed.load(Ordering::Relaxed) > 128 {
            Ok(())
        } else {
            Err(Error::Errno(28))
        }
    }
}
