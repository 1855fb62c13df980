//! The metadata stores of a volume as a check sees them: as if all rows were in one store.
//!
//! Each row belongs into one store. A mount reads it only there. So a check reports rows that are in other stores and ignores them, and a
//! repair removes them.

use jericho_format::record::{ino_mark_name, key_number};
use jericho_metadata::shard::{ShardId, ShardMap};
use jericho_metadata::store::tables::{Row, Table};
use jericho_metadata::store::{Change, StoreRef};
use jericho_volume::Volume;

use super::findings::{Fix, Found, show_key};
use super::limits::Limits;
use super::progress::Progress;
use crate::core::TURN_NAME;
use crate::error::Result;
use crate::types::{ROOT, SliceId};

/// Number of rows after which `Progress` is changed.
const ROWS_TOLD: u64 = 1024;

/// A part of a table in one store: the rows with keys from `from` on and, if `to` is given, before `to`.
#[derive(Clone, Copy)]
pub(super) struct Range<'a> {
    pub shard: ShardId,
    pub table: Table,
    pub from: &'a [u8],
    pub to: Option<&'a [u8]>,
}

impl Range<'_> {
    /// Returns a whole table of a store.
    pub fn all(shard: ShardId, table: Table) -> Range<'static> {
        Range {
            shard,
            table,
            from: &[],
            to: None,
        }
    }
}

/// The stores of a volume, one for each shard.
pub(super) struct Stores<'p> {
    pub all: Vec<StoreRef>,
    map: ShardMap,
    /// Names of the values that belong to one slice.
    marks: Vec<String>,
    progress: &'p Progress,
}

impl<'p> Stores<'p> {
    pub fn new(all: Vec<StoreRef>, volume: &Volume, progress: &'p Progress) -> Stores<'p> {
        let slices = 0..volume.slices().len() as SliceId;
        Stores {
            map: ShardMap::new(all.len()),
            marks: slices.map(ino_mark_name).collect(),
            progress,
            all,
        }
    }

    /// Returns the map from metadata to stores.
    pub fn map(&self) -> ShardMap {
        self.map
    }

    /// Returns the progress of the check.
    pub fn progress(&self) -> &Progress {
        self.progress
    }

    /// Returns all shards in order.
    pub fn shards(&self) -> Vec<ShardId> {
        self.map.all().iter().collect()
    }

    /// Returns the store to which a row belongs, or `None` if its key is invalid or each store has such a row.
    fn home_of(&self, table: Table, key: &[u8]) -> Option<ShardId> {
        match table {
            Table::Inodes
            | Table::Entries
            | Table::Extents
            | Table::Xattrs
            | Table::Orphans
            | Table::Sums => key_number(key).map(|ino| self.map.of_ino(ino)),
            // All begin with the slice.
            Table::Bitmaps | Table::Used | Table::Logged => {
                let slice = key.first_chunk().copied().map(SliceId::from_be_bytes)?;
                Some(self.map.of_slice(slice))
            }
            Table::Values => {
                let mut marks = self.marks.iter();
                let slice = marks.position(|mark| mark.as_bytes() == key);
                let is_turn = || (key == TURN_NAME.as_bytes()).then(|| self.map.of_ino(ROOT));
                slice.map_or_else(is_turn, |slice| Some(self.map.of_slice(slice as SliceId)))
            }
        }
    }

    /// Passes each row of a range that belongs into the store to `each`, until `each` returns false.
    pub fn scan(&self, range: Range, mut each: impl FnMut(&[u8], &[u8]) -> bool) -> Result<()> {
        self.rows(range, |is_home, key, value| !is_home || each(key, value))
    }

    /// Does the same as `scan`, and reports the rows that belong to another store, for the repair to remove.
    pub fn scan_all(
        &self,
        range: Range,
        found: &mut Found,
        mut each: impl FnMut(&mut Found, &[u8], &[u8]) -> bool,
    ) -> Result<()> {
        let Range { shard, table, .. } = range;
        self.rows(range, |is_home, key, value| {
            if is_home {
                return each(found, key, value);
            }
            found.damage(format!(
                "a row of table {table:?} with the key {} is in the metadata of another slice",
                show_key(key)
            ));
            found.remove_from(shard, table, key);
            true
        })
    }

    fn rows(&self, range: Range, mut each: impl FnMut(bool, &[u8], &[u8]) -> bool) -> Result<()> {
        let mut rows = 0;
        let store = &self.all[range.shard.index()];
        let read = store.scan_range(range.table, range.from, range.to, |key, value| {
            rows += 1;
            if rows == ROWS_TOLD {
                self.progress.add_rows(std::mem::take(&mut rows));
            }
            let home = self.home_of(range.table, key);
            each(home.is_none_or(|home| home == range.shard), key, value)
        });
        self.progress.add_rows(rows);
        read
    }

    /// Has the repair put or remove a row in the store to which it belongs.
    pub fn fix(&self, found: &mut Found, row: Row) {
        let home = self.home_of(row.table, &row.key);
        found.fix(home.unwrap_or_else(|| self.map.of_ino(ROOT)), row);
    }

    /// Has the repair put a row into the store to which it belongs.
    pub fn put(&self, found: &mut Found, table: Table, key: &[u8], value: Vec<u8>) {
        let row = Row {
            table,
            key: key.to_vec(),
            value: Some(value),
        };
        self.fix(found, row);
    }

    /// Has the repair remove a row from the store to which it belongs.
    pub fn remove(&self, found: &mut Found, table: Table, key: &[u8]) {
        let row = Row {
            table,
            key: key.to_vec(),
            value: None,
        };
        self.fix(found, row);
    }

    /// Puts and removes rows durably, store by store. After an interruption the next repair goes on.
    pub fn commit(&self, fixes: Vec<Fix>) -> Result<()> {
        let mut of_stores: Vec<Vec<Row>> = self.all.iter().map(|_| Vec::new()).collect();
        for fix in fixes {
            of_stores[fix.shard.index()].push(fix.row);
        }
        for (store, rows) in self.all.iter().zip(of_stores) {
            if !rows.is_empty() {
                store.commit_rows(rows)?;
            }
        }
        Ok(())
    }

    /// Records in each store that it was repaired.
    pub fn note_repair(&self) -> Result<()> {
        let repaired = Change::PutValue("repaired", 1);
        let mut stores = self.all.iter();
        stores.try_for_each(|store| store.commit(std::slice::from_ref(&repaired)))
    }

    /// Closes all stores.
    pub fn close(self) -> Result<()> {
        self.all.iter().try_for_each(|store| store.close())
    }
}

/// What a check compares, and the memory for it.
#[derive(Clone, Copy)]
pub(super) struct Subject<'a> {
    pub volume: &'a Volume,
    pub stores: &'a Stores<'a>,
    pub limits: Limits,
}
