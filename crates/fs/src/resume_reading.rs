//! Opens the stores of a volume that is mounted for reading again, which could not be read because a host was away.
//!
//! Such a volume has no changes: no batch, no sealed batch, no linked shard. So each store returns by itself.

use jericho_metadata::shard::{ShardId, ShardSet};
use jericho_metadata::stores;

use crate::error::Error;
use crate::fs::Fs;
use crate::resume::{Outcome, Resumed, Wait};

impl Fs {
    /// Opens the stores again whose devices answer. The caller holds `returning`.
    pub(crate) fn resume_reading(&self) -> Resumed {
        let core = &self.core;
        let mut resumed = Resumed::default();
        if *self.extending.lock() {
            return resumed;
        }
        for id in core.shards.map().all().iter() {
            let shard = core.shards.get(id);
            let Some(error) = shard.store.suspension() else {
                continue;
            };
            // It waits for the next mount.
            if shard.commits.has_ended() {
                continue;
            }
            match self.open_again(id, &error) {
                Ok(()) => {
                    let slices = core.shards.slices_of(id, core.slice_count());
                    resumed.slices.extend(slices);
                }
                Err(Wait::Later) => resumed.is_waiting = true,
                Err(Wait::NeedsMount(error)) => core.end_changes(ShardSet::one(id), &error),
            }
        }
        resumed
    }

    /// Opens the store of a shard again. The store that failed is not retired before the host answers: until then, metadata in memory can be read.
    fn open_again(&self, id: ShardId, error: &Error) -> Outcome<()> {
        let core = &self.core;
        let devices = core.devices_of(ShardSet::one(id));
        let is_silent = |index: &u16| core.volume.devices()[usize::from(*index)].is_silent();
        if devices.iter().any(is_silent) {
            return Err(Wait::Later);
        }
        self.check_labels(&devices)?;
        let memory = core.options.store_cache_bytes / core.shards.map().count();
        let before = &core.shards.get(id).store;
        let store = stores::open_again(&core.volume, memory, id.index(), before)?;
        // Readers find the new store from here on. `close` waits for nothing else.
        let closing = self.extending.lock();
        if *closing {
            return Err(Wait::Later);
        }
        match before.retire(error)? {
            Some(_) => {}
            None => return Err(Wait::Later),
        }
        let mut slices = core.shards.slices_of(id, core.slice_count());
        if let Some(slice) = slices.next() {
            core.allocator.put_store_back(slice, store);
        }
        Ok(())
    }
}
