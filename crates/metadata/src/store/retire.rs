//! Takes a store out of use whose device was unreachable and answers again. Another store over the same device, which was recovered as at a mount, takes
//! its place.
//!
//! docs/internals/fs.md, *A host that was away comes back*, has the order of the steps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jericho_storage::IoError;

use super::left::{BatchPlace, Retired};
use super::log::Log;
use super::payload::{IN_REDB, Requirement};
use super::view::{Snapshot, View};
use super::{Store, close_database};
use crate::error::{Error, Result};

/// Longest time that a thread waits for the writer of a store that it retires.
const LOCK_WAIT: Duration = Duration::from_millis(100);

/// Another thread keeps a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy;

impl Store {
    /// Returns whether this recovered store has the batch whose append has failed in the retired one. `None`: no append has failed. Fails if
    /// it does not have all batches before. `number` is that of the store.
    pub fn has_attempted(&self, retired: &Retired, number: u16) -> Result<Option<bool>> {
        let lost = |what: &str| Err(Error::Journal(format!("store {number}: {what}").into()));
        if let Some(end) = retired.end().filter(|end| end.seq > 0) {
            let last = BatchPlace {
                seq: end.seq - 1,
                ..end
            };
            if self.had(&last.as_requirement(number)) != Some(true) {
                return lost("the journal has lost batches that were durable");
            }
        }
        let Some(attempted) = retired.attempted else {
            return Ok(None);
        };
        match self.had(&attempted.as_requirement(number)) {
            Some(is_there) => Ok(Some(is_there)),
            None => lost("the journal does not tell whether it has the last batch"),
        }
    }

    /// Returns whether this recovered store has the batch that the retired store `before` wrote to redb past its journal when its host did not answer. `None`: there was
    /// none. redb has all rows of the batch or none, because they were in one transaction. If all rows are there although the transaction is not, the
    /// batch changed nothing.
    pub fn has_unpublished(&self, before: &Store) -> Result<Option<bool>> {
        let Some(rows) = before.unpublished_rows.lock().clone() else {
            return Ok(None);
        };
        for row in rows.iter() {
            let same = |value: &[u8]| Ok(row.value.as_deref() == Some(value));
            let found = self.read(|view| view.get(row.table, &row.key, same))?;
            if !found.unwrap_or(row.value.is_none()) {
                return Ok(Some(false));
            }
        }
        Ok(Some(true))
    }

    /// Returns the error because of which the store is out of use until a host answers again: its changes have ended, or redb fails
    /// all reads. Returns `None` if it is in use, or if another error has ended its changes.
    pub fn suspension(&self) -> Option<Error> {
        if let Some(error) = self.failed.lock().clone() {
            return error.is_unreachable().then_some(error);
        }
        let region = self.region.as_ref();
        let failed = region.and_then(|region| region.last_error());
        failed.filter(Error::is_unreachable)
    }

    /// Fails after the store was retired.
    pub(super) fn check_in_use(&self) -> Result<()> {
        match self.retired.get() {
            Some(error) => Err(error.clone().into()),
            None => Ok(()),
        }
    }

    /// Returns the cause of an error: that a host does not answer, if redb has failed after it did not. redb then fails in all kinds of
    /// ways, and the next store finds damage, if there is any.
    pub(super) fn blame(&self, error: Error) -> Error {
        if !matches!(error, Error::Store(_) | Error::Damaged(_)) {
            return error;
        }
        let region = self.region.as_ref();
        let failed = region.and_then(|region| region.last_error());
        failed.filter(Error::is_unreachable).unwrap_or(error)
    }

    /// Reports that a read has failed because a host does not answer.
    pub(super) fn note_unreachable(&self, error: &Error) {
        if error.is_unreachable()
            && let Some(supply) = self.supply()
        {
            supply.read_unreachable();
        }
    }

    /// Takes the store out of use: it refuses all reads and batches with this error, and writes nothing any more. Returns what the next
    /// store must have, also if the store was retired before. Returns `None`, without effect, if another thread keeps the store.
    /// Fails if another error than that of a silent host has ended the changes, or if a reader has found damage: only a mount can use the
    /// store then. No batch of the store is prepared.
    pub fn retire(&self, error: &Error) -> Result<Option<Retired>> {
        if let Some(damage) = self.damage.get() {
            return Err(damage.clone());
        }
        match (self.check(), error) {
            (Err(failed), _) if !failed.is_unreachable() => Err(failed),
            (_, Error::Io(error)) => Ok(self.retire_now(error)),
            (_, error) => Err(error.clone()),
        }
    }

    fn retire_now(&self, error: &IoError) -> Option<Retired> {
        let until = Instant::now() + LOCK_WAIT;
        let mut writer = self.writer.try_lock_until(until)?;
        let mut log = self.log.try_lock_until(until)?;
        if self.retired.get().is_none() {
            *self.left.lock() = self.knows(&log);
            Error::Io(error.clone()).note_in(&mut self.failed.lock());
            // Before anything else: a reader that finds what follows finds this, too.
            let _ = self.retired.set(error.clone());
            if let Some(region) = &self.region {
                region.close(error.clone());
            }
            *log = Log::Without;
            self.view.store(Arc::new(View::of(Snapshot::none())));
            if let Err(error) = close_database(writer.db.take()) {
                tracing::debug!(%error, "a metadata store of a silent host was closed");
            }
        }
        Some(*self.left.lock())
    }

    /// Returns whether this store has a batch that another store requires: it was durable before the last mount or return, or the store has appended it
    /// since. No batch of the store is being committed. Returns `None` if that is not known.
    pub fn has_now(&self, required: &Requirement) -> std::result::Result<Option<bool>, Busy> {
        let log = self.log.try_lock_until(Instant::now() + LOCK_WAIT);
        Ok(self.knows_of(required, &*log.ok_or(Busy)?))
    }

    /// Does the same as `has_now`. The caller holds the log.
    fn knows_of(&self, required: &Requirement, log: &Log) -> Option<bool> {
        if required.incarnation == IN_REDB {
            return match self.had(required) {
                Some(true) => Some(true),
                _ => Some(self.linked().ok()? >= required.seq),
            };
        }
        let known = match self.retired.get() {
            Some(_) => *self.left.lock(),
            None => self.knows(log),
        };
        match known.end() {
            Some(end) if end.incarnation == required.incarnation => {
                let is_durable = required.seq < end.seq;
                (is_durable || known.attempted.is_none()).then_some(is_durable)
            }
            _ => self.had(required),
        }
    }

    /// Returns what the store knows of the batches that its journal has. The caller holds the log.
    fn knows(&self, log: &Log) -> Retired {
        Retired {
            attempted: *self.unpublished.lock(),
            last: log.end().map(BatchPlace::from),
        }
    }
}
