//! Requests to add a device to the mounted volume.
//!
//! A path can be longer than the name of an attribute, and setting an attribute returns only an errno. So the request is the value of an
//! attribute that is set, and its result is the value of another one, whose name has a number that the caller chose.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use jericho_daemon::{AddError, Added, Addition, FormatOptions, Mounted, is_remote};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// Adds a device. Set to an [`AddRequest`] as JSON.
pub const ADD: &str = "jericho.add";
/// The prefix of the result's name.
const ADDED: &str = "jericho.added+";
/// Results that wait for their callers. A caller that was killed never asks for its own.
const RESULTS_MAX: usize = 8;

/// Why a path is refused that means something else to the daemon.
const ELSEWHERE: &str = "the daemon of the volume finds another file there, because it runs in another mount namespace; run this \
                         command where the volume was mounted";

/// A request to add a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddRequest {
    /// A random number.
    pub number: u64,
    /// The absolute path of the file or block device.
    pub path: Vec<u8>,
    /// The size of a new file.
    pub size_bytes: Option<u64>,
    /// Number of new slices.
    pub slices: u16,
    /// Overwrites what the device holds.
    pub force: bool,
    /// What the caller finds at the path.
    pub seen: Option<Seen>,
}

/// What a process finds at a path. A process in another mount namespace may find something else there, which must not be overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// There is nothing at the path. The other fields describe its directory then.
    pub is_new: bool,
    /// Number of a block device, or of the filesystem that has the file.
    pub device: u64,
    /// Number of the file; 0: a block device.
    pub inode: u64,
}

impl Seen {
    /// Returns what is at a path, or `None` if it has no directory.
    pub fn at(path: &Path) -> Option<Seen> {
        let (is_new, metadata) = match std::fs::metadata(path) {
            Ok(metadata) => (false, metadata),
            Err(_) => (true, std::fs::metadata(path.parent()?).ok()?),
        };
        let (device, inode) = match metadata.file_type().is_block_device() {
            true => (metadata.rdev(), 0),
            false => (metadata.dev(), metadata.ino()),
        };
        Some(Seen {
            is_new,
            device,
            inode,
        })
    }
}

/// The result of `jericho add` on a mounted volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Add {
    /// Number of the first new slice.
    pub first_slice: usize,
    /// The new device, as name and bytes.
    pub devices: Vec<(String, u64)>,
    /// The new slices, as home node, index of the device and capacity in bytes.
    pub slices: Vec<(Option<u32>, u16, u64)>,
    /// Why the device was not added.
    pub error: Option<String>,
    /// Why the mount does not use the new slices; the next one does.
    #[serde(default)]
    pub unused: Option<String>,
}

impl Add {
    /// Describes an addition, or why it failed.
    pub fn of(result: Result<Added, AddError>) -> Add {
        match result {
            Ok(added) => Add {
                first_slice: added.first_slice,
                devices: (added.summary.devices.into_iter())
                    .map(|(name, bytes)| (name.to_string(), bytes))
                    .collect(),
                slices: added.summary.slices,
                ..Add::default()
            },
            Err(error) => Add {
                error: Some(error.to_string()),
                ..Add::default()
            },
        }
    }

    /// Describes an addition to a mounted volume, or why it failed.
    fn of_mounted(result: Result<Addition, AddError>) -> Add {
        let (added, unused) = match result {
            Ok(addition) => (Ok(addition.added), addition.unused),
            Err(error) => (Err(error), None),
        };
        Add {
            unused,
            ..Add::of(added)
        }
    }
}

/// Returns the name of the attribute with the result of a request.
pub fn added_name(number: u64) -> String {
    format!("{ADDED}{number}")
}

/// The results of additions.
#[derive(Default)]
pub(crate) struct Additions(Mutex<VecDeque<(u64, Add)>>);

impl Additions {
    /// Parses a request. Fails with EINVAL for any other value.
    pub fn parse(value: &[u8]) -> Result<AddRequest, i32> {
        let request: Result<AddRequest, _> = serde_json::from_slice(value);
        let is_whole = |request: &AddRequest| {
            let path = Path::new(OsStr::from_bytes(&request.path));
            path.is_absolute() || is_remote(path)
        };
        request.ok().filter(is_whole).ok_or(libc::EINVAL)
    }

    /// Adds a device, and keeps the result for the caller.
    pub fn run(&self, mounted: &Mounted, request: &AddRequest) {
        let options = FormatOptions {
            size_bytes: request.size_bytes,
            slices: Some(request.slices),
            force: request.force,
            ..FormatOptions::default()
        };
        let path = Path::new(OsStr::from_bytes(&request.path));
        let added = match Seen::at(path) == request.seen {
            true => Add::of_mounted(mounted.add(path, &options)),
            false => Add {
                error: Some(ELSEWHERE.into()),
                ..Add::default()
            },
        };
        if let Some(error) = &added.error {
            tracing::warn!(%error, "a device could not be added");
        }
        let mut results = self.0.lock();
        results.push_back((request.number, added));
        while results.len() > RESULTS_MAX {
            results.pop_front();
        }
    }

    /// Returns the result of an attribute's name, if it has one.
    pub fn result(&self, name: &str) -> Option<Add> {
        let number: u64 = name.strip_prefix(ADDED)?.parse().ok()?;
        let results = self.0.lock();
        let own = results.iter().find(|(of, _)| *of == number)?;
        Some(own.1.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_leads_to_another_file_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        let new = Seen::at(&one).unwrap();
        assert!(new.is_new && Seen::at(&two) == Some(new));
        std::fs::write(&one, "1").unwrap();
        std::fs::write(&two, "2").unwrap();
        let seen = Seen::at(&one).unwrap();
        assert!(!seen.is_new && seen != new && Seen::at(&two) != Some(seen));
        std::fs::write(&one, "more").unwrap();
        assert_eq!(Seen::at(&one), Some(seen));
        assert_eq!(
            Seen::at(&one.join("below")),
            Some(Seen {
                is_new: true,
                ..seen
            })
        );
        assert_eq!(Seen::at(Path::new("/nowhere/file")), None);
    }

    #[test]
    fn a_request_has_an_absolute_path() {
        let request = AddRequest {
            number: u64::MAX,
            path: b"/a/\xff".to_vec(),
            size_bytes: Some(1 << 40),
            slices: 2,
            force: true,
            seen: Seen::at(Path::new("/")),
        };
        let json = serde_json::to_vec(&request).unwrap();
        assert_eq!(Additions::parse(&json), Ok(request.clone()));
        let relative = AddRequest {
            path: b"a".to_vec(),
            ..request
        };
        let json = serde_json::to_vec(&relative).unwrap();
        assert_eq!(Additions::parse(&json), Err(libc::EINVAL));
        assert_eq!(Additions::parse(b"{}"), Err(libc::EINVAL));
        assert!(Additions::default().result("jericho.added+1").is_none());
    }
}
