//! What a store that was taken out of use tells of its batches.

use jericho_journal::Position;

use super::payload::Requirement;

/// The incarnation and the number of the first segment of a batch in a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchPlace {
    pub incarnation: u64,
    pub seq: u64,
}

impl From<Position> for BatchPlace {
    fn from(position: Position) -> BatchPlace {
        BatchPlace {
            incarnation: position.incarnation,
            seq: position.seq,
        }
    }
}

impl BatchPlace {
    pub fn as_requirement(self, store: u16) -> Requirement {
        Requirement {
            store,
            incarnation: self.incarnation,
            seq: self.seq,
        }
    }
}

/// What a retired store tells of the batches that the next one must have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retired {
    /// The place of the batch whose append has failed.
    pub(super) attempted: Option<BatchPlace>,
    /// The place after the last batch of the journal.
    pub(super) last: Option<BatchPlace>,
}

impl Retired {
    /// Returns the place after the last batch that is durable for certain.
    pub(super) fn end(&self) -> Option<BatchPlace> {
        self.attempted.or(self.last)
    }
}
