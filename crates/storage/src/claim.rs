//! Holds a file or block device against all other processes on this machine.
//!
//! A device can be reached under several names: a loop device is another name for a file, a partition for a part of its
//! disk. So a claim consists of two things that the kernel tracks for the whole machine, independent of name, mount
//! namespace and container:
//!
//! - a lock on a range of bytes (F_OFD_SETLK) of the named inode, and of each file found below it: through partitions,
//!   loop devices (also stacked ones) and the slaves of stacked devices, as reported by sysfs and LOOP_GET_STATUS64;
//! - O_EXCL on block devices. A writer's open device holds it (module `block`). This module holds it for block devices below
//!   a loop device, because the loop device does not do so. A reader only checks that no process holds it, because two
//!   readers could not hold it at once.
//!
//! The order of locking does not matter, because no lock waits.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use jericho_sys::block::{self, Open};
use jericho_sys::errno;

use crate::opening::{self, OpenError};

/// Which other processes may use the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Other readers may use it.
    Shared,
    /// No other process may use it.
    Exclusive,
}

/// A held device. Dropping it releases the device.
#[derive(Debug)]
pub struct Claim {
    /// Closing these files ends their locks.
    held: Vec<File>,
}

/// Why a device could not be claimed.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Another process holds the device, under this or another name.
    #[error("{} is in use by {}", .path.display(), process(*.pid))]
    Held {
        /// The held file or device: the given path, or one below it.
        path: PathBuf,
        /// The process that holds it, if visible.
        pid: Option<u32>,
    },
    /// The device cannot be opened. `OpenError::Busy` when the kernel reports that it is held (mounted, swap, part of
    /// a stacked device).
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The backing file of a loop device cannot be opened here.
    #[error(
        "{} is backed by {}, which cannot be opened here ({why}); another use of that file would not be detected",
        .path.display(), .below.display()
    )]
    Hidden {
        /// The device.
        path: PathBuf,
        /// The file's path as the kernel reports it.
        below: PathBuf,
        /// The cause.
        why: String,
    },
    /// Another error.
    #[error("cannot lock {}: {cause}", .path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The cause.
        cause: io::Error,
    },
}

/// Returns "process 7", or a text for an invisible process.
fn process(pid: Option<u32>) -> String {
    pid.map_or("a process that cannot be seen from here".into(), |pid| {
        format!("process {pid}")
    })
}

/// Time after which a reader that finds a device held reports it as busy. Before that it checks again, because the holder may be
/// another reader that is checking the device.
const PROBE: Duration = Duration::from_secs(2);
/// Maximum number of devices stacked on each other; the kernel allows fewer.
const DEPTH_MAX: usize = 32;

impl Claim {
    /// Claims the device at `path` and everything below it. With `despite_hidden`, skips files below it that cannot be
    /// opened.
    pub fn take(path: &Path, access: Access, despite_hidden: bool) -> Result<Claim, ClaimError> {
        let metadata = std::fs::metadata(path).map_err(|cause| ClaimError::Io {
            path: path.into(),
            cause,
        })?;
        let mut claim = Claim { held: vec![] };
        claim.lock(path, &metadata, access, 0, 0)?;
        if metadata.file_type().is_block_device() {
            if access == Access::Shared {
                ask_holder(path)?;
            }
            claim.below(
                path,
                metadata.rdev(),
                None,
                access,
                despite_hidden,
                DEPTH_MAX,
            )?;
        }
        Ok(claim)
    }

