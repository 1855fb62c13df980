//! Slices on devices of their own, each with a store.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use jericho_cache::Slice;
use jericho_fs::check::data::check_data;
use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Ino, Kind, ROOT, SetAttr};
use jericho_fs::{File, Fs, FsOptions, Result};
use jericho_sim::{DeviceSet, SimDevice};
use jericho_storage::Device;
use jericho_volume::{FormatOptions, OpenMode, Volume};

use crate::mount::{CALLER, format_two, pattern, start_slices};

pub const MIB: u64 = 1 << 20;
pub const BYTES: usize = 3 * 4096 + 100;
pub const EIO: i32 = 5;
pub const ENODEV: i32 = 19;
pub const EROFS: i32 = 30;
pub const ENOSPC: i32 = 28;

/// Returns a volume with a store in each of two slices, which are on devices of their own.
pub fn formatted(checksums: bool) -> DeviceSet {
    formatted_with(checksums, [64 * MIB, 64 * MIB])
}

pub fn formatted_with(checksums: bool, sizes: [u64; 2]) -> DeviceSet {
    let devices = [
        SimDevice::new("one", sizes[0]).without_fua(),
        SimDevice::new("two", sizes[1]).without_fua(),
    ];
    format_two(devices, checksums)
}

pub struct Mounted {
    pub volume: Arc<Volume>,
    pub fs: Arc<Fs>,
    pub slices: Vec<Arc<Slice>>,
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.slices.iter().for_each(|slice| slice.close());
    }
}

pub fn try_mount(devices: Vec<Arc<dyn Device>>) -> Result<Mounted> {
    try_mount_with(devices, 16 << 20)
}

/// Mounts with this memory for the metadata stores.
pub fn try_mount_with(devices: Vec<Arc<dyn Device>>, store_cache_bytes: usize) -> Result<Mounted> {
    try_mount_as(devices, store_cache_bytes, OpenMode::WRITE)
}

/// Mounts for reading, with this memory for the metadata stores.
pub fn try_mount_for_reading(
    devices: Vec<Arc<dyn Device>>,
    store_cache_bytes: usize,
) -> Result<Mounted> {
    try_mount_as(devices, store_cache_bytes, OpenMode::READ)
}

fn try_mount_as(
    devices: Vec<Arc<dyn Device>>,
    store_cache_bytes: usize,
    mode: OpenMode,
) -> Result<Mounted> {
    let volume = Arc::new(Volume::open_from_devices(devices, mode).unwrap());
    let slices = start_slices(&volume, Duration::from_secs(3600));
    let options = FsOptions {
        store_cache_bytes,
        read_only: mode.read_only,
        inode_cache: 100,
        commit_interval_ms: 3_600_000,
    };
    match Fs::open(volume.clone(), slices.clone(), options) {
        Ok(fs) => Ok(Mounted { volume, fs, slices }),
        Err(error) => {
            slices.iter().for_each(|slice| slice.close());
            Err(error)
        }
    }
}

impl Mounted {
    pub fn dir(&self, name: &str) -> Ino {
        match self.fs.mkdir(ROOT, name.as_bytes(), 0o755, CALLER) {
            Ok(attr) => attr.ino,
            Err(_) => self.fs.lookup(ROOT, name.as_bytes()).unwrap().ino,
        }
    }

    pub fn create(&self, dir: Ino, name: &str) -> Result<Arc<File>> {
        let attr = self
            .fs
            .mknod(dir, name.as_bytes(), Kind::File, 0o644, 0, CALLER)?;
        self.fs.open_file(attr.ino)
    }

    pub fn write(&self, file: &Arc<File>, data: &[u8]) -> Result<()> {
        let _writing = file.writing();
        self.fs.begin_write(file, 0, data.len() as u64)?;
        let slice = &self.slices[usize::from(file.layout().home())];
        let (sender, receiver) = channel();
        let pages = data.len().div_ceil(4096) as u32;
        let intent = jericho_cache::Intent::Modify;
        slice.get(&file.object(), 0, pages, intent, move |pinned| {
            sender.send(pinned).unwrap();
        });
        let mut pinned = receiver
            .recv()
            .unwrap()
            .map_err(jericho_fs::error::of_cache)?;
        for (page, bytes) in (0..).zip(data.chunks(4096)) {
            pinned.write(page, 0, bytes).unwrap();
        }
        drop(pinned);
        self.fs.end_write(file, 0, data.len() as u64);
        Ok(())
    }

