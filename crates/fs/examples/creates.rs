//! Measures how creates of two threads in two slices compare with those of one thread.
//!
//! Usage: cargo run --release -p jericho-fs --example creates -- DIR [ROUNDS] [FILES]
//!
//! The devices are files in DIR, which are removed at the end. Each thread is bound to a CPU of its own and creates FILES files in a new
//! directory of its slice. The sides of a round run in turn:
//!
//! - one: one thread in slice 0
//! - two: two threads, one in each slice of one volume
//! - apart: two threads, each in a volume of its own. They share nothing of a volume, so this is what the machine allows
//! - together: two threads in two directories of slice 0
//!
//! The first table has no commit in the measured time. In the second one the committers and checkpointers of the slices work meanwhile, on the same
//! CPUs. CPU times hold on a busy machine, too: if threads wait for each other's locks or cache lines, a create takes more of it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::time::Instant;

use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, Ino, Kind, ROOT};
use jericho_fs::{Fs, FsOptions};
use jericho_storage::{Device, OpenOptions, open_device};
use jericho_sys::affinity;
use jericho_volume::{FormatOptions, OpenMode, Volume};

const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};
const SIDES: [&str; 4] = ["one", "two", "apart", "together"];
const DEVICE_BYTES: u64 = 8 << 30;
const ROUNDS: usize = 15;
const FILES: usize = 7000;
/// Files of a thread in a round with commits, as a multiple.
const MORE: usize = 6;
const NS_PER_US: f64 = 1000.0;

/// A mounted volume of two slices on devices of their own.
struct Bed {
    fs: Arc<Fs>,
    /// A directory of each slice.
    dirs: [Ino; 2],
    /// Number of directories made so far.
    made: u32,
    paths: [PathBuf; 2],
}

impl Bed {
    fn new(dir: &Path, name: &str, commit_interval_ms: u64) -> Bed {
        let paths = ["one", "two"].map(|device| dir.join(format!("{name}-{device}.volume")));
        for path in &paths {
            let file = std::fs::File::create(path).expect("a file");
            file.set_len(DEVICE_BYTES).expect("a size");
        }
        let open = |path| open_device(path, OpenOptions::default()).expect("a device");
        let devices: Vec<Arc<dyn Device>> = paths.iter().map(|path| open(path)).collect();
        let options = FormatOptions {
            slices: Some(2),
            has_stores: Some(true),
            ..FormatOptions::default()
        };
        format_devices(&devices, &paths, &options).expect("a format");
        let volume = Volume::open_from_devices(devices, OpenMode::WRITE).expect("a volume");
        let options = FsOptions {
            store_cache_bytes: 64 << 20,
            read_only: false,
            inode_cache: 100_000,
            commit_interval_ms,
        };
        let fs = Fs::open(Arc::new(volume), Vec::new(), options).expect("a mount");
        let dirs = [b"x", b"y"].map(|name| {
            let made = fs.mkdir(ROOT, name, 0o755, CALLER).expect("a directory");
            made.ino
        });
        Bed {
            fs,
            dirs,
            made: 0,
            paths,
        }
    }

    /// Makes an empty directory in a slice.
    fn directory(&mut self, slice: usize) -> Ino {
        self.made += 1;
        let (fs, name) = (&self.fs, self.made.to_string());
        let made = fs.mkdir(self.dirs[slice], name.as_bytes(), 0o755, CALLER);
        made.expect("a directory").ino
    }
}

/// Returns the nanoseconds that the calling thread has run.
fn thread_cpu_ns() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("schedstat");
    let first = stat.split_whitespace().next().expect("a field");
    first.parse().expect("a number")
}

/// Creates files, as the kernel's requests do: with a lookup that is forgotten, and an open file that is closed.
fn create(fs: &Fs, dir: Ino, files: usize) {
    for number in 0..files {
        let name = format!("file{number}");
        let made = fs.mknod(dir, name.as_bytes(), Kind::File, 0o644, 0, CALLER);
        let ino = made.expect("a file").ino;
        let file = fs.open_file(ino).expect("an open file");
        fs.close_file(&file);
        fs.forget(ino, 1);
    }
}

/// Removes what `create` has made, so that the volume does not fill up.
fn remove(fs: &Fs, dir: Ino, files: usize) {
    for number in 0..files {
        fs.unlink(dir, format!("file{number}").as_bytes())
            .expect("an unlink");
    }
}

