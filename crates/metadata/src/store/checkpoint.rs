//! Checkpoints: the rows in memory go to redb, and the journal's tail moves up.
//!
//! A checkpoint writes its rows in several transactions of a bounded size, *pieces*, so that the room that it needs is bounded. The last
//! piece has the position up to which redb has the journal. A crash between two pieces leaves redb between two states, with the
//! position of the older one. Recovery applies all batches after that position. Each row of a piece comes from one of these batches,
//! so the result does not depend on which pieces are in redb. Until the last piece, readers find all rows of the checkpoint in memory.
//!
//! If there are several pieces, removals come first, because they free pages that the other rows may need. Pages that a transaction
//! frees can be used after the next transaction, if no reader has an older state. So readers get redb's newest state after each piece. If
//! a piece finds no room, an empty transaction frees these pages, and then the pieces get smaller.

use std::sync::Arc;

use jericho_journal::Position;

use super::batch;
use super::log::Log;
use super::memtable::{Memtable, RowRef};
use super::region::Region;
use super::room::{PIECE_BYTES_MAX, PIECE_ROWS_FEW};
use super::tables::{CHECKPOINT, Table};
use super::view::{Snapshot, View};
use super::{Store, Writer, explain, guarded_over};
use crate::errno::ENOSPC;
use crate::error::{Error, Result};

/// The row that records a position.
struct PositionRow(Vec<u8>);

impl PositionRow {
    fn new(position: Position) -> PositionRow {
        PositionRow(position.encode().to_vec())
    }

    fn row(&self) -> RowRef<'_> {
        RowRef {
            table: Table::Values,
            key: CHECKPOINT.as_bytes(),
            value: Some(&self.0),
        }
    }
}

impl Store {
    /// Writes the rows in memory to redb. Commits go on meanwhile. After `Errno(ENOSPC)` the rows stay in memory and in the journal,
    /// and the store goes on; any other error ends all changes.
    pub fn checkpoint(&self) -> Result<()> {
        if !self.writable || self.view.load().is_in_redb() {
            return Ok(());
        }
        self.write_checkpoint()
    }

    /// Does the same as `checkpoint`, also without rows in memory: after a crash, `finish_recovery` must record the position.
    pub(super) fn write_checkpoint(&self) -> Result<()> {
        let mut writer = self.writer.lock();
        self.check()?;
        let (rows, position) = {
            let log = self.log.lock();
            let view = self.view.load();
            let rows = view.in_memory();
            // Later commits put their rows over the frozen ones. Readers find the frozen ones here until redb has them.
            self.view.store(Arc::new(View {
                active: Memtable::default(),
                frozen: rows.clone(),
                redb: view.redb.clone(),
            }));
            (rows, log.end())
        };
        let (free, freed_before) = (self.free_pages(), self.room.freed_bytes());
        let written = self.write_pieces(&mut writer, &rows, position);
        self.wrote(&rows, free);
        written?;
        // Holds the log for both changes, so that a batch that finds no rows in memory finds the journal empty.
        let mut log = self.log.lock();
        self.view.rcu(|view| View {
            active: view.active.clone(),
            frozen: Memtable::default(),
            redb: view.redb.clone(),
        });
        self.free_journal(&mut log, position)?;
        drop(log);
        self.prepare_room(&mut writer, &rows, freed_before)
    }

    /// Frees the journal up to a position that redb has durably.
    pub(super) fn free_journal(&self, log: &mut Log, position: Option<Position>) -> Result<()> {
        match position {
            Some(position) => log.free(position).map_err(|error| self.fail(error)),
            None => Ok(()),
        }
    }

    /// Writes rows to redb piece by piece, the position with the last one. Fails with `Errno(ENOSPC)` if the metadata region cannot
    /// grow enough; redb may have some of the pieces then.
    fn write_pieces(
        &self,
        writer: &mut Writer,
        rows: &Memtable,
        position: Option<Position>,
    ) -> Result<()> {
        let position = position.map(PositionRow::new);
        let mut rows: Vec<RowRef<'_>> = rows.rows().collect();
        if piece(&rows, self.room.piece_rows()) < rows.len() {
            removals_first(&mut rows);
        }
        let mut rest = &mut rows[..];
        let mut effort = Effort::default();
        loop {
            let count = piece(rest, self.room.piece_rows());
            let is_last = count == rest.len();
            let position = position.iter().filter(|_| is_last).map(PositionRow::row);
            let now: Vec<_> = rest[..count].iter().copied().chain(position).collect();
            if self.try_write(writer, now)? {
                self.show_redb(writer)?;
                if is_last {
                    return Ok(());
                }
                rest = &mut rest[count..];
                effort = Effort::default();
                self.room.larger_pieces();
            } else if !self.find_room(writer, &mut effort, count)? {
                return Err(ENOSPC);
            } else {
                removals_first(rest);
            }
        }
    }

