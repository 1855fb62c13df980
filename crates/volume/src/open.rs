//! Opens a volume: reads its superblock, finds its devices and checks that they belong to it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::label::VERSION;
use jericho_format::superblock::SuperblockError;
use jericho_storage::{Device, absent_device};

use crate::check_devices::check_devices;
use crate::device::{OpenMode, open_path};
use crate::error::VolumeError;
use crate::find;
use crate::labels::{check_length, good_label, path_of};
use crate::owner::{self, Verdict};
use crate::superblocks::{ReadError, Superblocks};
use crate::volume::Volume;

impl Volume {
    /// Opens a volume by the path of its first device. Finds the others by their labels (`find`).
    pub fn open(path: &Path, mode: OpenMode) -> Result<Volume, VolumeError> {
        Volume::open_among(path, &[], mode)
    }

    /// Does the same as `open`, but first looks for the other devices at `others`.
    pub fn open_among(
        path: &Path,
        others: &[PathBuf],
        mode: OpenMode,
    ) -> Result<Volume, VolumeError> {
        let first = open_path(path, mode)?;
        let superblocks = read_head(&first)?;
        if !mode.read_only {
            check_features(&first, &superblocks)?;
        }
        let mut devices = vec![first];
        while let Some(entry) = superblocks.with(|s| s.devices.get(devices.len()).cloned()) {
            let index = devices.len();
            let wanted = find::Wanted {
                first: path,
                first_entry: &superblocks.with(|s| s.devices[0].clone()),
                others,
                index,
                entry: &entry,
            };
            let device = match find::device(&wanted, mode) {
                Err(
                    error @ (VolumeError::DeviceMissing { .. }
                    | VolumeError::OtherRemote { .. }
                    | VolumeError::Unreachable(_)
                    | VolumeError::Refused(_)),
                ) => {
                    tracing::error!(
                        "the slices of device {index} are absent until it is found: {error}"
                    );
                    let name = path_of(&entry);
                    absent_device(
                        &name.to_string_lossy(),
                        entry.blocks.get().saturating_mul(PAGE_BYTES),
                    )
                }
                found => found?,
            };
            devices.push(device);
        }
        let superblocks = join(&superblocks, &devices)?;
        check_owner(&devices[0], &superblocks, mode)?;
        check_devices(&devices, &superblocks)?;
        Ok(Volume::assemble(devices, superblocks, mode.read_only))
    }

    /// Returns the id that the label of the device at `path` gives to the device. Reads only the label.
    pub fn device_id(path: &Path) -> Result<[u8; 16], VolumeError> {
        Ok(good_label(&open_path(path, OpenMode::READ)?)?.device_uuid)
    }

    /// Returns whether the volume whose first device is at `path` is mounted or was not cleanly unmounted. Reads only that
    /// device.
    pub fn is_dirty_at(path: &Path) -> Result<bool, VolumeError> {
        let first = open_path(path, OpenMode::READ)?;
        Ok(read_head(&first)?.is_dirty())
    }

    /// Opens a volume on devices that are open, in the order of their indices. A caller that changes the devices, and not only views of
    /// them, calls `check_features` first.
    pub fn open_from_devices(
        devices: Vec<Arc<dyn Device>>,
        mode: OpenMode,
    ) -> Result<Volume, VolumeError> {
        let first = devices.first().ok_or(VolumeError::NoDevices)?;
        let superblocks = read_head(first)?;
        let superblocks = join(&superblocks, &devices)?;
        check_devices(&devices, &superblocks)?;
        Ok(Volume::assemble(devices, superblocks, mode.read_only))
    }
}

/// Checks the label of the first device and reads the superblock.
fn read_head(device: &Arc<dyn Device>) -> Result<Superblocks, VolumeError> {
    let label = good_label(device)?;
    check_length(device, label.device_blocks.get())?;
    if label.device_index.get() != 0 {
        let index = label.device_index.get().into();
        // The superblock is only a hint here, so an unusable one is no error.
        let head = Superblocks::read(device.clone()).ok();
        return Err(VolumeError::NotFirst {
            device: device.name(),
            index,
            first: head.and_then(|head| head.with(|s| s.devices.first().map(path_of))),
        });
    }
    Superblocks::read(device.clone()).map_err(|error| match error {
        ReadError::Io(error) => VolumeError::Io(error),
        ReadError::Unusable(SuperblockError::Newer(found), _)
        | ReadError::Unusable(_, SuperblockError::Newer(found)) => VolumeError::Newer {
            device: device.name(),
            found,
            known: VERSION,
        },
        ReadError::Unusable(SuperblockError::Older(found), _)
        | ReadError::Unusable(_, SuperblockError::Older(found)) => VolumeError::Older {
            device: device.name(),
            found,
            known: VERSION,
        },
        ReadError::Unusable(
            what @ (SuperblockError::Records(_) | SuperblockError::Features(_)),
            _,
        )
        | ReadError::Unusable(
            _,
            what @ (SuperblockError::Records(_) | SuperblockError::Features(_)),
        ) => VolumeError::Records {
            device: device.name(),
            what,
        },
        error @ ReadError::Unusable(..) => VolumeError::SuperblockDamaged {
            device: device.name(),
            what: error.to_string(),
        },
    })
}

/// Refuses to change a volume with features that this version does not know.
pub fn check_features(
    device: &Arc<dyn Device>,
    superblocks: &Superblocks,
) -> Result<(), VolumeError> {
    match superblocks.with(|s| s.head.unknown_read_only()) {
        0 => Ok(()),
        unknown => Err(VolumeError::ReadOnlyFeatures {
            device: device.name(),
            unknown,
        }),
    }
}

/// Returns the superblock of the volume, from that of the first device and the copies of the others.
fn join(
    superblocks: &Superblocks,
    devices: &[Arc<dyn Device>],
) -> Result<Superblocks, VolumeError> {
    let joined = superblocks.joined(devices.to_vec());
    joined.map_err(|error| VolumeError::Contradiction(error.to_string()))
}

/// Refuses a volume that is mounted for writing, here or on another machine.
fn check_owner(
    device: &Arc<dyn Device>,
    superblocks: &Superblocks,
    mode: OpenMode,
) -> Result<(), VolumeError> {
    match superblocks.with(|s| owner::judge(&s.head)) {
        Verdict::Free => Ok(()),
        Verdict::Here(pid) => Err(VolumeError::Locked {
            path: PathBuf::from(&*device.name()),
            pid: Some(pid),
        }),
        Verdict::Elsewhere(host, pid) if mode.force => {
            tracing::warn!(device = %device.name(), host, pid, "forced: took over a volume that another host has not unmounted");
            Ok(())
        }
        Verdict::Elsewhere(host, pid) => Err(VolumeError::OtherHost {
            device: device.name(),
            host,
            pid,
        }),
    }
}
