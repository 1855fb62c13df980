//! Numbers of operations and bytes of a device.

use std::ops::Sub;

use crate::plan::Operation;

/// Numbers of operations that were begun, and of the bytes that they asked for. The difference of two says what a piece of code did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Reads.
    pub reads: u64,
    /// Bytes of the reads.
    pub read_bytes: u64,
    /// Writes that are not durable when they end.
    pub writes: u64,
    /// Writes that are durable when they end. A device without FUA has none: it counts a write and a flush.
    pub durable_writes: u64,
    /// Bytes of both kinds of writes.
    pub written_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards.
    pub discards: u64,
}

impl Traffic {
    pub(crate) fn count(&mut self, operation: Operation, length_bytes: u64) {
        match operation {
            Operation::Read => {
                self.reads += 1;
                self.read_bytes += length_bytes;
            }
            Operation::Write => {
                self.writes += 1;
                self.written_bytes += length_bytes;
            }
            Operation::DurableWrite => {
                self.durable_writes += 1;
                self.written_bytes += length_bytes;
            }
            Operation::Flush => self.flushes += 1,
            Operation::Discard => self.discards += 1,
        }
    }
}

impl Sub for Traffic {
    type Output = Traffic;

    fn sub(self, earlier: Traffic) -> Traffic {
        Traffic {
            reads: self.reads - earlier.reads,
            read_bytes: self.read_bytes - earlier.read_bytes,
            writes: self.writes - earlier.writes,
            durable_writes: self.durable_writes - earlier.durable_writes,
            written_bytes: self.written_bytes - earlier.written_bytes,
            flushes: self.flushes - earlier.flushes,
            discards: self.discards - earlier.discards,
        }
    }
}
