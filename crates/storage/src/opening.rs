//! The steps of opening that both kinds of devices share: options, direct I/O, errors that tell the user what to do.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use jericho_sys::block::{self, Open};
use jericho_sys::errno;

use crate::BLOCK_BYTES;
use crate::aligned::AlignedBuffer;

/// How to open a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// Refuses writes. Nothing on the device changes.
    pub read_only: bool,
    /// Creates a missing regular file, and makes a file exactly this long (longer or shorter). New space is sparse;
    /// `Device::provision` takes it from the host. A block device keeps its size and must have at least this size.
    pub create_size: Option<u64>,
    /// With `create_size`: fails if the file exists already, and changes nothing.
    pub create_new: bool,
    /// The kernel's NUMA node of the hardware. `None`: sysfs tells.
    pub home_node: Option<u32>,
}

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is something at the path, for example a link to nowhere.
    #[error("{}: exists already; choose another path, or remove it", .path.display())]
    Exists {
        /// The given path.
        path: PathBuf,
    },
    /// There is nothing at the path.
    #[error("{}: no such file or device; check the path, or give a size to create it", .path.display())]
    Missing {
        /// The given path.
        path: PathBuf,
    },
    /// The user has no permission.
    #[error("{}: no permission to open it for {access}; check its owner and mode, or run as its owner", .path.display())]
    Denied {
        /// The given path.
        path: PathBuf,
        /// "reading" or "reading and writing".
        access: &'static str,
    },
    /// The path is neither a file nor a block device.
    #[error("{}: is a {found}; a volume lives on a regular file or a block device", .path.display())]
    Kind {
        /// The given path.
        path: PathBuf,
        /// For example "directory".
        found: &'static str,
    },
    /// The device is held exclusively: mounted, swap, part of a RAID, another volume.
    #[error("{}: is in use (mounted, or held by another program); unmount or release it first", .path.display())]
    Busy {
        /// The given path.
        path: PathBuf,
    },
    /// The device has less than one block, or less than required.
    #[error("{}: has {size_bytes} bytes where at least {required_bytes} are needed", .path.display())]
    TooSmall {
        /// The given path.
        path: PathBuf,
        /// Size of the device.
        size_bytes: u64,
        /// Required size.
        required_bytes: u64,
    },
    /// The device's sectors are larger than `BLOCK_BYTES`.
    #[error("{}: has sectors of {sector_bytes} bytes; at most {BLOCK_BYTES} are supported", .path.display())]
    Sectors {
        /// The given path.
        path: PathBuf,
        /// Size of the device's sectors.
        sector_bytes: u32,
    },
    /// The host of a remote device does not answer.
    #[error("{why}")]
    Unreachable {
        /// Names the device, and says what to do.
        why: String,
    },
    /// A remote device cannot be used.
    #[error("{why}")]
    Refused {
        /// Names the device and the cause.
        why: String,
    },
    /// Another error.
    #[error("{}: cannot {action}: {source}", .path.display())]
    Io {
        /// The given path.
        path: PathBuf,
        /// For example "open it".
        action: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
}

/// Opens with O_DIRECT if possible, else buffered. Returns whether it is direct.
pub(crate) fn open_direct(path: &Path, how: Open) -> Result<(File, bool), OpenError> {
    let direct = Open {
        direct: true,
        ..how
    };
    match block::open(path, direct).and_then(|file| probe_direct(&file).map(|()| file)) {
        Ok(file) => Ok((file, true)),
        Err(error) if error.raw_os_error() == Some(errno::EINVAL) => {
            let file = block::open(path, how).map_err(|error| failed_open(path, how, error))?;
            tracing::info!(path = %path.display(), "direct I/O is refused; using buffered I/O");
            Ok((file, false))
        }
        Err(error) => Err(failed_open(path, how, error)),
    }
}

/// Fails with EINVAL when open(2) accepts direct I/O but transfers refuse it (sectors larger than a block, some stacked
/// filesystems). Ignores other errors: the device's later users meet them.
fn probe_direct(file: &File) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let mut buffer = AlignedBuffer::new(BLOCK_BYTES as usize);
    match file.read_at(buffer.as_mut_slice(), 0) {
        Err(error) if error.raw_os_error() == Some(errno::EINVAL) => Err(error),
        _ => Ok(()),
    }
}

/// Converts the error of a failed open(2) of `path`.
pub(crate) fn failed_open(path: &Path, how: Open, source: io::Error) -> OpenError {
    let path = path.to_path_buf();
    match source.kind() {
        io::ErrorKind::NotFound => OpenError::Missing { path },
        io::ErrorKind::PermissionDenied => {
            let access = if how.write {
                "reading and writing"
            } else {
                "reading"
            };
            OpenError::Denied { path, access }
        }
        io::ErrorKind::IsADirectory => OpenError::Kind {
            path,
            found: "directory",
        },
        io::ErrorKind::ResourceBusy => OpenError::Busy { path },
        _ => OpenError::Io {
            path,
            action: "open it",
            source,
        },
    }
}

/// Returns the error for a path of the wrong kind.
pub(crate) fn wrong_kind(path: &Path, file_type: std::fs::FileType) -> OpenError {
    let found = if file_type.is_dir() {
        "directory"
    } else if file_type.is_file() {
        "regular file"
    } else if file_type.is_block_device() {
        "block device"
    } else if file_type.is_char_device() {
        "character device"
    } else if file_type.is_fifo() {
        "FIFO"
    } else {
        "special file"
    };
    OpenError::Kind {
        path: path.to_path_buf(),
        found,
    }
}

/// Turns an error of `action` on `path` into an `OpenError`.
pub(crate) fn failed(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> OpenError {
    move |source| OpenError::Io {
        path: path.to_path_buf(),
        action,
        source,
    }
}

/// Returns the usable part of `size_bytes`. Fails if it is less than `required_bytes`.
pub(crate) fn usable_size(
    path: &Path,
    size_bytes: u64,
    required_bytes: u64,
) -> Result<u64, OpenError> {
    let required_bytes = required_bytes.max(BLOCK_BYTES);
    if size_bytes < required_bytes {
        return Err(OpenError::TooSmall {
            path: path.to_path_buf(),
            size_bytes,
            required_bytes,
        });
    }
    Ok(size_bytes - size_bytes % BLOCK_BYTES)
}
