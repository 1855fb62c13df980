//! Several threads on a volume with a metadata store in each of two slices, on a device each: each thread creates, writes, truncates, syncs,
//! moves and removes its own files, and renames them between the slices, until the power is cut. Then each file has one name or
//! none, a synced one has a name of its last sync or a later one, and each page has contents of the file's last sync or later.
//!
//! `JERICHO_CRASH_SEED=1000 JERICHO_CRASH_CASES=500` runs other cases. The order of the threads is not part of a case, so a failure
//! may need several runs to come again.

mod mount;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use jericho_fs::check::CheckOptions;
use jericho_fs::check::check_devices;
use jericho_fs::check::data::check_data;
use jericho_fs::types::{Done, Ino, Kind, ROOT, SetAttr};
use jericho_fs::{File, Result};
use jericho_sim::{FaultPlan, Random, SimDevice};
use jericho_storage::Device;

use mount::{CALLER, Mount, PAGE};

const CASES: u64 = 16;
const THREADS: u64 = 4;
/// Open files of a thread at most.
const FILES: usize = 4;
/// Pages of a file at most. A small sync takes fewer.
const PAGES: u64 = 24;
const DEVICE_BYTES: u64 = 24 << 20;
/// A directory in each slice.
const DIRS: [&str; 2] = ["x", "y"];

/// A directory, as an index in `DIRS`, and a name in it.
type Path = (usize, String);

/// A file, and what it may be after a power cut. A page consists of one number, repeated.
struct Model {
    ino: Ino,
    /// The names that the file may have. The last one is that in memory.
    paths: Vec<Path>,
    /// The file has one of these names.
    is_synced: bool,
    /// It may have none, because it was removed or replaced.
    may_be_gone: bool,
    now: Vec<u64>,
    /// Numbers that each page may have.
    may: Vec<BTreeSet<u64>>,
    steps: Vec<String>,
}

impl Model {
    fn new(ino: Ino, path: Path) -> Model {
        Model {
            ino,
            paths: vec![path],
            is_synced: false,
            may_be_gone: false,
            now: vec![0; PAGES as usize],
            may: vec![BTreeSet::from([0]); PAGES as usize],
            steps: Vec::new(),
        }
    }

    fn path(&self) -> &Path {
        self.paths.last().expect("at least one")
    }

    fn set(&mut self, pages: Range<u64>, number: u64) {
        for page in pages.start as usize..pages.end as usize {
            self.now[page] = number;
            self.may[page].insert(number);
        }
    }

    fn synced_bytes(&mut self) {
        self.is_synced = true;
        self.may = self.now.iter().map(|now| BTreeSet::from([*now])).collect();
    }

    fn synced_name(&mut self) {
        self.is_synced = true;
        self.paths.drain(..self.paths.len() - 1);
    }

    /// Fails if a file with these names and bytes is none of the possible ones.
    fn judge(&self, found: &[(Path, Vec<u8>)]) -> std::result::Result<(), String> {
        let [(path, bytes)] = found else {
            let is_right = found.is_empty() && (self.may_be_gone || !self.is_synced);
            let names: Vec<&Path> = found.iter().map(|(path, _)| path).collect();
            return is_right.then_some(()).ok_or(format!("the names {names:?}"));
        };
        if !self.paths.contains(path) {
            return Err(format!("the name {path:?}, not one of {:?}", self.paths));
        }
        let mut bytes = bytes.clone();
        bytes.resize((PAGES * PAGE) as usize, 0);
        for (page, bytes) in bytes.chunks(PAGE as usize).enumerate() {
            for number in bytes.chunks(8) {
                let number = u64::from_le_bytes(number.try_into().unwrap());
                if !self.may[page].contains(&number) {
                    let may = &self.may[page];
                    return Err(format!("{number:x} in page {page}, not one of {may:x?}"));
                }
            }
        }
        Ok(())
    }
}

/// An open file.
struct Open {
    file: Arc<File>,
    model: Model,
}

/// One thread.
struct Worker<'a> {
    mount: &'a Mount,
    dirs: [Ino; 2],
    thread: u64,
    random: Random,
    /// The last number that was written or used in a name.
    number: u64,
    open: Vec<Open>,
    /// Files that may be gone.
    removed: Vec<Model>,
    /// The power is cut.
    is_cut: &'a AtomicBool,
}

