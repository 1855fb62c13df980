//! Operations on files in different slices share no cache line that one of them writes: no lock, no atomic and no counter.
//!
//! Two threads make files, one after the other, each in a slice of its own, and the accesses of each to memory are recorded
//! (`jericho_sim::lines`). A line that one thread writes and the other one uses would make the two slow each other down if they ran at the
//! same time. The thread that syncs commits, so commits are recorded, too.
//!
//! Two things are shared, and the tests know their lines: the numbers of free blocks, which writes change, and the records of threads in
//! `arc_swap`, to which a commit writes. docs/internals/fs.md tells why.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, Barrier, mpsc};

use arc_swap::ArcSwap;
use jericho_fs::add::add_device;
use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, Ino, Kind, ROOT};
use jericho_fs::{Fs, FsOptions};
use jericho_sim::lines::{Record, announce, record, trace};
use jericho_storage::{Device, DiscardEffect, Layer, OpenOptions, open_device};
use jericho_volume::{FormatOptions, OpenMode, Volume};

const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};
/// Repetitions of the first part before the recorded ones: then each thread's own memory has grown to its size.
const WARM_UP: usize = 80;
const RECORDED: usize = 20;
/// The same for the other parts. A commit takes a hundred times as many accesses as a create.
const WARM_UP_LATER: usize = 4;
const RECORDED_LATER: usize = 3;

/// The environment variable with the directory of the devices.
const DIR: &str = "JERICHO_LINES_DIR";
/// The environment variable that is set if the second slice is added while the volume is mounted.
const ADDS: &str = "JERICHO_LINES_ADDS";

/// A device without discards: the thread that discards would be in the trace.
struct Plain(Arc<dyn Device>);

impl Layer for Plain {
    fn below(&self) -> &dyn Device {
        &*self.0
    }
    fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.queue_fd()
    }
    fn discard_effect(&self) -> DiscardEffect {
        DiscardEffect::Nothing
    }
}

fn devices(dir: &Path) -> Vec<Arc<dyn Device>> {
    let open = |name| {
        let device = open_device(&dir.join(name), OpenOptions::default()).unwrap();
        Arc::new(Plain(device)) as Arc<dyn Device>
    };
    ["one", "two"].map(open).into()
}

fn open(devices: Vec<Arc<dyn Device>>) -> Arc<Fs> {
    let volume = Volume::open_from_devices(devices, OpenMode::WRITE).unwrap();
    open_volume(Arc::new(volume))
}

fn open_volume(volume: Arc<Volume>) -> Arc<Fs> {
    let options = FsOptions {
        store_cache_bytes: 16 << 20,
        read_only: false,
        inode_cache: 10_000,
        commit_interval_ms: 3_600_000,
    };
    Fs::open(volume, Vec::new(), options).unwrap()
}

/// Makes a volume with a directory in each of two slices. With `adds`, a volume with one slice and a file for the second one.
fn prepare(dir: &Path, adds: bool) {
    let paths = ["one", "two"].map(|name| dir.join(name));
    for path in &paths {
        File::create(path).unwrap().set_len(72 << 20).unwrap();
    }
    let count = if adds { 1 } else { 2 };
    let options = FormatOptions {
        slices: Some(count),
        has_stores: Some(!adds),
        ..FormatOptions::default()
    };
    let count = usize::from(count);
    format_devices(&devices(dir)[..count], &paths[..count], &options).unwrap();
    if adds {
        return;
    }
    let fs = open(devices(dir));
    for name in [b"x", b"y"] {
        fs.mkdir(ROOT, name, 0o755, CALLER).unwrap();
    }
    fs.close().unwrap();
}

/// Mounts the volume, which gets its second slice while it is mounted.
fn open_and_add(dir: &Path) -> Arc<Fs> {
    let devices = devices(dir);
    let volume = Volume::open_from_devices(devices[..1].to_vec(), OpenMode::WRITE);
    let volume = Arc::new(volume.unwrap());
    let fs = open_volume(volume.clone());
    let added = add_device(&volume, devices[1].clone(), &dir.join("two"), 1).unwrap();
    fs.take(&added, || Ok(vec![]), |_| ()).unwrap();
    fs
}

/// What each thread does, and what the test expects of it.
const PARTS: [Part; 4] = [
    Part {
        name: "creates",
        run: create,
        uses_blocks: false,
        commits: false,
    },
    Part {
        name: "creates and removals",
        run: create_and_remove,
        uses_blocks: false,
        commits: false,
    },
    Part {
        name: "creates and syncs",
        run: create_and_sync,
        uses_blocks: false,
        commits: true,
    },
    Part {
        name: "writes, removals and syncs",
        run: write_and_remove,
        uses_blocks: true,
        commits: true,
    },
];

struct Part {
    name: &'static str,
    /// Makes a file with this name.
    run: fn(&Fs, Ino, &str),
    /// Changes the numbers of free blocks.
    uses_blocks: bool,
    commits: bool,
}

