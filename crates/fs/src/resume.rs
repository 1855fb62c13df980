//! Takes shards into use again that are suspended because the host of a device was away for too long, and answers again.
//!
//! docs/internals/fs.md, *A host that was away comes back*, has the order of the steps and why it is safe.

use std::cell::Cell;
use std::time::Duration;

use jericho_metadata::shard::{ShardId, ShardSet};
use jericho_metadata::store::{Requirement, Retired, Store};
use jericho_metadata::stores;

use crate::absences::Absences;
use crate::commit::ResumeShards;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::fs::Fs;
use crate::types::SliceId;

/// Pause after an attempt to lock the shards.
const LOCK_PAUSE: Duration = Duration::from_millis(200);

/// What `Fs::resume` has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resumed {
    /// The slices that take changes again.
    pub slices: Vec<SliceId>,
    /// Whether others still wait for their hosts.
    pub is_waiting: bool,
}

/// Why shards stay suspended.
enum Wait {
    /// A device does not answer, or a thread keeps a lock.
    Later,
    /// Only a mount can use them.
    NeedsMount(Error),
}

impl From<Error> for Wait {
    fn from(error: Error) -> Wait {
        match error.is_unreachable() {
            true => Wait::Later,
            false => Wait::NeedsMount(error),
        }
    }
}

type Outcome<T> = std::result::Result<T, Wait>;

/// A recovered store, which no other thread can reach.
struct Recovered {
    shard: ShardId,
    store: Store,
}

impl Fs {
    /// Returns what tells that shards are suspended.
    pub fn absences(&self) -> std::sync::Arc<Absences> {
        self.core.absences.clone()
    }

    /// Takes the suspended shards into use again whose devices answer. One call at a time does so. `close` waits for none of the steps that wait for a
    /// device.
    pub fn resume(&self) -> Resumed {
        let core = &self.core;
        let mut resumed = Resumed::default();
        let _alone = self.returning.lock();
        if self.may_return().is_err() {
            return resumed;
        }
        core.suspend_unreadable();
        let mut left = core.suspended();
        while let Some(first) = left.iter().next() {
            let group = core.linked_with(ShardSet::one(first));
            let set = group.unwrap_or(ShardSet::one(first));
            left = left.iter().filter(|shard| !set.contains(*shard)).collect();
            match group.map_or(Err(Wait::Later), |set| self.resume_group(set)) {
                Ok(()) => {
                    let slices = set.iter().flat_map(|id| {
                        core.shards
                            .slices_of(id, core.slice_count())
                            .collect::<Vec<_>>()
                    });
                    resumed.slices.extend(slices);
                }
                Err(Wait::Later) => resumed.is_waiting = true,
                // The error takes the place of the suspension.
                Err(Wait::NeedsMount(error)) => core.end_changes(set, &error),
            }
        }
        if !resumed.slices.is_empty() {
            core.leaving.freed(0);
            core.discards.wake();
        }
        resumed
    }

    /// Takes shards into use again whose sealed batches are linked.
    fn resume_group(&self, set: ShardSet) -> Outcome<()> {
        let core = &self.core;
        let devices = core.devices_of(set);
        let is_away = |index: &u16| {
            let device = &core.volume.devices()[usize::from(*index)];
            device.is_silent() || device.has_abandoned()
        };
        // Until the host answers, metadata in memory can be read.
        if devices.iter().any(is_away) {
            return Err(Wait::Later);
        }
        let Some(suspension) = core.check_suspended(set)? else {
            return Err(Wait::Later);
        };
        let retired = core.retire(set, &suspension)?;
        // The old store may have failed to write something since the first question. From here on it writes nothing.
        if devices.iter().any(is_away) {
            return Err(Wait::Later);
        }
        let superblocks = core.volume.superblocks();
        // Before a store is opened, which takes its chunks and its length from memory.
        let written = superblocks.update(&devices, |_| {});
        written.map_err(|error| Wait::from(Error::from(error)))?;
        let recovered = core.recover_suspended(set)?;
        let durable = durable_batches(&recovered, &retired)?;
        let mut recovered = Some(recovered);
        let publish = |recovered: &mut Option<Vec<Recovered>>| {
            for one in recovered.take().into_iter().flatten() {
                // Each slice of a shard has the shard's store.
                let mut slices = core.shards.slices_of(one.shard, core.slice_count());
                if let Some(slice) = slices.next() {
                    core.allocator.put_store_back(slice, one.store);
                }
            }
        };
        loop {
            let closing = self.extending.lock();
            if *closing {
                return Err(Wait::Later);
            }
            match core.resume_shards(set, durable, || publish(&mut recovered)) {
                ResumeShards::Done => return Ok(()),
                ResumeShards::Ended => {
                    core.check_suspended(set)?;
                    return Err(Wait::Later);
                }
                ResumeShards::NotNow => {}
            }
            drop(closing);
            std::thread::sleep(LOCK_PAUSE);
        }
    }
}

