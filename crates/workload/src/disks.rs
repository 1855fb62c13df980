//! The disks below a path, whose counters count each sector once.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Longest chain of devices on each other.
const DEPTH_MAX: usize = 8;
/// Bytes of a sector in the kernel's counters and sizes, and in the papers.
pub const SECTOR_BYTES: u64 = 512;

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// The kernel's name.
    pub name: String,
    /// Its model. `None`: the kernel does not tell.
    pub model: Option<String>,
    /// Its size.
    pub size_bytes: Option<u64>,
    /// Whether the kernel takes it for one with a rotating disk.
    pub rotational: Option<bool>,
}

/// Returns the directories in sysfs of the disks that a device uses, or a file or directory: of a partition its disk, of a device mapper or RAID
/// device those below, and of a loop device those of its file. `None` if there is no block device (a network, memory), or the filesystem does not tell
/// it: those with device numbers of their own, as btrfs and overlay.
pub(crate) fn disks_below(path: &Path) -> Option<BTreeSet<PathBuf>> {
    let mut disks = BTreeSet::new();
    of_path(path, &mut disks, 0)?;
    Some(disks)
}

fn of_path(path: &Path, disks: &mut BTreeSet<PathBuf>, depth: usize) -> Option<()> {
    let metadata = fs::metadata(path).ok()?;
    let device = match metadata.file_type().is_block_device() {
        true => metadata.rdev(),
        false => metadata.dev(),
    };
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let dir = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    of_device(&dir.canonicalize().ok()?, disks, depth)
}

fn of_device(dir: &Path, disks: &mut BTreeSet<PathBuf>, depth: usize) -> Option<()> {
    if depth > DEPTH_MAX {
        return None;
    }
    if dir.join("partition").exists() {
        return of_device(dir.parent()?, disks, depth + 1);
    }
    let below = fs::read_dir(dir.join("slaves")).into_iter().flatten();
    let below = below.filter_map(|entry| entry.ok()?.path().canonicalize().ok());
    let below: Vec<PathBuf> = below.collect();
    if !below.is_empty() {
        let mut below = below.iter();
        return below.try_for_each(|dir| of_device(dir, disks, depth + 1));
    }
    if let Ok(file) = fs::read_to_string(dir.join("loop/backing_file")) {
        // A file in memory, or on a filesystem that does not tell its device: the sectors of the loop device are those that move.
        let known = of_path(Path::new(file.trim_end_matches('\n')), disks, depth + 1);
        if known.is_some() {
            return known;
        }
    }
    disks.insert(dir.to_owned());
    Some(())
}

/// Describes the disk with this directory in sysfs. `None`: the directory has no name.
pub(crate) fn describe(dir: &Path) -> Option<Disk> {
    let name = dir.file_name()?.to_string_lossy().into_owned();
    let read = |file: &str| {
        let text = fs::read_to_string(dir.join(file)).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    };
    let sectors: Option<u64> = read("size").and_then(|text| text.parse().ok());
    Some(Disk {
        name,
        model: read("device/model"),
        size_bytes: sectors.map(|sectors| sectors.saturating_mul(SECTOR_BYTES)),
        rotational: read("queue/rotational").map(|text| text != "0"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a directory with files, and returns it.
    fn device(root: &Path, name: &str, files: &[&str]) -> PathBuf {
        let dir = root.join(name);
        fs::create_dir_all(&dir).unwrap();
        for file in files {
            fs::write(dir.join(file), "1").unwrap();
        }
        dir.canonicalize().unwrap()
    }

    #[test]
    fn a_partition_and_its_disk_and_a_device_on_it_are_one_disk() {
        let root = tempfile::tempdir().unwrap();
        let disk = device(root.path(), "sda", &["stat"]);
        let partition = device(root.path(), "sda/sda1", &["stat", "partition"]);
        let mapped = device(root.path(), "dm-0", &["stat"]);
        fs::create_dir(mapped.join("slaves")).unwrap();
        std::os::unix::fs::symlink(&partition, mapped.join("slaves/sda1")).unwrap();
        let mut disks = BTreeSet::new();
        for dir in [&disk, &partition, &mapped] {
            of_device(dir, &mut disks, 0).unwrap();
        }
        assert!(disks.iter().eq([&disk]), "{disks:?}");
    }

    #[test]
    fn a_disk_is_described_by_what_the_kernel_tells_of_it() {
        let root = tempfile::tempdir().unwrap();
        let disk = device(root.path(), "nvme0n1", &["stat"]);
        let unknown = Disk {
            name: "nvme0n1".into(),
            model: None,
            size_bytes: None,
            rotational: None,
        };
        assert_eq!(describe(&disk), Some(unknown));
        for (file, text) in [
            ("device/model", "Example Model 1T   \n"),
            ("size", "2048\n"),
            ("queue/rotational", "0\n"),
        ] {
            fs::create_dir_all(disk.join(file).parent().unwrap()).unwrap();
            fs::write(disk.join(file), text).unwrap();
        }
        let known = Disk {
            name: "nvme0n1".into(),
            model: Some("Example Model 1T".into()),
            size_bytes: Some(1 << 20),
            rotational: Some(false),
        };
        assert_eq!(describe(&disk), Some(known));
    }

    #[test]
    fn a_path_without_a_block_device_has_no_disks() {
        assert_eq!(disks_below(Path::new("/proc")), None);
        assert_eq!(disks_below(Path::new("/does/not/exist")), None);
    }
}
