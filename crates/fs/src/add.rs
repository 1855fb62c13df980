//! Adds a device with new slices to a volume that no process uses.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use jericho_storage::Device;
use jericho_volume::{AddError, FormatOptions, Summary, Volume, VolumeError};

use crate::metadata;

/// Memory for the pages of a new store.
const STORE_CACHE_BYTES: usize = 8 << 20;

/// Adds a file (created if missing) or a block device. See `jericho_volume::add`.
pub fn add(volume: Volume, path: &Path, options: &FormatOptions) -> Result<Summary, AddError> {
    jericho_volume::add(volume, path, options, make_stores)
}

/// Adds a device that is open for writing, and whatever it holds is lost. See `jericho_volume::add_device`.
pub fn add_device(
    volume: Volume,
    device: Arc<dyn Device>,
    path: &Path,
    slices: usize,
) -> Result<Summary, AddError> {
    jericho_volume::add_device(volume, device, path, slices, make_stores)
}

fn make_stores(volume: &Volume, stores: Range<usize>) -> Result<(), VolumeError> {
    Ok(metadata::create_added(volume, STORE_CACHE_BYTES, stores)?)
}
