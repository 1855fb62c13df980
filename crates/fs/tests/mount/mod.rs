//! A mount of a volume on a simulated device, without a daemon: real slices, and reads and writes of their pages.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use jericho_cache::{Config, Error as CacheError, FRAMES_MIN, Intent, Slice};
use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Attr, Caller, Ino, Kind, ROOT, SetAttr};
use jericho_fs::{File, Fs, FsOptions};
use jericho_sim::{DeviceSet, SimDevice};
use jericho_storage::Device;
use jericho_volume::{FormatOptions, OpenMode, Volume};

pub const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};
pub const PAGE: u64 = 4096;
pub const SLICES: u16 = 2;
/// Age at which a busy mount writes dirty pages back.
pub const DIRTY_AGE: Duration = Duration::from_millis(1);

pub struct Mount {
    pub device: Arc<SimDevice>,
    /// A second device, on the power supply of the first one.
    pub second: Option<Arc<SimDevice>>,
    /// Whether write-back by age and commits run all the time, or only on request.
    pub busy: bool,
    pub fs: Option<Arc<Fs>>,
    pub slices: Vec<Arc<Slice>>,
}

impl Mount {
    pub fn new(device_bytes: u64) -> Mount {
        Mount::formatted(device_bytes, false)
    }

    /// Mounts a new volume that keeps checksums of the data.
    pub fn summed(device_bytes: u64) -> Mount {
        Mount::formatted(device_bytes, true)
    }

    fn formatted(device_bytes: u64, checksums: bool) -> Mount {
        let device = Arc::new(SimDevice::new("sim", device_bytes));
        let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
        let options = FormatOptions {
            slices: Some(SLICES),
            checksums,
            ..FormatOptions::default()
        };
        format_devices(&devices, &[PathBuf::from("sim")], &options).unwrap();
        let mut mount = Mount {
            device,
            second: None,
            busy: false,
            fs: None,
            slices: Vec::new(),
        };
        mount.up();
        mount
    }

    /// Mounts a new volume of two devices, each with a slice that has a metadata store.
    pub fn on_two(devices: [SimDevice; 2], checksums: bool, busy: bool) -> Mount {
        let set = format_two(devices, checksums);
        let mut mount = Mount {
            device: set.devices()[0].clone(),
            second: Some(set.devices()[1].clone()),
            busy,
            fs: None,
            slices: Vec::new(),
        };
        mount.up();
        mount
    }

    pub fn devices(&self) -> Vec<Arc<dyn Device>> {
        let all = [&self.device].into_iter().chain(&self.second);
        all.map(|device| device.clone() as _).collect()
    }

    pub fn busy(device_bytes: u64) -> Mount {
        let mut mount = Mount::new(device_bytes);
        mount.fs().close().unwrap();
        mount.down();
        mount.busy = true;
        mount.up();
        mount
    }

    pub fn up(&mut self) {
        self.up_with(OpenMode::WRITE);
    }

    pub fn up_with(&mut self, mode: OpenMode) {
        let volume = Volume::open_from_devices(self.devices(), mode).unwrap();
        let dirty_age = match self.busy {
            true => DIRTY_AGE,
            false => Duration::from_secs(3600),
        };
        self.slices = start_slices(&volume, dirty_age);
        let options = FsOptions {
            store_cache_bytes: 64 << 20,
            read_only: mode.read_only,
            inode_cache: 100,
            commit_interval_ms: if self.busy { 1 } else { 3_600_000 },
        };
        self.fs = Some(Fs::open(Arc::new(volume), self.slices.clone(), options).unwrap());
    }

    pub fn down(&mut self) {
        self.fs = None;
        for slice in self.slices.drain(..) {
            slice.close();
        }
    }

    pub fn remount(&mut self) {
        self.fs().close().unwrap();
        self.down();
        self.assert_sound();
        self.up();
    }

    pub fn power_cut(&mut self, seed: u64) {
        self.device.cut_power();
        self.down();
        self.device = Arc::new(self.device.crash(seed));
        // Loses other changes than the first one.
        let second = self.second.take();
        self.second = second.map(|device| Arc::new(device.crash(!seed)));
        self.assert_sound();
        self.up();
    }

