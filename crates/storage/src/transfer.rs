//! The checks of a transfer, for both kinds of queues.

use std::ops::Range;

use jericho_sys::errno;
use jericho_sys::memory::{Mapping, Segment};

use crate::handle::is_in_range;
use crate::{BLOCK_BYTES, Cause, Devices, Direction, IoError, Transfer};

/// Returns the name of an operation in errors.
pub(crate) fn operation(direction: Direction) -> &'static str {
    match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    }
}

/// Returns the number of bytes that a transfer moves. Saturates; `check` refuses a length that large.
pub(crate) fn length_bytes(transfer: &Transfer) -> u64 {
    transfer
        .segments
        .iter()
        .fold(0, |sum, segment| sum.saturating_add(segment.len as u64))
}

/// Refuses invalid transfers. Fails with EINVAL for blocks that the device does not have or that are not whole. Fails with EFAULT
/// for memory that is outside of its mapping or must not be written. Fails with EROFS for a write to a read-only device.
pub(crate) fn check(transfer: &Transfer, devices: &Devices) -> Result<(), IoError> {
    let length_bytes = length_bytes(transfer);
    let device = devices.get(usize::from(transfer.device));
    let refuse = |errno| {
        let name = device.map_or_else(
            || format!("device number {} of {}", transfer.device, devices.len()).into(),
            |device| device.name(),
        );
        Err(IoError {
            operation: operation(transfer.direction),
            device: name,
            offset_bytes: transfer.offset_bytes,
            length_bytes,
            cause: Cause::Errno(errno),
        })
    };
    let Some(device) = device else {
        return refuse(errno::EINVAL);
    };
    if !is_in_range(transfer.offset_bytes, length_bytes, device.size_bytes()) {
        return refuse(errno::EINVAL);
    }
    for segment in &transfer.segments {
        let block = BLOCK_BYTES as usize;
        if !segment.offset.is_multiple_of(block) || !segment.len.is_multiple_of(block) {
            return refuse(errno::EINVAL);
        }
        let end = segment.offset.checked_add(segment.len);
        if end.is_none_or(|end| end > segment.mapping.len())
            || (transfer.direction == Direction::Read && !segment.mapping.is_writable())
        {
            return refuse(errno::EFAULT);
        }
    }
    if transfer.direction == Direction::Write && device.is_read_only() {
        return refuse(errno::EROFS);
    }
    Ok(())
}

/// Copies bytes from the memory of a transfer, beginning `at` bytes after its start. The bytes may be torn if a program writes them meanwhile.
/// Panics when the memory ends before.
pub fn gather(segments: &[Segment], at: usize, out: &mut [u8]) {
    visit(segments, at, out.len(), |segment, offset, range| {
        segment.mapping.copy_out(offset, &mut out[range]);
    });
}

/// Copies `length` bytes from the memory of a transfer, beginning `at` bytes after its start, to an offset in a mapping. The bytes may be torn if a
/// program writes them meanwhile. Panics when either memory ends before.
pub fn gather_to(segments: &[Segment], at: usize, length: usize, to: &Mapping, offset: usize) {
    visit(segments, at, length, |segment, from, range| {
        segment
            .mapping
            .copy_to(from, to, offset + range.start, range.len());
    });
}

/// Copies bytes into the memory of a transfer, beginning `at` bytes after its start. Panics when the memory ends before.
pub fn scatter(segments: &[Segment], at: usize, bytes: &[u8]) {
    visit(segments, at, bytes.len(), |segment, offset, range| {
        segment.mapping.copy_in(offset, &bytes[range]);
    });
}

/// Visits `length` bytes, by the offset in a segment's mapping and the range within the bytes.
fn visit(
    segments: &[Segment],
    mut at: usize,
    length: usize,
    mut piece: impl FnMut(&Segment, usize, Range<usize>),
) {
    let mut done = 0;
    for segment in segments {
        if at >= segment.len {
            at -= segment.len;
            continue;
        }
        let part = (segment.len - at).min(length - done);
        if part == 0 {
            break;
        }
        piece(segment, segment.offset + at, done..done + part);
        (done, at) = (done + part, 0);
    }
    assert_eq!(done, length, "the memory of a transfer ends");
}
