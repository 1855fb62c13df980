//! What the frames of a channel carry.

use jericho_format::PAGE_BYTES;
use jericho_format::wire::{FrameHeader, PLACE_BYTES, frame_kind};
use zerocopy::byteorder::little_endian::{U16, U32};

/// A request: its slot and its sequence there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RequestId {
    pub slot: u16,
    pub sequence: u32,
}

/// A part of the data of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub name: RequestId,
    pub from_bytes: u32,
    pub to_bytes: u32,
}

/// What a frame carries, as its sender must know it to send it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Requests or completions.
    Records(Vec<RequestId>),
    Data(Part),
}

impl Part {
    /// Takes what fits one frame from the start of the part. A small frame does not reach beyond the end of a page, so that each page
    /// has the same number of frames.
    pub fn take_first(&mut self, payload_max: u16) -> Part {
        let payload_max = u32::from(payload_max);
        let page_end = (self.from_bytes / PAGE_BYTES as u32 + 1) * PAGE_BYTES as u32;
        let mut to_bytes = self.to_bytes.min(self.from_bytes + payload_max);
        if payload_max < PAGE_BYTES as u32 {
            to_bytes = to_bytes.min(page_end);
        }
        let first = Part { to_bytes, ..*self };
        self.from_bytes = to_bytes;
        first
    }

    /// Returns the length.
    pub fn length_bytes(&self) -> u32 {
        self.to_bytes - self.from_bytes
    }

    /// Returns the header of the DATA with the part, without what is not the same for both sides.
    pub fn header(&self) -> FrameHeader {
        let mut header = FrameHeader::new(frame_kind::DATA, self.length_bytes() as usize);
        header.slot = U16::new(self.name.slot);
        header.sequence = U32::new(self.name.sequence);
        header.place = U16::new((self.from_bytes / PLACE_BYTES) as u16);
        header
    }

    /// Returns whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.from_bytes >= self.to_bytes
    }
}
