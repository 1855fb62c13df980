//! Opens a store with its journal, and applies the batches after redb's checkpoint again.
//!
//! The order makes a second crash at any point harmless. `recover` only reads. `finish_recovery` makes the batches durable in redb,
//! with the position after them, and only then begins a new incarnation of the journal, which hides the old segments.
//!
//! The last batch of a journal may require batches of other stores (`Requirement`). It counts only if these are there. So it goes into
//! memory when the journals of all stores have been read (`decide`). All earlier batches count: a writer appends a batch only when
//! everything that the batch before it requires is durable. A journal that has begun its next incarnation still tells
//! whether it had a batch (`Recovery::has_batch`), so a second crash, in the middle of the recovery, leads to the same decisions.

use std::sync::Arc;
use std::time::Instant;

use jericho_journal::{Journal, JournalArea, JournalVolume, Position, RecoverError, Recovery};
use jericho_storage::Device;

use super::batch::Operations;
use super::log::Log;
use super::payload::{IN_REDB, Requirement};
use super::tables::{CHECKPOINT, Table};
use super::{Ends, Past, Store, payload};
use crate::errno::ENOSPC;
use crate::error::{Error, Result};

/// Where the journal of a store is, and what its batches may name.
pub struct JournalPlace {
    /// Index of the store, which the journal names as its slice.
    pub store: u16,
    /// The device of the store.
    pub device: Arc<dyn Device>,
    /// The part of the device that the journal has.
    pub area: JournalArea,
    /// The volume's id and the secret of the journal's segments.
    pub volume: JournalVolume,
    /// Capacity of each slice.
    pub slices_blocks: Vec<u64>,
}

/// What to do if durable batches of a journal cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// Fail.
    Refuse,
    /// Go on with the batches before the damage.
    GiveUpRest,
}

/// The batches of the journal are in memory, and the journal still has them.
pub struct Recovered {
    /// `None`: the journal cannot be read at all.
    recovery: Option<Recovery>,
    place: JournalPlace,
    /// The last batch, if it requires others. Its rows are not in memory.
    last: Option<Last>,
    /// What is wrong with the journal, if the batches after some point were given up.
    pub damage: Option<String>,
}

/// A batch that counts only if others are there.
struct Last {
    operations: Operations,
    requires: Vec<Requirement>,
}

impl Recovered {
    /// Returns the batches of other stores without which the last batch does not count.
    pub fn requires(&self) -> &[Requirement] {
        self.last.as_ref().map_or(&[], |last| &last.requires)
    }
}

impl Store {
    /// Makes the journal of a new volume, or one in place of a journal that cannot be read.
    pub fn create_journal(&self, place: JournalPlace) -> Result<()> {
        self.has_journal(place.area);
        let journal = Journal::create(place.device, place.area, place.volume, place.store)
            .map_err(|error| Error::Journal(error.to_string().into()))?;
        *self.log.lock() = Log::Journal(Box::new(journal));
        // Records the journal's first position, so that a mount finds where to begin.
        self.write_checkpoint()
    }

    /// Applies the batches of the journal that redb does not have. Writes nothing.
    pub fn recover(&self, place: JournalPlace, damage: Damage) -> Result<Recovered> {
        let begin = Instant::now();
        let position = self.checkpoint_position()?;
        let journal = Journal::recover(
            place.device.clone(),
            place.area,
            place.volume,
            place.store,
            position,
        );
        let mut recovery = match journal {
            Ok(recovery) => recovery,
            Err(error @ (RecoverError::Io(_) | RecoverError::Newer { .. })) => {
                return Err(journal_error(error));
            }
            Err(error) if damage == Damage::Refuse => return Err(journal_error(error)),
            Err(error) => {
                return Ok(Recovered {
                    recovery: None,
                    place,
                    last: None,
                    damage: Some(error.to_string()),
                });
            }
        };
        let mut batches = 0;
        let mut last: Option<Last> = None;
        let found = loop {
            match recovery.next_batch() {
                Ok(Some(batch)) => {
                    if let Some(before) = last.take() {
                        self.replay(&before.operations)?;
                    }
                    let (operations, requires) =
                        payload::decode_within(batch.payload, &place.slices_blocks)?;
                    match requires.is_empty() {
                        true => self.replay(&operations)?,
                        false => {
                            last = Some(Last {
                                operations,
                                requires,
                            });
                        }
                    }
                }
                Ok(None) => break None,
                Err(error @ RecoverError::Damage(_)) if damage == Damage::GiveUpRest => {
                    break Some(error.to_string());
                }
                Err(error) => return Err(journal_error(error)),
            }
            batches += 1;
        };
        if batches > 0 {
            tracing::info!(
                batches,
                bytes = recovery.bytes_read(),
                milliseconds = begin.elapsed().as_millis() as u64,
                "recovered the changes that the last mount left in the journal"
            );
        }
        Ok(Recovered {
            recovery: Some(recovery),
            place,
            last,
            damage: found,
        })
    }

