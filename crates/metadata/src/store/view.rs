//! One state of the store for readers: the rows in memory over redb's tables.

use std::sync::Arc;

use redb::{Database, ReadableDatabase, TableError};

use super::memtable::Memtable;
use super::tables::{self, BytesTable, ReadError, Table};
use crate::error::{Error, Result};

/// redb's tables as of one of its transactions.
pub(super) struct Snapshot {
    /// `None` for a table that an older writer did not make. It has no rows.
    tables: Vec<Option<BytesTable>>,
}

impl Snapshot {
    pub fn take(db: &Database) -> Result<Snapshot> {
        let txn = db.begin_read().map_err(|e| Error::Store(e.to_string()))?;
        let open = |definition| match txn.open_table(definition) {
            Ok(table) => Ok(Some(table)),
            Err(TableError::TableDoesNotExist(_)) => Ok(None),
            Err(error) => Err(Error::Store(error.to_string())),
        };
        Ok(Snapshot {
            tables: tables::ALL.into_iter().map(open).collect::<Result<_>>()?,
        })
    }

    /// Returns no tables.
    pub fn none() -> Snapshot {
        Snapshot {
            tables: tables::ALL.into_iter().map(|_| None).collect(),
        }
    }

    fn table(&self, table: Table) -> Option<&BytesTable> {
        // `Table` is the index of its definition.
        self.tables[table as usize].as_ref()
    }
}

/// A state of the store. A commit and a checkpoint each publish a new one; a reader keeps the one that it began with.
#[derive(Clone)]
pub(super) struct View {
    /// Rows of commits since the last checkpoint began.
    pub active: Memtable,
    /// Rows that a checkpoint is writing, or that the last one could not write.
    pub frozen: Memtable,
    pub redb: Arc<Snapshot>,
}

impl View {
    /// Returns the view of a store without rows in memory.
    pub fn of(snapshot: Snapshot) -> View {
        View {
            active: Memtable::default(),
            frozen: Memtable::default(),
            redb: Arc::new(snapshot),
        }
    }

    /// Returns whether redb has all rows.
    pub fn is_in_redb(&self) -> bool {
        self.active.is_empty() && self.frozen.is_empty()
    }

    /// Returns all rows in memory.
    pub fn in_memory(&self) -> Memtable {
        if self.frozen.is_empty() {
            return self.active.clone();
        }
        let mut rows = self.frozen.clone();
        rows.put_all(&self.active);
        rows
    }

    /// Returns what `read` makes of the value of a row, or `None` without the row.
    pub fn get<T>(
        &self,
        table: Table,
        key: &[u8],
        read: impl FnOnce(&[u8]) -> std::result::Result<T, ReadError>,
    ) -> std::result::Result<Option<T>, ReadError> {
        let memory = [&self.active, &self.frozen];
        if let Some(value) = memory.into_iter().find_map(|rows| rows.get(table, key)) {
            return value.map(|value| read(&value)).transpose();
        }
        let Some(table) = self.redb.table(table) else {
            return Ok(None);
        };
        match table.get(key)? {
            Some(value) => read(value.value()).map(Some),
            None => Ok(None),
        }
    }

    /// Passes the rows of a table to `each` in the order of their keys, from `from` on and, if `to` is given, before `to`, until
    /// `each` returns false.
    pub fn each(
        &self,
        table: Table,
        from: &[u8],
        to: Option<&[u8]>,
        mut each: impl FnMut(&[u8], &[u8]) -> std::result::Result<bool, ReadError>,
    ) -> std::result::Result<(), ReadError> {
        let mut memory = self.memory_range(table, from, to).peekable();
        let table = self.redb.table(table);
        let stored = table.map(|table| match to {
            Some(to) => table.range::<&[u8]>(from..to),
            None => table.range::<&[u8]>(from..),
        });
        for item in stored.transpose()?.into_iter().flatten() {
            let (key, value) = item?;
            let key = key.value();
            while let Some((newer, value)) = memory.next_if(|(newer, _)| *newer < key) {
                if let Some(value) = value
                    && !each(newer, value)?
                {
                    return Ok(());
                }
            }
            let goes_on = match memory.next_if(|(newer, _)| *newer == key) {
                Some((_, Some(value))) => each(key, value)?,
                Some((_, None)) => true,
                None => each(key, value.value())?,
            };
            if !goes_on {
                return Ok(());
            }
        }
        for (key, value) in memory {
            if let Some(value) = value
                && !each(key, value)?
            {
                break;
            }
        }
        Ok(())
    }

    /// Returns the rows in memory of a range of a table, in order. A removed row has no value.
    fn memory_range(
        &self,
        table: Table,
        from: &[u8],
        to: Option<&[u8]>,
    ) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
        let mut active = self.active.range(table, from, to).peekable();
        let mut frozen = self.frozen.range(table, from, to).peekable();
        std::iter::from_fn(move || {
            let (Some((newer, _)), Some((older, _))) = (active.peek(), frozen.peek()) else {
                return active.next().or_else(|| frozen.next());
            };
            let (newer, older) = (*newer, *older);
            if older < newer {
                return frozen.next();
            }
            if older == newer {
                frozen.next();
            }
            active.next()
        })
    }
}
