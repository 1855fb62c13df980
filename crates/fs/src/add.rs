//! Adds a device with new slices to a volume. The volume may be mounted: `Fs::take` then takes the new slices into use.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use jericho_metadata::errno::EROFS;
use jericho_metadata::stores;
use jericho_storage::Device;
use jericho_volume::{AddError, Added, FormatOptions, Volume, VolumeError, VolumeLock};

use crate::error::Error;
use crate::fs::Fs;

/// Memory for the pages of a new store.
const STORE_CACHE_BYTES: usize = 8 << 20;

/// Adds a file (created if missing) or a block device. See `jericho_volume::add`.
pub fn add(
    volume: &Volume,
    path: &Path,
    options: &FormatOptions,
) -> Result<(Added, VolumeLock), AddError> {
    jericho_volume::add(volume, path, options, make_stores)
}

/// Adds a device that is open for writing, and whatever it holds is lost. See `jericho_volume::add_device`.
pub fn add_device(
    volume: &Volume,
    device: Arc<dyn Device>,
    path: &Path,
    slices: usize,
) -> Result<Added, AddError> {
    jericho_volume::add_device(volume, device, path, slices, make_stores)
}

impl Fs {
    /// Adds a file (created if missing) or a block device to the mounted volume. `Fs::take` takes it into use. See `jericho_volume::add`.
    pub fn add(
        &self,
        path: &Path,
        options: &FormatOptions,
    ) -> Result<(Added, VolumeLock), AddError> {
        self.core.may_change().map_err(|error| match error {
            Error::Errno(errno) if EROFS.errno() == errno => AddError::ReadOnly,
            error => AddError::Failed(error.to_string()),
        })?;
        add(&self.core.volume, path, options)
    }
}

fn make_stores(volume: &Volume, stores: Range<usize>) -> Result<(), VolumeError> {
    Ok(stores::create_added(volume, STORE_CACHE_BYTES, stores)?)
}
