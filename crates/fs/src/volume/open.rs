//! Finds the devices of a volume and checks that they belong to it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::label::{Label, LabelState, VERSION};
use jericho_format::superblock::{DeviceEntry, SuperblockError};
use jericho_storage::{Device, OpenOptions, open_device};

use super::Volume;
use super::error::VolumeError;
use super::find;
use super::format::read_label;
use super::owner::{self, Verdict};
use super::superblocks::{ReadError, Superblocks};

/// Mode in which a volume is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenMode {
    /// Prevents all writes to the devices.
    pub read_only: bool,
    /// Opens the volume even if another machine has not unmounted it, or if a second use of a loop device's file could
    /// not be detected.
    pub force: bool,
}

impl OpenMode {
    /// Opens for reading only.
    pub const READ: OpenMode = OpenMode {
        read_only: true,
        force: false,
    };
    /// Opens for reading and writing.
    pub const WRITE: OpenMode = OpenMode {
        read_only: false,
        force: false,
    };
}

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
        check_owner(&first, &superblocks, mode)?;
        let entries = superblocks.with(|s| s.devices.clone());
        let mut devices = vec![first];
        for (index, entry) in entries.iter().enumerate().skip(1) {
            devices.push(find::device(path, others, index, entry, mode)?);
        }
        check_devices(&devices, &superblocks)?;
        Ok(Volume::assemble(devices, superblocks, mode.read_only))
    }

    /// Returns whether the volume whose first device is at `path` is mounted or was not cleanly unmounted. Reads only that
    /// device.
    pub fn is_dirty_at(path: &Path) -> Result<bool, VolumeError> {
        let first = open_path(path, OpenMode::READ)?;
        Ok(read_head(&first)?.is_dirty())
    }

    /// Opens a volume on devices that are open, in the order of their indices.
    pub fn open_from_devices(
        devices: Vec<Arc<dyn Device>>,
        mode: OpenMode,
    ) -> Result<Volume, VolumeError> {
        let first = devices.first().ok_or(VolumeError::NoDevices)?;
        let superblocks = read_head(first)?;
        check_devices(&devices, &superblocks)?;
        Ok(Volume::assemble(devices, superblocks, mode.read_only))
    }
}

/// Refuses a path that cannot hold a volume. The error names the kind of file at the path.
pub(super) fn inspect(path: &Path) -> Result<std::fs::Metadata, VolumeError> {
    use std::os::unix::fs::FileTypeExt;
    let metadata = std::fs::metadata(path).map_err(|cause| match cause.kind() {
        std::io::ErrorKind::NotFound => VolumeError::Missing(path.into()),
        _ => VolumeError::System {
            action: "inspect",
            path: path.into(),
            cause,
        },
    })?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        return Err(VolumeError::IsDirectory(path.into()));
    }
    if !kind.is_file() && !kind.is_block_device() {
        return Err(VolumeError::WrongKind(path.into()));
    }
    Ok(metadata)
}

pub(super) fn open_path(path: &Path, mode: OpenMode) -> Result<Arc<dyn Device>, VolumeError> {
    let metadata = inspect(path)?;
    // Root could write to the file, but its permissions say that it must not change.
    if !mode.read_only && metadata.is_file() && metadata.permissions().readonly() {
        return Err(VolumeError::ReadOnly(path.into()));
    }
    if metadata.is_file() && metadata.len() < PAGE_BYTES {
        return Err(VolumeError::NotAVolume(path.to_string_lossy().into()));
    }
    let options = OpenOptions {
        read_only: mode.read_only,
        ..OpenOptions::default()
    };
    open_device(path, options).map_err(|e| VolumeError::Open(e.to_string()))
}

/// Returns the label of a device. Fails if the label is missing, damaged or of a newer format.
fn good_label(device: &Arc<dyn Device>) -> Result<Box<Label>, VolumeError> {
    match read_label(&**device)? {
        LabelState::Valid(label) => Ok(label),
        LabelState::Foreign => Err(VolumeError::NotAVolume(device.name())),
        LabelState::Damaged => Err(VolumeError::LabelDamaged(device.name())),
        LabelState::Newer(found) => Err(VolumeError::Newer {
            device: device.name(),
            found,
            known: VERSION,
        }),
    }
}

/// Checks the label of the first device and reads the superblock.
fn read_head(device: &Arc<dyn Device>) -> Result<Superblocks, VolumeError> {
    let label = good_label(device)?;
    check_length(device, label.device_blocks.get())?;
    if label.device_index.get() != 0 {
        let index = label.device_index.get().into();
        return Err(VolumeError::NotFirst {
            device: device.name(),
            index,
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
        error @ ReadError::Unusable(..) => VolumeError::SuperblockDamaged {
            device: device.name(),
            what: error.to_string(),
        },
    })
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

fn check_length(device: &Arc<dyn Device>, blocks: u64) -> Result<(), VolumeError> {
    let needed_bytes = blocks.saturating_mul(PAGE_BYTES);
    let found_bytes = device.size_bytes();
    if found_bytes < needed_bytes {
        return Err(VolumeError::Truncated {
            device: device.name(),
            needed_bytes,
            found_bytes,
        });
    }
    Ok(())
}

/// Returns the path that a device had when the volume was formatted.
pub(crate) fn path_of(entry: &DeviceEntry) -> PathBuf {
    let len = usize::from(entry.path_bytes.get()).min(entry.path.len());
    PathBuf::from(OsStr::from_bytes(&entry.path[..len]))
}

/// Checks that each device is the one that the superblock names.
pub(super) fn check_devices(
    devices: &[Arc<dyn Device>],
    superblocks: &Superblocks,
) -> Result<(), VolumeError> {
    let (entries, uuid) = superblocks.with(|s| (s.devices.clone(), s.head.volume_uuid));
    for (index, entry) in entries.iter().enumerate() {
        let Some(device) = devices.get(index) else {
            return Err(VolumeError::DeviceMissing {
                index,
                path: path_of(entry),
            });
        };
        let wrong = |is: &str| VolumeError::WrongDevice {
            device: device.name(),
            index,
            is: is.to_owned(),
        };
        let label = match good_label(device) {
            Ok(label) => label,
            Err(VolumeError::NotAVolume(_)) => return Err(wrong("holds no part of a volume")),
            Err(error) => return Err(error),
        };
        if label.volume_uuid != uuid {
            return Err(wrong("belongs to another volume"));
        }
        if label.device_uuid != entry.uuid {
            return Err(wrong(&format!("is device {}", label.device_index.get())));
        }
        check_length(device, entry.blocks.get())?;
    }
    Ok(())
}
