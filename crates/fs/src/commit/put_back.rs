//! Lets shards whose missing device has come back take changes, while no thread seals or commits a batch.

use std::time::{Duration, Instant};

use jericho_metadata::shard::{ShardId, ShardSet};
use parking_lot::{MutexGuard, RwLockWriteGuard};

use super::{Batch, Cut};
use crate::core::Core;
use crate::error::Error;
use crate::shards::Shard;

/// Longest time that a thread waits for all locks. Other threads wait meanwhile for the locks that it has.
pub(super) const LOCK_WAIT: Duration = Duration::from_millis(100);

/// What `Core::put_shards_back` has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutShardsBack {
    /// The shards take changes.
    Done,
    /// Nothing: a thread keeps a lock, because a device is slow or silent. Try again later.
    NotNow,
    /// Nothing: a shard has changes, or `put_back` has refused.
    Refused,
}

/// The locks of some shards.
pub(super) struct Locks<'a> {
    pub cuts: Vec<(ShardId, MutexGuard<'a, Cut>)>,
    _gates: Vec<RwLockWriteGuard<'a, ()>>,
}

impl Core {
    /// Calls `put_back`, which gives these shards their stores and returns whether it has done so. Then lets the shards take changes and opens the space of
    /// their slices. Meanwhile no operation holds a gate and no thread seals or commits a batch, so each of these sees the shards either without their stores
    /// or with them. Does nothing if a shard has changes: it must have none while its store is missing.
    ///
    /// `put_back` has no effect if it returns false, and takes no lock of a batch.
    ///
    /// A committer keeps its cut during transfers to its device. So this call gives up after a short time, and has no lock then.
    pub fn put_shards_back(&self, set: ShardSet, put_back: impl FnOnce() -> bool) -> PutShardsBack {
        let all = self.shards.map().all();
        let Some(locks) = self.lock_shards(all, Instant::now() + LOCK_WAIT) else {
            return PutShardsBack::NotNow;
        };
        let has_changes = |(id, cut): &(ShardId, MutexGuard<'_, Cut>)| {
            let batch = self.shards.get(*id).commits.batch.lock();
            set.contains(*id) && !(is_empty(&batch) && cut.changes.is_empty())
        };
        if locks.cuts.iter().any(has_changes) {
            return PutShardsBack::Refused;
        }
        // That of the missing device is the only failure that ends with the return. No other one arrives from here until the shards take changes, so
        // either all take changes or none.
        let shards: Vec<&Shard> = self.shards.of_set(set).collect();
        let locked = shards
            .iter()
            .map(|shard| shard.commits.lock_failure(Error::is_missing));
        let failures: Option<Vec<_>> = locked.collect();
        let Some(failures) = failures.filter(|_| put_back()) else {
            return PutShardsBack::Refused;
        };
        for (shard, failure) in shards.iter().zip(failures) {
            shard.commits.put_back(failure);
        }
        let slices = 0..self.slice_count();
        slices
            .filter(|slice| set.contains(self.shards.map().of_slice(*slice)))
            .for_each(|slice| self.allocator.put_back(slice));
        // A thread that needs no lock may have found a failure before the space was open, and closed nothing.
        self.close_failed_slices();
        PutShardsBack::Done
    }

    /// Locks shards in the order of a thread that commits them as one group. Returns `None`, with no lock, if that takes too long.
    pub(super) fn lock_shards(&self, set: ShardSet, until: Instant) -> Option<Locks<'_>> {
        let cuts = self.lock_cuts(set, until)?;
        let gate = |id| self.shards.get(id).commits.gate.try_write_until(until);
        let gates = set.iter().map(gate).collect::<Option<_>>()?;
        Some(Locks {
            cuts,
            _gates: gates,
        })
    }

    /// Locks the sealed batches of shards. Returns `None`, with no lock, if that takes too long.
    pub(super) fn lock_cuts(
        &self,
        set: ShardSet,
        until: Instant,
    ) -> Option<Vec<(ShardId, MutexGuard<'_, Cut>)>> {
        let cut = |id| Some((id, self.shards.get(id).commits.cut.try_lock_until(until)?));
        set.iter().map(cut).collect()
    }
}

fn is_empty(batch: &Batch) -> bool {
    batch.changes.is_empty()
        && batch.dirty.is_empty()
        && batch.dead.is_empty()
        && batch.left.is_empty()
        && batch.parked.is_empty()
        && batch.links == ShardSet::default()
}

#[cfg(test)]
mod tests;
