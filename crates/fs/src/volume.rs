//! A volume: its devices, its superblock, the ranges of its slices and its metadata region.

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
    /// First byte of the range.
    pub offset_bytes: u64,
    /// Length in blocks.
    pub blocks: u32,
}

/// A slice of the volume.
#[derive(Clone, Debug)]
pub struct Slice {
    /// Index of the slice.
    pub id: SliceId,
    /// Node of the slice's device, if it was known when the volume was formatted. Only a hint.
    pub node: Option<u32>,
    /// Capacity in blocks.
    pub blocks: u64,
    regions: Vec<Place>,
}

impl Slice {
    /// Returns the index of the device that holds the slice's first block.
    pub fn device(&self) -> u16 {
        self.regions.first().map_or(0, |r| r.device)
    }

    /// Returns the locations of the slice, in order.
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
    /// Creates a volume from devices whose superblock was read and whose labels were checked.
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

    /// Returns the devices, by index.
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    /// Returns the slices, by id.
    pub fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// Returns the superblock.
    pub fn superblocks(&self) -> &Arc<Superblocks> {
        &self.superblocks
    }

    /// Returns the identity of the volume.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Returns whether the volume was opened read-only.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the longest contiguous range of blocks of a slice that starts at `block`, at most `count` blocks. Returns `None`
    /// if the block is beyond the slice.
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

    /// Returns the contiguous ranges that hold `blocks`, in order. Ends early at the end of the slice.
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

    /// Returns the hash of a name. It has 63 bits and is at least 16 (lower values are for "." and ".."). The same name has a
    /// different hash on every volume, so that a user cannot prepare names that collide.
    pub fn hash_name(&self, name: &[u8]) -> u64 {
        let hash = SipHasher24::new_with_key(&self.hash_seed).hash(name) >> 1;
        hash.max(16)
    }

    /// Durably marks the volume as mounted by this process. Until `mark_clean`, other processes that open the volume check
    /// whether this process still exists, and repair the volume if it does not.
    pub fn mark_dirty(&self) -> std::result::Result<(), IoError> {
        self.superblocks.set_dirty(true)
    }

    /// Durably marks the volume as cleanly unmounted.
    pub fn mark_clean(&self) -> std::result::Result<(), IoError> {
        self.superblocks.set_dirty(false)
    }

    /// Returns whether the volume is mounted or was not cleanly unmounted.
    pub fn is_dirty(&self) -> bool {
        self.superblocks.is_dirty()
    }

    /// Opens the metadata store, with `cache_bytes` of memory, and the allocator over it.
    pub fn open_store(&self, cache_bytes: usize) -> Result<(StoreRef, Arc<Allocator>)> {
        let store = self.open_store_only(cache_bytes)?;
        let allocator = Allocator::of_volume(&store, self)?;
        Ok((store, allocator))
    }

    /// Opens the store without an allocator, for callers that cannot trust the bitmaps. The metadata region does not grow then.
    pub(crate) fn open_store_only(&self, cache_bytes: usize) -> Result<StoreRef> {
        let region = if self.read_only {
            // redb writes when it is opened, and more so after a crash. The overlay keeps these writes in memory.
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
                tracing::warn!("cannot allocate space for the metadata on the host: {error}");
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
