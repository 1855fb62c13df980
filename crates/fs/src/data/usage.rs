//! Use and state of each slice.

use crate::error::Error;
use crate::fs::Fs;
use crate::types::SliceId;

impl Fs {
    /// Returns the capacity and the free space of a slice, in blocks. A slice whose device is missing has none.
    pub fn space_of(&self, slice: SliceId) -> (u64, u64) {
        let volume = &self.core.volume;
        let space = volume.slices().get(usize::from(slice));
        if space.is_some_and(|space| volume.missing_of(space).is_some()) {
            return (0, 0);
        }
        let allocator = &self.core.allocator;
        // A slice may grow meanwhile: its capacity grows first, so it is read last.
        let free = allocator.free_of(slice);
        (allocator.capacity_of(slice), free)
    }

    /// Returns why a slice takes no changes until the next mount; `None` if it takes them.
    pub fn failure_of(&self, slice: SliceId) -> Option<Error> {
        let shards = &self.core.shards;
        let shard = shards.get(shards.map().of_slice(slice));
        shard.commits.failure().err()
    }
}