    pub fn assert_sound(&self) {
        let report = check_devices(self.devices(), CheckOptions::default()).unwrap();
        assert!(report.is_sound(), "{:#?}", report.findings);
    }

    pub fn fs(&self) -> &Arc<Fs> {
        self.fs.as_ref().unwrap()
    }

    pub fn create(&self, name: &str) -> (Ino, Arc<File>) {
        let fs = self.fs();
        let attr = fs
            .mknod(ROOT, name.as_bytes(), Kind::File, 0o644, 0, CALLER)
            .unwrap();
        (attr.ino, fs.open_file(attr.ino).unwrap())
    }

    /// Removes a file that `create` has made, as when the kernel has forgotten it.
    pub fn remove(&self, name: &str, file: Arc<File>) {
        let ino = file.ino();
        self.fs().unlink(ROOT, name.as_bytes()).unwrap();
        self.fs().close_file(&file);
        self.fs().forget(ino, 1);
    }

    pub fn open(&self, name: &str) -> Arc<File> {
        let attr = self.fs().lookup(ROOT, name.as_bytes()).unwrap();
        self.fs().open_file(attr.ino).unwrap()
    }

    pub fn try_write(&self, file: &Arc<File>, offset: u64, data: &[u8]) -> jericho_fs::Result<()> {
        self.write_pages(file, offset, data, |at, len| {
            self.fs().end_write(file, at, len);
        })
    }

    pub fn write_pages(
        &self,
        file: &Arc<File>,
        offset: u64,
        data: &[u8],
        written: impl Fn(u64, u64),
    ) -> jericho_fs::Result<()> {
        let _writing = file.writing();
        self.fs().begin_write(file, offset, data.len() as u64)?;
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let within = (at % PAGE) as usize;
            let len = (PAGE as usize - within).min(data.len() - done);
            let slice = &self.slices[usize::from(file.layout().home())];
            let (sender, receiver) = channel();
            slice.get(
                &file.object(),
                at / PAGE,
                1,
                Intent::Modify,
                move |pinned| {
                    sender.send(pinned).unwrap();
                },
            );
            let mut pinned = receiver
                .recv()
                .unwrap()
                .map_err(jericho_fs::error::of_cache)?;
            pinned
                .write(at / PAGE, within, &data[done..done + len])
                .unwrap();
            drop(pinned);
            done += len;
            written(at, len as u64);
        }
        Ok(())
    }

    pub fn write(&self, file: &Arc<File>, offset: u64, data: &[u8]) {
        self.try_write(file, offset, data).unwrap();
    }

    pub fn read(&self, file: &Arc<File>) -> Vec<u8> {
        let mut data = vec![0; file.size() as usize];
        for (page, bytes) in data.chunks_mut(PAGE as usize).enumerate() {
            let slice = &self.slices[usize::from(file.layout().home())];
            let (sender, receiver) = channel();
            slice.get(
                &file.object(),
                page as u64,
                1,
                Intent::Read,
                move |pinned| {
                    sender.send(pinned).unwrap();
                },
            );
            receiver
                .recv()
                .unwrap()
                .unwrap()
                .read(page as u64, 0, bytes)
                .unwrap();
        }
        data
    }

    pub fn fsync(&self, file: &Arc<File>) {
        let (sender, receiver) = channel();
        self.fs().fsync_blocking(
            file,
            false,
            Box::new(move |result| sender.send(result).unwrap()),
        );
        receiver.recv().unwrap().unwrap();
    }

    /// Begins an fdatasync, as a thread of the mount does.
    pub fn begin_fdatasync(&self, file: &Arc<File>) -> Receiver<jericho_fs::Result<()>> {
        let (sender, receiver) = channel();
        let done = Box::new(move |result| sender.send(result).unwrap());
        self.fs().fsync_blocking(file, true, done);
        receiver
    }

    /// Creates a file that is durable as a whole, and whose pages are in their blocks.
    pub fn durable(&self, name: &str, len: usize) -> Arc<File> {
        let (_, file) = self.create(name);
        self.write(&file, 0, &pattern(0, len));
        self.fsync(&file);
        self.fs().checkpoint().unwrap();
        file
    }

    pub fn commit(&self) {
        commit(self.fs());
    }

    pub fn truncate(&self, file: &Arc<File>, size: u64) -> Attr {
        let set = SetAttr {
            size: Some(size),
            ..SetAttr::default()
        };
        self.fs().setattr(file.ino(), set, CALLER).unwrap()
    }

    pub fn free(&self) -> u64 {
        self.fs().statfs().unwrap().free
    }
}

