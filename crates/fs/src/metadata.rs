//! Opens the metadata store and the allocator of a volume.

use std::sync::Arc;

use jericho_volume::superblocks::{ReadError, Superblocks};
use jericho_volume::{DeviceOverlay, Volume};

use crate::alloc::Allocator;
use crate::error::{Error, Result};
use crate::store::region::Region;
use crate::store::{Store, StoreOptions, StoreRef};

/// Opens the metadata store, with `cache_bytes` of memory, and the allocator over it.
pub fn open(volume: &Volume, cache_bytes: usize) -> Result<(StoreRef, Arc<Allocator>)> {
    let store = open_store_only(volume, cache_bytes)?;
    let allocator = Allocator::of_volume(&store, volume)?;
    Ok((store, allocator))
}

/// Opens the store without an allocator, for callers that cannot trust the bitmaps. The metadata region then grows only into its
/// spare chunks.
pub(crate) fn open_store_only(volume: &Volume, cache_bytes: usize) -> Result<StoreRef> {
    let region = if volume.read_only() {
        // redb writes when it is opened, and more so after a crash. The overlay keeps these writes in memory.
        let views: Vec<_> = volume
            .devices()
            .iter()
            .map(|d| DeviceOverlay::over(d.clone()))
            .collect();
        let superblocks = Superblocks::read(views[0].clone()).map_err(|e| match e {
            ReadError::Io(error) => Error::Io(error),
            error => Error::Damaged(error.to_string()),
        })?;
        Region::new(views, Arc::new(superblocks))
    } else {
        let region = Region::new(volume.devices().to_vec(), volume.superblocks().clone());
        if let Err(error) = region.provision_all() {
            tracing::warn!("cannot allocate space for the metadata on the host: {error}");
        }
        region
    };
    let container_blocks = volume.superblocks().with(|s| s.head.container_blocks.get());
    let options = StoreOptions {
        cache_bytes,
        container_blocks,
    };
    Ok(Arc::new(Store::open(region, options, !volume.read_only())?))
}

#[cfg(test)]
pub(crate) mod tests;
