//! Finds the devices of a volume by their labels.
//!
//! Names of block devices change from boot to boot, so the search uses a path only as the first place to try. It tries, in this
//! order: the paths that the user names, the device's path when the volume was formatted, the files with that name beside the
//! first device, the block devices of the machine, and the other files beside the first device. It only reads the candidates
//! until a label matches, because other programs may be using them. Two files with one label, or two block devices, are copies: the search
//! does not choose between them, unless the user names one. A member of a stacked device (device mapper, md) has the label of the stack,
//! and is no copy.
//!
//! If the recorded name of a device is that of a device of another host, the search looks only there and where the user says: a file or device of
//! this host with the right label may be the one that the other host serves.

use std::collections::HashSet;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_format::label::LabelState;
use jericho_format::superblock::DeviceEntry;
use jericho_storage::{Device, is_remote};

use crate::device::{OpenMode, open_path};
use crate::error::VolumeError;
use crate::labels::{path_of, read_label};

/// Largest number of entries that the search takes from a directory: that of the first device, or /dev/disk/by-id.
const BESIDE_MAX: usize = 1000;

/// A device of a volume to be found.
pub(crate) struct Wanted<'a> {
    /// Path of the first device.
    pub first: &'a Path,
    /// The entry of the first device.
    pub first_entry: &'a DeviceEntry,
    /// Paths that the user names.
    pub others: &'a [PathBuf],
    /// Index of the device.
    pub index: usize,
    /// Its entry.
    pub entry: &'a DeviceEntry,
}

/// A path whose label is the one that is searched for.
struct Match {
    path: PathBuf,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    File,
    Block,
    /// A block device that another one is stacked on.
    Member,
}

/// A search for a device. Visits each device once.
struct Search {
    uuid: [u8; 16],
    index: usize,
    mode: OpenMode,
    seen: HashSet<(u64, u64)>,
    refused: Option<VolumeError>,
}

/// Opens a device of a volume. Fails with `Copies` if two files could be this device, because a mount of a copy with the other devices of
/// the original would destroy the original.
pub(crate) fn device(wanted: &Wanted, mode: OpenMode) -> Result<Arc<dyn Device>, VolumeError> {
    let Wanted { first, entry, .. } = *wanted;
    let mut search = Search {
        uuid: entry.uuid,
        index: wanted.index,
        mode,
        seen: HashSet::new(),
        refused: None,
    };
    let named = search.matches(wanted.others.iter().cloned());
    if let Some(device) = search.open_one(named)? {
        return Ok(device);
    }
    let hint = path_of(entry);
    if is_remote(&hint) {
        return remote_device(&search, wanted, &hint);
    }
    let beside = hint.file_name().map(|name| first.with_file_name(name));
    let likely: Vec<PathBuf> = [hint.clone()].into_iter().chain(beside).collect();
    let matches = search.matches(likely.iter().cloned());
    if !matches.is_empty() {
        refuse_copy_of_first(wanted)?;
    }
    if let Some(device) = search.open_one(matches)? {
        return Ok(device);
    }
    let matches = search.matches(block_devices());
    if !matches.is_empty() {
        refuse_copy_of_first(wanted)?;
        refuse_block_copy_of_first(wanted)?;
    }
    if let Some(device) = search.open_one(matches)? {
        return Ok(device);
    }
    let matches = search.matches(files_beside(first));
    if !matches.is_empty() {
        refuse_copy_of_first(wanted)?;
    }
    if let Some(device) = search.open_one(matches)? {
        return Ok(device);
    }
    if let Some(device) = search.open_named_remote(wanted.others)? {
        return Ok(device);
    }
    if let Some(error) = search.refused {
        return Err(error);
    }
    // No device has the label. Returns a device with a likely path, so that `check_devices` reports how it differs.
    let likely = wanted
        .others
        .iter()
        .filter(|other| !is_remote(other))
        .chain(&likely);
    for path in likely.filter(|path| path.exists()) {
        if let Ok(device) = open_path(path, OpenMode::READ) {
            return Ok(device);
        }
    }
    Err(VolumeError::DeviceMissing {
        index: wanted.index,
        path: hint,
    })
}

/// Opens a device whose recorded name is that of a device of another host.
fn remote_device(
    search: &Search,
    wanted: &Wanted,
    name: &Path,
) -> Result<Arc<dyn Device>, VolumeError> {
    let recorded = search.open_remote(name);
    if let Ok(Some(device)) = recorded {
        return Ok(device);
    }
    if let Some(device) = search.open_named_remote(wanted.others)? {
        return Ok(device);
    }
    Err(recorded.err().unwrap_or(VolumeError::OtherRemote {
        index: wanted.index,
        name: name.to_owned(),
    }))
}

