//! Checkpoints: the rows in memory go to redb in one durable transaction, and the journal's tail moves up.
//!
//! The transaction also records the position up to which redb has the journal. So after a crash at any point, the store begins with
//! redb's last transaction and applies the batches of the journal after that position.

use std::sync::Arc;

use jericho_journal::{Journal, Position};
use parking_lot::MutexGuard;

use super::batch::{self, Operations};
use super::memtable::Memtable;
use super::region::Region;
use super::tables::{Row, Table};
use super::view::{Snapshot, View};
use super::{Change, Store, Writer, explain, guarded_over};
use crate::errno::ENOSPC;
use crate::error::{Error, Result};

/// Name of the value that holds the position of the last checkpoint.
pub(super) const CHECKPOINT: &str = "checkpoint";

/// Returns the row that records a position.
fn position_row(position: Position) -> Row {
    Row {
        table: Table::Values,
        key: CHECKPOINT.into(),
        value: Some(position.encode().to_vec()),
    }
}

impl Store {
    /// Writes the rows in memory to redb. Commits go on meanwhile. After `Errno(ENOSPC)` the rows stay in memory and in the journal,
    /// and the store goes on; any other error ends all changes.
    pub fn checkpoint(&self) -> Result<()> {
        if !self.writable || self.view.load().is_in_redb() {
            return Ok(());
        }
        self.write_checkpoint(None)
    }

    /// Does the same before the store has its journal. `position` is the position after the batches that were applied.
    pub(super) fn checkpoint_at(&self, position: Position) -> Result<()> {
        self.write_checkpoint(Some(position))
    }

    fn write_checkpoint(&self, position: Option<Position>) -> Result<()> {
        let mut writer = self.writer.lock();
        self.check()?;
        let (rows, position) = {
            let log = self.log.lock();
            let view = self.view.load();
            let rows = view.in_memory();
            // Later commits put their rows over these. A reader finds them until redb has them.
            self.view.store(Arc::new(View {
                active: Memtable::default(),
                frozen: rows.clone(),
                redb: view.redb.clone(),
            }));
            (rows, position.or(log.as_ref().map(Journal::end)))
        };
        let snapshot = Arc::new(self.write(&mut writer, &[], rows, position)?);
        self.view.rcu(|view| View {
            active: view.active.clone(),
            frozen: Memtable::default(),
            redb: snapshot.clone(),
        });
        free_journal(&mut self.log.lock(), position);
        Ok(())
    }

    /// Writes all rows in memory and a batch to redb, in one transaction: the batch is durable there and not in the journal.
    pub(super) fn commit_with_checkpoint(
        &self,
        changes: &[Change],
        operations: Operations,
    ) -> Result<()> {
        let mut writer = self.writer.lock();
        // Held over the transaction: a batch that another thread appended meanwhile would be missing in the view below.
        let mut log = self.log.lock();
        self.check()?;
        let view = self.view.load_full();
        let mut rows = view.in_memory();
        for row in self.rows_of(operations, &view)? {
            rows.put(row);
        }
        let position = log.as_ref().map(Journal::end);
        let snapshot = self.write(&mut writer, changes, rows, position)?;
        self.view.store(Arc::new(View::of(snapshot)));
        free_journal(&mut log, position);
        Ok(())
    }

    /// Writes rows to redb in one transaction, which also records up to which position redb has the journal. Returns redb's tables
    /// after it. Fails with `Errno(ENOSPC)`, without effect, if the metadata region cannot grow enough.
    fn write(
        &self,
        writer: &mut Writer,
        changes: &[Change],
        mut rows: Memtable,
        position: Option<Position>,
    ) -> Result<Snapshot> {
        if let Some(position) = position {
            rows.put(position_row(position));
        }
        let mut room_bytes = self.estimate_bytes(rows.len(), rows.bytes());
        let rows = rows.rows();
        let mut chunks = None;
        loop {
            self.make_ready(changes, room_bytes)?;
            // Tried once more with twice the room, as long as there is more room to be had.
            let now = self.region.as_ref().map(|r| r.chunks());
            if chunks.is_some() && chunks == now {
                self.room.none_left();
                return Err(ENOSPC);
            }
            chunks = now;
            if self.try_write(writer, &rows)? {
                break;
            }
            room_bytes = room_bytes.saturating_mul(2);
        }
        let Some(db) = writer.db.as_ref() else {
            return Err(Error::Store("the store is closed".into()));
        };
        // The rows are durable but cannot be seen: nothing that is built on them may go on.
        guarded_over(self.region.as_deref(), || Snapshot::take(db)).map_err(|e| self.fail(e))
    }

    /// Tries to write rows to redb. Returns false, without effect, if the metadata region has no room.
    fn try_write(&self, writer: &mut Writer, rows: &[Row]) -> Result<bool> {
        let Some(db) = writer.db.as_ref() else {
            return Err(Error::Store("the store is closed".into()));
        };
        let region = self.region.as_deref();
        if let Some(region) = region {
            region.begin_transaction();
        }
        let applied = guarded_over(region, || Ok(batch::apply(db, rows)));
        let Err(text) = applied.map_err(|error| self.fail(error))? else {
            return Ok(true);
        };
        if !region.is_some_and(Region::take_full) {
            return Err(self.fail(explain(region, text)));
        }
        // redb latches the failed write; what it had committed is on the device, so opening it again goes back to there.
        self.reopen(writer).map_err(|error| self.fail(error))?;
        Ok(false)
    }
}

/// Frees the journal up to a position that redb has durably.
fn free_journal(log: &mut MutexGuard<'_, Option<Journal>>, position: Option<Position>) {
    if let (Some(journal), Some(position)) = (log.as_mut(), position) {
        journal.set_tail(position);
    }
}
