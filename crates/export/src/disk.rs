//! A device as clients see it: a range of bytes.
//!
//! A device transfers whole blocks. Here requests for any bytes become transfers of blocks. A change of a part of a block reads the
//! block first, while `ranges` keeps all other changes of the block away.
//!
//! # Invariants
//! - Every change holds its blocks in `ranges` from before its first read until after its last write.
//! - A durable change ends only after the device has made it durable.

use std::ops::Range;
use std::sync::Arc;

use jericho_storage::{AlignedBuffer, BLOCK_BYTES, Device, DiscardEffect, Extent, IoError};

use crate::ranges::{Ranges, Use};
use crate::span::{Span, whole_blocks};

const BLOCK: usize = BLOCK_BYTES as usize;

/// How zeros are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zeroes {
    /// The zeros must be durable at the end.
    pub is_durable: bool,
    /// The range must not become a hole.
    pub keeps_space: bool,
    /// Fails at once unless this is faster than writing.
    pub must_be_fast: bool,
}

/// The end of a write of zeros that did not fail on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroed {
    /// The range reads as zeros.
    Done,
    /// The range is as before, because this device can make zeros only by writing them.
    NotFast,
}

/// The bytes of a device. All who change the device through the same `Disk` may do so at the same time.
pub struct Disk {
    device: Arc<dyn Device>,
    read_only: bool,
    ranges: Ranges,
}

impl Disk {
    /// Gives access to the bytes of `device`. `read_only` says that its users make no changes.
    pub fn new(device: Arc<dyn Device>, read_only: bool) -> Disk {
        Disk {
            read_only: read_only || device.is_read_only(),
            device,
            ranges: Ranges::default(),
        }
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Returns the size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    /// Returns whether the device must not be changed. The caller refuses changes.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    pub(crate) fn can_trim(&self) -> bool {
        !self.read_only && self.device.discard_effect() != DiscardEffect::Nothing
    }

    /// Reads any bytes inside the device. The offset of no bytes may be anywhere.
    pub fn read_bytes(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let span = Span::of(offset_bytes..offset_bytes + bytes.len() as u64);
        if span.is_whole() {
            return self.read(&span, bytes);
        }
        let mut blocks = AlignedBuffer::new(span.size());
        self.read(&span, blocks.as_mut_slice())?;
        bytes.copy_from_slice(&blocks.as_slice()[span.inside]);
        Ok(())
    }

    /// Writes any bytes inside the device. Keeps all other bytes of the device.
    pub fn write_bytes(
        &self,
        offset_bytes: u64,
        bytes: &[u8],
        is_durable: bool,
    ) -> Result<(), IoError> {
        let span = Span::of(offset_bytes..offset_bytes + bytes.len() as u64);
        if bytes.is_empty() {
            return Ok(());
        }
        if span.is_whole() {
            let _held = self.ranges.hold(span.blocks.clone(), Use::Shared);
            return self.write_blocks(span.blocks.start, bytes, is_durable);
        }
        let mut blocks = AlignedBuffer::new(span.size());
        blocks.as_mut_slice()[span.inside.clone()].copy_from_slice(bytes);
        self.write(&span, blocks.as_mut_slice(), is_durable)
    }

    /// Reads the blocks of a span.
    pub(crate) fn read(&self, span: &Span, blocks: &mut [u8]) -> Result<(), IoError> {
        self.device.read_at(span.blocks.start, blocks)
    }

    /// Writes the bytes of a span, which are at `span.inside` of `blocks`. Fills the rest of `blocks` with what the device has there.
    pub(crate) fn write(
        &self,
        span: &Span,
        blocks: &mut [u8],
        is_durable: bool,
    ) -> Result<(), IoError> {
        if span.inside.is_empty() {
            return Ok(());
        }
        let how = match span.is_whole() {
            true => Use::Shared,
            false => Use::Alone,
        };
        let _held = self.ranges.hold(span.blocks.clone(), how);
        self.fill_edges(span, blocks)?;
        self.write_blocks(span.blocks.start, blocks, is_durable)
    }

