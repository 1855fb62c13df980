//! Checkpoints: the rows in memory go to redb in one durable transaction, and the journal's tail moves up.
//!
//! The transaction also records the position up to which redb has the journal. So after a crash at any point, the store begins with
//! redb's last transaction and applies the batches of the journal after that position.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_journal::Position;

use super::batch;
use super::log::Log;
use super::memtable::Memtable;
use super::region::Region;
use super::tables::{CHECKPOINT, Row, Table};
use super::view::{Snapshot, View};
use super::{Store, Writer, explain, guarded_over};
use crate::errno::ENOSPC;
use crate::error::{Error, Result};

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
        self.write_checkpoint()
    }

    /// Does the same, also without rows in memory: after a crash, `finish_recovery` must record the position.
    pub(super) fn write_checkpoint(&self) -> Result<()> {
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
            (rows, log.end())
        };
        let snapshot = Arc::new(self.write(&mut writer, rows, position)?);
        // Locked over both: a batch that finds no rows in memory finds the journal empty.
        let mut log = self.log.lock();
        self.view.rcu(|view| View {
            active: view.active.clone(),
            frozen: Memtable::default(),
            redb: snapshot.clone(),
        });
        self.free_journal(&mut log, position)
    }

    /// Frees the journal up to a position that redb has durably.
    pub(super) fn free_journal(&self, log: &mut Log, position: Option<Position>) -> Result<()> {
        match position {
            Some(position) => log.free(position).map_err(|error| self.fail(error)),
            None => Ok(()),
        }
    }

    /// Writes rows to redb in one transaction, which also records up to which position redb has the journal. Returns redb's tables
    /// after it. Fails with `Errno(ENOSPC)`, without effect, if the metadata region cannot grow enough.
    pub(super) fn write(
        &self,
        writer: &mut Writer,
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
            self.make_ready(&[], room_bytes)
                .map_err(|error| match is_full(&error) {
                    true => error,
                    false => self.fail(error),
                })?;
            // Each repetition asks for twice the room. If the region has got no more chunks since the last attempt, there is
            // none.
            let now = self.region.as_ref().map(|r| r.chunks());
            if chunks.is_some() && chunks == now {
                self.room.none_left();
                self.lacks_room.store(true, Ordering::Release);
                return Err(ENOSPC);
            }
            chunks = now;
            if self.try_write(writer, &rows)? {
                self.lacks_room.store(false, Ordering::Release);
                break;
            }
            room_bytes = room_bytes.saturating_mul(2);
        }
        let Some(db) = writer.db.as_ref() else {
            return Err(Error::Store("the store is closed".into()));
        };
        // If this fails, the rows are durable and readers cannot see them. So all changes end.
        guarded_over(self.region.as_deref(), || Snapshot::take(db)).map_err(|e| self.fail(e))
    }

    /// Tries to write rows to redb. Returns false, without effect, if the metadata region has no room.
    fn try_write(&self, writer: &mut Writer, rows: &[Row]) -> Result<bool> {
        let Some(db) = writer.db.as_ref() else {
            return Err(Error::Store("the store is closed".into()));
        };
        let _in_transaction = self.in_transaction.lock();
        let region = self.region.as_deref();
        if let Some(region) = region {
            region.begin_transaction();
        }
        let applied = guarded_over(region, || Ok(batch::apply(db, rows)));
        let Err(text) = applied.map_err(|error| self.fail(error))? else {
            return Ok(true);
        };
        // After an error of a device it is unknown what is on it, so nothing is undone.
        let is_full = |region: &Region| region.last_error().is_none() && region.take_full();
        if !region.is_some_and(is_full) {
            return Err(self.fail(explain(region, text)));
        }
        // redb remembers the failed write until it is opened again. It then begins with its last committed transaction.
        self.reopen(writer).map_err(|error| self.fail(error))?;
        Ok(false)
    }
}

/// Returns whether an error means that there is no room.
pub(super) fn is_full(error: &Error) -> bool {
    error.errno() == ENOSPC.errno()
}
