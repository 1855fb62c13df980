//! Errors, one type an operation.

use std::fmt;
use std::sync::Arc;

use jericho_format::journal::{AREA_BLOCKS, JournalHeaderError};
use jericho_storage::IoError;

use crate::area::JournalArea;
use crate::position::Position;

/// Why a journal could not be created.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CreateError {
    /// The area has a wrong size, or the device does not have these blocks.
    #[error(transparent)]
    Area(#[from] AreaError),
    /// A write or flush failed.
    #[error("cannot create the journal: {0}")]
    Io(#[from] IoError),
}

/// An area that cannot be on its device.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "a journal cannot be in blocks {} to {} of {device}: expected {} to {} blocks within the device",
    .area.first_block, .area.first_block.saturating_add(.area.blocks), AREA_BLOCKS.start(), AREA_BLOCKS.end()
)]
pub struct AreaError {
    /// Name of the device.
    pub device: Arc<str>,
    /// The area.
    pub area: JournalArea,
}

/// Why a batch was not appended.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AppendError {
    /// The ring has no room until the tail moves. Nothing was written.
    #[error("the journal is full: {needed_bytes} bytes do not fit in {room_bytes}")]
    Full {
        /// Bytes of the payload.
        needed_bytes: u64,
        /// Longest payload that fits now.
        room_bytes: u64,
    },
    /// The payload would not fit in an empty ring, or has more than `BATCH_BYTES_MAX` bytes. Nothing was written.
    #[error("a batch of {needed_bytes} bytes is too long for the journal: at most {max_bytes}")]
    TooLong {
        /// Bytes of the payload.
        needed_bytes: u64,
        /// Longest payload for which an append of this class is possible at every place of the ring when it is empty.
        max_bytes: u64,
    },
    /// A write or flush failed, now or at an earlier append. Some of that batch's bytes may be on the device.
    #[error("the journal takes no more changes: {0}")]
    Io(#[from] IoError),
}

/// Why the batches of a journal cannot be read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RecoverError {
    /// The area has a wrong size, or the device does not have these blocks.
    #[error(transparent)]
    Area(#[from] AreaError),
    /// A read or flush failed.
    #[error("cannot read the journal: {0}")]
    Io(#[from] IoError),
    /// Neither copy of the header can be used.
    #[error(
        "cannot read the journal's header on {device}: block {block}: {first}; the copy in the next block: {second}"
    )]
    NoHeader {
        /// Name of the device.
        device: Arc<str>,
        /// Block of the first copy on the device.
        block: u64,
        /// What is wrong with the first copy.
        first: JournalHeaderError,
        /// What is wrong with the second copy.
        second: JournalHeaderError,
    },
    /// A newer program has written the header.
    #[error(
        "the journal on {device} has version {version}, which this program does not read: use a newer one"
    )]
    Newer {
        /// Name of the device.
        device: Arc<str>,
        /// The version.
        version: u32,
    },
    /// The header names another volume, slice or size.
    #[error("the journal at block {block} of {device} belongs to another {what}")]
    Foreign {
        /// Name of the device.
        device: Arc<str>,
        /// Block of the header on the device.
        block: u64,
        /// "volume", "slice" or "area".
        what: &'static str,
    },
    /// The checkpoint store's position does not fit the header: the store or the header is an older copy.
    #[error(
        "the checkpoint store is at segment {} of incarnation {}, but the journal on {device} begins at segment {} of incarnation {}: \
         one of them is an older copy", .checkpoint.seq, .checkpoint.incarnation, .begin.seq, .begin.incarnation
    )]
    Checkpoint {
        /// Name of the device.
        device: Arc<str>,
        /// Position of the checkpoint store.
        checkpoint: Position,
        /// Begin of the header's incarnation.
        begin: Position,
    },
    /// A segment that was durable cannot be read.
    #[error(transparent)]
    Damage(#[from] Damage),
}

