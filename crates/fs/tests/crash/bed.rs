//! A volume on two simulated devices, and the operations of a sequence on it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use jericho_cache::{Config, FRAMES_MIN, Intent, PagePlace, Slice};
use jericho_format::sums::checksum;
use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, Done, Ino, Kind, ROOT, SetAttr};
use jericho_fs::{File, Fs, FsOptions};
use jericho_sim::{DeviceSet, SimDevice};
use jericho_storage::Device;
use jericho_volume::{FormatOptions, OpenMode, Volume};

use crate::history::{Found, History, Names};
use crate::steps::{Base, Op, Sequence, Step};

const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};
const PAGE: usize = 4096;
const SLICES: u16 = 2;
/// The directories, one in each slice.
const DIRS: [&str; 2] = ["x", "y"];
/// Sizes of the two files that are durable before a sequence.
const SIZES: [usize; 2] = [3 * PAGE + 100, 5000];
/// Pages that each slice of a full volume has room for.
const ROOM: u64 = 30;
/// The file in the root that fills a full volume.
const FILLER: &str = "filler";
const ENOSPC: i32 = 28;
/// Modes of fallocate(2), both with FALLOC_FL_KEEP_SIZE.
const PUNCH: i32 = 3;
const ZERO: i32 = 0x11;
/// Pages of a file that a batch takes in a sequence with short steps: fewer than the files have.
const STEP_PAGES: u64 = 2;
/// Bytes by which a file grows after the recovery.
const GROWTH: u64 = 9000;

/// Returns bytes that depend on their position and on the write they belong to. None is 0.
fn pattern(write: usize, bytes: Range<usize>) -> Vec<u8> {
    bytes
        .map(|at| 1 + ((write * 37 + at * 7 + at / 512 * 31) % 200) as u8)
        .collect()
}

/// A mounted volume, with caches if its files are to be read and written.
struct Mount {
    fs: Arc<Fs>,
    /// Dropped after the filesystem.
    slices: Slices,
}

struct Slices(Vec<Arc<Slice>>);

impl Drop for Slices {
    fn drop(&mut self) {
        self.0.iter().for_each(|slice| slice.close());
    }
}

fn open(set: &DeviceSet, slices: impl FnOnce(&Volume) -> Vec<Arc<Slice>>) -> Result<Mount, String> {
    let volume = Volume::open_from_devices(set.as_devices(), OpenMode::WRITE)
        .map_err(|error| error.to_string())?;
    let slices = Slices(slices(&volume));
    let options = FsOptions {
        store_cache_bytes: 1 << 20,
        read_only: false,
        inode_cache: 100,
        // Commits only where a step asks for one.
        commit_interval_ms: 3_600_000,
    };
    let fs = Fs::open(Arc::new(volume), slices.0.clone(), options);
    let fs = fs.map_err(|error| error.to_string())?;
    Ok(Mount { fs, slices })
}

/// Mounts without caches: enough to see names, and to find pages on the devices.
fn open_to_look(set: &DeviceSet) -> Result<Mount, String> {
    open(set, |_| Vec::new())
}

fn open_to_work(set: &DeviceSet) -> Result<Mount, String> {
    open(set, |volume| {
        let start = |id| {
            let config = Config {
                id,
                frames: FRAMES_MIN,
                kernel_node: None,
                cpus: Vec::new(),
                dirty_age: Duration::from_secs(3600),
            };
            Slice::start(&config, volume.devices()).unwrap()
        };
        (0..SLICES).map(start).collect()
    })
}

impl Mount {
    /// Waits for an operation that reports its end.
    fn wait(start: impl FnOnce(Done)) {
        let (sender, receiver) = channel();
        start(Box::new(move |result| sender.send(result).unwrap()));
        receiver.recv().unwrap().unwrap();
    }

    fn slice_of(&self, file: &File) -> &Arc<Slice> {
        &self.slices.0[usize::from(file.layout().home())]
    }

    /// Writes bytes. Returns false, without an effect, if the volume has no room for them.
    fn write(&self, file: &Arc<File>, offset: usize, data: &[u8]) -> bool {
        let _writing = file.writing();
        let (start, len) = (offset as u64, data.len() as u64);
        if !has_room(self.fs.begin_write(file, start, len)) {
            return false;
        }
        let mut done = 0;
        while done < data.len() {
            let (page, within) = ((offset + done) / PAGE, (offset + done) % PAGE);
            let len = (PAGE - within).min(data.len() - done);
            let (sender, receiver) = channel();
            let answer = move |pages| sender.send(pages).unwrap();
            let page = page as u64;
            self.slice_of(file)
                .get(&file.object(), page, 1, Intent::Modify, answer);
            let mut pages = receiver.recv().unwrap().unwrap();
            pages.write(page, within, &data[done..done + len]).unwrap();
            drop(pages);
            self.fs.end_write(file, (offset + done) as u64, len as u64);
            done += len;
        }
        true
    }

