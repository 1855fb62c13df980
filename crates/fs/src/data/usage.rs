//! Use of each slice's space.

use crate::fs::Fs;
use crate::types::SliceId;

impl Fs {
    /// Returns the capacity and the free space of a slice, in blocks.
    pub fn space_of(&self, slice: SliceId) -> (u64, u64) {
        let allocator = &self.core.allocator;
        // A slice may grow meanwhile: its capacity grows first, so it is read last.
        let free = allocator.free_of(slice);
        (allocator.capacity_of(slice), free)
    }
}