    /// Locks the inode at `path`, which must be the one that `expected` describes.
    fn lock(
        &mut self,
        path: &Path,
        expected: &Metadata,
        access: Access,
        start_bytes: u64,
        length_bytes: u64,
    ) -> Result<(), ClaimError> {
        let io = |cause: io::Error| ClaimError::Io {
            path: path.into(),
            cause,
        };
        let exclusive = access == Access::Exclusive;
        let how = Open {
            write: exclusive,
            ..Open::default()
        };
        let file = block::open(path, how).map_err(|e| opening::failed_open(path, how, e))?;
        let metadata = file.metadata().map_err(io)?;
        if identity(&metadata) != identity(expected) {
            return Err(io(io::Error::other(
                "the file was replaced while it was being opened",
            )));
        }
        match block::lock_range(&file, exclusive, start_bytes, length_bytes) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(errno::EAGAIN) => {
                return Err(ClaimError::Held {
                    path: path.into(),
                    pid: lock_holder(identity(expected)),
                });
            }
            Err(error) => return Err(io(error)),
        }
        self.held.push(file);
        Ok(())
    }

    /// Claims the devices and files below block device number `rdev`. Only `range` (start and length in bytes) of the
    /// device is used.
    fn below(
        &mut self,
        shown: &Path,
        rdev: u64,
        range: Option<(u64, u64)>,
        access: Access,
        despite_hidden: bool,
        depth: usize,
    ) -> Result<(), ClaimError> {
        let (major, minor) = block::device_parts(rdev);
        let sysfs = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        let Ok(sysfs) = std::fs::canonicalize(sysfs) else {
            return Ok(()); // Without sysfs, the devices below are unknown.
        };
        let Some(depth) = depth.checked_sub(1) else {
            return Err(ClaimError::Io {
                path: shown.into(),
                cause: io::Error::other("the devices are stacked too deeply"),
            });
        };
        let (start, length) = match range {
            Some(range) => range,
            None => (0, sectors(&sysfs, "size").unwrap_or(0)),
        };
        if let Some(first) = sectors(&sysfs, "start").filter(|_| sysfs.join("partition").exists()) {
            let Some(disk) = sysfs.parent().and_then(number) else {
                return Ok(());
            };
            let range = Some((first.saturating_add(start), length));
            return self.below(shown, disk, range, access, despite_hidden, depth);
        }
        if let Ok(text) = std::fs::read(sysfs.join("loop/backing_file")) {
            let below = path_from_line(&text);
            let found = find_backing(&sysfs, rdev, &below);
            let (path, metadata, offset_bytes) = match found {
                Ok(found) => found,
                Err(_) if despite_hidden => return Ok(()),
                Err(error) => {
                    return Err(ClaimError::Hidden {
                        path: shown.into(),
                        below,
                        why: error.to_string(),
                    });
                }
            };
            let start = start.saturating_add(offset_bytes);
            if metadata.file_type().is_block_device() {
                self.hold_device(&path, &metadata, access)?;
                let range = Some((start, length));
                return self.below(&path, metadata.rdev(), range, access, despite_hidden, depth);
            }
            return match self.lock(&path, &metadata, access, start, length) {
                Err(error @ (ClaimError::Io { .. } | ClaimError::Open(_))) if !despite_hidden => {
                    Err(ClaimError::Hidden {
                        path: shown.into(),
                        below: path,
                        why: error.to_string(),
                    })
                }
                Err(ClaimError::Io { .. } | ClaimError::Open(_)) => Ok(()),
                other => other,
            };
        }
        // A stacked device holds its slaves with O_EXCL. But a slave may be a loop device, whose file no process holds. Claims
        // all of each slave, because the used part is unknown.
        for slave in std::fs::read_dir(sysfs.join("slaves"))
            .into_iter()
            .flatten()
        {
            let slave = slave
                .ok()
                .and_then(|s| std::fs::canonicalize(s.path()).ok());
            if let Some(slave) = slave.as_deref().and_then(number) {
                self.below(shown, slave, None, access, despite_hidden, depth)?;
            }
        }
        Ok(())
    }

    /// Holds a block device below a loop device.
    fn hold_device(
        &mut self,
        path: &Path,
        metadata: &Metadata,
        access: Access,
    ) -> Result<(), ClaimError> {
        self.lock(path, metadata, access, 0, 0)?;
        match access {
            Access::Shared => ask_holder(path),
            Access::Exclusive => {
                self.held.push(open_exclusively(path, true)?);
                Ok(())
            }
        }
    }
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

fn open_exclusively(path: &Path, write: bool) -> Result<File, ClaimError> {
    let how = Open {
        write,
        exclusive: true,
        ..Open::default()
    };
    block::open(path, how).map_err(|error| opening::failed_open(path, how, error).into())
}

/// Fails with `OpenError::Busy` when a writer holds a block device.
fn ask_holder(path: &Path) -> Result<(), ClaimError> {
    let deadline = Instant::now() + PROBE;
    loop {
        match open_exclusively(path, false) {
            // Another reader may be checking at this moment.
            Err(ClaimError::Open(OpenError::Busy { .. })) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other.map(drop),
        }
    }
}

/// Reads a sysfs file that counts sectors of 512 bytes. Returns bytes.
fn sectors(sysfs: &Path, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(sysfs.join(name)).ok()?;
    text.trim().parse::<u64>().ok()?.checked_mul(512)
}

