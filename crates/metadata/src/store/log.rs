//! The journal as commits see it.

use jericho_journal::{BeginError, Journal, Position, Recovery};

use crate::error::{Error, Result};

/// The journal, as far as commits may use it.
#[derive(Default)]
pub(super) enum Log {
    /// There is no journal: the store is in memory, or open for reading only. A commit goes to redb.
    #[default]
    Without,
    /// The journal still has batches that are not in redb. The next commit first writes these to redb, alone or with its own rows, and
    /// frees the journal.
    Recovered {
        recovery: Box<Recovery>,
        is_damaged: bool,
    },
    /// Commits append to the journal.
    Journal(Box<Journal>),
}

impl Log {
    /// Returns the position after all batches of the journal.
    pub fn end(&self) -> Option<Position> {
        match self {
            Log::Without => None,
            Log::Recovered { recovery, .. } => Some(recovery.end()),
            Log::Journal(journal) => Some(journal.end()),
        }
    }

    /// Frees the journal up to a position that redb has durably. After a recovery, begins a new incarnation.
    pub fn free(&mut self, position: Position) -> Result<()> {
        *self = match std::mem::take(self) {
            Log::Without => Log::Without,
            Log::Recovered {
                recovery,
                is_damaged,
            } => {
                let journal = match is_damaged {
                    false => recovery.begin_incarnation(position),
                    true => recovery.begin_incarnation_after_damage(position),
                };
                let journal = journal.map_err(|error| match error {
                    BeginError::Io(error) => Error::Io(error),
                    error => Error::Journal(error.to_string().into()),
                })?;
                Log::Journal(Box::new(journal))
            }
            Log::Journal(mut journal) => {
                journal.set_tail(position);
                Log::Journal(journal)
            }
        };
        Ok(())
    }
}
