//! Formats a volume with an empty root directory.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use jericho_format::record::INODES_NAME;
use jericho_storage::Device;
use jericho_volume::{FormatOptions, OpenMode, Summary, Volume, VolumeError};

use crate::shard::ShardMap;
use crate::store::{Change, InodeRecord};
use crate::stores;
use crate::types::{Kind, ROOT};

/// Memory for the pages of the store while the root directory is made.
const STORE_CACHE_BYTES: usize = 8 << 20;

/// Formats a volume on files (created if missing) and block devices.
pub fn format(paths: &[PathBuf], options: &FormatOptions) -> Result<Summary, VolumeError> {
    jericho_volume::format(paths, options, |volume| make_root(volume, options.owner))
}

/// Formats a volume and opens it, for callers that continue with the volume.
pub fn format_and_open(paths: &[PathBuf], options: &FormatOptions) -> Result<Volume, VolumeError> {
    format(paths, options)?;
    let first = paths.first().ok_or(VolumeError::NoDevices)?;
    Volume::open(first, OpenMode::WRITE)
}

/// Formats a volume on devices that are open for writing. Stores `paths`, so that a mount finds the devices. Writes nothing
/// unless all checks pass.
pub fn format_devices(
    devices: &[Arc<dyn Device>],
    paths: &[PathBuf],
    options: &FormatOptions,
) -> Result<Summary, VolumeError> {
    let make = |volume: &Volume| make_root(volume, options.owner);
    jericho_volume::format_devices(devices, paths, options, make)
}

/// Makes the metadata stores of a new volume, with the root directory.
fn make_root(volume: &Volume, owner: (u32, u32)) -> Result<(), VolumeError> {
    let (stores, _allocator) = stores::create(volume, STORE_CACHE_BYTES)?;
    let root_store = &stores[ShardMap::new(stores.len()).of_ino(ROOT).index()];
    root_store.commit(&[
        Change::PutInode(ROOT, root(owner)),
        Change::PutValue(INODES_NAME, 1),
    ])?;
    for store in stores {
        store.close()?;
    }
    Ok(())
}

/// Returns the record of an empty root directory.
pub fn root(owner: (u32, u32)) -> InodeRecord {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_nanos() as i128;
    InodeRecord {
        kind: Kind::Directory,
        perm: 0o755,
        nlink: 2,
        uid: owner.0,
        gid: owner.1,
        rdev: 0,
        generation: 0,
        size: 0,
        atime_ns: now,
        mtime_ns: now,
        ctime_ns: now,
        btime_ns: now,
        slice: None,
        placement: None,
        threads: Default::default(),
        parent: ROOT,
        blocks: 0,
        target: None,
    }
}
