//! Places between two segments.

use jericho_format::journal::{JournalHeader, POSITION_BYTES, PositionValue};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// A place between two segments. A checkpoint store keeps one position, and has all batches before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Incarnation of the journal when the position was taken.
    pub incarnation: u64,
    /// Number of the next segment.
    pub seq: u64,
    /// Block of the next segment, counted from the first block of the area.
    pub block: u32,
    /// Checksum of the segment before it.
    pub crc: u32,
}

impl Position {
    /// Returns the bytes for the checkpoint store.
    pub fn encode(&self) -> [u8; POSITION_BYTES] {
        let value = PositionValue {
            incarnation: U64::new(self.incarnation),
            seq: U64::new(self.seq),
            block: U32::new(self.block),
            crc: U32::new(self.crc),
        };
        let mut bytes = [0; POSITION_BYTES];
        bytes.copy_from_slice(value.as_bytes());
        bytes
    }

    /// Returns the position with these bytes, or `None` if their number is not `POSITION_BYTES`.
    pub fn decode(bytes: &[u8]) -> Option<Position> {
        let value = PositionValue::read_from_bytes(bytes).ok()?;
        Some(Position {
            incarnation: value.incarnation.get(),
            seq: value.seq.get(),
            block: value.block.get(),
            crc: value.crc.get(),
        })
    }

    /// Returns the begin of the header's incarnation.
    pub(crate) fn begin_of(header: &JournalHeader) -> Position {
        Position {
            incarnation: header.incarnation.get(),
            seq: header.first_seq.get(),
            block: header.first_block.get(),
            crc: header.first_crc.get(),
        }
    }

    /// Returns whether both are the same place; their incarnations may differ.
    pub(crate) fn is_at(&self, other: &Position) -> bool {
        (self.seq, self.block, self.crc) == (other.seq, other.block, other.crc)
    }
}