fn make(fs: &Fs, dir: Ino, name: &str) -> Arc<jericho_fs::File> {
    let made = fs.mknod(dir, name.as_bytes(), Kind::File, 0o644, 0, CALLER);
    fs.open_file(made.unwrap().ino).unwrap()
}

fn remove(fs: &Fs, dir: Ino, name: &str, file: &Arc<jericho_fs::File>) {
    fs.unlink(dir, name.as_bytes()).unwrap();
    fs.close_file(file);
    fs.forget(file.ino(), 1);
}

fn sync(fs: &Fs, file: &Arc<jericho_fs::File>) {
    let (sender, receiver) = mpsc::channel();
    let done = Box::new(move |result| sender.send(result).unwrap());
    fs.fsync_blocking(file, false, done);
    receiver.recv().unwrap().unwrap();
}

fn create(fs: &Fs, dir: Ino, name: &str) {
    fs.close_file(&make(fs, dir, name));
}

fn create_and_remove(fs: &Fs, dir: Ino, name: &str) {
    remove(fs, dir, name, &make(fs, dir, name));
}

fn create_and_sync(fs: &Fs, dir: Ino, name: &str) {
    let file = make(fs, dir, name);
    sync(fs, &file);
    fs.close_file(&file);
}

fn write_and_remove(fs: &Fs, dir: Ino, name: &str) {
    let file = make(fs, dir, name);
    fs.begin_write(&file, 0, 100).unwrap();
    fs.end_write(&file, 0, 100);
    sync(fs, &file);
    remove(fs, dir, name, &file);
    // Commits the removal.
    let (sender, receiver) = mpsc::channel();
    let done = Box::new(move |result| sender.send(result).unwrap());
    fs.fsync_dir_blocking(dir, done);
    receiver.recv().unwrap().unwrap();
}

/// What runs under valgrind.
#[test]
#[ignore = "run by the other tests, under valgrind"]
fn operations_that_are_recorded() {
    let dir = std::env::var_os(DIR).unwrap();
    let adds = std::env::var_os(ADDS).is_some();
    let fs = match adds {
        true => open_and_add(Path::new(&dir)),
        false => open(devices(Path::new(&dir))),
    };
    announce();
    let barrier = &Barrier::new(2);
    std::thread::scope(|scope| {
        for (index, name) in [b"x", b"y"].into_iter().enumerate() {
            let fs = &fs;
            scope.spawn(move || {
                for turn in 0..2 {
                    if turn == index {
                        // The inode is in memory that this thread has allocated.
                        let dir = match adds {
                            true => fs.mkdir(ROOT, name, 0o755, CALLER),
                            false => fs.lookup(ROOT, name),
                        };
                        let dir = dir.unwrap().ino;
                        assert_eq!((dir >> 40) as usize, index, "the slice");
                        PARTS.iter().enumerate().for_each(|(number, part)| {
                            let run = |from: usize, count| {
                                (from..from + count)
                                    .for_each(|i| (part.run)(fs, dir, &format!("{number}-{i}")));
                            };
                            let (before, recorded) = match number {
                                0 => (WARM_UP, RECORDED),
                                _ => (WARM_UP_LATER, RECORDED_LATER),
                            };
                            run(0, before);
                            record(|| run(before, recorded));
                        });
                    }
                    barrier.wait();
                }
            });
        }
    });
    // The lines that are known to be shared.
    record(|| fs.has_room_for(1));
    let swapped = ArcSwap::from_pointee(0);
    let one = Arc::new(1);
    record(|| swapped.store(one));
    // The trace is slow, so nothing more happens.
    std::process::exit(0);
}

#[test]
fn operations_in_two_slices_share_no_cache_line_that_one_of_them_writes() {
    assert_shares_no_line(false);
}

#[test]
fn operations_in_a_slice_that_was_added_share_no_cache_line_with_those_in_another_one() {
    assert_shares_no_line(true);
}

fn assert_shares_no_line(adds: bool) {
    // In the build directory, because /tmp may be a tmpfs, which has no direct I/O.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    prepare(dir.path(), adds);
    let mut variables = vec![(DIR, dir.path().as_os_str())];
    if adds {
        variables.push((ADDS, OsStr::new("1")));
    }
    let mut records = trace("operations_that_are_recorded", &variables);
    let threads = records.pop().unwrap().only_written();
    let blocks = records.pop().unwrap();
    assert_eq!(records.len(), 2 * PARTS.len());
    let mut found = vec![];
    for (index, part) in PARTS.iter().enumerate() {
        let (first, second) = (&records[index], &records[PARTS.len() + index]);
        // Else the trace is not that of creates.
        for record in [first, second] {
            assert!(record.written() > 2 * RECORDED, "{}", part.name);
        }
        let mut known: Vec<&Record> = vec![];
        known.extend(part.uses_blocks.then_some(&blocks));
        known.extend(part.commits.then_some(&threads));
        let shared = first.shared_with(second, &known).into_iter();
        found.extend(shared.map(|line| format!("{}: {line}", part.name)));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
