//! Takes the slices of a device into use that was missing when the filesystem was opened, and has come back.
//!
//! docs/internals/fs.md, *A missing device comes back*, has the order of the steps and why it is safe.

use std::fmt;
use std::sync::Arc;

use jericho_metadata::shard::ShardSet;
use jericho_metadata::store::{CheckpointNeed, Store};
use jericho_metadata::stores;
use jericho_storage::Device;

use crate::error::{Error, Result};
use crate::fs::Fs;
use crate::orphans;
use crate::types::{Ino, SliceId};

/// Why the slices of a device that has come back are not in use.
#[derive(Debug)]
pub enum PutBackError {
    /// The filesystem is being closed, or is open for reading only.
    Closing,
    /// Only a mount can take them into use.
    NeedsMount(String),
}

impl fmt::Display for PutBackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PutBackError::Closing => f.write_str("the volume is being unmounted"),
            PutBackError::NeedsMount(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for PutBackError {}

impl From<Error> for PutBackError {
    fn from(error: Error) -> PutBackError {
        PutBackError::NeedsMount(error.to_string())
    }
}

/// The recovered store of a slice, which no other thread can reach.
struct Returned {
    slice: SliceId,
    store: Store,
    orphans: Vec<Ino>,
}

impl Fs {
    /// Takes the slices of a missing device into use. `index`: its place among the devices of the volume. The caller has checked that `device` is the missing
    /// one, and has it locked. Returns the slices. After an error, do not try again: a part may be prepared already.
    pub fn put_back(
        &self,
        index: usize,
        device: &Arc<dyn Device>,
    ) -> std::result::Result<Vec<SliceId>, PutBackError> {
        let core = &self.core;
        let closing = self.extending.lock();
        if *closing || core.options.read_only {
            return Err(PutBackError::Closing);
        }
        let slices = self.slices_that_return(index)?;
        let mut devices = core.volume.devices().to_vec();
        devices[index] = device.clone();
        // The recovery of a store may change its length, which the superblock has.
        core.volume.superblocks().put_back(index, device);
        let returned = self.recover(&slices, &devices)?;
        for one in &returned {
            self.prepare_return(one)?;
        }
        let orphans: Vec<Ino> = returned
            .iter()
            .flat_map(|one| one.orphans.clone())
            .collect();
        self.publish_return(index, device, returned)?;
        // The device gets what has changed while it was missing. A failure costs nothing: each change of its slices writes the superblock there.
        if let Err(error) = core.volume.superblocks().update(&[], |_| {}) {
            tracing::warn!("the superblock could not be written when a device came back: {error}");
        }
        drop(closing);
        for slice in &slices {
            let shard = core.shards.map().of_slice(*slice);
            if !core.allocator.logged_of(shard).is_empty() {
                core.shards
                    .get(shard)
                    .checkpoints
                    .note(CheckpointNeed::AtLast);
            }
        }
        core.leaving.freed(0);
        orphans::remove_returned(core, orphans, &self.leaves_orphans);
        Ok(slices)
    }

    /// Returns the slices that a device completes.
    fn slices_that_return(&self, index: usize) -> std::result::Result<Vec<SliceId>, PutBackError> {
        let core = &self.core;
        let refuse = |why: &str| Err(PutBackError::NeedsMount(why.into()));
        let (volume, map) = (&core.volume, core.shards.map());
        if map.all().count() != volume.slices().len() {
            return refuse("the slices share one metadata store");
        }
        // Its last operation may need a store that comes back. Only a mount, which reads all journals, can tell.
        let has_failed =
            |shard: &crate::shards::Shard| !shard.store.is_absent() && shard.store.check().is_err();
        if core.shards.iter().any(has_failed) {
            return refuse("another slice takes no changes until the next mount");
        }
        let mut slices = Vec::new();
        for slice in volume.slices() {
            let on_it = |device: u16| usize::from(device) == index;
            let mut regions = slice.regions().iter().map(|region| region.device);
            if !regions.clone().any(on_it) {
                continue;
            }
            if regions
                .any(|device| !on_it(device) && volume.devices()[usize::from(device)].is_absent())
            {
                return refuse("a slice needs another device that is missing");
            }
            if !core.shards.get(map.of_slice(slice.id)).store.is_absent() {
                return refuse("a slice is in use already");
            }
            slices.push(slice.id);
        }
        Ok(slices)
    }

    /// Recovers the stores of slices.
    fn recover(&self, slices: &[SliceId], devices: &[Arc<dyn Device>]) -> Result<Vec<Returned>> {
        let (core, volume) = (&self.core, &self.core.volume);
        let memory = core.options.store_cache_bytes / volume.slices().len();
        let numbers: Vec<usize> = slices.iter().map(|slice| usize::from(*slice)).collect();
        let present = |store: usize| {
            let store = core.shards.iter().nth(store)?.store.clone();
            (!store.is_absent()).then_some(store)
        };
        let stores = stores::open_returned(volume, devices, memory, &numbers, &present)?;
        let returned = |(slice, store): (&SliceId, Store)| {
            Ok(Returned {
                slice: *slice,
                orphans: store.orphans()?,
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

    /// Gives the slices to all parts.
    fn publish_return(
        &self,
        index: usize,
        device: &Arc<dyn Device>,
        returned: Vec<Returned>,
    ) -> std::result::Result<(), PutBackError> {
        let core = &self.core;
        let slices: Vec<SliceId> = returned.iter().map(|one| one.slice).collect();
        let shards: ShardSet = slices
            .iter()
            .map(|slice| core.shards.map().of_slice(*slice))
            .collect();
        let mut is_back = false;
        let put_back = || {
            // First: a thread that finds a store also finds the images that are newer than their blocks.
            is_back = core.volume.devices()[index].put_back(device.clone());
            if is_back {
                for one in returned {
                    core.allocator.put_store_back(one.slice, one.store);
                }
            }
        };
        let has_ended = core.put_shards_back(shards, put_back);
        if !has_ended || !is_back {
            return Err(PutBackError::NeedsMount(
                "the slices have changes that wait for the next mount".into(),
            ));
        }
        slices
            .iter()
            .for_each(|slice| core.allocator.put_back(*slice));
        Ok(())
    }
}