/// Returns the shards whose sealed batch is in the recovered store.
fn durable_batches(recovered: &[Recovered], retired: &[Retired]) -> Outcome<ShardSet> {
    let mut durable = ShardSet::default();
    let mut is_any_lost = false;
    for (one, retired) in recovered.iter().zip(retired) {
        match one.store.has_attempted(retired, one.shard.index() as u16)? {
            Some(true) => durable.insert(one.shard),
            Some(false) => is_any_lost = true,
            None => {}
        }
    }
    // They are one group, of which a recovery keeps all batches or none.
    if is_any_lost && durable != ShardSet::default() {
        let what = "a part of an operation in several slices is missing";
        return Err(Wait::NeedsMount(Error::Journal(what.into())));
    }
    Ok(durable)
}

impl Core {
    /// Suspends the shards whose stores cannot be read because a host did not answer.
    fn suspend_unreadable(&self) {
        for id in self.shards.map().all().iter() {
            let shard = self.shards.get(id);
            if shard.commits.failure().is_ok()
                && let Some(error) = shard.store.suspension()
            {
                self.end_changes(ShardSet::one(id), &error);
            }
        }
    }

    /// Returns why these shards are suspended. Suspends those that are not, because they are linked with the others. Fails if the changes of one have
    /// ended.
    fn check_suspended(&self, set: ShardSet) -> Outcome<Option<Error>> {
        let mut suspension = None;
        for shard in self.shards.of_set(set) {
            match shard.commits.failure() {
                Err(error) if error.is_unreachable() => suspension = Some(error),
                Err(error) => return Err(Wait::NeedsMount(error)),
                Ok(()) => {}
            }
        }
        if let Some(error) = &suspension {
            self.end_changes(set, error);
        }
        Ok(suspension)
    }

    /// Takes the old stores of shards out of use. Returns what they tell of their batches, in the order of the shards.
    fn retire(&self, set: ShardSet, suspension: &Error) -> Outcome<Vec<Retired>> {
        let retire = || -> Result<Option<Vec<Retired>>> {
            let shards = self.shards.of_set(set);
            shards.map(|shard| shard.store.retire(suspension)).collect()
        };
        let retired = self.between_commits(set, retire).ok_or(Wait::Later)?;
        match retired {
            Ok(retired) => retired.ok_or(Wait::Later),
            Err(error) => Err(Wait::NeedsMount(error)),
        }
    }

    /// Recovers the stores of shards, in the order of the shards.
    fn recover_suspended(&self, set: ShardSet) -> Outcome<Vec<Recovered>> {
        let (volume, map) = (&self.volume, self.shards.map());
        let memory = self.options.store_cache_bytes / map.count();
        let numbers: Vec<usize> = set.iter().map(ShardId::index).collect();
        let is_unknown = Cell::new(false);
        let others_have = |required: &Requirement| {
            let shard = self.shards.iter().nth(required.store.into())?;
            let has = shard.store.has_now(required);
            // The other store may be in use by a thread, or suspended, too.
            let may_tell_later = !shard.store.is_absent() && !shard.commits.has_ended();
            is_unknown.set(is_unknown.get() || has.is_none() && may_tell_later);
            has
        };
        let devices = volume.devices();
        let stores = stores::open_returned(volume, devices, memory, &numbers, &others_have);
        let stores = stores.map_err(|error| match is_unknown.get() {
            true => Wait::Later,
            false => Wait::from(error),
        })?;
        let recovered = |(shard, store)| Recovered { shard, store };
        Ok(set.iter().zip(stores).map(recovered).collect())
    }
}
