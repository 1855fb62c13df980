//! The journal that takes appends.
//!
//! Invariants:
//! - The blocks from the tail to the end, `used_blocks` of them, hold the segments from the tail on. No append writes to them.
//! - Every segment before the end is durable.
//! - After a failed write or flush nothing is written.

use std::fmt;
use std::sync::Arc;

use jericho_format::journal::{
    JOURNAL_CLOSED, SEGMENT_CONTINUES, SEGMENT_HEADER_BYTES, SegmentHeader, segment_kind,
};
use jericho_storage::{AlignedBuffer, BLOCK_BYTES, Device, IoError};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::{U16, U32, U64};

use crate::area::{AreaDevice, JournalArea, JournalVolume};
use crate::error::{AppendError, AreaError, CreateError};
use crate::headers::{self, CurrentHeader};
use crate::position::Position;
use crate::ring::{Piece, Ring};

/// Which part of the ring an append may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppendClass {
    /// Seven eighths.
    Ordinary,
    /// All of it: for a caller whose checkpoints append, so that a full journal can be emptied. Only tests use it; the checkpoints of
    /// `metadata` append nothing.
    Checkpoint,
}

/// A journal that takes appends. It has one writer at a time.
pub struct Journal {
    place: AreaDevice,
    ring: Ring,
    header: CurrentHeader,
    tail: Position,
    end: Position,
    used_blocks: u32,
    /// The segment that is being written.
    buffer: AlignedBuffer,
    poisoned: Option<IoError>,
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal")
            .field("place", &self.place)
            .field("tail", &self.tail)
            .field("end", &self.end)
            .field("used_blocks", &self.used_blocks)
            .field("poisoned", &self.poisoned)
            .finish_non_exhaustive()
    }
}

impl Journal {
    /// Writes zeros to the whole area, then the headers. Returns an empty journal of incarnation 1. All of it is durable.
    pub fn create(
        device: Arc<dyn Device>,
        area: JournalArea,
        volume: JournalVolume,
        slice: u16,
    ) -> Result<Journal, CreateError> {
        if !area.is_on(&*device) {
            let device = device.name();
            return Err(AreaError { device, area }.into());
        }
        let place = AreaDevice {
            device,
            area,
            volume,
            slice,
        };
        place.write_zeros()?;
        let begin = Position {
            incarnation: 1,
            seq: 1,
            block: Ring::of(area.blocks).first(),
            crc: 0,
        };
        let header = headers::write(&place, None, begin, 0)?;
        Ok(Journal::empty(place, header))
    }

    /// Returns the journal at the begin of a header's incarnation. Both copies of the header are durable.
    pub(crate) fn empty(place: AreaDevice, header: CurrentHeader) -> Journal {
        let ring = Ring::of(place.area.blocks);
        let begin = Position::begin_of(&header.header);
        let buffer_bytes = ring.segment_blocks_max() as usize * BLOCK_BYTES as usize;
        Journal {
            place,
            ring,
            header,
            tail: begin,
            end: begin,
            used_blocks: 0,
            buffer: AlignedBuffer::new(buffer_bytes),
            poisoned: None,
        }
    }

    /// Appends a batch durably, and returns the position after it. After a crash during the call all of the batch is there or none.
    ///
    /// A batch of one segment is one `write_durable`. A longer batch, or one at the end of a lap, is several writes and one flush.
    /// `Full` and `TooLong` leave the journal as it was. After `Io` every later append fails with the same cause, and the
    /// batch may be there or not.
    pub fn append(&mut self, payload: &[u8], class: AppendClass) -> Result<Position, AppendError> {
        if let Some(cause) = &self.poisoned {
            return Err(cause.clone().into());
        }
        self.take_room(payload.len(), class)?;
        let result = self.write(payload);
        match &result {
            Ok(end) => self.end = *end,
            Err(cause) => self.poisoned = Some(cause.clone()),
        }
        Ok(result?)
    }

    /// Takes blocks for a payload, or fails.
    fn take_room(&mut self, payload_bytes: usize, class: AppendClass) -> Result<(), AppendError> {
        let needed_bytes = payload_bytes as u64;
        let max_bytes = self.longest_payload(class);
        if needed_bytes > max_bytes {
            return Err(AppendError::TooLong {
                needed_bytes,
                max_bytes,
            });
        }
        let needed = self.ring.blocks_needed(self.end.block, payload_bytes);
        if needed > u64::from(self.available_blocks(class)) {
            let room_bytes = self.room_bytes(class);
            return Err(AppendError::Full {
                needed_bytes,
                room_bytes,
            });
        }
        self.used_blocks += needed as u32;
        Ok(())
    }

