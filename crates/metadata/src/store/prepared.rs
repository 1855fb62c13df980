//! A commit in three steps, so that batches of several stores can become durable together.
//!
//! `Store::prepare` finds room for a batch and locks the store's log. `Prepared::append` makes the batch durable. `Prepared::publish`
//! shows it to readers. Between the first and the last step no other batch of the store is committed. A thread that prepares batches of
//! several stores does so in the order of their shards.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_format::superblock::SLICES_MAX;
use jericho_journal::{AppendClass, AppendError, Journal};
use parking_lot::MutexGuard;

use super::batch::{self, Operations};
use super::checkpoint::is_full;
use super::commit::is_too_large;
use super::left::BatchPlace;
use super::log::Log;
use super::payload::Requirement;
use super::tables::{LINKED, Row, Table};
use super::view::{Snapshot, View};
use super::{Change, Store, Writer, payload};
use crate::errno::EROFS;
use crate::error::{Error, Result};

/// Largest number of bytes of the requirements of a batch: one for each other store.
const REQUIRES_BYTES_MAX: usize = SLICES_MAX * payload::REQUIREMENT_BYTES;

/// A batch for which there is room. It has no effect before it is appended.
pub struct Prepared<'a> {
    store: &'a Store,
    /// Released last: redb's side is locked before the log.
    log: MutexGuard<'a, Log>,
    /// The rows that the batch puts and removes.
    rows: Vec<Row>,
    way: Way<'a>,
}

/// Returns the row that counts the linked batches that are in redb and were never in the journal.
fn linked_row(count: u64) -> Row {
    Row {
        table: Table::Values,
        key: LINKED.into(),
        value: Some(count.to_le_bytes().to_vec()),
    }
}

impl Store {
    /// Returns how many linked batches redb has that were never in the journal.
    pub(super) fn linked(&self) -> Result<u64> {
        Ok(self.value(LINKED)?.unwrap_or(0))
    }
}

/// How a batch becomes durable.
enum Way<'a> {
    /// It changes nothing.
    Nothing,
    /// This payload goes to the journal.
    Journal(Vec<u8>),
    /// There is no journal, or the batch cannot use it. The rows go to redb in one transaction, with all rows in memory.
    Redb(MutexGuard<'a, Writer>),
    /// The rows are in redb, but not in the view.
    InRedb(MutexGuard<'a, Writer>, Snapshot),
    /// The payload is in the journal.
    Appended,
}

/// Where a batch fits, as `prepare` finds while it holds the log.
enum Fit {
    Journal(Vec<u8>),
    /// After a checkpoint the batch may fit.
    AfterCheckpoint,
    /// The batch is too long for the journal.
    Redb,
}

impl Store {
    /// Takes note of the rows of a batch that goes to redb past the journal. If the host of a device does not answer meanwhile, the next store tells by its rows
    /// whether redb has the batch.
    fn begins_in_redb(&self, rows: Vec<Row>) {
        *self.unpublished_rows.lock() = Some(rows.into());
    }

    /// Ends all changes, if the host of a device did not answer while a batch was written to redb. After another error redb does not have the batch, or no
    /// other store takes the place of this one.
    fn failed_in_redb(&self, error: Error) -> Error {
        if error.is_unreachable() {
            return self.fail(error);
        }
        *self.unpublished_rows.lock() = None;
        error
    }

    /// Has the next batches go to redb past the journal, as those that are too long for it. For tests.
    pub fn pass_journal(&self, passes: bool) {
        self.passes_journal.store(passes, Ordering::Relaxed);
    }

    /// Finds room for a batch: in the journal, and in the memory for rows. If there is none, makes a checkpoint in this thread, or
    /// waits for the one that another thread makes. Fails with `Errno(ENOSPC)` if the metadata region has no room, with `Damaged` if
    /// the batch contradicts the bitmaps, and with the first error that ended all changes. None of these changes the store.
    pub fn prepare(&self, changes: &[Change]) -> Result<Prepared<'_>> {
        if !self.writable {
            return Err(EROFS);
        }
        if let Some(supply) = self.supply() {
            supply.before_commit(changes)?;
        }
        self.prepare_operations(&batch::prepare(changes))
    }

    /// Does the same as `prepare` for a batch that is already in order.
    pub(super) fn prepare_operations(&self, operations: &Operations) -> Result<Prepared<'_>> {
        loop {
            let log = self.log.lock();
            self.check()?;
            let journal = match &*log {
                Log::Journal(journal) => journal,
                Log::Without => {
                    drop(log);
                    return self.prepare_for_redb(operations);
                }
                // The batches of the last mount go to redb first. Then commits can use the journal.
                Log::Recovered { .. } => {
                    drop(log);
                    match self.write_checkpoint() {
                        // The batch may have removals that make room.
                        Err(error) if is_full(&error) => {
                            return self.prepare_for_redb(operations);
                        }
                        result => result?,
                    }
                    continue;
                }
            };
            let rows = self.rows_of(operations)?;
            let fit = match rows.is_empty() {
                true => None,
                false => Some(self.fit(journal, operations, &rows)),
            };
            let way = match fit {
                None => Way::Nothing,
                Some(Fit::Journal(payload)) => Way::Journal(payload),
                Some(Fit::AfterCheckpoint) => {
                    drop(log);
                    self.checkpoint()?;
                    continue;
                }
                Some(Fit::Redb) => {
                    drop(log);
                    return self.prepare_for_redb(operations);
                }
            };
            return Ok(Prepared {
                store: self,
                log,
                rows,
                way,
            });
        }
    }

    /// Returns where a batch fits now.
    fn fit(&self, journal: &Journal, operations: &Operations, rows: &[Row]) -> Fit {
        let Some(payload) = payload::encode(operations) else {
            return Fit::Redb;
        };
        if self.passes_journal.load(Ordering::Relaxed) {
            return Fit::Redb;
        }
        let longest = &self.longest_batch_bytes;
        longest.fetch_max(payload.len(), Ordering::Relaxed);
        let class = AppendClass::Ordinary;
        let needed_bytes = (payload.len() + REQUIRES_BYTES_MAX) as u64;
        if is_too_large(rows) || needed_bytes > journal.longest_payload(class) {
            return Fit::Redb;
        }
        // Only a holder of the log adds rows.
        let view = self.view.load_full();
        let has_room = self.memory_takes(&view, rows) && needed_bytes <= journal.room_bytes(class);
        if !has_room && !view.is_in_redb() {
            return Fit::AfterCheckpoint;
        }
        Fit::Journal(payload)
    }

    /// Locks redb's side for a batch that goes there, and then the log. The caller does not hold the log.
    fn prepare_for_redb(&self, operations: &Operations) -> Result<Prepared<'_>> {
        let writer = self.writer.lock();
        let log = self.log.lock();
        self.check()?;
        let rows = self.rows_of(operations)?;
        Ok(Prepared {
            store: self,
            log,
            rows,
            way: Way::Redb(writer),
        })
    }
}