    /// Writes whole blocks that the caller holds.
    fn write_blocks(&self, at: u64, blocks: &[u8], is_durable: bool) -> Result<(), IoError> {
        match is_durable {
            true => self.device.write_durable(at, blocks),
            false => self.device.write_at(at, blocks),
        }
    }

    /// Copies the device's bytes before and after a span's bytes into their blocks.
    fn fill_edges(&self, span: &Span, blocks: &mut [u8]) -> Result<(), IoError> {
        let Range { start, end } = span.inside;
        if span.is_whole() {
            return Ok(());
        }
        let mut edge = AlignedBuffer::new(BLOCK);
        let edge = edge.as_mut_slice();
        if start > 0 {
            self.device.read_at(span.blocks.start, edge)?;
            blocks[..start].copy_from_slice(&edge[..start]);
        }
        let kept = end % BLOCK;
        if kept > 0 {
            let last = blocks.len() - BLOCK;
            if start == 0 || last > 0 {
                let at = span.blocks.start + last as u64;
                self.device.read_at(at, edge)?;
            }
            blocks[last + kept..].copy_from_slice(&edge[kept..]);
        }
        Ok(())
    }

    /// Makes all changes durable that have ended before.
    pub fn flush(&self) -> Result<(), IoError> {
        match self.read_only {
            true => Ok(()),
            false => self.device.flush(),
        }
    }

    /// Discards the whole blocks of a range. Does nothing where the device cannot.
    pub(crate) fn trim(&self, bytes: Range<u64>, is_durable: bool) -> Result<(), IoError> {
        let blocks = whole_blocks(&bytes);
        if !blocks.is_empty() {
            let _held = self.ranges.hold(blocks.clone(), Use::Shared);
            match (self.device).discard(blocks.start, blocks.end - blocks.start) {
                Err(error) if error.is_unsupported() => {}
                discarded => discarded?,
            }
        }
        match is_durable {
            true => self.device.flush(),
            false => Ok(()),
        }
    }

    /// Writes zeros. Makes a hole if the caller permits it and the device's holes read as zeros.
    pub fn write_zeroes(&self, bytes: Range<u64>, how: Zeroes) -> Result<Zeroed, IoError> {
        let middle = whole_blocks(&bytes);
        let edges = match middle.is_empty() {
            true => [bytes.clone(), 0..0],
            false => [bytes.start..middle.start, middle.end..bytes.end],
        };
        let edges = edges.into_iter().filter(|edge| !edge.is_empty());
        let covered = Span::of(bytes.clone()).blocks;
        let held = match covered == middle {
            true => Use::Shared,
            false => Use::Alone,
        };
        let _held = self.ranges.hold(covered, held);
        if !middle.is_empty() && self.zero_blocks(&middle, how)? == Zeroed::NotFast {
            return Ok(Zeroed::NotFast);
        }
        for edge in edges {
            self.zero_edge(edge)?;
        }
        if how.is_durable {
            self.device.flush()?;
        }
        Ok(Zeroed::Done)
    }

    /// Writes zeros to whole blocks that the caller holds.
    fn zero_blocks(&self, blocks: &Range<u64>, how: Zeroes) -> Result<Zeroed, IoError> {
        let (offset_bytes, length_bytes) = (blocks.start, blocks.end - blocks.start);
        if !how.keeps_space && self.device.discard_makes_zeros() {
            match self.device.discard(offset_bytes, length_bytes) {
                Err(error) if error.is_unsupported() => {}
                discarded => return discarded.map(|()| Zeroed::Done),
            }
        }
        if how.must_be_fast {
            return Ok(Zeroed::NotFast);
        }
        self.device.write_zeros(offset_bytes, length_bytes)?;
        Ok(Zeroed::Done)
    }