/// Reads the device number from a device's sysfs directory.
fn number(sysfs: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(sysfs.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(jericho_sys::files::device(
        major.parse().ok()?,
        minor.parse().ok()?,
    ))
}

fn path_from_line(text: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    PathBuf::from(std::ffi::OsStr::from_bytes(text))
}

/// Returns the backing file of a loop device, if it can be opened here, and the device's offset in it. The path from
/// sysfs may belong to another mount namespace, so the inode is compared.
fn find_backing(sysfs: &Path, rdev: u64, named: &Path) -> io::Result<(PathBuf, Metadata, u64)> {
    let node = node_of(sysfs, rdev)
        .ok_or_else(|| io::Error::other("the loop device has no node below /dev"))?;
    let backing = block::loop_backing(block::open(&node, Open::default())?)?;
    let is_it = |path: &PathBuf| {
        let metadata = std::fs::metadata(path).ok()?;
        (identity(&metadata) == (backing.device, backing.inode)).then_some(metadata)
    };
    let mut candidates = std::iter::once(named.to_owned()).chain(elsewhere(named));
    candidates
        .find_map(|path| is_it(&path).map(|metadata| (path, metadata, backing.offset_bytes)))
        .ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Returns the node of a device below /dev.
fn node_of(sysfs: &Path, rdev: u64) -> Option<PathBuf> {
    let (major, minor) = block::device_parts(rdev);
    let event = std::fs::read_to_string(sysfs.join("uevent")).unwrap_or_default();
    let name = event.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    let by_name = name.map(|name| Path::new("/dev").join(name));
    let by_number = PathBuf::from(format!("/dev/block/{major}:{minor}"));
    by_name.into_iter().chain([by_number]).find(|path| {
        std::fs::metadata(path).is_ok_and(|m| m.file_type().is_block_device() && m.rdev() == rdev)
    })
}

/// Returns the paths at which this mount namespace may have a file that another mount namespace has at `named`. Each path is a
/// mount point and a suffix of `named`. For each mount point, the first suffix has all components of `named`, and each further
/// suffix has one fewer.
fn elsewhere(named: &Path) -> impl Iterator<Item = PathBuf> {
    let mounts = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let dirs: Vec<PathBuf> = mounts
        .split(|byte| *byte == b'\n')
        .filter_map(|line| line.split(|byte| *byte == b' ').nth(4))
        .map(path_from_line)
        .collect();
    let parts: Vec<_> = named
        .components()
        .skip(1)
        .map(|c| c.as_os_str().to_owned())
        .collect();
    let suffixes: Vec<PathBuf> = (0..parts.len())
        .map(|first| parts[first..].iter().collect())
        .collect();
    dirs.into_iter().flat_map(move |dir| {
        let joined: Vec<PathBuf> = suffixes.iter().map(|suffix| dir.join(suffix)).collect();
        joined
    })
}

/// Returns a process that holds an F_OFD_SETLK lock on an inode. Searches /proc/PID/fdinfo, because /proc/locks names no process
/// for a lock that belongs to an open file description.
fn lock_holder(inode: (u64, u64)) -> Option<u32> {
    let holds = |process: &Path| {
        let descriptors = std::fs::read_dir(process.join("fd")).into_iter().flatten();
        descriptors.flatten().any(|descriptor| {
            std::fs::metadata(descriptor.path()).is_ok_and(|m| identity(&m) == inode)
                && std::fs::read_to_string(process.join("fdinfo").join(descriptor.file_name()))
                    .is_ok_and(|text| text.contains("OFDLCK"))
        })
    };
    std::fs::read_dir("/proc")
        .ok()?
        .flatten()
        .filter_map(|process| {
            let pid = process.file_name().to_str()?.parse().ok()?;
            Some((pid, process.path()))
        })
        .find_map(|(pid, path): (u32, PathBuf)| holds(&path).then_some(pid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_share_a_file_and_a_writer_is_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("volume");
        std::fs::write(&path, [0; 4096]).unwrap();
        let me = Some(std::process::id());
        let take = |access| Claim::take(&path, access, false);
        let reader = take(Access::Shared).unwrap();
        let another = take(Access::Shared).unwrap();
        let held = |result| matches!(result, Err(ClaimError::Held { pid, .. }) if pid == me);
        assert!(held(take(Access::Exclusive)));
        drop((reader, another));
        let writer = take(Access::Exclusive).unwrap();
        assert!(held(take(Access::Shared)) && held(take(Access::Exclusive)));
        drop(writer);
        take(Access::Shared).unwrap();
    }

    #[test]
    fn another_name_of_a_file_is_the_same_file() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("volume"), dir.path().join("link"));
        std::fs::write(&path, [0; 4096]).unwrap();
        std::fs::hard_link(&path, &link).unwrap();
        let _writer = Claim::take(&path, Access::Exclusive, false).unwrap();
        let refused = Claim::take(&link, Access::Shared, false);
        assert!(matches!(refused, Err(ClaimError::Held { .. })));
    }
}
