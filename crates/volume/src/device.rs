//! Opens one device of a volume by its path or name.

use std::path::Path;
use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_storage::{Device, OpenError, OpenOptions, is_remote, open_device};

use crate::error::VolumeError;

/// Mode in which a volume is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenMode {
    /// Prevents all writes to the devices.
    pub read_only: bool,
    /// Opens the volume even if another machine has not unmounted it, or if the file of a loop device cannot be locked (a
    /// second use of that file is then not detected).
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

/// Refuses a path that cannot hold a volume. The error names the kind of file at the path.
pub(crate) fn inspect(path: &Path) -> Result<std::fs::Metadata, VolumeError> {
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

pub(crate) fn open_path(path: &Path, mode: OpenMode) -> Result<Arc<dyn Device>, VolumeError> {
    let options = OpenOptions {
        read_only: mode.read_only,
        ..OpenOptions::default()
    };
    if is_remote(path) {
        return open_with(path, options);
    }
    let metadata = inspect(path)?;
    // Root could write to the file, but its permissions say that it must not change.
    if !mode.read_only && metadata.is_file() && metadata.permissions().readonly() {
        return Err(VolumeError::ReadOnly(path.into()));
    }
    if metadata.is_file() && metadata.len() < PAGE_BYTES {
        return Err(VolumeError::NotAVolume(path.to_string_lossy().into()));
    }
    open_with(path, options)
}

pub(crate) fn open_with(path: &Path, options: OpenOptions) -> Result<Arc<dyn Device>, VolumeError> {
    open_device(path, options).map_err(|error| match error {
        OpenError::Unreachable { .. } => VolumeError::Unreachable(error.to_string()),
        OpenError::Refused { .. } => VolumeError::Refused(error.to_string()),
        error => VolumeError::Open(error.to_string()),
    })
}
