//! The shards of an open volume, with what each of them has.

use crate::commit::Commits;
use crate::commit::checkpoints::Checkpoints;
use crate::error::{Error, Result};
use crate::numbers::InodeCount;
use crate::shard::{ShardId, ShardMap, ShardSet};
use crate::store::StoreRef;
use crate::types::Ino;

/// A shard of an open volume.
pub struct Shard {
    pub store: StoreRef,
    pub commits: Commits,
    pub checkpoints: Checkpoints,
    pub inodes: InodeCount,
}

/// All shards of an open volume. There is at least one.
pub struct Shards {
    map: ShardMap,
    all: Vec<Shard>,
}

impl Shards {
    /// Makes the shards of these stores, whose batches are committed every `interval_ms`.
    pub fn new(stores: Vec<StoreRef>, interval_ms: u64) -> Result<Shards> {
        let map = ShardMap::new(stores.len());
        let shard = |store: StoreRef| {
            Ok(Shard {
                commits: Commits::new(interval_ms, store.limits_divisor()),
                checkpoints: Checkpoints::default(),
                inodes: InodeCount::load(&store)?,
                store,
            })
        };
        let all = stores.into_iter().map(shard).collect::<Result<_>>()?;
        Ok(Shards { map, all })
    }

    /// Returns which shard has which metadata.
    pub fn map(&self) -> ShardMap {
        self.map
    }

    /// Returns a shard.
    pub fn get(&self, shard: ShardId) -> &Shard {
        &self.all[shard.index()]
    }

    /// Returns the shard of an inode.
    pub fn of_ino(&self, ino: Ino) -> &Shard {
        self.get(self.map.of_ino(ino))
    }

    /// Returns all shards in order.
    pub fn iter(&self) -> impl Iterator<Item = &Shard> {
        self.all.iter()
    }

    /// Returns the shards of a set, in order.
    pub fn of_set(&self, set: ShardSet) -> impl Iterator<Item = &Shard> {
        set.iter().map(|shard| self.get(shard))
    }

    /// Fails with the failure that ended the changes of a shard, if there was one.
    pub fn failure(&self) -> Result<()> {
        self.iter().try_for_each(|shard| shard.commits.failure())
    }

    /// Ends the changes of all shards when the calling thread unwinds from a panic.
    pub fn fail_if_panicking(&self) {
        for shard in self.iter() {
            shard.commits.fail_if_panicking();
        }
    }

    /// Ends the changes of all shards after a failed flush of data. Any of them may have rows that describe the data.
    pub fn flush_failed(&self, error: &Error) {
        for shard in self.iter() {
            shard.commits.flush_failed(error);
        }
    }

    /// Returns whether each batch takes more changes.
    pub fn have_room(&self) -> bool {
        self.iter().all(|shard| shard.commits.has_room())
    }

    /// Returns the number of inodes, with those that no batch has yet.
    pub fn inodes(&self) -> u64 {
        self.iter().map(|shard| shard.inodes.now()).sum()
    }
}
