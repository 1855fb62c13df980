//! Lets suspended shards take changes again, whose devices answer.

use std::time::Instant;

use jericho_metadata::shard::{ShardId, ShardSet};

use super::group::became_durable;
use super::put_back::LOCK_WAIT;
use crate::core::Core;
use crate::error::Error;

/// What `Core::resume_shards` has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeShards {
    /// The shards take changes.
    Done,
    /// Nothing: a thread keeps a lock. Try again later.
    NotNow,
    /// Nothing: a shard has failed meanwhile, or its changes have ended until the next mount.
    Failed,
}

/// Suspended shards that can only return together.
#[derive(Clone)]
pub struct Linked {
    pub set: ShardSet,
    /// The shards with data that the sealed batches describe, besides these. The next commits flush their devices.
    pub data: ShardSet,
    /// The shards whose sealed batches are linked with each other: after a crash a group has all of them or none.
    pub groups: Vec<ShardSet>,
}

impl Linked {
    fn add_group(&mut self, mut group: ShardSet) {
        let touches = |other: &mut ShardSet| other.iter().any(|shard| group.contains(shard));
        let others: Vec<ShardSet> = self.groups.extract_if(.., touches).collect();
        others.into_iter().for_each(|other| group.extend(other));
        self.groups.push(group);
    }
}

impl Core {
    /// Returns the suspended shards.
    pub fn suspended(&self) -> ShardSet {
        let is_suspended = |id: &_| self.shards.get(*id).commits.suspension().is_some();
        self.shards
            .map()
            .all()
            .iter()
            .filter(is_suspended)
            .collect()
    }

    /// Returns these shards and those whose sealed batches are linked with theirs, and the suspended ones whose current batches are: they could commit
    /// nothing alone. Returns `None` if a thread keeps a sealed batch.
    pub fn linked_with(&self, mut set: ShardSet) -> Option<Linked> {
        loop {
            let mut larger = set;
            let mut linked = Linked {
                set,
                data: ShardSet::default(),
                groups: Vec::new(),
            };
            for (id, cut) in self.lock_cuts(set, Instant::now() + LOCK_WAIT)? {
                let mut group = cut.links;
                group.insert(id);
                linked.add_group(group);
                linked.data.extend(cut.data);
                larger.extend(group);
                let links = self.shards.get(id).commits.batch.lock().links;
                let suspended = self.suspended();
                larger.extend(links.iter().filter(|id| suspended.contains(*id)).collect());
            }
            if set.contains_all(&larger) {
                return Some(linked);
            }
            set.extend(larger);
        }
    }

    /// Calls `act` while no thread commits a batch of these shards. Returns `None` if a thread does so for long.
    pub fn between_commits<T>(&self, set: ShardSet, act: impl FnOnce() -> T) -> Option<T> {
        let _cuts = self.lock_cuts(set, Instant::now() + LOCK_WAIT)?;
        Some(act())
    }

    /// Calls `publish`, which gives these suspended shards their recovered stores. Then takes note that the sealed batches of the shards `durable` are in
    /// the stores, opens the space of the slices, and lets the shards take changes. Meanwhile no operation holds a gate and no thread seals or
    /// commits a batch of the shards. `recovered`: the shards that get a store. The others keep theirs.
    pub fn resume_shards(
        &self,
        set: ShardSet,
        (recovered, durable): (ShardSet, ShardSet),
        publish: impl FnOnce(),
    ) -> ResumeShards {
        let Some(mut locks) = self.lock_shards(set, Instant::now() + LOCK_WAIT) else {
            return ResumeShards::NotNow;
        };
        let has_failed = |id: ShardId| {
            let shard = self.shards.get(id);
            let needs_return = !recovered.contains(id) && shard.store.suspension().is_some();
            needs_return || shard.commits.has_ended()
        };
        if set.iter().any(has_failed) {
            return ResumeShards::Failed;
        }
        publish();
        let cuts = locks.cuts.iter_mut();
        for (id, cut) in cuts.filter(|(id, _)| durable.contains(*id)) {
            became_durable(self, *id, std::mem::take(&mut **cut));
        }
        for id in set.iter() {
            let shard = self.shards.get(id);
            for slice in self.shards.slices_of(id, self.slice_count()) {
                self.allocator.reopen(slice);
            }
            let Some(failure) = shard.commits.lock_failure(Error::is_unreachable) else {
                // It came since the question above. The others are linked.
                let failure = shard.commits.failure();
                let _ = failure.map_err(|error| self.end_changes(set, &error));
                return ResumeShards::Failed;
            };
            shard.commits.put_back(failure);
            shard.checkpoints.note(shard.store.checkpoint_need());
            // Commits what has waited.
            shard.commits.try_later();
        }
        drop(locks);
        // Those of other shards may have waited for these.
        self.shards.iter().for_each(|one| one.commits.try_parked());
        // A thread that needs no lock may have found a failure before the space was open, and closed nothing.
        self.close_failed_slices();
        ResumeShards::Done
    }
}
