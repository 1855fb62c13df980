//! Finding the devices of a volume by their labels.
//!
//! Names of block devices change from boot to boot, so that a path only says where to look first: where the user says,
//! where the device was when the volume was made, beside the first device, among the block devices of the machine, and among the
//! files beside the first device. A candidate is only read until its label is the right one; others may be in use by
//! others.

use std::collections::HashSet;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_format::label::LabelState;
use jericho_format::superblock::DeviceEntry;
use jericho_storage::Device;

use super::error::VolumeError;
use super::format::read_label;
use super::open::{OpenMode, open_path, path_of};

/// Most files beside the first device that are looked at.
const BESIDE_MAX: usize = 1000;

/// Opens device `index` of the volume whose first device is at `first`.
pub(super) fn device(
    first: &Path,
    others: &[PathBuf],
    index: usize,
    entry: &DeviceEntry,
    mode: OpenMode,
) -> Result<Arc<dyn Device>, VolumeError> {
    let hint = path_of(entry);
    let beside = hint.file_name().map(|name| first.with_file_name(name));
    let likely: Vec<PathBuf> = others
        .iter()
        .cloned()
        .chain([hint.clone()])
        .chain(beside)
        .collect();
    let mut seen = HashSet::new();
    let mut refused = None;
    let candidates = likely.iter().cloned().chain(
        // Listed only when they are needed.
        std::iter::once_with(|| block_devices().chain(files_beside(first))).flatten(),
    );
    for path in candidates {
        let Ok(metadata) = std::fs::metadata(&path) else {
            continue;
        };
        let kind = metadata.file_type();
        let identity = match kind.is_block_device() {
            true => (0, metadata.rdev()),
            false if kind.is_file() => (metadata.dev(), metadata.ino()),
            false => continue,
        };
        if !seen.insert(identity) {
            continue;
        }
        match label_uuid(&path) {
            Ok(Some(uuid)) if uuid == entry.uuid => match open_path(&path, mode) {
                Ok(device) => return Ok(device),
                // A part of a stacked device has the same label and is held by it.
                Err(error) => refused = refused.or(Some(error)),
            },
            _ => {}
        }
    }
    if let Some(error) = refused {
        return Err(error);
    }
    // `check_devices` says what is wrong with what is there instead.
    for path in likely.iter().filter(|path| path.exists()) {
        if let Ok(device) = open_path(path, OpenMode::READ) {
            return Ok(device);
        }
    }
    Err(VolumeError::DeviceMissing { index, path: hint })
}

/// Which device it is that is at `path`; `None` when it is of no volume.
fn label_uuid(path: &Path) -> Result<Option<[u8; 16]>, VolumeError> {
    let device = open_path(path, OpenMode::READ)?;
    Ok(match read_label(&*device)? {
        LabelState::Valid(label) => Some(label.device_uuid),
        _ => None,
    })
}

/// The block devices of this machine: by the names that last, then by the kernel's.
fn block_devices() -> impl Iterator<Item = PathBuf> {
    let mut lasting = list(Path::new("/dev/disk/by-id"));
    lasting.sort();
    let partitions = std::fs::read_to_string("/proc/partitions").unwrap_or_default();
    let names: Vec<PathBuf> = partitions
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().nth(3))
        // As in sysfs: a slash in a name is an exclamation mark there.
        .map(|name| Path::new("/dev").join(name.replace('!', "/")))
        .collect();
    lasting.into_iter().chain(names)
}

fn files_beside(first: &Path) -> impl Iterator<Item = PathBuf> {
    let directory = first.parent().filter(|p| !p.as_os_str().is_empty());
    let mut files = list(directory.unwrap_or(Path::new(".")));
    files.sort();
    files.into_iter()
}

fn list(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    let paths = entries.flatten().map(|entry| entry.path());
    paths.take(BESIDE_MAX).collect()
}
