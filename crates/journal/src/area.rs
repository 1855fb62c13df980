//! The blocks of a device that hold a journal.

use std::fmt;
use std::sync::Arc;

use jericho_format::journal::{AREA_BLOCKS, HEADER_COPIES, SEGMENT_BLOCKS_MAX};
use jericho_storage::{AlignedBuffer, BLOCK_BYTES, Device, IoError};

/// The blocks of a device that hold a journal: two headers, then the ring of segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalArea {
    /// First block on the device.
    pub first_block: u64,
    /// Number of blocks, within `AREA_BLOCKS`.
    pub blocks: u64,
}

impl JournalArea {
    /// Returns whether the size is possible and the device has these blocks.
    pub(crate) fn is_on(&self, device: &dyn Device) -> bool {
        let end = self.first_block.checked_add(self.blocks);
        let device_blocks = device.size_bytes() / BLOCK_BYTES;
        AREA_BLOCKS.contains(&self.blocks) && end.is_some_and(|end| end <= device_blocks)
    }
}

/// The volume of a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalVolume {
    /// Its id, in the headers.
    pub uuid: [u8; 16],
    /// Secret bytes of each segment. A program that writes files of the volume does not know them, so contents of a file in the journal
    /// cannot look like a segment.
    pub secret: [u8; 8],
}

/// A journal's area on its device. Block numbers count from the first block of the area.
#[derive(Clone)]
pub(crate) struct AreaDevice {
    pub device: Arc<dyn Device>,
    pub area: JournalArea,
    pub volume: JournalVolume,
    pub slice: u16,
}

impl fmt::Debug for AreaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AreaDevice")
            .field("device", &self.device.name())
            .field("area", &self.area)
            .field("slice", &self.slice)
            .finish_non_exhaustive()
    }
}

impl AreaDevice {
    /// Returns a block's number on the device.
    pub fn on_device(&self, block: u32) -> u64 {
        self.area.first_block + u64::from(block)
    }

    fn offset_bytes(&self, block: u32) -> u64 {
        self.on_device(block) * BLOCK_BYTES
    }

    pub fn read(&self, block: u32, buf: &mut [u8]) -> Result<(), IoError> {
        self.device.read_at(self.offset_bytes(block), buf)
    }

    pub fn write(&self, block: u32, buf: &[u8]) -> Result<(), IoError> {
        self.device.write_at(self.offset_bytes(block), buf)
    }

    pub fn write_durable(&self, block: u32, buf: &[u8]) -> Result<(), IoError> {
        self.device.write_durable(self.offset_bytes(block), buf)
    }

    pub fn flush(&self) -> Result<(), IoError> {
        self.device.flush()
    }

    /// Writes zeros to the whole area, the headers first, so that a crash leaves either no header or only zeros behind it.
    pub fn write_zeros(&self) -> Result<(), IoError> {
        let zeros = AlignedBuffer::new(SEGMENT_BLOCKS_MAX as usize * BLOCK_BYTES as usize);
        let write = |first: u64, end: u64| {
            let mut block = first;
            while block < end {
                let count = (end - block).min(SEGMENT_BLOCKS_MAX.into());
                let bytes = (count * BLOCK_BYTES) as usize;
                self.write(block as u32, &zeros.as_slice()[..bytes])?;
                block += count;
            }
            self.flush()
        };
        write(0, HEADER_COPIES.into())?;
        write(HEADER_COPIES.into(), self.area.blocks)
    }
}
