//! The journal: its header in two copies, and the headers of its segments. `docs/formats/journal.md` specifies these bytes.

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::PAGE_BYTES;

/// First bytes of a journal header.
pub const JOURNAL_MAGIC: [u8; 8] = *b"JERIJRNL";
/// First bytes of a segment.
pub const SEGMENT_MAGIC: [u8; 4] = *b"JSEG";
/// Version of journal headers and segments that this code writes, and the newest that it reads.
pub const JOURNAL_VERSION: u32 = 1;
/// Smallest and largest size of a journal's area, in blocks.
pub const AREA_BLOCKS: std::ops::RangeInclusive<u64> = 18..=1 << 20;
/// Number of header copies: the first blocks of the area.
pub const HEADER_COPIES: u32 = 2;
/// Maximum number of blocks of a segment.
pub const SEGMENT_BLOCKS_MAX: u32 = 256;
/// Maximum number of payload bytes of a batch.
pub const BATCH_BYTES_MAX: usize = 32 << 20;
/// Bit of `JournalHeader::flags`: no segment of this incarnation exists.
pub const JOURNAL_CLOSED: u32 = 1;
/// Bit of `SegmentHeader::flags`: the batch continues in the next segment.
pub const SEGMENT_CONTINUES: u16 = 1;
/// Size of a segment's header in bytes.
pub const SEGMENT_HEADER_BYTES: usize = size_of::<SegmentHeader>();
/// Size of an encoded position in bytes.
pub const POSITION_BYTES: usize = size_of::<PositionValue>();
/// Maximum of incarnations and numbers of segments, so that adding one never overflows.
pub const NUMBER_MAX: u64 = u64::MAX >> 1;

/// Number of earlier incarnations that a header names.
pub const EARLIER_BEGINS: usize = 250;

/// Values of `SegmentHeader::kind`.
pub mod segment_kind {
    /// Has a payload.
    pub const NORMAL: u8 = 1;
    /// Fills the rest of a lap.
    pub const PAD: u8 = 2;
}

/// Block 0 or 1 of a journal's area.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct JournalHeader {
    /// `JOURNAL_MAGIC`.
    pub magic: [u8; 8],
    /// `JOURNAL_VERSION`.
    pub version: U32,
    /// crc32c of the 4096 bytes with this field zero.
    pub crc: U32,
    /// Id of the volume.
    pub volume_uuid: [u8; 16],
    /// The slice whose journal it is.
    pub slice: U16,
    /// Zero.
    pub reserved0: U16,
    /// `JOURNAL_CLOSED` or 0.
    pub flags: U32,
    /// Blocks of the area.
    pub blocks: U64,
    /// Grows with each header. The greater of two valid copies counts.
    pub incarnation: U64,
    /// Number of the first segment of this incarnation.
    pub first_seq: U64,
    /// Block of the first segment.
    pub first_block: U32,
    /// `prev_crc` of the first segment.
    pub first_crc: U32,
    /// The headers before this one, the newest first; unused entries are zero. They tell which segments of an earlier incarnation
    /// counted.
    pub earlier: [BeginValue; EARLIER_BEGINS],
    /// Zero.
    pub reserved: [u8; 24],
}
const _: () = assert!(size_of::<JournalHeader>() == 4096);

/// Where an incarnation of a journal began.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct BeginValue {
    /// The incarnation; 0: none.
    pub incarnation: U64,
    /// Number of its first segment. All segments before it counted, and later ones of earlier incarnations did not.
    pub first_seq: U64,
}
const _: () = assert!(size_of::<BeginValue>() == 16);

