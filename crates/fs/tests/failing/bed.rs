//! A volume on two simulated devices, one of which fails, and the judgement of what is left.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use jericho_cache::{Config, FRAMES_MIN, Intent, Slice};
use jericho_format::superblock::COPY_FIRST_BLOCK;
use jericho_fs::add::add_device;
use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, Done, Ino, Kind, ROOT, SetAttr};
use jericho_fs::{Error, File, Fs, FsOptions, SeenErrors};
use jericho_sim::{DeviceSet, Effect, Fault, FaultPlan, Operation, SimDevice};
use jericho_storage::{BLOCK_BYTES, Device};
use jericho_volume::superblocks::read_copies;
use jericho_volume::{FormatOptions, GrowRequest, OpenMode, Volume, VolumeError};

use crate::SHORT;
use crate::model::Model;
use crate::steps::{Base, Case, DEVICES, KINDS, Op, Sequence, State, Step};

const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};
const PAGE: usize = 4096;
const SLICES: u16 = 2;
/// The directories, one in each slice.
const DIRS: [&str; 2] = ["x", "y"];
/// Index of the device that a step can add, and its size. No slice has less than 64 MiB after an addition.
const ADDED: usize = 2;
const ADDED_BYTES: u64 = 72 << 20;
/// Bytes by which a device grows.
const GROWTH: u64 = 8 << 20;
/// Sizes of the two files that are durable before a sequence.
const SIZES: [usize; 2] = [3 * PAGE + 100, 5000];

/// Returns bytes that depend on their position and on the write they belong to. None is 0.
fn pattern(write: usize, at: usize, len: usize) -> Vec<u8> {
    (at..at + len)
        .map(|at| 1 + ((write * 37 + at * 7 + at / 512 * 31) % 200) as u8)
        .collect()
}

/// The name of a device in errors: no other word contains it.
fn name_of(device: usize) -> String {
    format!("device-{}", DEVICES[device])
}

struct Slices(Vec<Arc<Slice>>);

impl Drop for Slices {
    fn drop(&mut self) {
        self.0.iter().for_each(|slice| slice.close());
    }
}

/// A mounted volume.
struct Mount {
    volume: Arc<Volume>,
    fs: Arc<Fs>,
    /// Dropped after the filesystem.
    slices: Slices,
}

fn start_slice(volume: &Volume, id: usize) -> Arc<Slice> {
    let config = Config {
        id: id as u16,
        frames: FRAMES_MIN,
        kernel_node: None,
        cpus: Vec::new(),
        dirty_age: Duration::from_secs(3600),
    };
    Slice::start(&config, volume.device_list()).unwrap()
}

/// Mounts the first `count` devices, which are all of the volume.
fn open(set: &DeviceSet, count: usize) -> Result<Mount, String> {
    let devices = set.as_devices()[..count].to_vec();
    let volume = Volume::open_from_devices(devices, OpenMode::WRITE);
    let volume = Arc::new(volume.map_err(|error| error.to_string())?);
    let slices = 0..volume.slices().len();
    let slices = Slices(slices.map(|id| start_slice(&volume, id)).collect());
    let options = FsOptions {
        store_cache_bytes: 1 << 20,
        read_only: false,
        inode_cache: 100,
        // Commits only where a step asks for one.
        commit_interval_ms: 3_600_000,
    };
    let fs = Fs::open(volume.clone(), slices.0.clone(), options);
    let fs = fs.map_err(|error| error.to_string())?;
    Ok(Mount { volume, fs, slices })
}

fn wait(start: impl FnOnce(Done)) -> Result<(), Error> {
    let (sender, receiver) = channel();
    start(Box::new(move |result| sender.send(result).unwrap()));
    receiver.recv().unwrap()
}

impl Mount {
    fn grant(
        &self,
        file: &Arc<File>,
        page: u64,
        intent: Intent,
    ) -> Result<jericho_cache::Grant, Error> {
        let (sender, receiver) = channel();
        let answer = move |pages| sender.send(pages).unwrap();
        let slice = &self.slices.0[usize::from(file.layout().home())];
        slice.get(&file.object(), page, 1, intent, answer);
        receiver
            .recv()
            .unwrap()
            .map_err(jericho_fs::error::of_cache)
    }

