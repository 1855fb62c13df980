//! Takes the slices of a device into use that was missing when the filesystem was opened, and has come back.
//!
//! docs/internals/fs.md, *A missing device comes back*, has the order of the steps and why it is safe.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use jericho_metadata::shard::ShardSet;
use jericho_metadata::store::{CheckpointNeed, Requirement, Store};
use jericho_metadata::stores;
use jericho_storage::Device;

use crate::commit::PutShardsBack;
use crate::error::{Error, Result};
use crate::fs::Fs;
use crate::types::{Ino, SliceId};

/// Pause after an attempt to lock all shards.
const LOCK_PAUSE: Duration = Duration::from_secs(1);

/// A missing device that has come back, with its place among the devices of the volume. The caller has checked that it is the missing one, and has it
/// locked.
pub type ReturnedDevice = (usize, Arc<dyn Device>);

/// Why the slices of a device that has come back are not in use.
#[derive(Debug)]
pub enum PutBackError {
    /// The filesystem is being closed, or is open for reading only.
    Closing,
    /// A device failed before memory had a part of a slice. Open the device again and try again.
    Failed(String),
    /// The slices need another missing device. Try again together with that one, or after it.
    Waits(String),
    /// Only a mount can take them into use. Do not try again: a part may be prepared.
    NeedsMount(String),
}

