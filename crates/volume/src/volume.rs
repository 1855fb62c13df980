//! An open volume.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use jericho_format::PAGE_BYTES;
use jericho_storage::{Appended, Device, Devices, IoError};
use parking_lot::{Mutex, MutexGuard};
use siphasher::sip::SipHasher24;

use crate::space::{Blocks, DeviceRun, SliceId, SliceSpace, slices_of};
use crate::superblocks::Superblocks;

/// An open volume.
pub struct Volume {
    /// The devices as they were opened, and again after each one that was added and taken into use.
    devices: Appended<Vec<Arc<dyn Device>>>,
    /// The same devices, for queues of transfers.
    device_list: Devices,
    superblocks: Arc<Superblocks>,
    /// The slices as they were opened, and again after each growth and each device that was taken into use.
    slices: Appended<Vec<SliceSpace>>,
    growing: Mutex<()>,
    uuid: [u8; 16],
    hash_seed: [u8; 16],
    read_only: bool,
    has_checksums: bool,
    /// A device is on another host.
    may_fall_silent: AtomicBool,
    /// Devices that turned out to be others while the volume was open.
    excluded: Appended<u16>,
}

impl Volume {
    /// Creates a volume from devices whose superblock was read and whose labels were checked.
    pub(crate) fn assemble(
        devices: Vec<Arc<dyn Device>>,
        superblocks: Superblocks,
        read_only: bool,
    ) -> Volume {
        let (slices, uuid, hash_seed) =
            superblocks.with(|s| (slices_of(s), s.head.volume_uuid, s.head.hash_seed));
        let has_checksums = superblocks.with(|s| s.head.has_checksums());
        let may_fall_silent = devices.iter().any(|device| device.may_fall_silent());
        Volume {
            may_fall_silent: may_fall_silent.into(),
            device_list: Devices::from(&devices),
            devices: [devices].into_iter().collect(),
            superblocks: Arc::new(superblocks),
            slices: [slices].into_iter().collect(),
            growing: Mutex::new(()),
            excluded: Appended::default(),
            uuid,
            hash_seed,
            read_only,
            has_checksums,
        }
    }

    /// Returns the devices, by index. After a device was taken into use, the next call returns it, too. A caller that gets indices of
    /// devices from `slices` or `translate` calls this afterwards.
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        self.devices.last().map_or(&[], Vec::as_slice)
    }

    /// Returns the devices as a list that gets those that are taken into use later.
    pub fn device_list(&self) -> &Devices {
        &self.device_list
    }

    /// Returns the slices, by id. After a growth, the next call returns their new space; after a device was taken into use, its slices, too.
    pub fn slices(&self) -> &[SliceSpace] {
        self.slices.last().map_or(&[], Vec::as_slice)
    }

    fn devices_of(&self, slice: &SliceSpace) -> impl Iterator<Item = &Arc<dyn Device>> {
        let regions = slice.regions.iter();
        regions.map(|region| &self.devices()[usize::from(region.device)])
    }

    /// Returns the device of a slice that is missing, if one is.
    pub fn missing_of(&self, slice: &SliceSpace) -> Option<&Arc<dyn Device>> {
        self.devices_of(slice).find(|device| device.is_absent())
    }

    /// Returns whether a device of a slice is known to answer nothing at present.
    pub fn is_silent(&self, slice: &SliceSpace) -> bool {
        self.devices_of(slice).any(|device| device.is_silent())
    }

    pub(crate) fn note_excluded(&self, device: u16) {
        self.excluded.append([device]);
    }

    /// Returns whether nothing may be written to a device, because it turned out to be another one (`exclude`).
    #[inline]
    pub fn is_excluded(&self, device: u16) -> bool {
        self.excluded.iter().any(|excluded| *excluded == device)
    }

    /// Returns whether the volume has a device on another host, which may fall silent.
    #[inline]
    pub fn may_fall_silent(&self) -> bool {
        self.may_fall_silent.load(Ordering::Relaxed)
    }

    /// Returns whether a device is known to answer nothing at present.
    pub fn has_silent_device(&self) -> bool {
        self.devices().iter().any(|device| device.is_silent())
    }

    /// Takes the slices' new space into use. The superblock names it durably.
    pub(crate) fn adopt(&self, slices: Vec<SliceSpace>) {
        self.slices.append([slices]);
    }

    /// Appends a device to those that the calls of the volume return.
    pub(crate) fn adopt_device(&self, device: &Arc<dyn Device>) {
        self.device_list.push(device.clone());
        if device.may_fall_silent() {
            self.may_fall_silent.store(true, Ordering::Relaxed);
        }
        let devices = self.devices().iter().chain([device]).cloned();
        self.devices.append([devices.collect::<Vec<_>>()]);
    }

    /// Returns the lock that a thread holds while the volume grows.
    pub(crate) fn lock_growth(&self) -> MutexGuard<'_, ()> {
        self.growing.lock()
    }

    /// Returns the superblock.
    pub fn superblocks(&self) -> &Arc<Superblocks> {
        &self.superblocks
    }

    /// Returns the identity of the volume.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Returns whether the data of files has checksums.
    pub fn has_checksums(&self) -> bool {
        self.has_checksums
    }

    /// Returns whether the volume was opened read-only.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the longest contiguous range of blocks of a slice that starts at `block`, at most `count` blocks. Returns `None`
    /// if the block is beyond the slice.
    pub fn translate(&self, slice: SliceId, block: u64, count: u32) -> Option<DeviceRun> {
        let regions = &self.slices().get(usize::from(slice))?.regions;
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

    /// Durably marks the volume as mounted by this process. Until `mark_clean`, processes on other machines cannot open the volume
    /// without `force`. Other processes on this machine cannot open it while this process runs and they see it in /proc.
    pub fn mark_dirty(&self) -> Result<(), IoError> {
        self.superblocks.set_dirty(true)
    }

    /// Durably marks the volume as cleanly unmounted.
    pub fn mark_clean(&self) -> Result<(), IoError> {
        self.superblocks.set_dirty(false)
    }

    /// Returns whether the volume is mounted or was not cleanly unmounted.
    pub fn is_dirty(&self) -> bool {
        self.superblocks.is_dirty()
    }
}
