//! From a batch of changes to rows, and from rows to a transaction of redb.
//!
//! Rows are sorted by table and key, so that neighbours share a leaf that redb has already copied. The original order matters only
//! between changes of one key, where the last one wins, and between `Use` and `Free` of one block, which keep their order.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use jericho_format::record;
use jericho_format::sums::{self, Group};
use jericho_volume::Blocks;
use redb::{Database, Durability};

use super::codec;
use super::memtable::RowRef;
use super::records::Change;
use super::tables::{self, ReadError, Row, Table};
use super::view::View;

type Read<T> = std::result::Result<T, ReadError>;

/// A batch in the order in which it is applied.
#[derive(Debug)]
pub(super) struct Operations {
    pub(super) rows: Vec<Row>,
    /// (blocks, used)
    pub(super) blocks: Vec<(Blocks, bool)>,
    /// Changes of rows of `SUMS`, with their keys.
    pub(super) sums: Vec<(SumsKey, Box<[u8]>)>,
}

/// How a batch changes bitmaps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bitmaps {
    pub container_blocks: u32,
    /// The batch is applied again, perhaps over bitmaps that a checkpoint has written already. So blocks may already have the state that
    /// the batch gives them.
    pub is_replay: bool,
}
/// A key of `SUMS`.
pub(super) type SumsKey = [u8; 16];

pub(super) fn prepare(changes: &[Change]) -> Operations {
    let mut rows = Vec::with_capacity(changes.len());
    let mut blocks = Vec::new();
    let mut sums = Vec::new();
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
            Change::PutInoMark(slice, mark) => (
                Table::Values,
                record::ino_mark_name(*slice).into_bytes(),
                Some(mark.to_le_bytes().to_vec()),
            ),
            Change::PutLogged(block, image) => (
                Table::Logged,
                tables::block_key(*block).to_vec(),
                Some(image.to_vec()),
            ),
            Change::DelLogged(block) => (Table::Logged, tables::block_key(*block).to_vec(), None),
            Change::Sums(ino, group, change) => {
                sums.push((record::sums_key(*ino, *group), change.clone()));
                continue;
            }
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
    Operations::new(rows, blocks, sums)
}

impl Operations {
    pub(super) fn new(
        mut rows: Vec<Row>,
        blocks: Vec<(Blocks, bool)>,
        sums: Vec<(SumsKey, Box<[u8]>)>,
    ) -> Operations {
        // Stable, so that the last of equal keys is the latest change.
        rows.sort_by(|a, b| (a.table, &a.key).cmp(&(b.table, &b.key)));
        Operations { rows, blocks, sums }
    }