impl Worker<'_> {
    /// Takes steps until the power is cut. Returns all files.
    fn run(mut self) -> Vec<Model> {
        while !self.is_cut.load(Ordering::Acquire) && self.step().is_ok() {}
        self.is_cut.store(true, Ordering::Release);
        let open = self.open.drain(..).map(|open| {
            self.mount.fs().close_file(&open.file);
            open.model
        });
        open.chain(self.removed).collect()
    }

    fn next(&mut self) -> u64 {
        self.number += 1;
        self.number
    }

    /// Returns a name that no file had.
    fn name(&mut self) -> String {
        let number = self.next() & 0xffff_ffff;
        format!("{}-{number}", self.thread)
    }

    /// Fails when the power is cut.
    fn step(&mut self) -> Result<()> {
        if self.open.len() < FILES && self.random.below(3) == 0 || self.open.is_empty() {
            return self.create();
        }
        let at = self.random.below(self.open.len() as u64) as usize;
        let first = self.random.below(PAGES);
        let pages = first..(first + 1 + self.random.below(8)).min(PAGES);
        let step = self.random.below(18);
        let steps = &mut self.open[at].model.steps;
        steps.push(format!("step {step} of pages {pages:?}"));
        match step {
            0..=4 => self.write(at, pages),
            5..=8 => self.sync(at, step == 5, step < 8),
            9..=12 => self.rename(at),
            13 => self.replace(at),
            14 => self.truncate(at, first),
            15 => self.sync_dir(),
            // May find a slice full.
            16 => {
                let home = self.random.below(2) as u16;
                let _ = self.mount.fs().move_to(self.open[at].model.ino, home);
                Ok(())
            }
            _ => self.remove(at),
        }
    }

    fn create(&mut self) -> Result<()> {
        let dir = self.random.below(2) as usize;
        let name = self.name();
        let fs = self.mount.fs();
        let made = fs.mknod(
            self.dirs[dir],
            name.as_bytes(),
            Kind::File,
            0o644,
            0,
            CALLER,
        )?;
        let model = Model::new(made.ino, (dir, name));
        match fs.open_file(made.ino) {
            Ok(file) => self.open.push(Open { file, model }),
            Err(error) => {
                self.removed.push(model);
                return Err(error);
            }
        }
        fs.forget(made.ino, 1);
        Ok(())
    }

    fn write(&mut self, at: usize, pages: Range<u64>) -> Result<()> {
        let number = self.next();
        let Open { file, model } = &mut self.open[at];
        model.set(pages.clone(), number);
        let pages_bytes = (pages.end - pages.start) * PAGE;
        let bytes = number.to_le_bytes().repeat(pages_bytes as usize / 8);
        self.mount.try_write(file, pages.start * PAGE, &bytes)
    }

    fn truncate(&mut self, at: usize, pages: u64) -> Result<()> {
        let model = &mut self.open[at].model;
        model.set(pages..PAGES, 0);
        let set = SetAttr {
            size: Some(pages * PAGE),
            ..SetAttr::default()
        };
        let fs = self.mount.fs();
        fs.setattr(model.ino, set, CALLER).map(drop)
    }

    fn sync(&mut self, at: usize, datasync: bool, may_block: bool) -> Result<()> {
        let fs = self.mount.fs();
        let Open { file, model } = &mut self.open[at];
        wait(|done| match may_block {
            true => fs.fsync_blocking(file, datasync, done),
            false => fs.fsync(file, datasync, done),
        })?;
        model.synced_bytes();
        if !datasync {
            model.synced_name();
        }
        Ok(())
    }

    /// Syncs a directory. Its entries are then those in memory.
    fn sync_dir(&mut self) -> Result<()> {
        let dir = self.random.below(2) as usize;
        wait(|done| self.mount.fs().fsync_dir_blocking(self.dirs[dir], done))?;
        let files = self.open.iter_mut().map(|open| &mut open.model);
        files
            .filter(|model| model.path().0 == dir)
            .for_each(Model::synced_name);
        Ok(())
    }

    /// Renames a file to the other slice.
    fn rename(&mut self, at: usize) -> Result<()> {
        let name = self.name();
        let model = &mut self.open[at].model;
        let from = model.path().clone();
        let to = (1 - from.0, name);
        model.paths.push(to.clone());
        self.rename_to(&from, &to)
    }

    /// Renames a file over another one.
    fn replace(&mut self, at: usize) -> Result<()> {
        let other = self.random.below(self.open.len() as u64) as usize;
        if other == at {
            return Ok(());
        }
        let to = self.open[other].model.path().clone();
        self.open[other].model.may_be_gone = true;
        let model = &mut self.open[at].model;
        let from = model.path().clone();
        model.paths.push(to.clone());
        self.rename_to(&from, &to)?;
        self.forget(other);
        Ok(())
    }

    fn rename_to(&self, from: &Path, to: &Path) -> Result<()> {
        let (from_dir, to_dir) = (self.dirs[from.0], self.dirs[to.0]);
        let fs = self.mount.fs();
        fs.rename(from_dir, from.1.as_bytes(), to_dir, to.1.as_bytes(), 0)
    }

    fn remove(&mut self, at: usize) -> Result<()> {
        let model = &mut self.open[at].model;
        model.may_be_gone = true;
        let (dir, name) = model.path().clone();
        self.mount.fs().unlink(self.dirs[dir], name.as_bytes())?;
        self.forget(at);
        Ok(())
    }

    /// Closes a file that has no name. Its blocks go to other files.
    fn forget(&mut self, at: usize) {
        let Open { file, model } = self.open.swap_remove(at);
        self.mount.fs().close_file(&file);
        self.removed.push(model);
    }
}

