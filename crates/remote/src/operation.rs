//! Operations on a remote device, as both sides see them.

use std::ops::Range;

use jericho_format::PAGE_BYTES;
use jericho_format::wire::{TRANSFER_BYTES_MAX, op};

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Reads.
    Read,
    /// Writes. `is_durable`: the write is durable when it completes (FUA).
    Write {
        /// FUA.
        is_durable: bool,
    },
    /// Writes zeros.
    WriteZeroes {
        /// FUA.
        is_durable: bool,
    },
    /// Discards: the contents become unspecified.
    Discard,
    /// Makes all changes durable that completed before it was submitted.
    Flush,
}

/// An operation on a range of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// What it does.
    pub action: Action,
    /// Offset on the device; 0 for a flush.
    pub offset_bytes: u64,
    /// Length; 0 for a flush.
    pub length_bytes: u32,
}

impl Operation {
    /// Returns a flush.
    pub fn flush() -> Operation {
        Operation {
            action: Action::Flush,
            offset_bytes: 0,
            length_bytes: 0,
        }
    }

    /// Returns the range on the device.
    pub fn range(&self) -> Range<u64> {
        let end = self.offset_bytes.saturating_add(self.length_bytes.into());
        self.offset_bytes..end
    }

    /// Returns whether the operation changes the device's contents.
    pub fn is_change(&self) -> bool {
        !matches!(self.action, Action::Read | Action::Flush)
    }

    /// Returns whether the operation is durable when it completes.
    pub fn is_durable(&self) -> bool {
        match self.action {
            Action::Write { is_durable } | Action::WriteZeroes { is_durable } => is_durable,
            _ => false,
        }
    }

    /// Returns the number of pages of its data, which cross the wire.
    pub fn data_pages(&self) -> u32 {
        match self.action {
            Action::Read | Action::Write { .. } => self.length_bytes / PAGE_BYTES as u32,
            _ => 0,
        }
    }

    /// Returns whether offset and length are whole blocks of a device of `size_bytes`, and the length is allowed.
    pub fn is_valid(&self, size_bytes: u64) -> bool {
        if self.action == Action::Flush {
            return self.offset_bytes == 0 && self.length_bytes == 0;
        }
        let length = u64::from(self.length_bytes);
        let moves = matches!(self.action, Action::Read | Action::Write { .. });
        length > 0
            && self.offset_bytes.is_multiple_of(PAGE_BYTES)
            && length.is_multiple_of(PAGE_BYTES)
            && (!moves || self.length_bytes <= TRANSFER_BYTES_MAX)
            && self
                .offset_bytes
                .checked_add(length)
                .is_some_and(|end| end <= size_bytes)
    }

    /// Returns `RequestRecord::op` of the operation.
    pub fn op(&self) -> u8 {
        match self.action {
            Action::Read => op::READ,
            Action::Write { .. } => op::WRITE,
            Action::WriteZeroes { .. } => op::WRITE_ZEROES,
            Action::Discard => op::DISCARD,
            Action::Flush => op::FLUSH,
        }
    }

    /// Returns the action of `RequestRecord::op`.
    pub fn action_of(op: u8, is_durable: bool) -> Option<Action> {
        match op {
            op::READ => Some(Action::Read),
            op::WRITE => Some(Action::Write { is_durable }),
            op::WRITE_ZEROES => Some(Action::WriteZeroes { is_durable }),
            op::DISCARD => Some(Action::Discard),
            op::FLUSH => Some(Action::Flush),
            _ => None,
        }
    }
}
