//! A volume on two simulated devices, one of which fails, and the judgement of what is left.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use jericho_cache::{Config, FRAMES_MIN, Intent, Slice};
use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, Done, Ino, Kind, ROOT, SetAttr};
use jericho_fs::{Error, File, Fs, FsOptions, SeenErrors};
use jericho_sim::{DeviceSet, Effect, Fault, FaultPlan, SimDevice};
use jericho_volume::{FormatOptions, OpenMode, Volume};

use crate::SHORT;
use crate::model::{Model, Names};
use crate::steps::{Base, Case, DEVICES, KINDS, Op, Sequence, Step};

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
    fs: Arc<Fs>,
    /// Dropped after the filesystem.
    slices: Slices,
}

fn open(set: &DeviceSet) -> Result<Mount, String> {
    let volume = Volume::open_from_devices(set.as_devices(), OpenMode::WRITE)
        .map_err(|error| error.to_string())?;
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
    let slices = Slices((0..SLICES).map(start).collect());
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

    /// Returns all files with their contents.
    fn look(&self) -> Result<BTreeMap<String, Vec<u8>>, Error> {
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
                found.insert(path, self.read(&open.file)?);
                self.fs.close_file(&open.file);
            }
        }
        Ok(found)
    }
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

/// Volumes in the states in which sequences begin.
pub struct Templates {
    clean: (DeviceSet, Model),
    crashed: (DeviceSet, Model),
}

impl Templates {
    pub fn new() -> Templates {
        let devices = [24 << 20, 16 << 20].into_iter().enumerate();
        let set = DeviceSet::new(
            devices.map(|(device, bytes)| SimDevice::new(&name_of(device), bytes).with_discards()),
        );
        let options = FormatOptions {
            slices: Some(SLICES),
            ..FormatOptions::default()
        };
        let paths = DEVICES.map(PathBuf::from);
        format_devices(&set.as_devices(), &paths, &options).unwrap();
        let mount = open(&set).unwrap();
        for dir in DIRS {
            mount.fs.mkdir(ROOT, dir.as_bytes(), 0o755, CALLER).unwrap();
        }
        let mut names = Names::new();
        let mut files = Vec::new();
        for (file, size) in SIZES.into_iter().enumerate() {
            let made = mount.create(&path_of(file)).unwrap();
            files.push(pattern(file, 0, size));
            mount.write(&made.file, 0, &files[file]).unwrap();
            names.insert(path_of(file), file);
        }
        mount.fs.close().unwrap();
        drop(mount);
        let clean = (set.crash(0), Model::new(names, files));
        let sequence = "clean,append:a,fsync:a,overwrite:b,fdatasync:b,create:b,append:b,fsync:b";
        let (set, mut model) = (clean.0.crash(0), clean.1.clone());
        let mut bed = Bed::begin(&set, &mut model, None).unwrap().unwrap();
        for step in &sequence.parse::<Sequence>().unwrap().steps {
            bed.step(*step).unwrap();
        }
        wait(|done| bed.mount.fs.fsync_dir(ROOT, done)).unwrap();
        drop(bed);
        model.synced_all_names();
        let crashed = (set.crash(0), model);
        Templates { clean, crashed }
    }

    fn of(&self, base: Base) -> (DeviceSet, Model) {
        let (set, model) = match base {
            Base::Clean => &self.clean,
            Base::Crashed => &self.crashed,
        };
        // Nothing is volatile, so nothing is lost.
        (set.crash(0), model.clone())
    }
}

/// Returns how many operations of each kind each device does in a sequence without a fault.
pub fn count(templates: &Templates, sequence: &Sequence) -> Vec<[u64; KINDS.len()]> {
    let (set, mut model) = templates.of(sequence.base);
    run(&set, &mut model, sequence, None).unwrap();
    let of_kind = |device: &Arc<SimDevice>| KINDS.map(|(kind, _)| device.operations(Some(kind)));
    set.devices().iter().map(of_kind).collect()
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
    set.devices()[case.device].set_plan(FaultPlan {
        faults: vec![fault],
        ..FaultPlan::default()
    });
    run(&set, &mut model, &case.sequence, Some(case))?;
    let after = set.crash(case.nth);
    judge(&after, &model).map_err(|why| format!("after a power cut: {why}"))
}

