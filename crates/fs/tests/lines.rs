//! Creates in different slices share no cache line that one of them writes: no lock, no atomic and no counter.
//!
//! The test runs itself under valgrind's tool lackey, which prints each access to memory. Two threads create files, one after the other, each in
//! a slice of its own. A line that one thread writes and the other one uses would make the two slow each other down if they ran at the same
//! time. Nothing is committed, because lackey does not tell threads apart, and the checkpointer follows each commit.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

use jericho_fs::add::add_device;
use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, Ino, Kind, ROOT};
use jericho_fs::{Fs, FsOptions};
use jericho_storage::{Device, DiscardEffect, Layer, OpenOptions, open_device};
use jericho_volume::{FormatOptions, OpenMode, Volume};

const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};
const LINE_BYTES: u64 = 64;
/// Creates before the recorded ones: then each thread's own memory has grown to its size.
const WARM_UP: usize = 80;
const RECORDED: usize = 20;
/// Written at the begin and at the end of what is recorded: the number of the thread, and 0. The trace shows where.
static MARK: Mark = Mark([0; 8], AtomicU64::new(0), [0; 8]);

/// Has cache lines of its own.
#[repr(align(128))]
struct Mark(
    #[expect(dead_code)] [u64; 8],
    AtomicU64,
    #[expect(dead_code)] [u64; 8],
);

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

fn create(fs: &Fs, dir: Ino, from: usize, count: usize) {
    for number in from..from + count {
        let name = format!("f{number}");
        let made = fs.mknod(dir, name.as_bytes(), Kind::File, 0o644, 0, CALLER);
        let file = fs.open_file(made.unwrap().ino).unwrap();
        fs.close_file(&file);
    }
}

/// What runs under valgrind. Prints the address of `MARK`.
#[test]
#[ignore = "run by the other tests, under valgrind"]
fn creates_that_are_recorded() {
    let dir = std::env::var_os(DIR).unwrap();
    let adds = std::env::var_os(ADDS).is_some();
    let fs = match adds {
        true => open_and_add(Path::new(&dir)),
        false => open(devices(Path::new(&dir))),
    };
    println!("mark {:x}", &raw const MARK.1 as usize);
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
                        // The other thread reaches the barrier meanwhile.
                        create(fs, dir, 0, WARM_UP);
                        MARK.1.store(1 + index as u64, Ordering::SeqCst);
                        create(fs, dir, WARM_UP, RECORDED);
                        MARK.1.store(0, Ordering::SeqCst);
                    }
                    barrier.wait();
                }
            });
        }
    });
    // The trace is slow, so nothing more happens.
    std::process::exit(0);
}

/// The use of a line by the two threads: where each of them read and wrote it last, as the address of the instruction.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    read: [Option<u64>; 2],
    written: [Option<u64>; 2],
}

impl Use {
    fn is_shared(&self) -> bool {
        let uses = |thread: usize| self.read[thread].or(self.written[thread]).is_some();
        (0..2).any(|thread| self.written[thread].is_some() && uses(1 - thread))
    }
}

/// Follows lackey's trace: a line `I  ADDRESS,SIZE` for each instruction, and ` L`, ` S` or ` M` for each load, store and both.
#[derive(Default)]
struct Trace {
    /// Number of times that the mark was written.
    marks: u32,
    instruction: u64,
    uses: BTreeMap<u64, Use>,
}

impl Trace {
    fn follow(&mut self, line: &str, mark: u64) {
        let Some((kind, place)) = line.split_at_checked(3) else {
            return;
        };
        let Some((address, size)) = place.split_once(',') else {
            return;
        };
        let Ok(address) = u64::from_str_radix(address, 16) else {
            return;
        };
        let is_store = match kind {
            "I  " => {
                self.instruction = address;
                return;
            }
            " L " => false,
            " S " | " M " => true,
            _ => return,
        };
        if address == mark {
            self.marks += u32::from(is_store);
            return;
        }
        let thread = match self.marks {
            1 => 0,
            3 => 1,
            _ => return,
        };
        let size: u64 = size.trim().parse().unwrap();
        for line in address / LINE_BYTES..=(address + size - 1) / LINE_BYTES {
            let uses = self.uses.entry(line).or_default();
            match is_store {
                true => uses.written[thread] = Some(self.instruction),
                false => uses.read[thread] = Some(self.instruction),
            }
        }
    }
}

#[test]
fn creates_in_two_slices_share_no_cache_line_that_one_of_them_writes() {
    assert_shares_no_line(false);
}

#[test]
fn creates_in_a_slice_that_was_added_share_no_cache_line_with_those_in_another_one() {
    assert_shares_no_line(true);
}

fn assert_shares_no_line(adds: bool) {
    // In the build directory, because /tmp may be a tmpfs, which has no direct I/O.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    prepare(dir.path(), adds);
    let mut traced = Command::new("valgrind");
    traced
        .args(["--tool=lackey", "--trace-mem=yes", "--basic-counts=no"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "creates_that_are_recorded", "--ignored"])
        .args(["--nocapture", "--test-threads=1"])
        .env(DIR, dir.path())
        // Else a thread goes on to use memory that another thread has allocated and that it has freed itself.
        .env("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if adds {
        traced.env(ADDS, "1");
    }
    let mut traced = traced.spawn().expect("valgrind runs");
    let said = BufReader::new(traced.stdout.take().unwrap());
    let mark = Arc::new(AtomicU64::new(0));
    let found = mark.clone();
    let reader = std::thread::spawn(move || {
        for line in said.lines() {
            if let Some((_, address)) = line.unwrap().split_once("mark ") {
                found.store(u64::from_str_radix(address, 16).unwrap(), Ordering::SeqCst);
            }
        }
    });
    let mut trace = Trace::default();
    let mut lines = BufReader::new(traced.stderr.take().unwrap());
    let mut line = String::new();
    while lines.read_line(&mut line).unwrap() > 0 {
        trace.follow(&line, mark.load(Ordering::SeqCst));
        line.clear();
    }
    assert!(traced.wait().unwrap().success());
    reader.join().unwrap();
    assert_eq!(trace.marks, 4, "begin and end of two threads");
    let written = |thread: usize| {
        let lines = trace.uses.values();
        lines.filter(|uses| uses.written[thread].is_some()).count()
    };
    // Else the trace is not that of creates.
    assert!(written(0) > 2 * RECORDED && written(1) > 2 * RECORDED);
    let shared: Vec<_> = (trace.uses.iter())
        .filter(|(_, uses)| uses.is_shared())
        .map(|(line, uses)| format!("{:#x}: {uses:x?}", line * LINE_BYTES))
        .collect();
    assert!(
        shared.is_empty(),
        "{} lines:\n{}",
        shared.len(),
        shared.join("\n")
    );
}