    fn read(&self, file: &Arc<File>) -> Vec<u8> {
        let mut data = vec![0; file.size() as usize];
        for (page, bytes) in (0..).zip(data.chunks_mut(PAGE)) {
            let (sender, receiver) = channel();
            let answer = move |pages| sender.send(pages).unwrap();
            self.slice_of(file)
                .get(&file.object(), page, 1, Intent::Read, answer);
            let pages = receiver.recv().unwrap().unwrap();
            pages.read(page, 0, bytes).unwrap();
        }
        data
    }

    fn dir(&self, index: usize) -> Ino {
        let found = self.fs.lookup(ROOT, DIRS[index].as_bytes()).unwrap();
        self.fs.forget(found.ino, 1);
        found.ino
    }

    fn create(&self, path: &str) -> Arc<File> {
        let (dir, name) = self.split(path);
        let attr = self.fs.mknod(dir, name, Kind::File, 0o644, 0, CALLER);
        let file = self.fs.open_file(attr.unwrap().ino).unwrap();
        self.fs.forget(file.ino(), 1);
        file
    }

    /// Returns the directory and the name of a path.
    fn split<'p>(&self, path: &'p str) -> (Ino, &'p [u8]) {
        let (dir, name) = path.split_once('/').unwrap();
        let index = DIRS.iter().position(|other| *other == dir).unwrap();
        (self.dir(index), name.as_bytes())
    }

    fn truncate(&self, file: &File, size: u64) {
        let set = SetAttr {
            size: Some(size),
            ..SetAttr::default()
        };
        self.fs.setattr(file.ino(), set, CALLER).unwrap();
    }
}

/// Returns whether an operation that takes space found it.
fn has_room(result: jericho_fs::Result<()>) -> bool {
    match result {
        Ok(()) => true,
        Err(error) if error.errno() == ENOSPC => false,
        Err(error) => panic!("{error}"),
    }
}

/// Returns the slice of a path's directory. Each directory is in the slice of its index.
fn slice_of_path(path: &str) -> usize {
    let dir = path.split('/').next();
    let slice = DIRS.iter().position(|other| Some(*other) == dir);
    slice.unwrap()
}

/// The path of a file when it is created.
fn path_of(file: usize) -> String {
    format!("{}/{}", DIRS[file], ["a", "b"][file])
}

/// Formatted volumes in the states in which sequences begin: with one metadata store, and with one for each slice, without checksums
/// and with them.
pub struct Templates([[Volumes; 2]; 2]);

impl Templates {
    pub fn new() -> Templates {
        let of_stores = |stores| [Volumes::new(stores, false), Volumes::new(stores, true)];
        Templates([of_stores(1), of_stores(2)])
    }

    fn of(&self, sequence: &Sequence) -> &DeviceSet {
        let volumes = &self.0[sequence.stores - 1][usize::from(sequence.has_checksums)];
        match sequence.base {
            Base::Durable => &volumes.durable,
            Base::Full => &volumes.full,
            Base::Fresh => &volumes.empty,
        }
    }
}

struct Volumes {
    empty: DeviceSet,
    durable: DeviceSet,
    full: DeviceSet,
}

impl Volumes {
    fn new(stores: usize, checksums: bool) -> Volumes {
        let empty = DeviceSet::new([
            SimDevice::new("one", 24 << 20).with_discards(),
            SimDevice::new("two", 16 << 20).with_discards(),
        ]);
        let options = FormatOptions {
            slices: Some(SLICES),
            has_stores: Some(stores > 1),
            checksums,
            ..FormatOptions::default()
        };
        let paths = ["one", "two"].map(PathBuf::from);
        format_devices(&empty.as_devices(), &paths, &options).unwrap();
        let mount = open_to_work(&empty).unwrap();
        for dir in DIRS {
            mount.fs.mkdir(ROOT, dir.as_bytes(), 0o755, CALLER).unwrap();
        }
        mount.fs.close().unwrap();
        drop(mount);
        let durable = empty.crash(0);
        let mount = open_to_work(&durable).unwrap();
        for (file, size) in SIZES.into_iter().enumerate() {
            let made = mount.create(&path_of(file));
            assert_eq!(usize::from(made.layout().home()), file);
            assert!(mount.write(&made, 0, &pattern(file, 0..size)));
        }
        mount.fs.close().unwrap();
        drop(mount);
        let full = durable.crash(0);
        fill(open_to_work(&full).unwrap());
        Volumes {
            empty,
            durable,
            full,
        }
    }
}