/// Creates files in these directories, with a thread each. Returns creates a second of all threads, and microseconds of CPU of a create.
fn run(places: &[(Arc<Fs>, Ino)], cpus: &[u32], files: usize) -> (f64, f64) {
    let barrier = &Barrier::new(places.len() + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (places.iter().enumerate())
            .map(|(index, (fs, dir))| {
                scope.spawn(move || {
                    affinity::set(None, &[cpus[index % cpus.len()]]).expect("a CPU");
                    barrier.wait();
                    let (begin, cpu) = (Instant::now(), thread_cpu_ns());
                    create(fs, *dir, files);
                    (begin.elapsed().as_secs_f64(), thread_cpu_ns() - cpu)
                })
            })
            .collect();
        barrier.wait();
        let times: Vec<_> = threads
            .into_iter()
            .map(|t| t.join().expect("creates"))
            .collect();
        let longest = times.iter().map(|(wall, _)| *wall).fold(0.0, f64::max);
        let all = (files * places.len()) as f64;
        let cpu: f64 = times.iter().map(|(_, cpu)| cpu / NS_PER_US).sum();
        (all / longest, cpu / all)
    })
}

/// Returns the median, the least and the greatest value.
fn spread(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    (
        values[values.len() / 2],
        values[0],
        values[values.len() - 1],
    )
}

fn measure(dir: &Path, title: &str, rounds: usize, files: usize, commit_interval_ms: u64) {
    let cpus = affinity::get(None).expect("the CPUs of the process");
    let mut beds = ["own", "other"].map(|name| Bed::new(dir, name, commit_interval_ms));
    let mut results: Vec<Vec<(f64, f64)>> = vec![vec![]; SIDES.len()];
    for round in 0..=rounds {
        for (side, name) in SIDES.iter().enumerate() {
            let mut place = |bed: usize, slice| (beds[bed].fs.clone(), beds[bed].directory(slice));
            let places = match *name {
                "one" => vec![place(0, 0)],
                "two" => vec![place(0, 0), place(0, 1)],
                "apart" => vec![place(0, 0), place(1, 0)],
                _ => vec![place(0, 0), place(0, 0)],
            };
            let result = run(&places, &cpus, files);
            // The first round warms up.
            if round > 0 {
                results[side].push(result);
            }
            for (fs, dir) in &places {
                remove(fs, *dir, files);
            }
            for bed in &beds {
                bed.fs.checkpoint().expect("a checkpoint");
            }
        }
    }
    println!(
        "\n{title}: {rounds} rounds, {files} files a thread, {} CPUs\n",
        cpus.len()
    );
    println!(
        "| side | creates/s | ratio to one (least to greatest) | CPU of a create, us | ratio to one (least to greatest) |\n|---|---|---|---|---|"
    );
    for (side, name) in SIDES.iter().enumerate() {
        let ratios = |pick: fn(&(f64, f64)) -> f64| {
            let pairs = results[side].iter().zip(&results[0]);
            spread(pairs.map(|(own, one)| pick(own) / pick(one)).collect())
        };
        let middle =
            |pick: fn(&(f64, f64)) -> f64| spread(results[side].iter().map(pick).collect()).0;
        let (rate, cpu) = (ratios(|r| r.0), ratios(|r| r.1));
        println!(
            "| {name} | {:.0} | {:.2} ({:.2} to {:.2}) | {:.2} | {:.2} ({:.2} to {:.2}) |",
            middle(|r| r.0),
            rate.0,
            rate.1,
            rate.2,
            middle(|r| r.1),
            cpu.0,
            cpu.1,
            cpu.2
        );
    }
    for bed in beds {
        bed.fs.close().expect("an unmount");
        for path in bed.paths {
            std::fs::remove_file(path).expect("a file to remove");
        }
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let Some(dir) = arguments.next() else {
        eprintln!("usage: creates DIR [ROUNDS] [FILES]");
        std::process::exit(2);
    };
    let dir = Path::new(&dir);
    let mut numbers = arguments.map(|text| text.parse().expect("a number"));
    let rounds = numbers.next().unwrap_or(ROUNDS);
    let files = numbers.next().unwrap_or(FILES);
    measure(dir, "Creates alone", rounds, files, 3_600_000);
    measure(
        dir,
        "Creates with commits and checkpoints",
        rounds,
        files * MORE,
        2000,
    );
}