    /// Returns whether this store has a batch that another store requires, or `None` if the journal no longer tells. No last batch has
    /// been dropped yet.
    pub fn has(&self, recovered: &Recovered, required: &Requirement) -> Result<Option<bool>> {
        if required.incarnation == IN_REDB {
            return Ok(Some(self.linked()? >= required.seq));
        }
        Ok(match &recovered.recovery {
            Some(recovery) => recovery.has_batch(required.incarnation, required.seq),
            None => Some(false),
        })
    }

    /// Notes which batches the store has. Call it after `decide`, once.
    pub fn note_past(&self, recovered: &Recovered) -> Result<()> {
        let _ = self.past.set(Past {
            journal: recovered.recovery.as_ref().map(Recovery::history),
            linked: self.linked()?,
            ends: self.ends(recovered)?,
        });
        Ok(())
    }

    fn ends(&self, recovered: &Recovered) -> Result<Ends> {
        Ok(Ends {
            redb: self.checkpoint_position()?,
            journal: recovered.recovery.as_ref().map(Recovery::end),
        })
    }

    /// Recovers this store as `before` was recovered, on a volume that is open for reading: the last batch counts if it counted then. Writes nothing. Fails if
    /// redb or the journal ends at another place, because the view of a mount for reading must not change.
    pub fn recover_as(&self, before: &Store, place: JournalPlace) -> Result<()> {
        let mut recovered = self.recover(place, Damage::GiveUpRest)?;
        let kept = before.kept_last.get().copied();
        let has_last = recovered.last.is_some() == kept.is_some();
        self.decide(&mut recovered, kept.unwrap_or(true))?;
        self.note_past(&recovered)?;
        let ends = |store: &Store| store.past.get().map(|past| past.ends);
        if !has_last || ends(self) != ends(before) {
            let what = "it was changed while its host was away";
            return Err(Error::Journal(what.into()));
        }
        Ok(())
    }

    /// Returns whether this store had a batch that another store requires when it was opened, or `None` if that is not known. The other store was
    /// missing since then, so its requirements are older.
    pub fn had(&self, required: &Requirement) -> Option<bool> {
        let past = self.past.get()?;
        if required.incarnation == IN_REDB {
            return Some(past.linked >= required.seq);
        }
        match &past.journal {
            Some(journal) => journal.has_batch(required.incarnation, required.seq),
            None => Some(false),
        }
    }

    /// Puts a batch of the journal into memory, as `recover` does.
    #[cfg(test)]
    pub fn replay_bytes(&self, payload: &[u8], slices_blocks: &[u64]) -> Result<()> {
        self.replay(&payload::decode_within(payload, slices_blocks)?.0)
    }

    /// Puts the last batch into memory if it counts, or drops it. The journals of all stores have been read.
    pub fn decide(&self, recovered: &mut Recovered, counts: bool) -> Result<()> {
        let Some(last) = recovered.last.take() else {
            return Ok(());
        };
        let _ = self.kept_last.set(counts);
        if counts {
            return self.replay(&last.operations);
        }
        tracing::info!(
            store = recovered.place.store,
            "dropped an operation that the last mount did not finish in all slices"
        );
        if let Some(recovery) = &mut recovered.recovery {
            recovery.drop_last();
        }
        Ok(())
    }

    /// Makes the recovered batches durable in redb and empties the journal. Commits use the journal from then on. If the metadata
    /// region has no room, the batches stay in memory and in the journal until a commit finds room.
    pub fn finish_recovery(&self, recovered: Recovered) -> Result<()> {
        let Some(recovery) = recovered.recovery else {
            return self.create_journal(recovered.place);
        };
        self.has_journal(recovered.place.area);
        let end = recovery.end();
        let is_current = end == self.checkpoint_position()?;
        let mut log = self.log.lock();
        *log = Log::Recovered {
            recovery: Box::new(recovery),
            is_damaged: recovered.damage.is_some(),
        };
        if is_current {
            return log.free(end);
        }
        drop(log);
        match self.write_checkpoint() {
            Err(error) if error.errno() == ENOSPC.errno() => {
                tracing::warn!("the metadata region is full: remove files");
                Ok(())
            }
            result => result,
        }
    }

    /// Returns the position up to which redb has the journal.
    fn checkpoint_position(&self) -> Result<Position> {
        let key = CHECKPOINT.as_bytes();
        let bytes = self.read(|view| view.get(Table::Values, key, |value| Ok(value.to_vec())))?;
        let position = bytes.and_then(|bytes| Position::decode(&bytes));
        let damaged = "the metadata store does not say where its journal begins";
        position.ok_or_else(|| Error::Damaged(damaged.into()))
    }
}

fn journal_error(error: RecoverError) -> Error {
    match error {
        RecoverError::Io(error) => Error::Io(error),
        error @ RecoverError::Damage(_) => Error::Journal(
            format!(
                "{error}; mount the volume with --read-only to copy its files, or run jericho check --repair, which gives up \
                 the changes from there on"
            )
            .into(),
        ),
        error => Error::Journal(error.to_string().into()),
    }
}
