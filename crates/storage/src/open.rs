//! Opens a device by its path or name.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use crate::Device;
use crate::opening::{OpenError, OpenOptions};
use crate::schemes;

/// Opens the regular file or block device at `path`, or the device of another host with this name. Follows symbolic links.
pub fn open_device(path: &Path, options: OpenOptions) -> Result<Arc<dyn Device>, OpenError> {
    let device = match std::fs::metadata(path) {
        _ if schemes::is_remote(path) => schemes::open(path, options),
        Ok(metadata) if metadata.file_type().is_block_device() => crate::block::open(path, options),
        // Also for missing paths and other kinds: `file::open` creates the file or returns the error.
        _ => crate::file::open(path, options),
    };
    #[cfg(feature = "faults")]
    let device = device
        .map(crate::volatile::with_volatile_writes)
        .map(crate::faults::with_faults);
    device
}