    /// Writes all rows to redb in one transaction, with the position. Returns redb's tables after it. Fails with `Errno(ENOSPC)`,
    /// without effect, if the metadata region cannot grow enough.
    pub(super) fn write_at_once(
        &self,
        writer: &mut Writer,
        rows: &Memtable,
        position: Option<Position>,
    ) -> Result<Snapshot> {
        let position = position.map(PositionRow::new);
        let mut effort = Effort::default();
        loop {
            let position = position.iter().map(PositionRow::row);
            let all = rows.rows().chain(position).collect();
            if self.try_write(writer, all)? {
                return self.snapshot(writer);
            }
            if !self.find_room(writer, &mut effort, 1)? {
                return Err(ENOSPC);
            }
        }
    }

    /// Shows redb's newest state to readers, so that redb can free the pages of older ones.
    fn show_redb(&self, writer: &Writer) -> Result<()> {
        let redb = Arc::new(self.snapshot(writer)?);
        self.view.rcu(|view| View {
            redb: redb.clone(),
            ..View::clone(view)
        });
        Ok(())
    }

    /// Returns redb's tables. Ends all changes on a failure, because durable rows are then invisible to readers.
    fn snapshot(&self, writer: &Writer) -> Result<Snapshot> {
        let Some(db) = writer.db.as_ref() else {
            return Err(Error::Store("the store is closed".into()));
        };
        guarded_over(self.region.as_deref(), || Snapshot::take(db)).map_err(|e| self.fail(e))
    }

    /// Looks for room after a transaction of `rows` rows that found none. Returns false if there is nothing left to try. Lets the region
    /// grow late, because it never gets smaller.
    fn find_room(&self, writer: &mut Writer, effort: &mut Effort, rows: usize) -> Result<bool> {
        if !std::mem::replace(&mut effort.has_freed, true) && self.free_old_pages(writer)? {
            return Ok(true);
        }
        if self.room.smaller_pieces(rows, PIECE_ROWS_FEW) {
            return Ok(true);
        }
        // Asks for twice as many pages each time.
        let spare = self.region.as_ref().map_or(0, |r| r.spare_pages());
        effort.pages = (effort.pages * 2).max(spare + 1);
        Ok(self.add_spares(effort.pages)? || self.room.smaller_pieces(rows, 1))
    }

    /// Frees the pages of earlier transactions, with an empty one. Returns false if there is no room for it.
    pub(super) fn free_old_pages(&self, writer: &mut Writer) -> Result<bool> {
        let is_written = self.try_write(writer, Vec::new())?;
        if is_written {
            self.show_redb(writer)?;
        }
        Ok(is_written)
    }

    /// Tries to write rows to redb. Returns false, without effect, if the metadata region has no room.
    fn try_write(&self, writer: &mut Writer, mut rows: Vec<RowRef<'_>>) -> Result<bool> {
        let Some(db) = writer.db.as_ref() else {
            return Err(Error::Store("the store is closed".into()));
        };
        rows.sort_unstable_by_key(|row| (row.table, row.key));
        let _in_transaction = self.in_transaction.lock();
        let region = self.region.as_deref();
        if let Some(region) = region {
            region.begin_transaction();
        }
        let applied = guarded_over(region, || Ok(batch::apply(db, &rows)));
        let text = match applied.map_err(|error| self.fail(error))? {
            Ok(freed_bytes) => {
                self.room.freed(freed_bytes);
                return Ok(true);
            }
            Err(text) => text,
        };
        // After an error of a device its contents are unknown, so nothing is undone.
        let is_full = |region: &Region| region.last_error().is_none() && region.take_full();
        if !region.is_some_and(is_full) {
            return Err(self.fail(explain(region, text)));
        }
        // redb fails until it is opened again. It then begins with its last committed transaction.
        self.reopen(writer).map_err(|error| self.fail(error))?;
        Ok(false)
    }
}

/// What a checkpoint has done so far to find room for a transaction.
#[derive(Default)]
struct Effort {
    /// Spare pages asked for.
    pages: u64,
    has_freed: bool,
}

/// Returns the number of rows that a piece takes.
fn piece(rows: &[RowRef<'_>], rows_max: usize) -> usize {
    let mut bytes = 0;
    let fits = |row: &&RowRef<'_>| {
        bytes += row.key.len() + row.value.map_or(0, <[u8]>::len);
        bytes <= PIECE_BYTES_MAX
    };
    let count = rows.iter().take(rows_max).take_while(fits).count();
    count.max(1).min(rows.len())
}

/// Puts removals before the other rows. Both parts stay in the order of their keys.
fn removals_first(rows: &mut [RowRef<'_>]) {
    rows.sort_by_key(|row| row.value.is_some());
}

/// Returns whether an error means that there is no room.
pub(super) fn is_full(error: &Error) -> bool {
    error.errno() == ENOSPC.errno()
}

#[cfg(test)]
mod tests;
