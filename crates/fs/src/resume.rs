//! Takes shards into use again that are suspended because the host of a device was away for too long, and answers again.
//!
//! docs/internals/fs.md, *A host that was away comes back*, has the order of the steps and why it is safe.

use std::cell::Cell;
use std::time::Duration;

use jericho_metadata::shard::{ShardId, ShardSet};
use jericho_metadata::store::{Busy, Requirement, Retired, Store};
use jericho_metadata::stores;
use jericho_volume::VolumeError;

use crate::absences::Absences;
use crate::commit::{Linked, ResumeShards};
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
pub(crate) enum Wait {
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

pub(crate) type Outcome<T> = std::result::Result<T, Wait>;

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

    /// Takes the suspended shards into use again whose devices answer. On a volume that is mounted for reading, opens the stores again that could not be read. One call at a time does so. `close` waits for none of the steps that wait for a
    /// device.
    pub fn resume(&self) -> Resumed {
        let core = &self.core;
        let mut resumed = Resumed::default();
        let _alone = self.returning.lock();
        if core.options.read_only {
            return self.resume_reading();
        }
        if self.may_return().is_err() {
            return resumed;
        }
        core.suspend_unreadable();
        let mut left = core.suspended();
        while let Some(first) = left.iter().next() {
            let linked = core.linked_with(ShardSet::one(first));
            let set = linked.as_ref().map_or(ShardSet::one(first), |one| one.set);
            left = left.iter().filter(|shard| !set.contains(*shard)).collect();
            match linked.map_or(Err(Wait::Later), |linked| self.resume_group(&linked)) {
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

    /// Checks that devices whose hosts were away are still those of the volume, before anything is written to them. Has nothing more written to one that
    /// is another one.
    pub(crate) fn check_labels(&self, devices: &[u16]) -> Outcome<()> {
        let volume = &self.core.volume;
        let is_far = |index: &&u16| volume.devices()[usize::from(**index)].may_fall_silent();
        for index in devices.iter().filter(is_far) {
            match volume.check_returned(*index) {
                Ok(()) => {}
                Err(VolumeError::Io(error)) => return Err(Error::from(error).into()),
                Err(error) => {
                    volume.exclude(*index);
                    let error = format!("{error}, and mount the volume again");
                    return Err(Wait::NeedsMount(Error::WrongDevice(error.into())));
                }
            }
        }
        Ok(())
    }

    /// Takes shards into use again that can only return together.
    fn resume_group(&self, linked: &Linked) -> Outcome<()> {
        let (core, set) = (&self.core, linked.set);
        // Also those that the next commits flush. Otherwise they would suspend the shards again at once.
        let needed: ShardSet = set.iter().chain(linked.data.iter()).collect();
        let devices = core.devices_of(needed);
        let is_away = |index: &u16| {
            let device = &core.volume.devices()[usize::from(*index)];
            device.is_silent() || device.has_abandoned()
        };
        // The old store is not retired before the host answers: until then, metadata in memory can be read.
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
        self.check_labels(&devices)?;
        // Each other store has not failed itself. It stays in use, and its next commit is as any other.
        let failed: ShardSet = retired.iter().map(|(shard, _)| *shard).collect();
        let mut recovered = Vec::new();
        if !retired.is_empty() {
            let superblocks = core.volume.superblocks();
            // Before a store is opened, which takes its chunks and its length from memory.
            let written = superblocks.update(&core.devices_of(failed), |_| {});
            written.map_err(|error| Wait::from(Error::from(error)))?;
            recovered = core.recover_suspended(failed)?;
        }
        let durable = core.durable_batches(&recovered, &retired, &linked.groups)?;
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
            match core.resume_shards(set, (failed, durable), || publish(&mut recovered)) {
                ResumeShards::Done => return Ok(()),
                ResumeShards::Failed => {
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

    /// Takes the stores out of use that have failed because their host did not answer. Returns what each knows of its batches, in
    /// the order of the shards. A shard may be suspended without that: because of a linked one, or because a flush of data has failed.
    fn retire(&self, set: ShardSet, suspension: &Error) -> Outcome<Vec<(ShardId, Retired)>> {
        let retire = || -> Result<Option<Vec<(ShardId, Retired)>>> {
            let mut retired = Vec::new();
            for (id, shard) in set.iter().zip(self.shards.of_set(set)) {
                match shard.store.suspension() {
                    Some(_) => match shard.store.retire(suspension)? {
                        Some(one) => retired.push((id, one)),
                        None => return Ok(None),
                    },
                    None => shard.store.check()?,
                }
            }
            Ok(Some(retired))
        };
        let retired = self.between_commits(set, retire).ok_or(Wait::Later)?;
        match retired {
            Ok(retired) => retired.ok_or(Wait::Later),
            Err(error) => Err(Wait::NeedsMount(error)),
        }
    }

    /// Returns the shards whose sealed batch is in the recovered store. `groups`: those whose sealed batches are linked. The retired stores are still in their
    /// places.
    fn durable_batches(
        &self,
        recovered: &[Recovered],
        retired: &[(ShardId, Retired)],
        groups: &[ShardSet],
    ) -> Outcome<ShardSet> {
        let (mut durable, mut lost) = (ShardSet::default(), ShardSet::default());
        for (one, (_, retired)) in recovered.iter().zip(retired) {
            let in_journal = one.store.has_attempted(retired, one.shard.index() as u16)?;
            let before = &self.shards.get(one.shard).store;
            let in_redb = one.store.has_unpublished(before)?;
            if in_redb == Some(true) {
                self.harden(one.shard)?;
            }
            match in_journal.or(in_redb) {
                Some(true) => durable.insert(one.shard),
                Some(false) => lost.insert(one.shard),
                None => {}
            }
        }
        // A recovery keeps all batches of a group or none.
        let has_any = |group: &ShardSet, of: ShardSet| group.iter().any(|shard| of.contains(shard));
        let is_torn = |group: &ShardSet| has_any(group, durable) && has_any(group, lost);
        if groups.iter().any(is_torn) {
            let what = "a part of an operation in several slices is missing";
            return Err(Wait::NeedsMount(Error::Journal(what.into())));
        }
        Ok(durable)
    }

    /// Makes what redb has of a shard durable: its last flush may have failed.
    fn harden(&self, shard: ShardId) -> Outcome<()> {
        for index in self.devices_of(ShardSet::one(shard)) {
            let flushed = self.volume.devices()[usize::from(index)].flush();
            flushed.map_err(|error| Wait::from(Error::from(error)))?;
        }
        Ok(())
    }

    /// Recovers the stores of shards, in the order of the shards.
    fn recover_suspended(&self, set: ShardSet) -> Outcome<Vec<Recovered>> {
        let (volume, map) = (&self.volume, self.shards.map());
        let memory = self.options.store_cache_bytes / map.count();
        let numbers: Vec<usize> = set.iter().map(ShardId::index).collect();
        let may_tell_later = Cell::new(false);
        let others_have = |required: &Requirement| {
            let shard = self.shards.iter().nth(required.store.into())?;
            // A store that is suspended, too, tells it after its return. Any other one has no more to tell.
            let has = shard.store.has_now(required);
            let is_certain = match has {
                Ok(None) => shard.store.suspension().is_none(),
                Ok(Some(_)) => true,
                Err(Busy) => false,
            };
            may_tell_later.set(may_tell_later.get() || !is_certain);
            has.ok().flatten()
        };
        let devices = volume.devices();
        let stores = stores::open_returned(volume, devices, memory, &numbers, &others_have);
        let stores = stores.map_err(|error| match may_tell_later.get() {
            true => Wait::Later,
            false => Wait::from(error),
        })?;
        let recovered = |(shard, store)| Recovered { shard, store };
        Ok(set.iter().zip(stores).map(recovered).collect())
    }
}