fn wait(start: impl FnOnce(Done)) -> Result<()> {
    let (sender, receiver) = channel();
    start(Box::new(move |result| sender.send(result).unwrap()));
    receiver.recv().unwrap()
}

/// Returns the names and bytes of all files.
fn look(mount: &Mount) -> BTreeMap<Ino, Vec<(Path, Vec<u8>)>> {
    let fs = mount.fs();
    let mut found: BTreeMap<Ino, Vec<(Path, Vec<u8>)>> = BTreeMap::new();
    for (dir, name) in DIRS.iter().enumerate() {
        let parent = fs.lookup(ROOT, name.as_bytes()).unwrap().ino;
        let mut names = Vec::new();
        fs.readdir(parent, 2, &mut |entry| {
            names.push(String::from_utf8_lossy(&entry.name).into_owned());
            true
        })
        .unwrap();
        for name in names {
            let ino = fs.lookup(parent, name.as_bytes()).unwrap().ino;
            let bytes = mount.read(&fs.open_file(ino).unwrap());
            found.entry(ino).or_default().push(((dir, name), bytes));
        }
    }
    found
}

fn assert_sound(mount: &Mount, case: u64) {
    let devices = mount.devices();
    let mut report = check_devices(devices.clone(), CheckOptions::default()).unwrap();
    check_data(&devices, &mut report, &Arc::default()).unwrap();
    assert!(report.is_sound(), "case {case}: {:#?}", report.findings);
}

/// Has the threads work until the power is cut. Returns all files.
fn work(mount: &Mount, case: u64) -> Vec<Model> {
    let fs = mount.fs();
    let dirs = DIRS.map(|name| fs.mkdir(ROOT, name.as_bytes(), 0o755, CALLER).unwrap().ino);
    assert_eq!(dirs.map(|ino| ino >> 40), [0, 1], "the slices");
    fs.sync_all().unwrap();
    let mut random = Random::of(case, &[]);
    let cut_at = 10 + random.below(900);
    let is_second = random.coin();
    for (device, is_cut) in [
        (&mount.device, !is_second),
        (mount.second.as_ref().unwrap(), is_second),
    ] {
        device.set_plan(FaultPlan {
            // In the middle of an operation, perhaps between the batches of two slices.
            power_cut_at: is_cut.then_some(cut_at),
            // Lets the threads meet at more points.
            latency_max: (!case.is_multiple_of(3))
                .then(|| Duration::from_micros(100 << (case % 4))),
            seed: case,
            ..FaultPlan::default()
        });
    }
    let is_cut = AtomicBool::new(false);
    let models = std::thread::scope(|scope| {
        let start = |thread: u64| {
            let worker = Worker {
                mount,
                dirs,
                thread,
                random: Random::of(case, &[thread]),
                number: thread << 48,
                open: Vec::new(),
                removed: Vec::new(),
                is_cut: &is_cut,
            };
            scope.spawn(|| worker.run())
        };
        let threads: Vec<_> = (1..=THREADS).map(start).collect();
        while !is_cut.load(Ordering::Acquire) && threads.iter().any(|thread| !thread.is_finished())
        {
            let _ = fs.checkpoint();
        }
        let models = threads.into_iter().map(|thread| thread.join().unwrap());
        models.flatten().collect()
    });
    assert!(
        mount.device.flush().is_err(),
        "case {case}: a step has failed before the power was cut"
    );
    models
}

fn run_case(case: u64) {
    let device = |name| match case % 5 {
        0 => SimDevice::new(name, DEVICE_BYTES).without_fua(),
        _ => SimDevice::new(name, DEVICE_BYTES),
    };
    let checksums = case.is_multiple_of(4);
    let mut mount = Mount::on_two(
        ["one", "two"].map(device),
        checksums,
        !case.is_multiple_of(2),
    );
    let models = work(&mount, case);
    mount.power_cut(case);
    let mut found = look(&mount);
    for model in models {
        let found = found.remove(&model.ino).unwrap_or_default();
        if let Err(why) = model.judge(&found) {
            let steps = &model.steps;
            panic!("case {case}: inode {:x}: {why}: {steps:#?}", model.ino);
        }
    }
    let unknown: Vec<_> = found
        .into_values()
        .flatten()
        .map(|(path, _)| path)
        .collect();
    assert!(unknown.is_empty(), "case {case}: {unknown:?}");
    mount.durable("later", 5000);
    mount.fs().close().unwrap();
    mount.down();
    assert_sound(&mount, case);
}

#[test]
fn after_a_power_cut_each_file_of_several_threads_has_one_name_in_one_slice_and_what_was_synced() {
    let number = |name, default| std::env::var(name).map_or(default, |n| n.parse().unwrap());
    let first = number("JERICHO_CRASH_SEED", 1);
    let cases = number("JERICHO_CRASH_CASES", CASES);
    (first..first + cases).for_each(run_case);
}
