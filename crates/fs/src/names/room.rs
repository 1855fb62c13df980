//! Room in the metadata region for what is created.

use std::cell::Cell;

use jericho_metadata::errno::ENOSPC;

use crate::core::Core;
use crate::error::Result;

impl Core {
    /// Runs `attempt`, which creates something. If a metadata region has no room, looks for room and runs it again: room shows when
    /// removals are committed and in redb. `attempt` must change nothing when it fails with ENOSPC. May take as long as a commit and a
    /// checkpoint. The caller holds no lock.
    pub fn with_room<T>(&self, attempt: impl Fn() -> Result<T>) -> Result<T> {
        match attempt() {
            Err(error) if error.errno() == ENOSPC.errno() && self.make_room() => attempt(),
            result => result,
        }
    }

    /// Looks for room in all metadata regions. Returns whether one may have more than before.
    fn make_room(&self) -> bool {
        let mut has_found = false;
        for shard in self.shards.map().all().iter() {
            let (store, commits) = {
                let shard = self.shards.get(shard);
                (&shard.store, &shard.commits)
            };
            let has_removals = Cell::new(false);
            let found = store.make_room(|| {
                self.commit_shard_now(shard)?;
                has_removals.set(commits.has_removals());
                Ok(())
            });
            let found = match found {
                // The rest of the removals may make room.
                Ok(false) if has_removals.get() => {
                    store.make_room(|| self.commit_shards(&mut std::iter::once(commits)))
                }
                found => found,
            };
            match found {
                Ok(found) => has_found |= found,
                // The caller gets its first error. One that ends all changes is in the log.
                Err(error) => tracing::debug!(%error, "no room is found in a metadata region"),
            }
        }
        has_found
    }
}
