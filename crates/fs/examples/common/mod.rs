//! A new volume of one slice on a file, mounted without a daemon.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use jericho_cache::{Config, Slice};
use jericho_fs::format::format;
use jericho_fs::types::Caller;
use jericho_fs::{Fs, FsOptions};
use jericho_storage::{OpenOptions, open_device};
use jericho_volume::{FormatOptions, OpenMode, Volume};

pub const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};

/// Replaces the file at `path` by a volume, and mounts it. The cache has `frames` pages, which are written back after `dirty_age`.
pub fn mount(
    path: &Path,
    size_bytes: u64,
    (frames, dirty_age): (u32, Duration),
    commit_interval_ms: u64,
) -> (Arc<Fs>, Arc<Slice>) {
    let _ = std::fs::remove_file(path);
    let options = FormatOptions {
        size_bytes: Some(size_bytes),
        ..FormatOptions::default()
    };
    format(&[path.to_path_buf()], &options).expect("a format");
    let device = open_device(path, OpenOptions::default()).expect("a device");
    let volume = Volume::open_from_devices(vec![device], OpenMode::WRITE).expect("a volume");
    let config = Config {
        id: 0,
        frames,
        kernel_node: None,
        cpus: Vec::new(),
        dirty_age,
    };
    let slice = Slice::start(&config, volume.devices()).expect("a cache");
    let options = FsOptions {
        store_cache_bytes: 64 << 20,
        read_only: false,
        inode_cache: 10_000,
        commit_interval_ms,
    };
    let fs = Fs::open(Arc::new(volume), vec![slice.clone()], options).expect("a mount");
    (fs, slice)
}
