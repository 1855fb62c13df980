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

    /// Gives a recovered store to all that have the store of a slice, and has it call the allocator before commits.
    pub fn put_store_back(self: &Arc<Self>, slice: SliceId, store: Store) {
        let place = &self.shard(self.shards().of_slice(slice)).store;
        let has_own = self.shards.len() == self.slices.len();
        self.supply(&store, has_own.then_some(slice));
        place.put_back(store);
    }

    /// Has blocks of a slice allocated again that `close` has closed. Memory has counted them all the time.
    pub fn reopen(&self, slice: SliceId) {
        let space = self.space(slice);
        let mut closed = space.closed.lock();
        let Some(taken) = closed.take() else {
            return;
        };
        space.is_closed.store(false, Ordering::Release);
        // Last: only blocks that an allocation finds may be reserved.
        self.counts.available.fetch_add(taken, Ordering::AcqRel);
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