/// The start of a segment.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct SegmentHeader {
    /// `SEGMENT_MAGIC`.
    pub magic: [u8; 4],
    /// `JOURNAL_VERSION`.
    pub version: U16,
    /// `SEGMENT_CONTINUES` or 0.
    pub flags: U16,
    /// The slice whose journal it is.
    pub slice: U16,
    /// One of `segment_kind`.
    pub kind: u8,
    /// Zero.
    pub reserved0: u8,
    /// crc32c of the header with this field zero, the payload and the page list. Detects torn and misdirected writes.
    pub crc: U32,
    /// Incarnation of the journal. Tells segments of an earlier mount from the next segment.
    pub incarnation: U64,
    /// Number of the segment. Tells segments of an earlier lap from the next segment.
    pub seq: U64,
    /// `crc` of the segment before it.
    pub prev_crc: U32,
    /// Blocks of the segment, pages included.
    pub blocks: U32,
    /// Bytes of the payload.
    pub payload_bytes: U32,
    /// Number of pages. Zero in this version.
    pub pages: U32,
    /// Number of requirements in the payload. Zero in this version.
    pub requires: U32,
    /// Number of segments of the same batch before this one.
    pub batch_index: U32,
    /// All segments up to this number were durable before this one was written. Tells damage from a torn end.
    pub durable_seq: U64,
    /// All segments before this number were in the checkpoint store before this one was written.
    pub tail_seq: U64,
    /// Bytes that only the volume's owner knows. Contents of files in a payload cannot have them, so they never look like a segment.
    pub secret: [u8; 8],
    /// Zero.
    pub reserved: [u8; 16],
}
const _: () = assert!(size_of::<SegmentHeader>() == 96);

/// A place between two segments, as a checkpoint store keeps it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct PositionValue {
    /// Incarnation at the time of the checkpoint.
    pub incarnation: U64,
    /// Number of the next segment.
    pub seq: U64,
    /// Block of the next segment.
    pub block: U32,
    /// `prev_crc` of the next segment.
    pub crc: U32,
}
const _: () = assert!(size_of::<PositionValue>() == 24);

/// Why a copy of the journal header cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JournalHeaderError {
    /// The block has no journal header.
    #[error("no journal header found")]
    Magic,
    /// The copy has this newer version.
    #[error("it has version {0}")]
    Newer(u32),
    /// The copy is torn or damaged.
    #[error("its checksum is wrong")]
    Checksum,
    /// The checksum is right, but a field contradicts another one.
    #[error("its fields contradict each other")]
    Inconsistent,
}

impl JournalHeader {
    /// Returns a header with magic and version set and the rest zero.
    pub fn new() -> Box<JournalHeader> {
        let mut header = Box::new(JournalHeader::new_zeroed());
        header.magic = JOURNAL_MAGIC;
        header.version = U32::new(JOURNAL_VERSION);
        header
    }

    /// Returns the 4096 bytes to store, with the checksum set.
    pub fn encode(&self) -> Vec<u8> {
        let mut header = Box::new(self.clone());
        header.crc = U32::new(0);
        header.crc = U32::new(crc32c::crc32c(header.as_bytes()));
        header.as_bytes().to_vec()
    }

    /// Decodes a copy.
    pub fn decode(block: &[u8]) -> Result<Box<JournalHeader>, JournalHeaderError> {
        let Ok((header, _)) = JournalHeader::read_from_prefix(block) else {
            return Err(JournalHeaderError::Magic);
        };
        if header.magic != JOURNAL_MAGIC {
            return Err(JournalHeaderError::Magic);
        }
        // A newer version may have another checksum or layout. Only magic and version are in the same place in all versions.
        if header.version.get() > JOURNAL_VERSION {
            return Err(JournalHeaderError::Newer(header.version.get()));
        }
        if header.encode() != block[..size_of::<JournalHeader>()] {
            return Err(JournalHeaderError::Checksum);
        }
        let numbers = 1..=NUMBER_MAX;
        let ring = u64::from(HEADER_COPIES)..header.blocks.get();
        let is_consistent = AREA_BLOCKS.contains(&header.blocks.get())
            && numbers.contains(&header.incarnation.get())
            && numbers.contains(&header.first_seq.get())
            && ring.contains(&header.first_block.get().into());
        match is_consistent {
            true => Ok(Box::new(header)),
            false => Err(JournalHeaderError::Inconsistent),
        }
    }
}

impl SegmentHeader {
    /// Returns a header with magic and version set and the rest zero.
    pub fn new() -> SegmentHeader {
        SegmentHeader {
            magic: SEGMENT_MAGIC,
            version: U16::new(JOURNAL_VERSION as u16),
            ..SegmentHeader::new_zeroed()
        }
    }

