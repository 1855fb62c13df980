//! How much of each slice's space is used.

use super::Fs;
use crate::types::SliceId;

impl Fs {
    /// Capacity of a slice and what of it is free, in blocks.
    pub fn space_of(&self, slice: SliceId) -> (u64, u64) {
        let allocator = &self.core.allocator;
        (allocator.capacity_of(slice), allocator.free_of(slice))
    }
}
