//! The shards of an open volume, with what each of them has.

use jericho_metadata::numbers::InodeCount;
use jericho_metadata::shard::{ShardId, ShardMap, ShardSet};
use jericho_metadata::store::StoreRef;
use jericho_storage::Appended;

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

/// All shards of an open volume. There is at least one. Grows with the slices, if each has its own shard.
pub struct Shards {
    all: Appended<Shard>,
}

impl Shard {
    /// Makes the shard of a store, whose batches are committed every `interval_ms`.
    pub fn new(store: StoreRef, interval_ms: u64) -> Result<Shard> {
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
    }
}

impl Shards {
    /// Makes the shards of these stores, whose batches are committed every `interval_ms`.
    pub fn new(stores: Vec<StoreRef>, interval_ms: u64) -> Result<Shards> {
        let shard = |store| Shard::new(store, interval_ms);
        let all: Vec<Shard> = stores.into_iter().map(shard).collect::<Result<_>>()?;
        Ok(Shards {
            all: all.into_iter().collect(),
        })
    }

    /// Appends the shard of a further slice.
    pub fn append(&self, shard: Shard) {
        self.all.append([shard]);
    }

    /// Returns which shard has which metadata. A caller that learns of an inode or a block later asks again, because its slice may be
    /// newer than the map.
    pub fn map(&self) -> ShardMap {
        ShardMap::new(self.all.len())
    }

    /// Returns a shard.
    pub fn get(&self, shard: ShardId) -> &Shard {
        let found = self.all.get(shard.index());
        found.expect("a shard of the volume")
    }

    /// Returns the shard of an inode.
    pub fn of_ino(&self, ino: Ino) -> &Shard {
        self.get(self.map().of_ino(ino))
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
        let map = self.map();
        (0..count).filter(move |slice| map.of_slice(*slice) == shard)
    }

    /// Returns whether each batch takes more changes.
    pub fn have_room(&self) -> bool {
        self.iter()
            .all(|shard| shard.commits.has_room() && shard.commits.has_room_for_removals())
    }

    /// Returns the number of inodes, with those that no batch has yet.
    pub fn inodes(&self) -> u64 {
        self.iter().map(|shard| shard.inodes.now()).sum()
    }
}
