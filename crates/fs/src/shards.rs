//! The shards of an open volume, with what each of them has.

use jericho_metadata::numbers::InodeCount;
use jericho_metadata::shard::{ShardId, ShardMap, ShardSet};
use jericho_metadata::store::StoreRef;

use crate::commit::Commits;
use crate::commit::checkpoints::Checkpoints;
use crate::error::Result;
use crate::types::{Ino, SliceId};

/// A shard of an open volume. Has cache lines of its own.
#[repr(align(128))]
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
            let commits = Commits::new(interval_ms, store.limits_divisor());
            if let Err(error) = store.check() {
                commits.fail(error);
            }
            Ok(Shard {
                commits,
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

    /// Returns the slices of a shard, of `count` slices of the volume.
    pub fn slices_of(&self, shard: ShardId, count: SliceId) -> impl Iterator<Item = SliceId> {
        let map = self.map;
        (0..count).filter(move |slice| map.of_slice(*slice) == shard)
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
