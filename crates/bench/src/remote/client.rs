//! What the generator needs from a client.

use crate::Result;

/// A transfer of one contiguous range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Memory to device.
    pub is_write: bool,
    /// Offset on the device, a multiple of 4096.
    pub offset_bytes: u64,
    /// Length, a multiple of 4096, at most [`MEMORY_BYTES`].
    pub length_bytes: usize,
}

/// Memory of a client. A transfer in slot N uses the bytes from N x its length on, so all slots of a load together fit.
pub const MEMORY_BYTES: usize = 16 << 20;

/// A client of a target. All transfers that are in progress have the same length.
pub trait Client {
    /// Returns the size of the device.
    fn size_bytes(&self) -> u64;

    /// Begins a transfer in a slot that has none. A client may send it with the next `wait`.
    fn begin(&mut self, slot: usize, transfer: Transfer) -> Result<()>;

    /// Waits until a transfer has ended. Appends the slots of all that have.
    fn wait(&mut self, ended: &mut Vec<usize>) -> Result<()>;

    /// Copies bytes into the memory of the slots, from an offset on.
    fn put(&mut self, at: usize, bytes: &[u8]);

    /// Copies bytes out of the memory of the slots, from an offset on.
    fn get(&self, at: usize, bytes: &mut [u8]);

    /// Returns how often something was sent again so far, if the client counts that.
    fn repetitions(&self) -> Option<u64> {
        None
    }
}