    fn write(&self, file: &Arc<File>, offset: usize, data: &[u8]) -> Result<(), Error> {
        let _writing = file.writing();
        self.fs
            .begin_write(file, offset as u64, data.len() as u64)?;
        let mut done = 0;
        while done < data.len() {
            let (page, within) = ((offset + done) / PAGE, (offset + done) % PAGE);
            let len = (PAGE - within).min(data.len() - done);
            let mut pages = self.grant(file, page as u64, Intent::Modify)?;
            let written = pages.write(page as u64, within, &data[done..done + len]);
            written.expect("no other writer");
            drop(pages);
            self.fs.end_write(file, (offset + done) as u64, len as u64);
            done += len;
        }
        Ok(())
    }

    fn read(&self, file: &Arc<File>) -> Result<Vec<u8>, Error> {
        let mut data = vec![0; file.size() as usize];
        for (page, bytes) in (0..).zip(data.chunks_mut(PAGE)) {
            let pages = self.grant(file, page, Intent::Read)?;
            pages.read(page, 0, bytes).expect("the page was asked for");
        }
        Ok(data)
    }

    /// Returns the directory and the name of a path.
    fn split<'p>(&self, path: &'p str) -> Result<(Ino, &'p [u8]), Error> {
        let (dir, name) = path.split_once('/').expect("a directory");
        let found = self.fs.lookup(ROOT, dir.as_bytes())?;
        self.fs.forget(found.ino, 1);
        Ok((found.ino, name.as_bytes()))
    }

    fn create(&self, path: &str) -> Result<Open, Error> {
        let (dir, name) = self.split(path)?;
        let attr = self.fs.mknod(dir, name, Kind::File, 0o644, 0, CALLER)?;
        self.open(attr.ino)
    }

    fn open_path(&self, path: &str) -> Result<Open, Error> {
        let (dir, name) = self.split(path)?;
        let attr = self.fs.lookup(dir, name)?;
        self.open(attr.ino)
    }

    /// Opens a file that was looked up.
    fn open(&self, ino: Ino) -> Result<Open, Error> {
        let file = self.fs.open_file(ino);
        self.fs.forget(ino, 1);
        let file = file?;
        let seen = file.errors_seen();
        Ok(Open { file, seen })
    }

    /// Makes a larger part of the devices usable.
    fn grow(&self) -> Result<(), String> {
        let grown = self.fs.grow(&GrowRequest::default());
        grown.map(drop).map_err(|error| error.to_string())
    }

    /// Adds a device with one slice. Returns whether the volume has it, and whether the mount uses it.
    fn add(&mut self, device: &Arc<SimDevice>) -> (Result<(), String>, Result<(), String>) {
        let name = device.name();
        let added = match add_device(&self.volume, device.clone(), Path::new(&*name), 1) {
            Ok(added) => added,
            Err(error) => return (Err(error.to_string()), Ok(())),
        };
        let volume = &self.volume;
        let make = || {
            let caches = added.slices().map(|id| start_slice(volume, id));
            Ok(caches.collect())
        };
        let slices = &mut self.slices.0;
        let taken = self
            .fs
            .take(&added, make, |caches| slices.extend_from_slice(caches));
        (Ok(()), taken.map_err(|error| error.to_string()))
    }

    /// Returns all files with their contents.
    fn look(&self) -> Result<BTreeMap<String, Found>, Error> {
        let mut found = BTreeMap::new();
        for dir in DIRS {
            let ino = self.split(&format!("{dir}/"))?.0;
            let mut names = Vec::new();
            self.fs.readdir(ino, 2, &mut |entry| {
                names.push(String::from_utf8_lossy(&entry.name).into_owned());
                true
            })?;
            for name in names {
                let path = format!("{dir}/{name}");
                let open = self.open_path(&path)?;
                let file = Found {
                    ino: open.file.ino(),
                    bytes: self.read(&open.file)?,
                };
                found.insert(path, file);
                self.fs.close_file(&open.file);
            }
        }
        Ok(found)
    }
}