/// Leaves little room in a volume, and unmounts it.
fn fill(mount: Mount) {
    let fs = &mount.fs;
    let free = || fs.statfs().unwrap().free;
    // Keeps the room of the first slice until the filler has taken the rest.
    let room = mount.create("x/room");
    fs.fallocate(&room, 0, 0, ROOM * PAGE as u64).unwrap();
    fs.sync_all().unwrap();
    let attr = fs.mknod(ROOT, FILLER.as_bytes(), Kind::File, 0o644, 0, CALLER);
    let filler = fs.open_file(attr.unwrap().ino).unwrap();
    let rest = (free() - ROOM) * PAGE as u64;
    fs.fallocate(&filler, 0, 0, rest).unwrap();
    fs.unlink(mount.dir(0), b"room").unwrap();
    fs.close_file(&room);
    fs.sync_all().unwrap();
    assert_eq!(free(), 2 * ROOM);
    fs.close_file(&filler);
    fs.close().unwrap();
}

/// A sequence that was run to its end, with all changes of the devices.
pub struct Recorded {
    pub set: DeviceSet,
    pub history: History,
}

/// Runs a sequence.
pub fn run(templates: &Templates, sequence: &Sequence) -> Recorded {
    // Nothing is volatile, so nothing is lost.
    let set = templates.of(sequence).crash(0);
    set.record();
    let mount = open_to_work(&set).unwrap();
    if sequence.has_short_steps {
        mount.fs.shorten_steps(STEP_PAGES);
    }
    let mut bed = Bed {
        set: &set,
        mount,
        history: History::new(Names::new(), Vec::new(), sequence.stores, slice_of_path),
        stores: sequence.stores,
        handles: Vec::new(),
        current: [0, 1],
        writes: SIZES.len(),
    };
    bed.begin(sequence.base);
    bed.history.has_short_steps = sequence.has_short_steps;
    for step in &sequence.steps {
        bed.step(*step);
    }
    let history = bed.end();
    Recorded { set, history }
}

struct Bed<'s> {
    set: &'s DeviceSet,
    mount: Mount,
    history: History,
    stores: usize,
    /// Open files, in the order of the history.
    handles: Vec<Arc<File>>,
    /// The files that a step can name, as indices in `handles`.
    current: [usize; 2],
    /// Number of writes so far, including those of the templates.
    writes: usize,
}

