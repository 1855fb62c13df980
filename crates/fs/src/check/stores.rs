//! The metadata stores of a volume as a check sees them: as if all rows were in one store.
//!
//! Each row has one store where it belongs. A mount reads it only there. So a check ignores rows that are elsewhere, reports them, and
//! removes them.

use std::cell::RefCell;

use jericho_format::record::{ino_mark_name, key_number};
use jericho_volume::Volume;

use crate::core::TURN_NAME;
use crate::error::Result;
use crate::shard::{ShardId, ShardMap};
use crate::store::tables::{Row, Table};
use crate::store::{Change, StoreRef};
use crate::types::{ROOT, SliceId};

/// A row to put or to remove, and the store in which.
pub(super) struct Fix {
    pub shard: ShardId,
    pub row: Row,
}

/// The stores of a volume, one for each shard.
pub(super) struct Stores {
    pub all: Vec<StoreRef>,
    map: ShardMap,
    /// Names of the values that belong to one slice.
    marks: Vec<String>,
    /// Rows that scans have found in a store where they do not belong.
    misplaced: RefCell<Vec<Fix>>,
}

impl Stores {
    pub fn new(all: Vec<StoreRef>, volume: &Volume) -> Stores {
        let slices = 0..volume.slices().len() as SliceId;
        Stores {
            map: ShardMap::new(all.len()),
            marks: slices.map(ino_mark_name).collect(),
            misplaced: RefCell::default(),
            all,
        }
    }

    /// Returns which store has which metadata.
    pub fn map(&self) -> ShardMap {
        self.map
    }

    /// Returns the store where a row belongs, or `None` if its key makes no sense or each store has such a row.
    pub fn home_of(&self, table: Table, key: &[u8]) -> Option<ShardId> {
        match table {
            Table::Inodes | Table::Entries | Table::Extents | Table::Xattrs | Table::Orphans => {
                key_number(key).map(|ino| self.map.of_ino(ino))
            }
            // Both begin with the slice.
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

    /// Passes each row of a table that is where it belongs to `each`, with its store.
    pub fn scan(&self, table: Table, mut each: impl FnMut(ShardId, &[u8], &[u8])) -> Result<()> {
        for (shard, store) in self.map.all().iter().zip(&self.all) {
            store.scan(table, |key, value| {
                match self.home_of(table, key) {
                    Some(home) if home != shard => self.misplaced.borrow_mut().push(Fix {
                        shard,
                        row: Row {
                            table,
                            key: key.to_vec(),
                            value: None,
                        },
                    }),
                    _ => each(shard, key, value),
                }
                true
            })?;
        }
        Ok(())
    }

    /// Returns the removals of rows that scans have found where they do not belong.
    pub fn take_misplaced(&self) -> Vec<Fix> {
        self.misplaced.take()
    }

    /// Puts and removes rows durably, store by store. If it is interrupted, the next repair goes on.
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
