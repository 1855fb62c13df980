//! Takes a slice into use whose device was missing when the volume was opened.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Allocator;
use crate::error::{Error, Result};
use crate::store::Store;
use crate::types::SliceId;

impl Allocator {
    /// Counts the blocks of a slice that its store says are used. Nothing is allocated in the slice before `put_back`. Call it once: the slice
    /// has none counted before.
    pub fn count_returned(&self, slice: SliceId, store: &Store) -> Result<()> {
        let space = self.space(slice);
        for ((of, container), used) in store.used_counts()? {
            if of != slice {
                let what = format!("blocks of slice {of} are in another slice's store");
                return Err(Error::Damaged(what));
            }
            space.take_at_opening(slice, container as usize, used)?;
        }
        Ok(())
    }

    /// Gives the store of a slice back to all that have it, and has it call the allocator before commits.
    pub fn put_store_back(self: &Arc<Self>, slice: SliceId, store: Store) {
        let place = &self.shard(self.shards().of_slice(slice)).store;
        place.put_back(store);
        self.supply(place, Some(slice));
    }

    /// Has blocks of a slice allocated from now on. No commit may free blocks meanwhile: they would be counted twice.
    pub fn put_back(&self, slice: SliceId) {
        let _alone = self.growing.lock();
        let space = self.space(slice);
        let containers = space.containers.iter();
        let free = containers.map(|c| u64::from(c.free.load(Ordering::Relaxed)));
        let free: u64 = free.sum();
        space.free.store(free, Ordering::Release);
        space.is_closed.store(false, Ordering::Release);
        // Last: only blocks that an allocation finds may be reserved.
        self.counts.available.fetch_add(free, Ordering::AcqRel);
    }
}