impl Bed<'_> {
    fn changes(&self) -> u64 {
        self.set.supply().changes()
    }

    fn begin(&mut self, base: Base) {
        if base == Base::Fresh {
            self.create(0);
            self.create(1);
            return;
        }
        let mut files = Vec::new();
        for (file, size) in SIZES.into_iter().enumerate() {
            let path = path_of(file);
            let (dir, name) = self.mount.split(&path);
            let ino = self.mount.fs.lookup(dir, name).unwrap().ino;
            self.handles.push(self.mount.fs.open_file(ino).unwrap());
            self.mount.fs.forget(ino, 1);
            files.push((ino, pattern(file, 0..size)));
        }
        let names = (0..files.len()).map(|file| (path_of(file), file)).collect();
        self.history = History::new(names, files, self.stores, slice_of_path);
    }

    fn create(&mut self, slot: usize) {
        let path = path_of(slot);
        if self.history.names().contains_key(&path) {
            return;
        }
        let begun = self.changes();
        let handle = self.mount.create(&path);
        let file = self.history.files.len();
        self.history.note(file, handle.ino(), begun, |names| {
            names.insert(path, file);
        });
        self.history.add_file(handle.ino(), Vec::new(), begun);
        self.handles.push(handle);
        self.current[slot] = file;
    }

    /// Returns the first path of a file.
    fn path(&self, file: usize) -> Option<String> {
        let mut names = self.history.names().iter();
        let found = names.find(|(_, other)| **other == file)?;
        Some(found.0.clone())
    }

    fn step(&mut self, Step { op, file: slot }: Step) {
        let file = self.current[slot];
        let size = self.history.files[file].bytes().len();
        match op {
            Op::Create => self.create(slot),
            Op::Write1 => self.write(file, 10, 1),
            Op::Write4K => self.write(file, PAGE, PAGE),
            Op::Write200K => self.write(file, 2048, 200 << 10),
            Op::Append => self.write(file, size, 3000),
            Op::SyncWrite => {
                let range = 5 * PAGE - 96..5 * PAGE + 4;
                self.write(file, range.start, range.len());
                self.sync(file, |fs, handle, done| {
                    fs.sync_range_blocking(handle, range.start as u64, range.len() as u64, done);
                });
                let changes = self.changes();
                let range = range.start as u64..range.end as u64;
                self.history.sync_bytes(file, range, changes);
                let created = self.history.files[file].created;
                self.history.sync_state(file, created, changes);
            }
            Op::Fsync | Op::Fdatasync | Op::FsyncBySlice | Op::FdatasyncBySlice => {
                let is_data = matches!(op, Op::Fdatasync | Op::FdatasyncBySlice);
                self.sync(file, |fs, handle, done| match op {
                    Op::FsyncBySlice | Op::FdatasyncBySlice => fs.fsync(handle, is_data, done),
                    _ => fs.fsync_blocking(handle, is_data, done),
                });
                let changes = self.changes();
                self.history.sync_bytes(file, 0..u64::MAX, changes);
                let inode = &self.history.files[file];
                let state = if is_data {
                    inode.created
                } else {
                    inode.touched
                };
                self.history.sync_state(file, state, changes);
            }
            Op::RenameSame | Op::RenameCross | Op::RenameOver | Op::Link | Op::Unlink => {
                self.rename_link_or_unlink(op, slot);
            }
            Op::TruncateToNothing => self.truncate(file, 0),
            Op::TruncateToPart => self.truncate(file, 1000),
            Op::TruncateUp => self.truncate(file, size + 20_000),
            Op::Punch => self.punch(file, PUNCH, 2048..10_240),
            Op::Zero => self.punch(file, ZERO, 2048..10_240),
            Op::Move => {
                let handle = &self.handles[file];
                let other = SLICES - 1 - handle.layout().home();
                let begun = self.changes();
                // Without room, some pages stay.
                if !has_room(self.mount.fs.move_to(handle.ino(), other)) {
                    return;
                }
                let ino = handle.ino();
                self.history.note(file, ino, begun, |_| ());
                let changes = self.changes();
                self.history.sync_bytes(file, 0..u64::MAX, changes);
                self.history.sync_all(changes);
            }
            Op::WriteBack => {
                let handle = &self.handles[file];
                let slice = self.mount.slice_of(handle);
                let (sender, receiver) = channel();
                let done = move |result| sender.send(result).unwrap();
                slice.sync(&handle.object(), 2..u64::MAX, Box::new(done));
                receiver.recv().unwrap().unwrap();
            }
            Op::Checkpoint => self.mount.fs.checkpoint().unwrap(),
            Op::Commit => {
                self.mount.fs.commit().unwrap();
                self.history.sync_all(self.changes());
            }
        }
    }

    fn sync(&self, file: usize, start: impl FnOnce(&Fs, &Arc<File>, Done)) {
        Mount::wait(|done| start(&self.mount.fs, &self.handles[file], done));
    }

    fn write(&mut self, file: usize, offset: usize, len: usize) {
        let data = pattern(self.writes, offset..offset + len);
        self.writes += 1;
        let begun = self.changes();
        if !self.mount.write(&self.handles[file], offset, &data) {
            return;
        }
        let mut bytes = self.history.files[file].bytes().to_vec();
        bytes.resize(bytes.len().max(offset + len), 0);
        bytes[offset..offset + len].copy_from_slice(&data);
        self.history.note_bytes(file, begun, bytes, 0..0);
    }

    fn truncate(&mut self, file: usize, size: usize) {
        let begun = self.changes();
        self.mount.truncate(&self.handles[file], size as u64);
        let mut bytes = self.history.files[file].bytes().to_vec();
        let removed = if size < bytes.len() {
            size as u64..u64::MAX
        } else {
            0..0
        };
        bytes.resize(size, 0);
        self.history.note_bytes(file, begun, bytes, removed);
    }

    /// Makes a range read as zeros, without changing the size.
    fn punch(&mut self, file: usize, mode: i32, range: Range<usize>) {
        let begun = self.changes();
        let (start, len) = (range.start as u64, range.len() as u64);
        let handle = &self.handles[file];
        // Zeroing takes space for holes.
        if !has_room(self.mount.fs.fallocate(handle, mode, start, len)) {
            return;
        }
        let mut bytes = self.history.files[file].bytes().to_vec();
        let end = range.end.min(bytes.len());
        if let Some(punched) = bytes.get_mut(range.start..end) {
            punched.fill(0);
        }
        // The zeros of the pages at both ends are data like any other.
        let whole = start.next_multiple_of(PAGE as u64)..(start + len) / PAGE as u64 * PAGE as u64;
        self.history.note_bytes(file, begun, bytes, whole);
    }

    fn rename_link_or_unlink(&mut self, op: Op, slot: usize) {
        let file = self.current[slot];
        let Some(path) = self.path(file) else {
            return;
        };
        let (dir, name) = path.split_once('/').unwrap();
        let other_dir = DIRS[usize::from(dir == DIRS[0])];
        let to = match op {
            Op::RenameSame => format!("{dir}/{name}2"),
            Op::RenameCross => format!("{other_dir}/{name}"),
            Op::Link => format!("{other_dir}/link-{name}"),
            Op::RenameOver => match self.path(self.current[1 - slot]) {
                Some(path) => path,
                None => return,
            },
            _ => return self.unlink(file, &path),
        };
        let begun = self.changes();
        let (old_dir, old_name) = self.mount.split(&path);
        let (new_dir, new_name) = self.mount.split(&to);
        let replaced = self.history.names().get(&to).copied();
        if op == Op::Link {
            if replaced.is_none() {
                let ino = self.handles[file].ino();
                self.mount.fs.link(ino, new_dir, new_name).unwrap();
                self.mount.fs.forget(ino, 1);
                self.history.note(file, ino, begun, |names| {
                    names.insert(to, file);
                });
            }
            return;
        }
        let fs = &self.mount.fs;
        fs.rename(old_dir, old_name, new_dir, new_name, 0).unwrap();
        if replaced == Some(file) {
            return;
        }
        let ino = self.handles[file].ino();
        self.history.note(file, ino, begun, |names| {
            names.remove(&path);
            names.insert(to, file);
        });
        if let Some(replaced) = replaced {
            self.history.files[replaced].touched = self.history.states.len() - 1;
            self.history.note_replacing(file);
        }
    }

    fn unlink(&mut self, file: usize, path: &str) {
        let begun = self.changes();
        let (dir, name) = self.mount.split(path);
        self.mount.fs.unlink(dir, name).unwrap();
        let ino = self.handles[file].ino();
        self.history.note(file, ino, begun, |names| {
            names.remove(path);
        });
    }

    /// Unmounts, which makes everything durable.
    fn end(mut self) -> History {
        for handle in self.handles.drain(..) {
            self.mount.fs.close_file(&handle);
        }
        self.mount.fs.close().unwrap();
        let changes = self.changes();
        for file in 0..self.history.files.len() {
            self.history.sync_bytes(file, 0..u64::MAX, changes);
        }
        self.history.sync_all(changes);
        self.history
    }
}

