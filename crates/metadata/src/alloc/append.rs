//! Takes a further slice into use, while blocks are allocated and freed.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Allocator, ShardParts, Space, SpaceOptions};
use crate::error::{Error, Result};
use crate::store::StoreRef;
use crate::types::SliceId;

/// The space of a slice that the allocator does not have yet.
pub struct AppendedSlice {
    slice: SliceId,
    space: Space,
    free: u64,
}

/// What the allocator gets of the shard of a further slice.
pub struct AppendedShard(ShardParts);

impl AppendedShard {
    /// Prepares the shard of a store that has no logged pages. `has_checksums` is a property of the volume.
    pub fn new(store: StoreRef, has_checksums: bool) -> Result<AppendedShard> {
        if !store.images()?.is_empty() {
            let what = "the store of an added slice has logged pages".into();
            return Err(Error::Damaged(what));
        }
        let parts = ShardParts::new(store);
        parts.logged.set_max(parts.store.images_max());
        if has_checksums {
            parts.logged.wait_for_batch();
        }
        Ok(AppendedShard(parts))
    }
}

impl Allocator {
    /// Prepares a further slice with its own store. Counts the blocks that the store says are used. Changes nothing.
    pub fn prepare(
        &self,
        slice: SliceId,
        store: &StoreRef,
        options: SpaceOptions,
    ) -> Result<AppendedSlice> {
        let space = Space::new(options, self.container_blocks);
        for ((of, container), used) in store.used_counts()? {
            if of != slice {
                let what = format!("blocks of slice {of} are in another slice's store");
                return Err(Error::Damaged(what));
            }
            space.take_at_opening(slice, container as usize, used)?;
        }
        let free = space.end_opening(slice, self.container_blocks, self.chunk_blocks)?;
        Ok(AppendedSlice { slice, space, free })
    }

    /// Appends the shard of a further slice. Nothing is allocated in the slice yet.
    pub fn append_shard(self: &Arc<Self>, shard: AppendedShard) {
        let slice = self.shards.len() as SliceId;
        self.supply(&shard.0.store, Some(slice));
        self.shards.append([shard.0]);
    }

    /// Appends the space of a further slice, whose shard was appended before. Blocks of it are allocated from now on.
    pub fn append_slice(&self, added: AppendedSlice) {
        let _alone = self.growing.lock();
        assert_eq!(usize::from(added.slice), self.slices.len());
        self.slices.append([added.space]);
        // Last: only blocks that an allocation finds may be reserved.
        self.counts
            .available
            .fetch_add(added.free, Ordering::AcqRel);
    }
}
