//! A disk with what NBD clients see of it besides its bytes: name, abilities, and the status of its blocks.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use jericho_storage::{Device, IoError};

use crate::disk::Disk;
use crate::protocol::{
    FLAG_CAN_MULTI_CONN, FLAG_HAS_FLAGS, FLAG_READ_ONLY, FLAG_SEND_FAST_ZERO, FLAG_SEND_FLUSH,
    FLAG_SEND_FUA, FLAG_SEND_TRIM, FLAG_SEND_WRITE_ZEROES, STATE_HOLE, STATE_ZERO,
    STRING_BYTES_MAX,
};
use crate::span::Span;

/// Maximum length of an export's name.
pub const NAME_BYTES_MAX: usize = STRING_BYTES_MAX;

/// How a device is served.
#[derive(Clone, Debug, Default)]
pub struct ExportOptions {
    /// The name by which clients ask for the device, at most `NAME_BYTES_MAX` bytes. The empty name works, too.
    pub name: String,
    /// Refuses changes.
    pub read_only: bool,
}

/// A run of bytes with the same flags of the context "base:allocation".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status {
    pub length_bytes: u32,
    pub flags: u32,
}

/// A served device. All connections share it.
pub struct Export {
    pub(crate) disk: Disk,
    options: ExportOptions,
    is_ending: AtomicBool,
}

impl Export {
    /// Serves `device`. Refuses changes if the device or `options` do.
    pub fn new(device: Arc<dyn Device>, options: ExportOptions) -> Export {
        Export {
            disk: Disk::new(device, options.read_only),
            options,
            is_ending: AtomicBool::new(false),
        }
    }

    /// Returns the name by which clients ask for the device.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Returns the text that describes the device to clients.
    pub(crate) fn description(&self) -> String {
        let mut text = format!("jericho: {}", self.disk.device().name());
        let mut ends = (0..=STRING_BYTES_MAX.min(text.len())).rev();
        let end = ends.find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
        text
    }

    /// Refuses new requests from now on.
    pub(crate) fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// Returns the transmission flags that do not depend on the client. A flush covers the writes of all connections, so clients may
    /// use several at a time.
    pub(crate) fn flags(&self) -> u16 {
        let flags = FLAG_HAS_FLAGS | FLAG_SEND_FLUSH | FLAG_CAN_MULTI_CONN;
        let trim = if self.disk.can_trim() {
            FLAG_SEND_TRIM
        } else {
            0
        };
        match self.disk.is_read_only() {
            true => flags | FLAG_READ_ONLY,
            false => flags | trim | FLAG_SEND_FUA | FLAG_SEND_WRITE_ZEROES | FLAG_SEND_FAST_ZERO,
        }
    }

    /// Returns the status of a range from its beginning on: at most `runs_max` runs, of which neighbours differ.
    pub(crate) fn status(
        &self,
        bytes: Range<u64>,
        runs_max: usize,
    ) -> Result<Vec<Status>, IoError> {
        let blocks = Span::of(bytes.clone()).blocks;
        let mut runs: Vec<Status> = vec![];
        let mut at = blocks.start;
        while at < blocks.end {
            let extent = self.disk.device().extent_at(at, blocks.end - at)?;
            let end = at + extent.length_bytes;
            // At most a request's length, which has 32 bits.
            let length_bytes = (end.min(bytes.end) - at.max(bytes.start)) as u32;
            let flags = if extent.is_hole {
                STATE_HOLE | STATE_ZERO
            } else {
                0
            };
            let is_full = runs.len() == runs_max;
            match runs.last_mut() {
                Some(last) if last.flags == flags => last.length_bytes += length_bytes,
                _ if is_full => break,
                _ => runs.push(Status {
                    length_bytes,
                    flags,
                }),
            }
            at = end;
        }
        Ok(runs)
    }
}
