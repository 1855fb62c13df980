//! A volume: its devices, its superblock, its slices' ranges and its metadata region.

pub mod error;
mod find;
mod foreign;
pub mod format;
mod format_paths;
mod layout;
mod lock;
pub mod open;
pub(crate) mod overlay;
mod owner;
pub mod superblocks;

use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::superblock::{NO_NODE, Superblock};
use jericho_storage::{Device, IoError};
use siphasher::sip::SipHasher24;

pub use self::error::VolumeError;
pub use self::format::{FormatOptions, Summary, format_devices};
pub use self::format_paths::{format, format_and_open};
pub use self::lock::VolumeLock;
pub use self::open::OpenMode;
use self::overlay::Overlay;
use self::superblocks::Superblocks;
use crate::alloc::{Allocator, Blocks, Place};
use crate::error::{Error, Result};
use crate::store::region::Region;
use crate::store::{Store, StoreOptions, StoreRef};
use crate::types::SliceId;

/// A contiguous range of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRun {
    /// Index in `Volume::devices`.
    pub device: u16,
    /// Where.
    pub offset_bytes: u64,
    /// Length in blocks.
    pub blocks: u32,
}

/// A slice of the volume.
#[derive(Clone, Debug)]
pub struct Slice {
    /// Its index.
    pub id: SliceId,
    /// Node of the device that it is on, as far as known when the volume was formatted: a hint.
    pub node: Option<u32>,
    /// Capacity in blocks.
    pub blocks: u64,
    regions: Vec<Place>,
}

impl Slice {
    /// Index of the device that holds the slice's first block.
    pub fn device(&self) -> u16 {
        self.regions.first().map_or(0, |r| r.device)
    }

    /// Where it is, in order.
    pub(crate) fn places(&self) -> impl Iterator<Item = Place> + '_ {
        self.regions.iter().copied()
    }
}

/// An open volume.
pub struct Volume {
    devices: Vec<Arc<dyn Device>>,
    superblocks: Arc<Superblocks>,
    slices: Vec<Slice>,
    uuid: [u8; 16],
    hash_seed: [u8; 16],
    read_only: bool,
}

impl Volume {
    /// A volume of devices whose superblock was read and whose labels were checked.
    fn assemble(
        devices: Vec<Arc<dyn Device>>,
        superblocks: Superblocks,
        read_only: bool,
    ) -> Volume {
        let (slices, uuid, hash_seed) =
            superblocks.with(|s| (slices_of(s), s.head.volume_uuid, s.head.hash_seed));
        Volume {
            devices,
            superblocks: Arc::new(superblocks),
            slices,
            uuid,
            hash_seed,
            read_only,
        }
    }

    /// The devices, by index.
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    /// The slices, by id.
    pub fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// The superblock.
    pub fn superblocks(&self) -> &Arc<Superblocks> {
        &self.superblocks
    }

    /// Identifies the volume.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Whether it was opened for reading only.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Where blocks of a slice are: the longest contiguous range that starts at `block`, at most
    /// `count` blocks. `None` when the block is beyond the slice.
    pub fn translate(&self, slice: SliceId, block: u64, count: u32) -> Option<DeviceRun> {
        let regions = &self.slices.get(usize::from(slice))?.regions;
        let index = regions.partition_point(|r| r.slice_first + r.blocks <= block);
        let region = regions.get(index)?;
        let skip = block - region.slice_first;
        Some(DeviceRun {
            device: region.device,
            offset_bytes: (region.device_first + skip) * PAGE_BYTES,
            blocks: u64::from(count).min(region.blocks - skip) as u32,
        })
    }

    /// The contiguous ranges that hold `blocks`, in order. Ends early where the slice ends.
    pub fn runs(&self, blocks: Blocks) -> impl Iterator<Item = DeviceRun> + '_ {
        let end = blocks.first + u64::from(blocks.count);
        let mut at = blocks.first;
        std::iter::from_fn(move || {
            if at == end {
                return None;
            }
            let run = self.translate(blocks.slice, at, (end - at) as u32)?;
            at += u64::from(run.blocks);
            Some(run)
        })
    }

    /// Hash of a name: 63 bits, at least 16 (lower ones are for "." and ".."), different on every volume, so that nobody can prepare
    /// names that collide.
    pub fn hash_name(&self, name: &[u8]) -> u64 {
        let hash = SipHasher24::new_with_key(&self.hash_seed).hash(name) >> 1;
        hash.max(16)
    }

    /// Durably marks the volume as mounted by this process. Until `mark_clean`, other processes that open the volume check
    /// whether this process still exists, and repair the volume if it does not.
    pub fn mark_dirty(&self) -> std::result::Result<(), IoError> {
        self.superblocks.set_dirty(true)
    }

    /// Marks it as cleanly unmounted, durably.
    pub fn mark_clean(&self) -> std::result::Result<(), IoError> {
        self.superblocks.set_dirty(false)
    }

    /// Whether it is mounted or was not cleanly unmounted.
    pub fn is_dirty(&self) -> bool {
        self.superblocks.is_dirty()
    }

    /// Opens the metadata store and the allocator over it. `cache_bytes`: memory for the store.
    pub fn open_store(&self, cache_bytes: usize) -> Result<(StoreRef, Arc<Allocator>)> {
        let store = self.open_store_only(cache_bytes)?;
        let allocator = Allocator::of_volume(&store, self)?;
        Ok((store, allocator))
    }

    /// The store without an allocator, for who cannot trust the bitmaps. Its region does not grow.
    pub(crate) fn open_store_only(&self, cache_bytes: usize) -> Result<StoreRef> {
        let region = if self.read_only {
            // redb writes when it is opened, the more so after a crash: that stays in memory.
            let views: Vec<_> = self
                .devices
                .iter()
                .map(|d| Overlay::over(d.clone()))
                .collect();
            let superblocks = Superblocks::read(views[0].clone()).map_err(|e| match e {
                superblocks::ReadError::Io(error) => Error::Io(error),
                error => Error::Damaged(error.to_string()),
            })?;
            Region::new(views, Arc::new(superblocks))
        } else {
            let region = Region::new(self.devices.clone(), self.superblocks.clone());
            if let Err(error) = region.provision_all() {
                tracing::warn!("the metadata has no space of its own on the host: {error}");
            }
            region
        };
        let container_blocks = self.superblocks.with(|s| s.head.container_blocks.get());
        let options = StoreOptions {
            cache_bytes,
            container_blocks,
        };
        Ok(Arc::new(Store::open(region, options, !self.read_only)?))
    }
}

fn slices_of(superblock: &Superblock) -> Vec<Slice> {
    let of = |(id, slice): (usize, &jericho_format::superblock::SliceEntry)| {
        let first = usize::from(slice.first_region.get());
        let mut slice_first = 0;
        let regions = superblock.regions[first..first + usize::from(slice.regions.get())]
            .iter()
            .map(|region| {
                let here = Place {
                    slice_first,
                    device: region.device.get(),
                    device_first: region.first_block.get(),
                    blocks: region.blocks.get(),
                };
                slice_first += here.blocks;
                here
            })
            .collect();
        let node = slice.node.get();
        Slice {
            id: id as SliceId,
            node: (node != NO_NODE).then_some(node),
            blocks: slice.blocks.get(),
            regions,
        }
    };
    superblock.slices.iter().enumerate().map(of).collect()
}

#[cfg(test)]
pub(crate) mod tests;
