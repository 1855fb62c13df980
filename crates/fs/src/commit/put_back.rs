//! Lets shards whose missing device has come back take changes, while no thread seals or commits a batch.

use jericho_metadata::shard::ShardSet;

use super::{Batch, Cut};
use crate::core::Core;

impl Core {
    /// Calls `put_back`, which gives these shards their stores, and then lets them take changes. Meanwhile no operation holds a gate and no thread
    /// seals or commits a batch, so each of these sees the shards either without their stores or with them. Returns false, and does nothing, if a shard has
    /// changes: it must have none while its store is missing.
    pub fn put_shards_back(&self, set: ShardSet, put_back: impl FnOnce()) -> bool {
        let all = || self.shards.map().all();
        // In the order of a thread that commits all shards as one group.
        let cuts: Vec<_> = (all().iter())
            .map(|id| (id, self.shards.get(id).commits.cut.lock()))
            .collect();
        let _gates: Vec<_> = (all().iter())
            .map(|id| self.shards.get(id).commits.gate.write())
            .collect();
        let has_changes = |(id, cut): &(_, parking_lot::MutexGuard<'_, Cut>)| {
            let batch = self.shards.get(*id).commits.batch.lock();
            set.contains(*id) && !(is_empty(&batch) && cut.changes.is_empty())
        };
        if cuts.iter().any(has_changes) {
            return false;
        }
        put_back();
        self.shards
            .of_set(set)
            .for_each(|shard| shard.commits.put_back());
        true
    }
}

fn is_empty(batch: &Batch) -> bool {
    batch.changes.is_empty()
        && batch.dirty.is_empty()
        && batch.dead.is_empty()
        && batch.left.is_empty()
        && batch.links == ShardSet::default()
}
