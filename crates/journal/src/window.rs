//! Reads the ring once, from a block on, a window of it at a time.

use jericho_format::journal::SEGMENT_BLOCKS_MAX;
use jericho_storage::{AlignedBuffer, BLOCK_BYTES, IoError};

use crate::area::AreaDevice;
use crate::ring::Ring;

const BLOCK: usize = BLOCK_BYTES as usize;

/// The blocks of the ring that are read and not passed yet.
pub(crate) struct Window {
    place: AreaDevice,
    ring: Ring,
    /// First block that is not passed.
    block: u32,
    /// Blocks of the ring that are not passed, read or not.
    left: u32,
    buffer: AlignedBuffer,
    /// Blocks of `buffer` before `block`.
    passed: usize,
    /// Blocks of `buffer` from `block` on. They never reach beyond the lap.
    held: usize,
    bytes_read: u64,
}

impl Window {
    /// Returns a window at a block of the ring.
    pub fn new(place: AreaDevice, ring: Ring, block: u32) -> Window {
        let blocks = ring.blocks().min(2 * SEGMENT_BLOCKS_MAX);
        Window {
            place,
            ring,
            block,
            left: ring.blocks(),
            buffer: AlignedBuffer::new(blocks as usize * BLOCK),
            passed: 0,
            held: 0,
            bytes_read: 0,
        }
    }

    /// Returns the block at which the window begins.
    pub fn block(&self) -> u32 {
        self.block
    }

    /// Returns the number of blocks of the ring that are not passed.
    pub fn left(&self) -> u32 {
        self.left
    }

    /// Returns the number of blocks to the end of the lap.
    pub fn lap_rest(&self) -> u32 {
        self.ring.lap_rest(self.block)
    }

    /// Returns the bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// Returns the next blocks without passing them, or `None` if the ring or the lap has fewer.
    pub fn peek(&mut self, blocks: u32) -> Result<Option<&[u8]>, IoError> {
        let most = self.left.min(self.lap_rest());
        if blocks > most.min(SEGMENT_BLOCKS_MAX) {
            return Ok(None);
        }
        let blocks = blocks as usize;
        if blocks > self.held {
            let held = self.passed * BLOCK..(self.passed + self.held) * BLOCK;
            let buffer = self.buffer.as_mut_slice();
            buffer.copy_within(held, 0);
            self.passed = 0;
            let end = buffer.len().min(most as usize * BLOCK);
            let target = &mut buffer[self.held * BLOCK..end];
            let from = self.block + self.held as u32;
            self.place.read(from, target)?;
            self.bytes_read += target.len() as u64;
            self.held = end / BLOCK;
        }
        let from = self.passed * BLOCK;
        Ok(Some(&self.buffer.as_slice()[from..from + blocks * BLOCK]))
    }

    /// Passes blocks, read or not. The caller ensures that the lap has them.
    pub fn pass(&mut self, blocks: u32) {
        let blocks = blocks.min(self.left);
        match (blocks as usize) < self.held {
            true => {
                self.passed += blocks as usize;
                self.held -= blocks as usize;
            }
            false => (self.passed, self.held) = (0, 0),
        }
        self.block = self.ring.after(self.block, blocks);
        self.left -= blocks;
    }
}