/// A file as a mount shows it.
#[derive(Clone, PartialEq)]
struct Found {
    ino: Ino,
    bytes: Vec<u8>,
}

/// An open file.
struct Open {
    file: Arc<File>,
    seen: SeenErrors,
}

/// The path of a file when it is created.
fn path_of(file: usize) -> String {
    format!("{}/{}", DIRS[file], ["a", "b"][file])
}

fn slice_of_path(path: &str) -> usize {
    usize::from(path.starts_with(DIRS[1]))
}

/// Volumes in the states in which sequences begin: with one metadata store, and with one for each slice, without checksums and with them.
pub struct Templates([[Volumes; 2]; 2]);

struct Volumes {
    clean: (DeviceSet, Model),
    crashed: (DeviceSet, Model),
}

impl Templates {
    pub fn new() -> Templates {
        let of = |stores| [Volumes::new(stores, false), Volumes::new(stores, true)];
        Templates([false, true].map(of))
    }

    fn of(&self, base: Base) -> (DeviceSet, Model) {
        let volumes = &self.0[usize::from(base.has_stores)][usize::from(base.has_checksums)];
        let (set, model) = match base.state {
            State::Clean => &volumes.clean,
            State::Crashed => &volumes.crashed,
        };
        // Nothing is volatile, so nothing is lost.
        (set.crash(0), model.clone())
    }
}

impl Volumes {
    fn new(has_stores: bool, checksums: bool) -> Volumes {
        let devices = [
            (name_of(0), 24 << 20),
            (name_of(1), 16 << 20),
            ("device-three".to_owned(), ADDED_BYTES),
        ];
        let set = DeviceSet::new(
            devices.map(|(name, bytes)| SimDevice::new(&name, bytes).with_discards()),
        );
        let options = FormatOptions {
            slices: Some(SLICES),
            has_stores: Some(has_stores),
            checksums,
            ..FormatOptions::default()
        };
        let paths = [0, 1].map(|device| PathBuf::from(DEVICES[device]));
        format_devices(&set.as_devices()[..ADDED], &paths, &options).unwrap();
        let mount = open(&set, ADDED).unwrap();
        for dir in DIRS {
            mount.fs.mkdir(ROOT, dir.as_bytes(), 0o755, CALLER).unwrap();
        }
        let mut files = Vec::new();
        for (file, size) in SIZES.into_iter().enumerate() {
            let made = mount.create(&path_of(file)).unwrap();
            assert_eq!((made.file.ino() >> 40) as usize, file, "the slice");
            let bytes = pattern(file, 0, size);
            mount.write(&made.file, 0, &bytes).unwrap();
            files.push((path_of(file), bytes));
        }
        mount.fs.close().unwrap();
        drop(mount);
        let shards = if has_stores { DIRS.len() } else { 1 };
        let clean = (set.crash(0), Model::new(files, shards, slice_of_path));
        let mut sequence =
            "clean,append:a,fsync:a,overwrite:b,fdatasync:b,create:b,append:b,fsync:b,commit:b"
                .to_owned();
        if has_stores {
            // The journals have batches that count only together.
            sequence += ",link:a,commit:a";
        }
        let (set, mut model) = (clean.0.crash(0), clean.1.clone());
        let mut bed = Bed::begin(&set, &mut model, None).unwrap().unwrap();
        for step in &sequence.parse::<Sequence>().unwrap().steps {
            bed.step(*step).unwrap();
        }
        drop(bed);
        let crashed = (set.crash(0), model);
        Volumes { clean, crashed }
    }
}

/// Returns how many operations of each kind each device does in a sequence without a fault.
pub fn count(templates: &Templates, sequence: &Sequence) -> Vec<[u64; KINDS.len()]> {
    let (set, mut model) = templates.of(sequence.base);
    run(&set, &mut model, &sequence.steps, None).unwrap();
    let of_kind = |device: &Arc<SimDevice>| KINDS.map(|(kind, _)| device.operations(Some(kind)));
    set.devices()[..DEVICES.len()].iter().map(of_kind).collect()
}