    /// Writes the segments of a batch and makes them durable. Returns the position after them.
    fn write(&mut self, payload: &[u8]) -> Result<Position, IoError> {
        let mut next = self.end;
        let mut rest = payload;
        for (index, piece) in (0..).zip(self.ring.pieces(self.end.block, payload.len())) {
            let (taken, left) = rest.split_at(piece.payload_bytes);
            rest = left;
            next.crc = self.fill_buffer(next, piece, index, taken);
            next.seq += 1;
            next.block = self.ring.after(piece.block, piece.blocks);
            let blocks = if piece.is_pad {
                1
            } else {
                piece.blocks as usize
            };
            let bytes = &self.buffer.as_slice()[..blocks * BLOCK_BYTES as usize];
            match index == 0 && !piece.continues {
                true => self.place.write_durable(piece.block, bytes)?,
                false => self.place.write(piece.block, bytes)?,
            }
            // After the last of several segments: a durable write of this one would promise nothing about the others.
            if index > 0 && !piece.continues {
                self.place.flush()?;
            }
        }
        Ok(next)
    }

    /// Puts a segment into the buffer. Returns its checksum.
    fn fill_buffer(&mut self, at: Position, piece: Piece, index: u32, payload: &[u8]) -> u32 {
        let mut header = SegmentHeader::new();
        header.flags = U16::new(if piece.continues {
            SEGMENT_CONTINUES
        } else {
            0
        });
        header.slice = U16::new(self.place.slice);
        header.kind = match piece.is_pad {
            true => segment_kind::PAD,
            false => segment_kind::NORMAL,
        };
        header.incarnation = U64::new(at.incarnation);
        header.seq = U64::new(at.seq);
        header.prev_crc = U32::new(at.crc);
        header.blocks = U32::new(piece.blocks);
        header.payload_bytes = U32::new(payload.len() as u32);
        header.batch_index = U32::new(index);
        header.durable_seq = U64::new(self.end.seq - 1);
        header.tail_seq = U64::new(self.tail.seq);
        header.secret = self.place.volume.secret;
        let crc = header.checksum(payload);
        header.crc = U32::new(crc);
        let end = SEGMENT_HEADER_BYTES + payload.len();
        let buffer = self.buffer.as_mut_slice();
        buffer[..SEGMENT_HEADER_BYTES].copy_from_slice(header.as_bytes());
        buffer[SEGMENT_HEADER_BYTES..end].copy_from_slice(payload);
        buffer[end..end.next_multiple_of(BLOCK_BYTES as usize)].fill(0);
        crc
    }

    /// Returns the position after the last batch.
    pub fn end(&self) -> Position {
        self.end
    }

    /// Returns the tail: appends write no block from this position to the end.
    pub fn tail(&self) -> Position {
        self.tail
    }

    /// Frees the segments before a position. The caller has made a checkpoint durable at this position or later.
    ///
    /// # Panics
    /// Panics when the position is not between the tail and the end.
    pub fn set_tail(&mut self, tail: Position) {
        let is_between = (self.tail.seq..=self.end.seq).contains(&tail.seq);
        assert!(
            is_between,
            "{tail:?} is not from {:?} to {:?}",
            self.tail, self.end
        );
        // In a full ring, tail and end are at the same block.
        self.used_blocks = match tail.seq {
            seq if seq == self.end.seq => 0,
            seq if seq == self.tail.seq => self.used_blocks,
            _ => self.ring.distance(tail.block, self.end.block),
        };
        self.tail = tail;
    }

    /// Returns the blocks that an append of this class may take now.
    fn available_blocks(&self, class: AppendClass) -> u32 {
        self.most_blocks(class).saturating_sub(self.used_blocks)
    }

    fn most_blocks(&self, class: AppendClass) -> u32 {
        match class {
            AppendClass::Ordinary => self.ring.blocks() - self.ring.reserve_blocks(),
            AppendClass::Checkpoint => self.ring.blocks(),
        }
    }

    /// Returns the longest payload that an append of this class takes now.
    pub fn room_bytes(&self, class: AppendClass) -> u64 {
        let available = self.available_blocks(class);
        let room = self.ring.longest_payload(self.end.block, available);
        room.min(self.longest_payload(class))
    }

    /// Returns the longest payload that an append of this class takes when the ring is empty, wherever its end is.
    pub fn longest_payload(&self, class: AppendClass) -> u64 {
        // A pad is at most one block shorter than a segment.
        let pad = self.ring.segment_blocks_max() - 1;
        let blocks = self.most_blocks(class) - pad;
        self.ring.longest_payload(self.ring.first(), blocks)
    }

    /// Returns the bytes of the ring from tail to end, with headers, padding and pads.
    pub fn used_bytes(&self) -> u64 {
        u64::from(self.used_blocks) * BLOCK_BYTES
    }

    /// Returns the bytes of the ring.
    pub fn ring_bytes(&self) -> u64 {
        u64::from(self.ring.blocks()) * BLOCK_BYTES
    }

    /// Returns the first failure of a write or flush. After it the journal takes no more appends.
    pub fn poisoned(&self) -> Option<&IoError> {
        self.poisoned.as_ref()
    }

    /// Marks the journal as closed: the next recovery reads the headers only. Before this call, the caller must have made all batches
    /// durable in the checkpoint store, with the position `end`.
    pub fn close(self) -> Result<(), AppendError> {
        if let Some(cause) = self.poisoned {
            return Err(cause.into());
        }
        let begin = Position {
            incarnation: self.end.incarnation + 1,
            ..self.end
        };
        headers::write(&self.place, Some(&self.header), begin, JOURNAL_CLOSED)?;
        Ok(())
    }
}