    /// Reads the header at the start of a block, unchecked. Returns `None` when there is no magic.
    pub fn read(block: &[u8]) -> Option<SegmentHeader> {
        let (header, _) = SegmentHeader::read_from_prefix(block).ok()?;
        (header.magic == SEGMENT_MAGIC).then_some(header)
    }

    /// Returns the bytes of header, payload and page list.
    pub fn checked_bytes(&self) -> u64 {
        let list = u64::from(self.pages.get()) * 4;
        SEGMENT_HEADER_BYTES as u64 + u64::from(self.payload_bytes.get()) + list
    }

    /// Returns whether the sizes agree: `blocks` is what payload and pages need, or a pad has neither.
    pub fn sizes_agree(&self) -> bool {
        let blocks = self.blocks.get();
        let needed = self.checked_bytes().div_ceil(PAGE_BYTES) + u64::from(self.pages.get());
        let right = match self.kind {
            segment_kind::NORMAL => needed == u64::from(blocks),
            segment_kind::PAD => self.checked_bytes() == SEGMENT_HEADER_BYTES as u64,
            _ => false,
        };
        right && (1..=SEGMENT_BLOCKS_MAX).contains(&blocks)
    }

    /// Returns whether the numbers are possible and agree: the durable segments are before the batch, and the tail is not after
    /// the segment.
    pub fn numbers_agree(&self) -> bool {
        let (seq, incarnation) = (self.seq.get(), self.incarnation.get());
        let begin = seq.checked_sub(self.batch_index.get().into());
        seq <= NUMBER_MAX
            && (1..=NUMBER_MAX).contains(&incarnation)
            && begin.is_some_and(|begin| self.durable_seq.get() < begin)
            && self.tail_seq.get() <= seq
    }

    /// Returns the checksum of the header and of the bytes that follow it, up to the end of the page list.
    pub fn checksum(&self, following: &[u8]) -> u32 {
        let zero = SegmentHeader {
            crc: U32::new(0),
            ..*self
        };
        crc32c::crc32c_append(crc32c::crc32c(zero.as_bytes()), following)
    }
}

impl Default for SegmentHeader {
    fn default() -> SegmentHeader {
        SegmentHeader::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Box<JournalHeader> {
        let mut header = JournalHeader::new();
        header.blocks = U64::new(64);
        header.incarnation = U64::new(3);
        header.first_seq = U64::new(9);
        header.first_block = U32::new(5);
        header
    }

    #[test]
    fn a_flipped_bit_anywhere_in_a_journal_header_is_detected() {
        let bytes = header().encode();
        assert_eq!(JournalHeader::decode(&bytes), Ok(header_of(&bytes)));
        for at in (12..bytes.len()).step_by(7) {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            let decoded = JournalHeader::decode(&bad);
            assert_eq!(decoded, Err(JournalHeaderError::Checksum), "byte {at}");
        }
    }

    fn header_of(bytes: &[u8]) -> Box<JournalHeader> {
        Box::new(JournalHeader::read_from_bytes(bytes).expect("a header"))
    }

    #[test]
    fn a_newer_version_is_distinguished_from_damage() {
        let mut newer = header();
        newer.version = U32::new(JOURNAL_VERSION + 1);
        let decoded = JournalHeader::decode(&newer.encode());
        assert_eq!(decoded, Err(JournalHeaderError::Newer(JOURNAL_VERSION + 1)));
    }

    #[test]
    fn a_header_that_contradicts_itself_is_refused() {
        let changes: [fn(&mut JournalHeader); 6] = [
            |h| h.blocks = U64::new(17),
            |h| h.blocks = U64::new(u64::MAX),
            |h| h.incarnation = U64::new(0),
            |h| h.first_seq = U64::new(u64::MAX),
            |h| h.first_block = U32::new(1),
            |h| h.first_block = U32::new(64),
        ];
        for change in changes {
            let mut bad = header();
            change(&mut bad);
            let decoded = JournalHeader::decode(&bad.encode());
            assert_eq!(decoded, Err(JournalHeaderError::Inconsistent));
        }
    }
}