/// Runs a case, and judges what is left after a power cut.
pub fn try_case(templates: &Templates, case: &Case) -> Result<(), String> {
    let (set, mut model) = templates.of(case.sequence.base);
    let fault = Fault {
        operation: Some(case.operation),
        nth: case.nth,
        is_lasting: case.is_lasting,
        effect: match case.errno {
            SHORT => Effect::Short {
                done_bytes: PAGE as u64,
            },
            errno => Effect::Errno(errno),
        },
    };
    // Real devices remember a failed flush (`Device::flush`). The filesystem depends on that only where it writes the superblock.
    let writes_superblock = |step: &Step| matches!(step.op, Op::Grow | Op::Add);
    let is_remembered = case.is_lasting || case.sequence.steps.iter().any(writes_superblock);
    set.devices()[case.device].set_plan(FaultPlan {
        faults: vec![fault],
        forgets_failed_flushes: !is_remembered,
        seed: case.nth,
        ..FaultPlan::default()
    });
    run(&set, &mut model, &case.sequence.steps, Some(case))?;
    let after = set.crash(case.nth);
    if case.sequence.steps.iter().any(|step| step.op == Op::Repair) {
        // The repair of the sequence may have failed. Without a fault it does not.
        repair_devices(&after)?;
    }
    judge(&after, &model).map_err(|why| format!("after a power cut: {why}"))
}

/// Mounts a volume, takes the steps, judges what a power cut would leave, and unmounts.
fn run(
    set: &DeviceSet,
    model: &mut Model,
    steps: &[Step],
    case: Option<&Case>,
) -> Result<(), String> {
    let Some(mut bed) = Bed::begin(set, model, case)? else {
        return Ok(());
    };
    for (done, step) in steps.iter().enumerate() {
        if step.op == Op::Repair {
            // Ends the mount without an unmount, as when the daemon is killed.
            let is_synced = bed.sync_all()?;
            drop(bed);
            return match is_synced && repair(set, case, step.file)? {
                true => run(set, model, &steps[done + 1..], case),
                false => Ok(()),
            };
        }
        if !bed.step(*step)? {
            return Ok(());
        }
    }
    // An unmount writes everything once more, so it can repair what a sync has left out.
    if case.is_some_and(|_| has_failed(set)) {
        let case = case.map_or(0, |case| case.nth);
        judge(&set.crash(case), bed.model).map_err(|why| format!("before the unmount: {why}"))?;
    }
    bed.unmount()?;
    Ok(())
}

/// Returns whether an operation of a device has failed.
fn has_failed(set: &DeviceSet) -> bool {
    let has_failed = |device: &Arc<SimDevice>| device.log().iter().any(|l| l.failure.is_some());
    set.devices().iter().any(has_failed)
}

/// Returns how many devices the volume has.
fn count_devices(set: &DeviceSet) -> Result<usize, String> {
    let devices = set.as_devices()[..ADDED].to_vec();
    match Volume::open_from_devices(devices, OpenMode::READ) {
        Ok(_) => Ok(ADDED),
        // An addition has become durable.
        Err(VolumeError::DeviceMissing { .. }) => Ok(ADDED + 1),
        Err(error) => Err(error.to_string()),
    }
}

fn check(set: &DeviceSet, count: usize) -> Result<(), String> {
    let devices = set.as_devices()[..count].to_vec();
    let report = check_devices(devices, CheckOptions::default());
    let report = report.map_err(|error| format!("check: {error}"))?;
    match report.is_sound() {
        true => Ok(()),
        false => Err(format!("check: {:?}", report.findings)),
    }
}