/// Checks a volume after a power cut, without changing it.
pub fn check(set: &DeviceSet) -> Result<(), String> {
    let report = check_devices(set.as_devices(), CheckOptions::default());
    let report = report.map_err(|error| format!("the check fails: {error}"))?;
    match report.is_sound() {
        true => Ok(()),
        false => Err(format!("the check finds {:?}", report.findings)),
    }
}

/// Mounts a volume after a power cut, and returns all files by path.
pub fn look(set: &DeviceSet) -> Result<BTreeMap<String, Found>, String> {
    let mount = open_to_look(set).map_err(|error| format!("it does not mount: {error}"))?;
    let mut found = BTreeMap::new();
    let mut root = names_in(&mount.fs, ROOT)?;
    let fillers = root.extract_if(.., |name| name == FILLER).count();
    if root != DIRS {
        return Err(format!("the root has {root:?}"));
    }
    for dir in DIRS {
        let parent = mount.fs.lookup(ROOT, dir.as_bytes());
        let parent = parent.map_err(|error| error.to_string())?.ino;
        for name in names_in(&mount.fs, parent)? {
            let attr = mount.fs.lookup(parent, name.as_bytes());
            let attr = attr.map_err(|error| format!("{dir}/{name}: {error}"))?;
            let bytes = bytes_on_devices(&mount.fs, set, attr.ino)
                .map_err(|error| format!("{dir}/{name}: {error}"))?;
            let file = Found {
                ino: attr.ino,
                links: attr.nlink,
                bytes,
            };
            found.insert(format!("{dir}/{name}"), file);
        }
    }
    let inodes: BTreeSet<Ino> = found.values().map(|file| file.ino).collect();
    let expected = (1 + DIRS.len() + fillers + inodes.len()) as u64;
    let stat = mount.fs.statfs().map_err(|error| error.to_string())?;
    match stat.files - stat.files_free {
        used if used == expected => Ok(found),
        used => Err(format!(
            "{used} inodes are in use, and {expected} have names"
        )),
    }
}