fn run(
    set: &DeviceSet,
    model: &mut Model,
    sequence: &Sequence,
    case: Option<&Case>,
) -> Result<(), String> {
    let Some(mut bed) = Bed::begin(set, model, case)? else {
        return Ok(());
    };
    for step in &sequence.steps {
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

fn check(set: &DeviceSet) -> Result<(), String> {
    let report = check_devices(set.as_devices(), CheckOptions::default());
    let report = report.map_err(|error| format!("check: {error}"))?;
    match report.is_sound() {
        true => Ok(()),
        false => Err(format!("check: {:?}", report.findings)),
    }
}

/// Checks a volume, compares what it shows with the model, and uses it.
fn judge(set: &DeviceSet, model: &Model) -> Result<(), String> {
    check(set)?;
    let mount = open(set)?;
    let found = mount.look().map_err(|error| error.to_string())?;
    model.judge(&found)?;
    let mut expected = found.clone();
    for (path, bytes) in &mut expected {
        let grown = pattern(99, bytes.len(), 5000);
        let open = mount.open_path(path).map_err(|error| error.to_string())?;
        let written = mount.write(&open.file, bytes.len(), &grown);
        written.map_err(|error| error.to_string())?;
        bytes.extend(grown);
        mount.fs.close_file(&open.file);
    }
    mount.fs.close().map_err(|error| error.to_string())?;
    drop(mount);
    check(set)?;
    let mount = open(set)?;
    match mount.look() {
        Ok(found) if found == expected => Ok(()),
        Ok(_) => Err("what was written after the recovery is lost".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// A mounted volume with a model of it.
struct Bed<'s> {
    set: &'s DeviceSet,
    model: &'s mut Model,
    case: Option<&'s Case>,
    mount: Mount,
    /// The open files that a step can name, with their index in the model.
    current: [Option<(usize, Open)>; 2],
    writes: usize,
}

impl<'s> Bed<'s> {
    /// Mounts the volume. Returns `None` if that fails with a good reason.
    fn begin(
        set: &'s DeviceSet,
        model: &'s mut Model,
        case: Option<&'s Case>,
    ) -> Result<Option<Bed<'s>>, String> {
        let mount = match open(set) {
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
            current: [None, None],
            writes: SIZES.len(),
        };
        for slot in 0..2 {
            let path = path_of(slot);
            let Some(file) = bed.model.names().get(&path).copied() else {
                continue;
            };
            match bed.mount.open_path(&path) {
                Ok(open) => bed.current[slot] = Some((file, open)),
                Err(error) => bed.refused("open", &error)?,
            }
        }
        Ok(Some(bed))
    }

    /// Fails unless an error of an operation has a good reason and says so.
    fn refused(&self, what: &str, error: &Error) -> Result<(), String> {
        refuse_unexplained(self.set, self.case, what, &error.to_string())
    }

    /// Returns whether a result is a success.
    fn judge<T>(&self, what: &str, result: Result<T, Error>) -> Result<bool, String> {
        match result {
            Ok(_) => Ok(true),
            Err(error) => self.refused(what, &error).map(|()| false),
        }
    }

    /// Unmounts. Returns whether that succeeded.
    fn unmount(&mut self) -> Result<bool, String> {
        for (_, open) in self.current.iter_mut().flat_map(Option::take) {
            self.mount.fs.close_file(&open.file);
        }
        let closed = self.judge("unmount", self.mount.fs.close())?;
        if closed {
            self.model.synced_all_names();
            self.model.files.iter_mut().for_each(|file| file.synced());
        }
        Ok(closed)
    }

    /// Takes a step. Returns false if the sequence ends with it.
    fn step(&mut self, Step { op, file: slot }: Step) -> Result<bool, String> {
        match op {
            Op::Create => self.create(slot)?,
            Op::Commit => {
                let committed = wait(|done| self.mount.fs.fsync_dir(ROOT, done));
                if self.judge("commit", committed)? {
                    self.model.synced_all_names();
                }
            }
            Op::Checkpoint => drop(self.judge("checkpoint", self.mount.fs.checkpoint())?),
            Op::Trim => drop(self.judge("trim", self.mount.fs.trim(0..u64::MAX, 1, None))?),
            Op::Remount => return self.remount(),
            _ => {
                if let Some((file, open)) = self.current[slot].take() {
                    let result = self.step_of_file(op, file, &open);
                    self.current[slot] = Some((file, open));
                    result?;
                }
            }
        }
        Ok(true)
    }

    fn remount(&mut self) -> Result<bool, String> {
        if !self.unmount()? {
            return Ok(false);
        }
        // The devices can be opened only once, so the old mount ends first.
        let (set, case) = (self.set, self.case);
        self.mount.slices.0.iter().for_each(|slice| slice.close());
        let Some(next) = Bed::begin(set, self.model, case)? else {
            return Ok(false);
        };
        let (mount, current) = (next.mount, next.current);
        self.mount = mount;
        self.current = current;
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
                    self.model.files[file].synced();
                    let touched = self.model.files[file].touched;
                    self.model.synced_names(touched);
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
            Op::Truncate | Op::Punch => self.shorten(op, file, open),
            Op::Move => {
                let other = SLICES - 1 - open.file.layout().home();
                let moved = self.mount.fs.move_to(open.file.ino(), other);
                self.judge("move", moved).map(drop)
            }
            _ => self.rename_or_unlink(op, file),
        }
    }

    fn read(&mut self, file: usize, open: &Open) -> Result<(), String> {
        match self.mount.read(&open.file) {
            // An operation that failed half-way may have changed some bytes.
            Ok(bytes) => self.model.files[file]
                .judge(&bytes)
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
        let written = self.judge("write", written)?;
        self.changed(file, written, bytes);
        Ok(written)
    }

    fn changed(&mut self, file: usize, is_done: bool, bytes: Vec<u8>) {
        match is_done {
            true => self.model.files[file].change(bytes),
            false => self.model.files[file].may_change(bytes),
        }
    }

    fn shorten(&mut self, op: Op, file: usize, open: &Open) -> Result<(), String> {
        let mut bytes = self.model.files[file].bytes().to_vec();
        let fs = &self.mount.fs;
        let result = if op == Op::Truncate {
            bytes.resize(1000, 0);
            let set = SetAttr {
                size: Some(1000),
                ..SetAttr::default()
            };
            fs.setattr(open.file.ino(), set, CALLER).map(drop)
        } else {
            let range = 2048..10_240.min(bytes.len());
            if let Some(punched) = bytes.get_mut(range) {
                punched.fill(0);
            }
            fs.fallocate(&open.file, 3, 2048, 10_240 - 2048)
        };
        let is_done = self.judge("truncate or punch", result)?;
        self.changed(file, is_done, bytes);
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
    match error.contains(&device) && error.contains(operation) {
        true => Ok(()),
        false => Err(format!(
            "{what} does not name {operation} of {device}: {error}"
        )),
    }
}