impl Search {
    /// Opens the device of another host that the user names, if one has the right label.
    fn open_named_remote(
        &self,
        others: &[PathBuf],
    ) -> Result<Option<Arc<dyn Device>>, VolumeError> {
        for name in others.iter().filter(|other| is_remote(other)) {
            // Another device of the volume may be there.
            match self.open_remote(name) {
                Ok(Some(device)) => return Ok(Some(device)),
                Ok(None) => {}
                Err(error @ (VolumeError::Unreachable(_) | VolumeError::Refused(_))) => {
                    tracing::warn!("{error}");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Opens a device of another host, if its label is right.
    fn open_remote(&self, name: &Path) -> Result<Option<Arc<dyn Device>>, VolumeError> {
        let device = open_path(name, self.mode)?;
        let is_it = match read_label(&*device)? {
            LabelState::Valid(label) => label.device_uuid == self.uuid,
            _ => false,
        };
        Ok(is_it.then_some(device))
    }

    /// Returns the paths whose label is right, without those that were seen before under another name.
    fn matches(&mut self, paths: impl IntoIterator<Item = PathBuf>) -> Vec<Match> {
        let mut matches = Vec::new();
        for path in paths {
            let Some((identity, kind)) = identity(&path) else {
                continue;
            };
            if self.seen.insert(identity)
                && label_uuid(&path).is_ok_and(|uuid| uuid == Some(self.uuid))
            {
                matches.push(Match { path, kind });
            }
        }
        matches
    }

    /// Opens the first of the matches that can be opened. Fails with `Copies` if two of them are of one kind.
    fn open_one(&mut self, matches: Vec<Match>) -> Result<Option<Arc<dyn Device>>, VolumeError> {
        for kind in [Kind::File, Kind::Block] {
            let mut alike = matches.iter().filter(|one| one.kind == kind);
            if let (Some(one), Some(other)) = (alike.next(), alike.next()) {
                return Err(VolumeError::Copies {
                    index: self.index,
                    one: one.path.clone(),
                    other: other.path.clone(),
                });
            }
        }
        for one in matches {
            match open_path(&one.path, self.mode) {
                Ok(device) => return Ok(Some(device)),
                // A member of a stacked device has the same label, and the stacked device holds it open.
                Err(error) => self.refused = self.refused.take().or(Some(error)),
            }
        }
        Ok(None)
    }
}

/// Fails if the volume's first device is also where it was when the volume was formatted, in another file or block device. Then the devices
/// that a search finds may belong to that one.
fn refuse_copy_of_first(wanted: &Wanted) -> Result<(), VolumeError> {
    let recorded = path_of(wanted.first_entry);
    let (Some((one, kind)), Some((other, other_kind))) =
        (identity(wanted.first), identity(&recorded))
    else {
        return Ok(());
    };
    let is_copy = one != other
        && kind != Kind::Member
        && kind == other_kind
        && label_uuid(&recorded).is_ok_and(|uuid| uuid == Some(wanted.first_entry.uuid));
    if is_copy {
        return Err(copy_of_first(wanted, recorded));
    }
    Ok(())
}

/// Fails if the volume's first device is a block device and another one has its label. Then the devices that a search finds may belong to
/// that one.
fn refuse_block_copy_of_first(wanted: &Wanted) -> Result<(), VolumeError> {
    let Some((first, Kind::Block)) = identity(wanted.first) else {
        return Ok(());
    };
    let mut search = Search {
        uuid: wanted.first_entry.uuid,
        index: 0,
        mode: OpenMode::READ,
        seen: HashSet::from([first]),
        refused: None,
    };
    let matches = search.matches(block_devices());
    match matches.into_iter().find(|one| one.kind == Kind::Block) {
        Some(copy) => Err(copy_of_first(wanted, copy.path)),
        None => Ok(()),
    }
}

fn copy_of_first(wanted: &Wanted, copy: PathBuf) -> VolumeError {
    VolumeError::Copies {
        index: 0,
        one: wanted.first.to_owned(),
        other: copy,
    }
}

/// Returns what all names of a file or block device have in common, and its kind; `None` if it is neither.
fn identity(path: &Path) -> Option<((u64, u64), Kind)> {
    let metadata = std::fs::metadata(path).ok()?;
    let kind = metadata.file_type();
    if kind.is_block_device() {
        let kind = match jericho_sys::block::has_holders(metadata.rdev()) {
            true => Kind::Member,
            false => Kind::Block,
        };
        Some(((0, metadata.rdev()), kind))
    } else {
        let identity = (metadata.dev(), metadata.ino());
        kind.is_file().then_some((identity, Kind::File))
    }
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