    /// Returns the rows to put: the batch's own rows, then the rows of the bitmaps and checksums as they are after the
    /// batch. If several rows have one key, the last one counts. A new batch fails with `Damaged` if a block already has the state
    /// that the batch gives it.
    pub(super) fn to_rows(&self, view: &View, bitmaps: Bitmaps) -> Read<Vec<Row>> {
        let mut rows = self.rows.clone();
        if !self.blocks.is_empty() {
            rows.append(&mut bitmap_rows(view, &self.blocks, bitmaps)?);
        }
        rows.append(&mut sums_rows(view, &self.sums)?);
        Ok(rows)
    }
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

/// Makes a transaction durable, with redb's allocator state, so that opening the store after a crash need not read all of the store.
fn set_durable(
    txn: &mut redb::WriteTransaction,
) -> std::result::Result<(), redb::SetDurabilityError> {
    txn.set_quick_repair(true);
    txn.set_durability(Durability::Immediate)
}

/// Writes rows in one durable transaction. They are in order and have different keys. Returns the bytes of the values that were
/// removed or replaced.
pub(super) fn apply(db: &Database, rows: &[RowRef<'_>]) -> std::result::Result<u64, String> {
    let mut freed_bytes = 0;
    let mut txn = db.begin_write().map_err(|e| e.to_string())?;
    set_durable(&mut txn).map_err(|e| e.to_string())?;
    // Dropping a transaction aborts it, so an early return changes nothing.
    for rows in rows.chunk_by(|a, b| a.table == b.table) {
        let mut table = txn
            .open_table(tables::ALL[rows[0].table as usize])
            .map_err(|e| e.to_string())?;
        for row in rows {
            let result = match row.value {
                Some(value) => table.insert(row.key, value),
                None => table.remove(row.key),
            };
            let before = result.map_err(|e| e.to_string())?;
            freed_bytes += before.map_or(0, |value| (row.key.len() + value.value().len()) as u64);
        }
    }
    txn.commit().map_err(|e| e.to_string())?;
    Ok(freed_bytes)
}

/// Returns the checksums of a row. A row that makes no sense counts as none: a read of its other pages then fails, because these have
/// data without a checksum, and the batch gives its own pages new ones. If the batch failed, this row would end all changes of the store.
fn stored_sums(view: &View, key: &SumsKey) -> Read<Option<Group>> {
    match view.get(Table::Sums, key, codec::sums_of_value) {
        Err(ReadError::Damaged(why)) => {
            let (ino, group) = codec::group_of_key(key)?;
            let first = group * sums::GROUP_PAGES;
            tracing::error!(
                "inode {ino}, pages {first} to {}: {why}; pages that are not written again cannot be read, run jericho check",
                first + sums::GROUP_PAGES - 1
            );
            Ok(None)
        }
        stored => stored,
    }
}

/// Returns the rows of checksums after these changes.
fn sums_rows(view: &View, changes: &[(SumsKey, Box<[u8]>)]) -> Read<Vec<Row>> {
    // `None`: the row is removed. A group takes 2 KiB, and the removal of a large file changes many.
    let mut touched: BTreeMap<SumsKey, Option<Box<Group>>> = BTreeMap::new();
    for (key, change) in changes {
        if change[..] == sums::WHOLE_GONE {
            touched.insert(*key, None);
            continue;
        }
        let group = match touched.entry(*key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(stored_sums(view, key)?.map(Box::new)),
        };
        if group.get_or_insert_default().apply(change).is_none() {
            return Err(ReadError::Damaged(
                "a change of checksums makes no sense".into(),
            ));
        }
    }
    let row = |(key, group): (SumsKey, Option<Box<Group>>)| {
        let value = group.map(|group| group.encode());
        Row {
            table: Table::Sums,
            key: key.to_vec(),
            value: value.filter(|value| !value.is_empty()),
        }
    };
    Ok(touched.into_iter().map(row).collect())
}

/// Returns the rows of the bitmaps, and of the counts beside them, after these changes.
fn bitmap_rows(view: &View, changes: &[(Blocks, bool)], bitmaps: Bitmaps) -> Read<Vec<Row>> {
    let container_blocks = bitmaps.container_blocks;
    let words = container_blocks as usize / 64;
    let mut touched: BTreeMap<(u16, u32), Box<[u64]>> = BTreeMap::new();
    for (range, use_them) in changes {
        let mut at = range.first;
        let end = range.first.saturating_add(u64::from(range.count));
        while at < end {
            let container = u32::try_from(at / u64::from(container_blocks))
                .map_err(|_| ReadError::Damaged(format!("block {at} is beyond any slice")))?;
            let bitmap = match touched.entry((range.slice, container)) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => {
                    let key = tables::container_key(range.slice, container);
                    let read = |bytes: &[u8]| codec::bitmap_from_bytes(bytes, words);
                    let stored = view.get(Table::Bitmaps, &key, read)?;
                    entry.insert(stored.unwrap_or_else(|| vec![0; words].into_boxed_slice()))
                }
            };
            let first = (at % u64::from(container_blocks)) as usize;
            let count = (end - at).min(u64::from(container_blocks) - first as u64) as usize;
            if let Some(bad) = set_bits(bitmap, first, count, *use_them)
                && !bitmaps.is_replay
            {
                let block = at - first as u64 + bad as u64;
                let state = if *use_them {
                    "used already"
                } else {
                    "free already"
                };
                return Err(ReadError::Damaged(format!(
                    "block {block} of slice {} is {state}",
                    range.slice
                )));
            }
            at += count as u64;
        }
    }
    let (mut bitmaps, mut used) = (vec![], vec![]);
    for ((slice, container), bitmap) in touched {
        let key = tables::container_key(slice, container).to_vec();
        let count: u32 = bitmap.iter().map(|w| w.count_ones()).sum();
        let row = |table, value| Row {
            table,
            key: key.clone(),
            value,
        };
        let bytes = (count > 0).then(|| codec::bitmap_to_bytes(&bitmap));
        bitmaps.push(row(Table::Bitmaps, bytes));
        let bytes = (count > 0).then(|| count.to_le_bytes().to_vec());
        used.push(row(Table::Used, bytes));
    }
    bitmaps.append(&mut used);
    Ok(bitmaps)
}

/// Sets or clears bits. Returns the first bit that already had the value.
fn set_bits(bitmap: &mut [u64], first: usize, count: usize, value: bool) -> Option<usize> {
    let mut bit = first;
    let end = first + count;
    let mut found = None;
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
            found = found.or(Some(bit - bit % 64 + wrong.trailing_zeros() as usize));
        }
        match value {
            true => *word |= mask,
            false => *word &= !mask,
        }
        bit += n;
    }
    found
}
