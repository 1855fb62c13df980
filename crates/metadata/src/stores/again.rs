//! Opens a store of a volume again that is mounted for reading.

use jericho_volume::Volume;

use super::{STORE_CACHE_BYTES_MIN, journal_of, open_redb};
use crate::error::Result;
use crate::store::Store;

/// Opens a store again on a volume that is open for reading, as the mount did: over a view of the devices, so nothing is written to them. `before` is the store that
/// could not be read because a host was away. The new one shows the same state. Fails if the bytes of the store have changed since.
pub fn open_again(
    volume: &Volume,
    cache_bytes: usize,
    store: usize,
    before: &Store,
) -> Result<Store> {
    let cache_bytes = cache_bytes.max(STORE_CACHE_BYTES_MIN);
    let opened = open_redb(volume, volume.devices(), cache_bytes, store)?;
    opened.recover_as(before, journal_of(volume, volume.devices(), store))?;
    Ok(opened)
}