    /// Writes zeros to less than two blocks that the caller holds: the bytes before or after whole blocks, or all of a short range.
    fn zero_edge(&self, bytes: Range<u64>) -> Result<(), IoError> {
        let span = Span::of(bytes);
        let mut blocks = AlignedBuffer::new(span.size());
        self.fill_edges(&span, blocks.as_mut_slice())?;
        self.device.write_at(span.blocks.start, blocks.as_slice())
    }

    /// Returns the run of holes or data that begins at an offset inside the device, cut off at its end.
    pub fn extent_at(&self, offset_bytes: u64) -> Result<Extent, IoError> {
        let block = offset_bytes - offset_bytes % BLOCK_BYTES;
        let extent = (self.device).extent_at(block, self.size_bytes() - block)?;
        Ok(Extent {
            length_bytes: extent.length_bytes - (offset_bytes - block),
            ..extent
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_sim::SimDevice;

    #[test]
    fn any_write_and_any_zeros_leave_all_other_bytes_as_they_are() {
        let size = 4 * BLOCK;
        let device = Arc::new(SimDevice::new("sim", size as u64));
        let disk = Disk::new(device, false);
        let read = || {
            let span = Span::of(0..size as u64);
            let mut bytes = vec![0; size];
            disk.read(&span, &mut bytes).unwrap();
            bytes
        };
        let mut model = vec![0; size];
        let cuts = [0, 1, 511, 4095, 4096, 4097, 8191, 8192, 9000, 16383, 16384];
        let mut fill = 0;
        for start in cuts {
            for end in cuts.into_iter().filter(|end| *end > start) {
                fill = fill % 250 + 1;
                let span = Span::of(start as u64..end as u64);
                let mut blocks = vec![0xee; span.size()];
                blocks[span.inside.clone()].fill(fill);
                disk.write(&span, &mut blocks, end % 2 == 0).unwrap();
                model[start..end].fill(fill);
                assert!(read() == model, "write {start}..{end}");
                let (start, end) = (start + (end - start) / 3, end - (end - start) / 3);
                let zeroed = disk.write_zeroes(start as u64..end as u64, Zeroes::default());
                assert_eq!(zeroed.unwrap(), Zeroed::Done);
                model[start..end].fill(0);
                assert!(read() == model, "zeros {start}..{end}");
            }
        }
    }

    #[test]
    fn no_bytes_are_read_and_written_at_any_offset() {
        let size = BLOCK_BYTES;
        let disk = Disk::new(Arc::new(SimDevice::new("sim", size)), false);
        for offset in [0, 5, size, size + 5, size + BLOCK_BYTES] {
            disk.read_bytes(offset, &mut []).unwrap();
            disk.write_bytes(offset, &[], true).unwrap();
        }
    }

    #[test]
    fn fast_zeros_change_nothing_on_a_device_that_must_write_them() {
        // Its discarded blocks read as garbage.
        let device = Arc::new(SimDevice::new("sim", 8 << 12).with_discards());
        let disk = Disk::new(device.clone(), false);
        let span = Span::of(0..8 << 12);
        disk.write(&span, &mut vec![7; 8 << 12], false).unwrap();
        let before = device.digest();
        let fast = Zeroes {
            must_be_fast: true,
            ..Zeroes::default()
        };
        let zeroed = disk.write_zeroes(100..20_000, fast);
        assert_eq!(zeroed.unwrap(), Zeroed::NotFast);
        assert_eq!(device.digest(), before);
        disk.write_zeroes(100..20_000, Zeroes::default()).unwrap();
        let mut bytes = vec![1; 8 << 12];
        disk.read(&span, &mut bytes).unwrap();
        assert!(bytes[100..20_000].iter().all(|byte| *byte == 0));
        assert!(
            bytes[..100]
                .iter()
                .chain(&bytes[20_000..])
                .all(|byte| *byte == 7)
        );
    }
}