impl fmt::Display for PutBackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PutBackError::Closing => f.write_str("the volume is being unmounted"),
            PutBackError::Failed(why)
            | PutBackError::Waits(why)
            | PutBackError::NeedsMount(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for PutBackError {}

impl From<Error> for PutBackError {
    fn from(error: Error) -> PutBackError {
        PutBackError::NeedsMount(error.to_string())
    }
}

/// Returns the error of a step that comes before all changes of memory.
fn failed_early(error: Error) -> PutBackError {
    match error {
        Error::Io(error) => PutBackError::Failed(error.to_string()),
        error => error.into(),
    }
}

type Outcome<T> = std::result::Result<T, PutBackError>;

/// The recovered store of a slice, which no other thread can reach.
struct Returned {
    slice: SliceId,
    store: Store,
    orphans: Vec<Ino>,
}

impl Fs {
    /// Takes the slices of missing devices into use. Returns the slices. One call at a time does so.
    ///
    /// `close` waits for none of the steps that wait for a device.
    pub fn put_back(&self, came: &[ReturnedDevice]) -> Outcome<Vec<SliceId>> {
        let _alone = self.returning.lock();
        self.may_return()?;
        let superblocks = self.core.volume.superblocks();
        let slices = self.slices_that_return(came)?;
        // The recovery of a store may change its length, which the superblock has.
        let joined = came
            .iter()
            .try_for_each(|(index, device)| superblocks.put_back(*index, device));
        let over = joined
            .map_err(|error| failed_early(error.into()))
            .and_then(|()| self.return_slices(came, &slices));
        if over.is_err() {
            // The session of the device ends, so that another one can begin.
            for (index, _) in came {
                let missing = &self.core.volume.devices()[*index];
                superblocks.take_away(*index, missing);
            }
            return over.map(|()| slices);
        }
        // The devices get what has changed while they were missing. A failure costs nothing: each change of their slices writes the superblock there.
        if let Err(error) = superblocks.update(&[], |_| {}) {
            tracing::warn!("the superblock could not be written when a device came back: {error}");
        }
        Ok(slices)
    }

    /// Fails if the filesystem is being closed.
    pub(crate) fn may_return(&self) -> Outcome<()> {
        match *self.extending.lock() || self.core.options.read_only {
            true => Err(PutBackError::Closing),
            false => Ok(()),
        }
    }

    /// Recovers the slices and gives them to all parts.
    fn return_slices(&self, came: &[ReturnedDevice], slices: &[SliceId]) -> Outcome<()> {
        let mut devices = self.core.volume.devices().to_vec();
        for (index, device) in came {
            devices[*index] = device.clone();
        }
        let returned = self.recover(slices, &devices)?;
        self.may_return()?;
        for one in &returned {
            self.prepare_return(one)?;
        }
        let of_one = |one: &mut Returned| std::mem::take(&mut one.orphans);
        let mut returned = returned;
        let orphans: Vec<Ino> = returned.iter_mut().flat_map(of_one).collect();
        let mut returned = Some(returned);
        loop {
            let closing = self.extending.lock();
            if *closing {
                return Err(PutBackError::Closing);
            }
            match self.publish_return(came, slices, &mut returned) {
                PutShardsBack::Done => {
                    self.after_return(came, slices, orphans);
                    return Ok(());
                }
                PutShardsBack::Refused => {
                    return Err(PutBackError::NeedsMount(
                        "the slices have changes that wait for the next mount".into(),
                    ));
                }
                PutShardsBack::NotNow => {}
            }
            drop(closing);
            std::thread::sleep(LOCK_PAUSE);
        }
    }

    /// Starts the work in the background that the slices need. The caller holds `extending`, and the filesystem is not being closed.
    fn after_return(&self, came: &[ReturnedDevice], slices: &[SliceId], orphans: Vec<Ino>) {
        let core = &self.core;
        for slice in slices {
            let shard = core.shards.map().of_slice(*slice);
            if !core.allocator.logged_of(shard).is_empty() {
                core.shards
                    .get(shard)
                    .checkpoints
                    .note(CheckpointNeed::AtLast);
            }
        }
        core.leaving.freed(0);
        for (index, device) in came {
            core.discards.put_back(*index, &**device);
        }
        if let Err(error) = self.start_discarder() {
            tracing::warn!("freed blocks are not discarded: {error}");
        }
        if let Err(error) = self.remove_returned(orphans) {
            tracing::warn!("files without a name stay until the next mount: {error}");
        }
    }

    /// Returns the slices that the devices complete.
    fn slices_that_return(&self, came: &[ReturnedDevice]) -> Outcome<Vec<SliceId>> {
        let core = &self.core;
        let refuse = |why: &str| Err(PutBackError::NeedsMount(why.into()));
        let (volume, map) = (&core.volume, core.shards.map());
        if map.all().count() != volume.slices().len() {
            return refuse("the slices share one metadata store");
        }
        // Its last operation may need a store that comes back. Only a mount, which reads all journals, can tell.
        let has_failed =
            |shard: &crate::shards::Shard| !shard.store.is_absent() && shard.store.check().is_err();
        if core.suspended() != ShardSet::default() {
            return Err(PutBackError::Failed(
                "the host of another slice does not answer".into(),
            ));
        }
        if core.shards.iter().any(has_failed) {
            return refuse("another slice takes no changes until the next mount");
        }
        let mut slices = Vec::new();
        for slice in volume.slices() {
            let came_back =
                |device: u16| came.iter().any(|(index, _)| usize::from(device) == *index);
            let mut regions = slice.regions().iter().map(|region| region.device);
            if !regions.clone().any(came_back) {
                continue;
            }
            let is_missing = |device: u16| volume.devices()[usize::from(device)].is_absent();
            if regions.any(|device| !came_back(device) && is_missing(device)) {
                return Err(PutBackError::Waits(
                    "a slice needs another device that is missing".into(),
                ));
            }
            if !core.shards.get(map.of_slice(slice.id)).store.is_absent() {
                return refuse("a slice is in use already");
            }
            slices.push(slice.id);
        }
        Ok(slices)
    }

    /// Recovers the stores of slices.
    fn recover(&self, slices: &[SliceId], devices: &[Arc<dyn Device>]) -> Outcome<Vec<Returned>> {
        let (core, volume) = (&self.core, &self.core.volume);
        let memory = core.options.store_cache_bytes / volume.slices().len();
        let numbers: Vec<usize> = slices.iter().map(|slice| usize::from(*slice)).collect();
        let waits = Cell::new(false);
        let others_have = |required: &Requirement| {
            let store = core.shards.iter().nth(required.store.into())?.store.clone();
            if store.is_absent() {
                waits.set(true);
                return None;
            }
            store.had(required)
        };
        let stores = stores::open_returned(volume, devices, memory, &numbers, &others_have);
        let stores = stores.map_err(|error| match waits.get() {
            true => PutBackError::Waits(error.to_string()),
            false => failed_early(error),
        })?;
        let returned = |(slice, store): (&SliceId, Store)| {
            Ok(Returned {
                slice: *slice,
                orphans: store.orphans().map_err(failed_early)?,
                store,
            })
        };
        slices.iter().zip(stores).map(returned).collect()
    }

    /// Fills what the parts have of a slice. No thread uses it: the slice takes no changes, and its device is missing to all others.
    fn prepare_return(&self, returned: &Returned) -> Result<()> {
        let (core, store) = (&self.core, &returned.store);
        let shard = core.shards.map().of_slice(returned.slice);
        core.allocator.count_returned(returned.slice, store)?;
        core.numbers.put_back(store, returned.slice)?;
        core.shards.get(shard).inodes.put_back(store)?;
        stores::load_images(store, &core.allocator, shard, core.has_checksums())
    }

    /// Gives the slices to all parts, and takes them out of `returned`.
    fn publish_return(
        &self,
        came: &[ReturnedDevice],
        slices: &[SliceId],
        returned: &mut Option<Vec<Returned>>,
    ) -> PutShardsBack {
        let core = &self.core;
        let map = core.shards.map();
        let shards: ShardSet = slices.iter().map(|slice| map.of_slice(*slice)).collect();
        core.put_shards_back(shards, || {
            // First: a thread that finds a store also finds the images that are newer than their blocks.
            let devices = core.volume.devices();
            if !came.iter().all(|(index, _)| devices[*index].is_absent()) {
                return false;
            }
            for (index, device) in came {
                devices[*index].put_back(device.clone());
            }
            for one in returned.take().into_iter().flatten() {
                core.allocator.put_store_back(one.slice, one.store);
            }
            true
        })
    }
}