impl Prepared<'_> {
    /// Returns what a batch of another store must require to become durable together with this one, or `None` if this one changes nothing.
    pub fn as_requirement(&self, store: u16) -> Result<Option<Requirement>> {
        let (incarnation, seq) = match &self.way {
            Way::Journal(_) => match self.log.end() {
                Some(end) => (end.incarnation, end.seq),
                None => return Ok(None),
            },
            Way::Redb(_) => (payload::IN_REDB, self.store.linked()? + 1),
            _ => return Ok(None),
        };
        Ok(Some(Requirement {
            store,
            incarnation,
            seq,
        }))
    }

    /// Returns whether the batch goes to redb. A batch in redb counts without the others of its group, and they do not count without it. So
    /// the caller must append it last.
    pub fn is_for_redb(&self) -> bool {
        matches!(self.way, Way::Redb(_))
    }

    /// Makes the batch durable. After a crash a batch in the journal counts only with the batches of other stores in `requires`.
    /// Readers do not see the batch yet. After `Errno(ENOSPC)` nothing has changed. Any other error ends all changes.
    pub fn append(&mut self, requires: &[Requirement]) -> Result<()> {
        let store = self.store;
        self.way = match std::mem::replace(&mut self.way, Way::Nothing) {
            Way::Journal(mut payload) => {
                payload::put_requires(&mut payload, requires);
                self.append_to_journal(&payload)?;
                Way::Appended
            }
            Way::Redb(mut writer) => {
                let mut rows = store.view.load().in_memory();
                if !requires.is_empty() {
                    self.rows.push(linked_row(store.linked()? + 1));
                }
                store.begins_in_redb(self.rows.clone());
                self.rows.drain(..).for_each(|row| rows.put(row));
                let position = self.log.end();
                let written = store.write_at_once(&mut writer, &rows, position);
                let snapshot = written.map_err(|error| store.failed_in_redb(error))?;
                let freed = store.free_journal(&mut self.log, position);
                freed.map_err(|error| store.failed_in_redb(error))?;
                Way::InRedb(writer, snapshot)
            }
            other => other,
        };
        Ok(())
    }

    fn append_to_journal(&mut self, payload: &[u8]) -> Result<()> {
        let Log::Journal(journal) = &mut *self.log else {
            return Err(Error::Store("the store is closed".into()));
        };
        *self.store.unpublished.lock() = Some(BatchPlace::from(journal.end()));
        match journal.append(payload, AppendClass::Ordinary) {
            Ok(_) => Ok(()),
            Err(AppendError::Io(error)) => Err(self.store.fail(error.into())),
            // Never: there was room, and the log is locked since.
            Err(error) => Err(self.store.fail(Error::Journal(error.to_string().into()))),
        }
    }

    /// Shows the appended batch to readers.
    pub fn publish(mut self) {
        let store = self.store;
        match std::mem::replace(&mut self.way, Way::Nothing) {
            Way::Appended => {
                // A loop runs it again if a checkpoint publishes a view meanwhile.
                store.view.rcu(|view| {
                    let mut next = View::clone(view);
                    self.rows
                        .iter()
                        .for_each(|row| next.active.put(row.clone()));
                    next
                });
                *store.unpublished.lock() = None;
            }
            Way::InRedb(_writer, snapshot) => {
                store.view.store(Arc::new(View::of(snapshot)));
                *store.unpublished_rows.lock() = None;
            }
            other => {
                debug_assert!(matches!(other, Way::Nothing), "publish before append");
                return;
            }
        }
        store.room.committed();
    }

    /// Drops the batch because another one of its group could not be appended. Ends all changes with that error if this one was appended:
    /// after a crash it does not count, and later batches would be computed without it.
    pub fn abandon(mut self, error: &Error) {
        if let Way::Appended | Way::InRedb(..) = std::mem::replace(&mut self.way, Way::Nothing) {
            self.store.fail(error.clone());
        }
    }
}

impl Drop for Prepared<'_> {
    /// Ends all changes if the batch is durable and not published: later batches would be computed without it.
    fn drop(&mut self) {
        if matches!(self.way, Way::Appended | Way::InRedb(..)) {
            self.store.fail(Error::HalfDone);
        }
    }
}

#[cfg(test)]
mod tests;