    pub fn read(&self, file: &Arc<File>) -> Result<Vec<u8>> {
        let mut data = vec![0; file.size() as usize];
        let slice = &self.slices[usize::from(file.layout().home())];
        for (page, bytes) in (0..).zip(data.chunks_mut(4096)) {
            let (sender, receiver) = channel();
            let intent = jericho_cache::Intent::Read;
            slice.get(&file.object(), page, 1, intent, move |pinned| {
                sender.send(pinned).unwrap();
            });
            receiver
                .recv()
                .unwrap()
                .map_err(jericho_fs::error::of_cache)?
                .read(page, 0, bytes)
                .unwrap();
        }
        Ok(data)
    }

    pub fn fsync(&self, file: &Arc<File>) -> Result<()> {
        let (sender, receiver) = channel();
        let done = Box::new(move |result| sender.send(result).unwrap());
        self.fs.fsync_blocking(file, false, done);
        receiver.recv().unwrap()
    }

    pub fn change_mode(&self, file: &File, perm: u16) -> Result<()> {
        let set = SetAttr {
            perm: Some(perm),
            ..SetAttr::default()
        };
        self.fs.setattr(file.ino(), set, CALLER).map(drop)
    }

    /// Commits all operations on names and attributes of the directory's slice.
    pub fn sync_dir(&self, dir: Ino) -> Result<()> {
        let (sender, receiver) = channel();
        let done = Box::new(move |result| sender.send(result).unwrap());
        self.fs.fsync_dir_blocking(dir, done);
        receiver.recv().unwrap()
    }

    /// Creates a file of `BYTES` bytes that is durable.
    pub fn synced(&self, dir: Ino, name: &str, seed: u64) -> Result<Arc<File>> {
        let file = self.create(dir, name)?;
        self.write(&file, &pattern(seed, BYTES))?;
        self.fsync(&file)?;
        Ok(file)
    }

    pub fn contents(&self, dir: Ino, name: &str) -> Result<Vec<u8>> {
        let ino = self.fs.lookup(dir, name.as_bytes())?.ino;
        let file = self.fs.open_file(ino)?;
        self.read(&file)
    }
}

/// Makes a directory with a durable file in each slice, and unmounts.
pub fn filled(checksums: bool) -> DeviceSet {
    let set = formatted(checksums);
    let mounted = try_mount(set.as_devices()).unwrap();
    for (slice, name) in ["x", "y"].iter().enumerate() {
        let dir = mounted.dir(name);
        let file = mounted.synced(dir, "old", slice as u64).unwrap();
        assert_eq!(usize::from(file.layout().home()), slice);
        assert_eq!((file.ino() >> 40) as usize, slice, "the inode's slice");
    }
    mounted.fs.close().unwrap();
    drop(mounted);
    set
}

pub fn assert_sound(set: &DeviceSet) {
    let mut report = check_devices(set.as_devices(), CheckOptions::default()).unwrap();
    check_data(&set.as_devices(), &mut report, &Arc::default()).unwrap();
    assert!(report.is_sound(), "{:#?}", report.findings);
}

#[track_caller]
pub fn fails_with<T>(errno: i32, result: Result<T>) {
    match result {
        Ok(_) => panic!("no error"),
        Err(error) => assert_eq!(error.errno(), errno, "{error}"),
    }
}

/// Returns a volume with a store in each of three slices, which are on devices of their own, and a durable file in each.
pub fn filled_three(checksums: bool) -> DeviceSet {
    let names = ["one", "two", "three"];
    let set = DeviceSet::new(names.map(|name| SimDevice::new(name, 64 * MIB).without_fua()));
    let options = FormatOptions {
        slices: Some(3),
        has_stores: Some(true),
        checksums,
        ..FormatOptions::default()
    };
    format_devices(&set.as_devices(), &names.map(PathBuf::from), &options).unwrap();
    let mounted = try_mount(set.as_devices()).unwrap();
    for (slice, name) in ["x", "y", "z"].iter().enumerate() {
        let dir = mounted.dir(name);
        mounted.synced(dir, "old", slice as u64).unwrap();
        assert_eq!((dir >> 40) as usize, slice, "the inode's slice");
    }
    mounted.fs.close().unwrap();
    drop(mounted);
    set
}