/// Why a new incarnation could not begin.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BeginError {
    /// A write or flush failed.
    #[error("cannot write the journal's header: {0}")]
    Io(#[from] IoError),
    /// Recovery has not returned all batches.
    #[error("the journal has batches that recovery has not returned")]
    NotAtEnd,
    /// Recovery has failed for this reason.
    #[error(transparent)]
    Recover(RecoverError),
    /// No greater incarnation is possible, because a segment or header has the greatest one.
    #[error("the journal is at its last incarnation: create it again")]
    LastIncarnation,
    /// The checkpoint store is not at the end of the journal.
    #[error(
        "the checkpoint store is at segment {} and the journal ends at segment {}", .checkpoint.seq, .end.seq
    )]
    Checkpoint {
        /// Position of the checkpoint store.
        checkpoint: Position,
        /// End of the journal.
        end: Position,
    },
}

/// A segment that was durable cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the journal on {device} is damaged: block {block} should begin segment {expected_seq}, but {found}; {evidence}; {lost}"
)]
pub struct Damage {
    /// Name of the device.
    pub device: Arc<str>,
    /// Block on the device at which the segment should begin.
    pub block: u64,
    /// Number of the segment.
    pub expected_seq: u64,
    /// What is there.
    pub found: Found,
    /// What shows that the segment was durable.
    pub evidence: Evidence,
    /// What is lost with the segment.
    pub lost: Lost,
}

/// What is lost if a recovery ends before an unreadable segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Number of the unreadable segment.
    pub first_seq: u64,
    /// Greatest number of a segment that is still in the ring.
    pub last_seq: u64,
    /// Least number of batches that these segments belonged to.
    pub batches: u64,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lost {
            first_seq,
            last_seq,
            batches,
        } = self;
        match last_seq - first_seq {
            0 => write!(f, "segment {first_seq} is lost")?,
            _ => write!(f, "segments {first_seq} to {last_seq} are lost")?,
        }
        write!(f, ", with at least {batches} batches of changes")
    }
}

/// What is in a block at which a segment should begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Found {
    /// No segment.
    #[error("no segment is there")]
    Nothing,
    /// A segment of another version.
    #[error("a segment of version {0} is there")]
    Version(u16),
    /// A segment of another volume or slice.
    #[error("a segment of another volume or slice is there")]
    Foreign,
    /// A segment whose sizes contradict each other, or leave the ring.
    #[error("its sizes are wrong")]
    Sizes,
    /// A segment with a wrong checksum.
    #[error("its checksum is wrong")]
    Checksum,
    /// A whole segment, but another one.
    #[error("segment {seq} of incarnation {incarnation} is there")]
    Other {
        /// Its number.
        seq: u64,
        /// Its incarnation.
        incarnation: u64,
    },
    /// The segment that is due, but its `prev_crc` is not the checksum of the segment before it.
    #[error("it does not follow the segment before it")]
    Chain,
    /// The segment that is due, with fields that contradict each other or that this version does not know.
    #[error("its fields contradict each other")]
    Fields,
}

/// What shows that a segment was durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// A later segment, which was written after the unreadable one was durable.
    Later {
        /// Block of the later segment on the device.
        block: u64,
        /// Number of the later segment.
        seq: u64,
        /// Whether the later segment says that the checkpoint store has the unreadable one: then the store is an older copy.
        is_before_tail: bool,
    },
    /// A segment of a greater incarnation than the header's: the newer header is lost.
    Newer {
        /// Block of that segment on the device.
        block: u64,
        /// Its incarnation.
        incarnation: u64,
    },
    /// The checksum of the segment itself is right, so its write was not torn.
    Whole,
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Evidence::Later {
                block,
                seq,
                is_before_tail: false,
            } => write!(f, "segment {seq} at block {block} was written after it"),
            Evidence::Later { block, seq, .. } => write!(
                f,
                "segment {seq} at block {block} says that the checkpoint store has it: the store is an older copy"
            ),
            Evidence::Newer { block, incarnation } => write!(
                f,
                "a segment of incarnation {incarnation}, newer than the header, is at block {block}"
            ),
            Evidence::Whole => {
                f.write_str("its checksum is right, so its write was not interrupted")
            }
        }
    }
}