/// Checks a volume, compares what it shows with the model, and uses it.
fn judge(set: &DeviceSet, model: &Model) -> Result<(), String> {
    let count = count_devices(set)?;
    check(set, count)?;
    let mount = open(set, count)?;
    let found = mount.look().map_err(|error| error.to_string())?;
    let of_paths = found
        .iter()
        .map(|(path, f)| (path.clone(), f.bytes.clone()));
    model.judge(&of_paths.collect())?;
    let mut expected = found.clone();
    let by_ino: BTreeMap<Ino, &String> = found.iter().map(|(path, f)| (f.ino, path)).collect();
    for (ino, path) in by_ino {
        let size = found[path].bytes.len();
        let grown = pattern(99, size, 5000);
        let open = mount.open_path(path).map_err(|error| error.to_string())?;
        let written = mount.write(&open.file, size, &grown);
        written.map_err(|error| error.to_string())?;
        let names = expected.values_mut().filter(|f| f.ino == ino);
        names.for_each(|file| file.bytes.extend(&grown));
        mount.fs.close_file(&open.file);
    }
    mount.fs.close().map_err(|error| error.to_string())?;
    drop(mount);
    check(set, count)?;
    let mount = open(set, count)?;
    match mount.look() {
        Ok(found) if found == expected => Ok(()),
        Ok(_) => Err("what was written after the recovery is lost".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// Makes the older copy of the superblock of a device unusable. Does nothing if the device fails.
fn damage_older_superblock(device: &SimDevice) {
    let Ok([Ok(first), Ok(second)]) = read_copies(device) else {
        return;
    };
    let is_second_older = first.head.sequence.get() > second.head.sequence.get();
    let at = COPY_FIRST_BLOCK[usize::from(is_second_older)] * BLOCK_BYTES;
    let damaged = device.write_at(at, &[0xa5; BLOCK_BYTES as usize]);
    let _ = damaged.and_then(|()| device.flush());
}

/// Repairs a volume with a damaged copy of the superblock on the device of a slice. Returns whether that succeeded.
fn repair(set: &DeviceSet, case: Option<&Case>, slice: usize) -> Result<bool, String> {
    damage_older_superblock(&set.devices()[slice]);
    match repair_devices(set) {
        Ok(()) => Ok(true),
        Err(error) => refuse_unexplained(set, case, "repair", &error).map(|()| false),
    }
}

fn repair_devices(set: &DeviceSet) -> Result<(), String> {
    let options = CheckOptions {
        repair: true,
        ..CheckOptions::default()
    };
    let report = check_devices(set.as_devices()[..ADDED].to_vec(), options);
    let report = report.map_err(|error| error.to_string())?;
    match report.is_sound() {
        true => Ok(()),
        false => Err(format!("{:?}", report.findings)),
    }
}

/// A mounted volume with a model of it.
struct Bed<'s> {
    set: &'s DeviceSet,
    model: &'s mut Model,
    case: Option<&'s Case>,
    mount: Mount,
    /// Number of devices of the volume.
    devices: usize,
    /// The open files that a step can name, with their index in the model.
    current: [Option<(usize, Open)>; 2],
    writes: usize,
    /// The slice of the step, if it needs no other one.
    slice: Option<usize>,
}

impl<'s> Bed<'s> {
    /// Mounts the volume. Returns `None` if that fails with a good reason.
    fn begin(
        set: &'s DeviceSet,
        model: &'s mut Model,
        case: Option<&'s Case>,
    ) -> Result<Option<Bed<'s>>, String> {
        let mount = match open(set, ADDED) {
            Ok(mount) => mount,
            Err(error) => {
                refuse_unexplained(set, case, "mount", &error)?;
                return Ok(None);
            }
        };
        let mut bed = Bed {
            set,
            model,
            case,
            mount,
            devices: ADDED,
            current: [None, None],
            writes: SIZES.len(),
            slice: None,
        };
        bed.open_files()?;
        Ok(Some(bed))
    }

    fn open_files(&mut self) -> Result<(), String> {
        for slot in 0..2 {
            let path = path_of(slot);
            let Some(file) = self.model.names().get(&path).copied() else {
                continue;
            };
            match self.mount.open_path(&path) {
                Ok(open) => self.current[slot] = Some((file, open)),
                Err(error) => self.refused("open", &error)?,
            }
        }
        Ok(())
    }

    /// Fails unless an error of an operation has a good reason and says so.
    fn refused(&self, what: &str, error: &dyn Display) -> Result<(), String> {
        refuse_unexplained(self.set, self.case, what, &error.to_string())?;
        let (Some(slice), Some(case)) = (self.slice, self.case) else {
            return Ok(());
        };
        // Each slice is on the device of its number. The root directory is on the first one.
        let is_needed =
            slice == case.device || (case.device, case.operation) == (0, Operation::Read);
        match is_needed {
            true => Ok(()),
            false => Err(format!("{what} does not need the device: {error}")),
        }
    }

    /// Returns whether a result is a success.
    fn judge<T, E: Display>(&self, what: &str, result: Result<T, E>) -> Result<bool, String> {
        match result {
            Ok(_) => Ok(true),
            Err(error) => self.refused(what, &error).map(|()| false),
        }
    }

    fn close_files(&mut self) {
        for (_, open) in self.current.iter_mut().flat_map(Option::take) {
            self.mount.fs.close_file(&open.file);
        }
    }

    /// Unmounts. Returns whether that succeeded.
    fn unmount(&mut self) -> Result<bool, String> {
        self.slice = None;
        self.close_files();
        let closed = self.judge("unmount", self.mount.fs.close())?;
        if closed {
            self.model.synced_all();
        }
        Ok(closed)
    }

    /// Takes a step. Returns false if the sequence ends with it.
    fn step(&mut self, Step { op, file: slot }: Step) -> Result<bool, String> {
        let is_separate = self.case.is_some_and(|case| case.sequence.is_separate());
        self.slice = is_separate.then_some(slot);
        match op {
            Op::Create => self.create(slot)?,
            Op::Commit => self.commit(slot)?,
            Op::SyncAll => drop(self.sync_all()?),
            Op::Checkpoint => drop(self.judge("checkpoint", self.mount.fs.checkpoint())?),
            Op::Trim => drop(self.judge("trim", self.mount.fs.trim(0..u64::MAX, 1, None))?),
            Op::Grow => {
                for device in &self.set.devices()[..ADDED] {
                    device.enlarge(device.size_bytes() + GROWTH);
                }
                self.judge("grow", self.mount.grow())?;
            }
            Op::Add => {
                let (added, taken) = self.mount.add(&self.set.devices()[ADDED]);
                if self.judge("add", added)? {
                    self.devices = ADDED + 1;
                    self.judge("take", taken)?;
                }
            }
            Op::Remount => return self.remount(),
            _ => {
                // `run` takes the step of a repair.
                if let Some((file, open)) = self.current[slot].take() {
                    let result = self.step_of_file(op, file, &open);
                    self.current[slot] = Some((file, open));
                    result?;
                }
            }
        }
        Ok(true)
    }

    fn commit(&mut self, slot: usize) -> Result<(), String> {
        let fs = &self.mount.fs;
        let committed = match self.mount.split(&path_of(slot)) {
            Ok((dir, _)) => wait(|done| fs.fsync_dir(dir, done)),
            Err(error) => Err(error),
        };
        if self.judge("commit", committed)? {
            self.model.synced_names(slot);
        }
        Ok(())
    }

    fn sync_all(&mut self) -> Result<bool, String> {
        let synced = self.judge("sync of everything", self.mount.fs.sync_all())?;
        if synced {
            self.model.synced_all();
        }
        Ok(synced)
    }

    fn remount(&mut self) -> Result<bool, String> {
        Ok(self.unmount()? && self.mount_again()?)
    }

    /// Mounts once more, after the end of the mount.
    fn mount_again(&mut self) -> Result<bool, String> {
        // The devices can be opened only once, so the old mount ends first.
        self.mount.slices.0.iter().for_each(|slice| slice.close());
        match open(self.set, self.devices) {
            Ok(mount) => self.mount = mount,
            Err(error) => return self.refused("mount", &error).map(|()| false),
        }
        self.open_files()?;
        Ok(true)
    }

    fn create(&mut self, slot: usize) -> Result<(), String> {
        let path = format!("{}/new", DIRS[slot]);
        if self.model.names().contains_key(&path) {
            return Ok(());
        }
        match self.mount.create(&path) {
            Ok(open) => {
                let file = self.model.create(path);
                if let Some((_, before)) = self.current[slot].replace((file, open)) {
                    self.mount.fs.close_file(&before.file);
                }
                Ok(())
            }
            Err(error) => self.refused("create", &error),
        }
    }

    fn step_of_file(&mut self, op: Op, file: usize, open: &Open) -> Result<(), String> {
        let size = self.model.files[file].bytes().len();
        match op {
            Op::Read => self.read(file, open),
            Op::Overwrite => self.write(file, open, PAGE - 50, PAGE).map(drop),
            Op::Append => self.write(file, open, size, 3000).map(drop),
            Op::WriteBig => self.write(file, open, 2048, 200 << 10).map(drop),
            Op::Rewrite => self.write(file, open, 0, size + PAGE).map(drop),
            Op::SyncWrite => {
                let (at, len) = (5 * PAGE - 96, 100);
                if self.write(file, open, at, len)? {
                    let fs = &self.mount.fs;
                    let sync = |done| {
                        fs.sync_range_blocking(&open.file, at as u64, len as u64, done);
                    };
                    if self.sync(open, sync)? {
                        self.model.files[file].synced_range(at..at + len);
                    }
                }
                Ok(())
            }
            Op::Fsync => {
                let fs = &self.mount.fs;
                if self.sync(open, |done| fs.fsync_blocking(&open.file, false, done))? {
                    self.model.synced(file);
                }
                Ok(())
            }
            Op::Fdatasync => {
                let fs = &self.mount.fs;
                if self.sync(open, |done| fs.fsync(&open.file, true, done))? {
                    self.model.files[file].synced();
                }
                Ok(())
            }
            Op::WriteBack => {
                let slice = &self.mount.slices.0[usize::from(open.file.layout().home())];
                let (sender, receiver) = channel();
                let done = move |result| sender.send(result).unwrap();
                slice.sync(&open.file.object(), 0..u64::MAX, Box::new(done));
                let written = receiver.recv().unwrap();
                let written = written.map_err(jericho_fs::error::of_cache);
                self.judge("write-back", written).map(drop)
            }
            Op::FdatasyncHere => {
                let fs = &self.mount.fs;
                if self.sync(open, |done| fs.fsync_blocking(&open.file, true, done))? {
                    self.model.files[file].synced();
                }
                Ok(())
            }
            Op::Truncate => self.truncate(file, open),
            Op::Punch => self.punch(file, open),
            Op::Move => {
                let other = SLICES - 1 - open.file.layout().home();
                let moved = self.mount.fs.move_to(open.file.ino(), other);
                if self.judge("move", moved)? {
                    self.model.files[file].synced();
                }
                Ok(())
            }
            Op::Link => self.link(file, open),
            _ => self.rename_or_unlink(op, file),
        }
    }

    fn read(&mut self, file: usize, open: &Open) -> Result<(), String> {
        match self.mount.read(&open.file) {
            Ok(bytes) => self.model.files[file]
                .read(bytes)
                .map_err(|why| format!("read: {why}")),
            Err(error) => self.refused("read", &error),
        }
    }

    fn sync(&self, open: &Open, start: impl FnOnce(Done)) -> Result<bool, String> {
        let synced = wait(start);
        let reported = open.file.report_errors(&open.seen);
        self.judge("sync", synced.and(reported))
    }

    /// Returns whether the write succeeded.
    fn write(&mut self, file: usize, open: &Open, at: usize, len: usize) -> Result<bool, String> {
        let data = pattern(self.writes, at, len);
        self.writes += 1;
        let mut bytes = self.model.files[file].bytes().to_vec();
        bytes.resize(bytes.len().max(at + len), 0);
        bytes[at..at + len].copy_from_slice(&data);
        let written = self.mount.write(&open.file, at, &data);
        let is_written = self.judge("write", written)?;
        let contents = &mut self.model.files[file];
        match is_written {
            true => contents.write(bytes, at..at + len),
            false => contents.may_change(bytes, at..at + len),
        }
        Ok(is_written)
    }

    fn truncate(&mut self, file: usize, open: &Open) -> Result<(), String> {
        const SIZE: usize = 1000;
        let set = SetAttr {
            size: Some(SIZE as u64),
            ..SetAttr::default()
        };
        let result = self.mount.fs.setattr(open.file.ino(), set, CALLER);
        let is_done = self.judge("truncate", result)?;
        let contents = &mut self.model.files[file];
        let mut bytes = contents.bytes().to_vec();
        let old = bytes.len();
        bytes.resize(SIZE, 0);
        match is_done {
            true => contents.truncate(bytes),
            false => contents.may_change(bytes, SIZE..old.max(SIZE)),
        }
        Ok(())
    }

    fn punch(&mut self, file: usize, open: &Open) -> Result<(), String> {
        const RANGE: std::ops::Range<usize> = 2048..10_240;
        let (at, len) = (RANGE.start as u64, RANGE.len() as u64);
        let result = self.mount.fs.fallocate(&open.file, 3, at, len);
        let is_done = self.judge("punch", result)?;
        let contents = &mut self.model.files[file];
        let mut bytes = contents.bytes().to_vec();
        let end = RANGE.end.min(bytes.len());
        if let Some(punched) = bytes.get_mut(RANGE.start..end) {
            punched.fill(0);
        }
        match is_done {
            true => contents.zero(bytes, RANGE),
            false => contents.may_change(bytes, RANGE),
        }
        Ok(())
    }

    /// Gives a file a further name in the directory in which it has no name.
    fn link(&mut self, file: usize, open: &Open) -> Result<(), String> {
        let mut names = self.model.names().iter();
        let Some((path, _)) = names.find(|(_, f)| **f == file) else {
            return Ok(());
        };
        let (_, name) = path.split_once('/').expect("a directory");
        let to = format!("{}/link-{name}", DIRS[1 - slice_of_path(path)]);
        if self.model.names().contains_key(&to) {
            return Ok(());
        }
        let ino = open.file.ino();
        let linked = self.mount.split(&to).and_then(|(dir, name)| {
            let linked = self.mount.fs.link(ino, dir, name);
            linked.inspect(|_| self.mount.fs.forget(ino, 1))
        });
        if self.judge("link", linked)? {
            self.model.rename(file, |names| {
                names.insert(to, file);
            });
        }
        Ok(())
    }

    fn rename_or_unlink(&mut self, op: Op, file: usize) -> Result<(), String> {
        let mut names = self.model.names().iter();
        let Some(path) = names.find(|(_, f)| **f == file).map(|(p, _)| p.clone()) else {
            return Ok(());
        };
        let (dir, name) = path.split_once('/').expect("a directory");
        let other_dir = DIRS[usize::from(dir == DIRS[0])];
        let to = match op {
            Op::RenameOver => path_of(usize::from(path_of(0) == path)),
            Op::RenameCross => format!("{other_dir}/{name}"),
            _ => String::new(),
        };
        let change = || {
            let (dir, name) = self.mount.split(&path)?;
            if op == Op::Unlink {
                return self.mount.fs.unlink(dir, name);
            }
            let (dir_to, name_to) = self.mount.split(&to)?;
            self.mount.fs.rename(dir, name, dir_to, name_to, 0)
        };
        if self.judge("rename or unlink", change())? {
            self.model.rename(file, |names| {
                names.remove(&path);
                if op != Op::Unlink {
                    names.insert(to, file);
                }
            });
        }
        Ok(())
    }
}

/// Fails unless the device has failed and the error says which device and which operation.
fn refuse_unexplained(
    set: &DeviceSet,
    case: Option<&Case>,
    what: &str,
    error: &str,
) -> Result<(), String> {
    let Some(case) = case else {
        return Err(format!("{what} failed without a fault: {error}"));
    };
    if !has_failed(set) {
        return Err(format!("{what} failed before the device did: {error}"));
    }
    let (device, operation) = (name_of(case.device), case.operation.name());
    // A device that remembers a failed flush fails its durable writes, too.
    let also = match case.operation {
        Operation::Flush => Operation::DurableWrite.name(),
        _ => operation,
    };
    let names_operation = error.contains(operation) || error.contains(also);
    match error.contains(&device) && names_operation {
        true => Ok(()),
        false => Err(format!(
            "{what} does not name {operation} of {device}: {error}"
        )),
    }
}
