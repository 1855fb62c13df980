//! Which batch has the newest operation on names or attributes of each shard.
//!
//! The sync of a directory promises that all operations that ended before it are durable. If the batch with the newest of them is durable,
//! the sync has nothing to do. A database that syncs its journal and then the journal's directory meets this case in each transaction.

use std::sync::atomic::{AtomicU64, Ordering};

use jericho_format::superblock::SLICES_MAX;
use jericho_metadata::shard::ShardId;

/// The number of a batch for each shard. A volume has at most as many shards as slices.
pub struct NewestOperations(Box<[Newest]>);

/// Has cache lines of its own, because every operation reads it.
#[derive(Default)]
#[repr(align(128))]
struct Newest(AtomicU64);

impl NewestOperations {
    pub fn new() -> NewestOperations {
        NewestOperations((0..SLICES_MAX).map(|_| Newest::default()).collect())
    }

    /// Records that an operation begins whose changes go into this batch. The shard's gate is held, so the number stays right until the
    /// operation ends.
    pub fn note(&self, shard: ShardId, batch: u64) {
        let newest = &self.0[shard.index()].0;
        // Most operations follow another one of the same batch, and need not write.
        if newest.load(Ordering::Acquire) < batch {
            newest.fetch_max(batch, Ordering::AcqRel);
        }
    }

    /// Returns the batch with the newest operation; 0 without one since the mount.
    pub fn newest(&self, shard: ShardId) -> u64 {
        self.0[shard.index()].0.load(Ordering::Acquire)
    }
}