fn names_in(fs: &Fs, dir: Ino) -> Result<Vec<String>, String> {
    let mut names = Vec::new();
    fs.readdir(dir, 2, &mut |entry| {
        names.push(String::from_utf8_lossy(&entry.name).into_owned());
        true
    })
    .map_err(|error| error.to_string())?;
    names.sort();
    Ok(names)
}

/// Reads a file as a cache without any of its pages would.
fn bytes_on_devices(fs: &Fs, set: &DeviceSet, ino: Ino) -> Result<Vec<u8>, String> {
    let file = fs.open_file(ino).map_err(|error| error.to_string())?;
    let pages = (file.size() as usize).div_ceil(PAGE);
    let (mut runs, mut sums) = (Vec::new(), Vec::new());
    file.object()
        .resolve_summed(0, pages as u32, &mut runs, &mut sums)
        .map_err(|error| error.to_string())?;
    let mut bytes = vec![0; pages * PAGE];
    let mut at = 0;
    for run in runs {
        let end = at + run.pages as usize * PAGE;
        match run.place {
            PagePlace::Hole => {}
            PagePlace::Memory(image) => bytes[at..end].copy_from_slice(&image),
            PagePlace::Device {
                device,
                offset_bytes,
            } => set.devices()[usize::from(device)]
                .read_at(offset_bytes, &mut bytes[at..end])
                .map_err(|error| error.to_string())?,
        }
        at = end;
    }
    for (page, (contents, sum)) in bytes.chunks(PAGE).zip(sums).enumerate() {
        if sum.is_some_and(|sum| checksum(contents) != sum) {
            return Err(format!("page {page} has a wrong checksum"));
        }
    }
    bytes.truncate(file.size() as usize);
    fs.close_file(&file);
    Ok(bytes)
}

/// Uses a volume after a power cut as programs do: reads all files, lets them grow, writes to them and unmounts.
pub fn live_on(set: &DeviceSet, found: &BTreeMap<String, Found>) -> Result<(), String> {
    let mount = open_to_work(set)?;
    let files: BTreeMap<Ino, &Found> = found.values().map(|file| (file.ino, file)).collect();
    let mut grown: BTreeMap<Ino, Vec<u8>> = BTreeMap::new();
    for (ino, was) in files {
        let bytes = grow(&mount, was).map_err(|why| format!("inode {ino}: {why}"))?;
        grown.insert(ino, bytes);
    }
    mount.fs.close().map_err(|error| error.to_string())?;
    drop(mount);
    check(set)?;
    for (path, now) in look(set)? {
        if grown.get(&now.ino) != Some(&now.bytes) {
            return Err(format!("{path}: the bytes after the recovery are lost"));
        }
    }
    Ok(())
}

/// Lets a file grow, and writes into the new part. Returns its new bytes.
fn grow(mount: &Mount, was: &Found) -> Result<Vec<u8>, String> {
    let file = mount.fs.open_file(was.ino).unwrap();
    if mount.read(&file) != was.bytes {
        return Err("the cache reads other bytes".into());
    }
    let size = was.bytes.len();
    mount.truncate(&file, size as u64 + GROWTH);
    let mut bytes = was.bytes.clone();
    bytes.resize(size + GROWTH as usize, 0);
    if mount.read(&file) != bytes {
        return Err(format!("not zeros after its old size {size}"));
    }
    let range = size + 2000..size + 7000;
    let data = pattern(SIZES.len(), range.clone());
    if mount.write(&file, range.start, &data) {
        bytes[range].copy_from_slice(&data);
    }
    Mount::wait(|done| mount.fs.fsync(&file, false, done));
    mount.fs.close_file(&file);
    Ok(bytes)
}
