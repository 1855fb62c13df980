//! Finds the devices of a volume by their labels.
//!
//! Names of block devices change from boot to boot, so the search uses a path only as the first place to try. It tries, in this
//! order: the paths that the user names, the device's path when the volume was formatted, the files with that name beside the
//! first device, the block devices of the machine, and the other files beside the first device. It only reads the candidates
//! until a label matches, because other programs may be using them.

use std::collections::HashSet;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_format::label::LabelState;
use jericho_format::superblock::DeviceEntry;
use jericho_storage::Device;

use crate::device::{OpenMode, open_path};
use crate::error::VolumeError;
use crate::labels::{path_of, read_label};

/// Largest number of entries that the search takes from a directory: that of the first device, or /dev/disk/by-id.
const BESIDE_MAX: usize = 1000;

/// Opens device `index` of the volume whose first device is at `first`.
pub(crate) fn device(
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
        // Lists these candidates only if the search gets this far.
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
                // A member of a stacked device has the same label, and the stacked device holds it open.
                Err(error) => refused = refused.or(Some(error)),
            },
            _ => {}
        }
    }
    if let Some(error) = refused {
        return Err(error);
    }
    // No device has the label. Returns a device with a likely path, so that `check_devices` reports how it differs.
    for path in likely.iter().filter(|path| path.exists()) {
        if let Ok(device) = open_path(path, OpenMode::READ) {
            return Ok(device);
        }
    }
    Err(VolumeError::DeviceMissing { index, path: hint })
}

/// Returns the label's UUID of the device at `path`, or `None` if it belongs to no volume.
fn label_uuid(path: &Path) -> Result<Option<[u8; 16]>, VolumeError> {
    let device = open_path(path, OpenMode::READ)?;
    Ok(match read_label(&*device)? {
        LabelState::Valid(label) => Some(label.device_uuid),
        _ => None,
    })
}

/// Returns the block devices of this machine: first by persistent names, then by the kernel's names.
fn block_devices() -> impl Iterator<Item = PathBuf> {
    let mut lasting = list(Path::new("/dev/disk/by-id"));
    lasting.sort();
    let partitions = std::fs::read_to_string("/proc/partitions").unwrap_or_default();
    let names: Vec<PathBuf> = partitions
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().nth(3))
        // sysfs replaces the slashes in a name with exclamation marks.
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