/// Makes a volume of two devices, each with a slice that has a metadata store.
pub fn format_two(devices: [SimDevice; 2], checksums: bool) -> DeviceSet {
    let set = DeviceSet::new(devices);
    let options = FormatOptions {
        slices: Some(SLICES),
        has_stores: Some(true),
        checksums,
        ..FormatOptions::default()
    };
    let paths = ["one", "two"].map(PathBuf::from);
    format_devices(&set.as_devices(), &paths, &options).unwrap();
    set
}

/// Starts the smallest cache for each of the `SLICES` slices of a volume. Pages are old after `dirty_age`.
pub fn start_slices(volume: &Volume, dirty_age: Duration) -> Vec<Arc<Slice>> {
    let start = |id| {
        let config = Config {
            id,
            frames: FRAMES_MIN,
            kernel_node: None,
            cpus: Vec::new(),
            dirty_age,
        };
        Slice::start(&config, volume.device_list()).unwrap()
    };
    (0..volume.slices().len() as u16).map(start).collect()
}

pub fn commit(fs: &Fs) {
    let (sender, receiver) = channel();
    fs.fsync_dir(ROOT, Box::new(move |result| sender.send(result).unwrap()));
    receiver.recv().unwrap().unwrap();
}

/// Returns bytes that depend on their position.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|i| (i.wrapping_mul(31) ^ (i >> 8) ^ seed) as u8 | 1)
        .collect()
}

/// Writes back a file's dirty pages as the evictor does when they are old, without a sync of the file.
pub fn write_back(mount: &Mount, file: &Arc<File>) {
    let (sender, receiver) = channel();
    mount.slices[usize::from(file.layout().home())].sync(
        &file.object(),
        0..u64::MAX,
        Box::new(move |result| sender.send(result).unwrap()),
    );
    receiver.recv().unwrap().unwrap();
}

/// Reads pages of a file in one request.
pub fn read(
    mount: &Mount,
    file: &Arc<File>,
    first: u64,
    count: u32,
) -> Result<Vec<u8>, CacheError> {
    let slice = &mount.slices[usize::from(file.layout().home())];
    let (sender, receiver) = channel();
    let answer = move |pages| sender.send(pages).unwrap();
    slice.get(&file.object(), first, count, Intent::Read, answer);
    let pages = receiver.recv().unwrap()?;
    let mut bytes = vec![0; count as usize * PAGE as usize];
    for (page, bytes) in (first..).zip(bytes.chunks_mut(PAGE as usize)) {
        pages.read(page, 0, bytes).unwrap();
    }
    Ok(bytes)
}

/// Overwrites a whole page without reading it.
pub fn overwrite(mount: &Mount, file: &Arc<File>, page: u64, data: &[u8]) {
    let _writing = file.writing();
    mount.fs().begin_write(file, page * PAGE, PAGE).unwrap();
    let slice = &mount.slices[usize::from(file.layout().home())];
    let (sender, receiver) = channel();
    slice.get(&file.object(), page, 1, Intent::Overwrite, move |pages| {
        sender.send(pages).unwrap();
    });
    let mut pages = receiver.recv().unwrap().unwrap();
    pages.write(page, 0, data).unwrap();
    drop(pages);
    mount.fs().end_write(file, page * PAGE, PAGE);
}

/// Drops a file's clean pages from the cache, so that the next read fetches them.
pub fn evict(mount: &Mount, file: &Arc<File>) {
    let slice = &mount.slices[usize::from(file.layout().home())];
    let (sender, receiver) = channel();
    assert_eq!(slice.first_dirty(file.object_id(), 0), None);
    let done = move |result| sender.send(result).unwrap();
    slice.invalidate(file.object_id(), 0..u64::MAX, Box::new(done));
    receiver.recv().unwrap().unwrap();
}
