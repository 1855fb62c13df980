//! The gates that an operation on names or attributes holds: one of each shard in which it changes something.
//!
//! An operation learns only on its way which inodes it changes, but must enter the gates before it takes another lock, in the order of
//! the shards. So it begins with the gates of the inodes that it knows. Before it changes a further inode it asks `cover`. If the gate of
//! that inode's shard is not held, the operation gives up without a change, and runs again with one more gate (`Core::in_gates`).

use std::cell::Cell;

use jericho_metadata::shard::{ShardId, ShardSet};

use crate::commit::Gate;
use crate::core::Core;
use crate::error::Result;
use crate::types::{Ino, SliceId};

/// Gates that are held.
pub struct Gates<'a> {
    core: &'a Core,
    held: ShardSet,
    missing: Cell<ShardSet>,
    /// Most operations have one gate, and so need no memory for a list.
    _first: Option<Gate<'a>>,
    _others: Vec<Gate<'a>>,
}

impl Gates<'_> {
    /// Returns whether the operation may change an inode. If not, it must end without a change.
    #[must_use]
    pub fn cover(&self, ino: Ino) -> bool {
        self.cover_shard(self.core.shards.map().of_ino(ino))
    }

    /// Returns whether the operation may make an inode with a number of this slice. If not, it must end without a change.
    #[must_use]
    pub fn cover_slice(&self, slice: SliceId) -> bool {
        self.cover_shard(self.core.shards.map().of_slice(slice))
    }

    /// Returns whether the batches of all these shards become durable together with the operation. If not, it must end without a change.
    #[must_use]
    pub fn cover_shards(&self, shards: ShardSet) -> bool {
        // Asks for all, so that the next attempt has all.
        let missing = shards.iter().filter(|shard| !self.cover_shard(*shard));
        missing.count() == 0
    }

    fn cover_shard(&self, shard: ShardId) -> bool {
        let is_held = self.held.contains(shard);
        if !is_held {
            let mut missing = self.missing.get();
            missing.insert(shard);
            self.missing.set(missing);
        }
        is_held
    }
}

impl Core {
    /// Starts an operation that changes names or attributes of these inodes only. All changes that it makes until the guard is
    /// dropped go into one batch of each shard, and these batches become durable together. May wait for the committer, so the caller
    /// holds no lock but `File::exclusive`, which the committer never takes. Must not be nested. Changes of a file's contents do not use it:
    /// they only mark the inode dirty.
    pub fn begin(&self, inos: &[Ino]) -> Result<Gates<'_>> {
        let map = self.shards.map();
        self.begin_in(inos.iter().map(|ino| map.of_ino(*ino)).collect())
    }

    /// Runs an operation in the gates of these inodes. The operation returns `None` if `Gates::cover` has refused an inode, and then
    /// runs again. `removes`: it may remove a name, so it first waits while very many removed files of these shards have blocks.
    pub fn in_gates<T>(
        &self,
        inos: &[Ino],
        removes: bool,
        operation: impl Fn(&Gates<'_>) -> Result<Option<T>>,
    ) -> Result<T> {
        let map = self.shards.map();
        let mut set: ShardSet = inos.iter().map(|ino| map.of_ino(*ino)).collect();
        loop {
            if removes {
                let shards = self.shards.of_set(set);
                shards.for_each(|shard| shard.commits.wait_for_removals());
            }
            let gates = self.begin_in(set)?;
            if let Some(done) = operation(&gates)? {
                return Ok(done);
            }
            set.extend(gates.missing.get());
        }
    }

    fn begin_in(&self, set: ShardSet) -> Result<Gates<'_>> {
        self.may_change_at_all()?;
        for shard in self.shards.of_set(set) {
            shard.commits.failure()?;
            shard.commits.wait_for_room();
        }
        let mut entered = set
            .iter()
            .map(|shard| self.shards.get(shard).commits.enter());
        let gates = Gates {
            core: self,
            held: set,
            missing: Cell::default(),
            _first: entered.next(),
            _others: entered.collect(),
        };
        // After a failure the batch may contain half an operation. All before the first link, which would have a shard that works wait for the other.
        let mut shards = self.shards.of_set(set);
        shards.try_for_each(|shard| shard.commits.failure())?;
        if set.count() > 1 {
            let shards = self.shards.of_set(set);
            shards.for_each(|shard| shard.commits.link(set));
        }
        for id in set.iter() {
            let batch = self.shards.get(id).commits.seq();
            self.operations.note(id, batch);
        }
        Ok(gates)
    }
}
