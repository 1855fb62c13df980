//! Measures syncs on a volume with many inodes and dirty pages of other files beside syncs on an empty volume.
//!
//! Usage: cargo run --release -p jericho-fs --example volumes -- DIR [INODES] [DIRTY_MIB] [ROUNDS]
//!
//! Makes two volumes on files in DIR, which are removed at the end. One has INODES files (a million) and DIRTY_MIB (1024) of dirty pages of another
//! file. The write-back begins at a tenth of the cache, so the cache of this volume has eleven times as many pages, and the process needs that much memory: 12 GiB.
//! In each round, a thread syncs on one volume and then on the other one:
//!
//! - overwrite: a page that is in its block, and fdatasync
//! - append: a page at the end of a small file, and fsync
//! - beside creates: the same append, while another thread creates files in the same slice
//!
//! A ratio is the time of a sync on the large volume to that on the empty one, in the same round. The bytes are those that the process wrote during a
//! sync (/proc/self/io): the median, and the most of all rounds, in which the committer or a checkpoint wrote meanwhile. They hold on a busy machine,
//! too.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use jericho_cache::{Intent, Slice};
use jericho_fs::types::{Ino, Kind, ROOT};
use jericho_fs::{File, Fs};

use common::{CALLER, mount};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
const SYNCS: usize = 100;
const FILES_IN_A_DIRECTORY: u64 = 10_000;
/// Pages that the thread writes at a time.
const PIECE_PAGES: u64 = 64;

struct Bed {
    path: PathBuf,
    fs: Arc<Fs>,
    slice: Arc<Slice>,
    overwritten: Arc<File>,
}

impl Bed {
    fn new(path: PathBuf, cache_pages: u64, size_bytes: u64) -> Bed {
        let cache = (cache_pages as u32, Duration::from_secs(24 * 3600));
        let (fs, slice) = mount(&path, size_bytes, cache, 2000);
        let overwritten = create(&fs, ROOT, "overwritten");
        let bed = Bed {
            path,
            fs,
            slice,
            overwritten,
        };
        bed.write(&bed.overwritten, 0, 256);
        bed.sync(&bed.overwritten, false);
        bed
    }

    fn write(&self, file: &Arc<File>, first: u64, pages: u64) {
        let _writing = file.writing();
        let (offset, bytes) = (first * PAGE, pages * PAGE);
        self.fs.begin_write(file, offset, bytes).expect("room");
        let (sender, receiver) = channel();
        let answer = move |pinned| {
            let _ = sender.send(pinned);
        };
        (self.slice).get(&file.object(), first, pages as u32, Intent::Modify, answer);
        let mut pinned = receiver.recv().expect("an answer").expect("pages");
        for page in first..first + pages {
            pinned
                .write(page, 0, &[page as u8; PAGE as usize])
                .expect("a write");
        }
        drop(pinned);
        self.fs.end_write(file, offset, bytes);
    }

    fn sync(&self, file: &Arc<File>, datasync: bool) {
        let (sender, receiver) = channel();
        let done = Box::new(move |result| sender.send(result).expect("a receiver"));
        self.fs.fsync_blocking(file, datasync, done);
        receiver.recv().expect("an answer").expect("a sync");
    }

    /// Creates files in new directories, without syncs.
    fn fill(&self, inodes: u64) {
        let mut dir = ROOT;
        for number in 0..inodes {
            if number % FILES_IN_A_DIRECTORY == 0 {
                let name = format!("directory{number}");
                let made = self.fs.mkdir(ROOT, name.as_bytes(), 0o755, CALLER);
                dir = made.expect("a directory").ino;
            }
            create_only(&self.fs, dir, &format!("file{number}"));
        }
        self.fs.checkpoint().expect("a checkpoint");
    }

    fn dirty(&self, pages: u64) {
        let file = create(&self.fs, ROOT, "dirty");
        for first in (0..pages).step_by(PIECE_PAGES as usize) {
            self.write(&file, first, PIECE_PAGES.min(pages - first));
        }
        self.fs.commit().expect("a commit");
    }

    fn close(self) {
        drop(self.overwritten);
        self.fs.close().expect("an unmount");
        self.slice.close();
        std::fs::remove_file(self.path).expect("a file to remove");
    }
}

fn create_only(fs: &Fs, dir: Ino, name: &str) -> Ino {
    let made = fs.mknod(dir, name.as_bytes(), Kind::File, 0o644, 0, CALLER);
    let ino = made.expect("a file").ino;
    fs.forget(ino, 1);
    ino
}

fn create(fs: &Fs, dir: Ino, name: &str) -> Arc<File> {
    let made = fs.mknod(dir, name.as_bytes(), Kind::File, 0o644, 0, CALLER);
    fs.open_file(made.expect("a file").ino)
        .expect("an open file")
}

/// Returns the bytes that the process has written to devices.
fn written_bytes() -> u64 {
    let io = std::fs::read_to_string("/proc/self/io").expect("/proc/self/io");
    let line = io
        .lines()
        .find_map(|line| line.strip_prefix("write_bytes: "));
    line.expect("write_bytes").parse().expect("a number")
}

/// Syncs of one kind in a round: median seconds, median bytes, and bytes of the largest.
#[derive(Clone, Copy, Default)]
struct Syncs {
    seconds: f64,
    bytes: u64,
    bytes_max: u64,
}

fn measured(mut sync: impl FnMut(u64)) -> Syncs {
    let (mut times, mut written) = (vec![], vec![]);
    for number in 0..SYNCS as u64 {
        let (begin, bytes) = (Instant::now(), written_bytes());
        sync(number);
        times.push(begin.elapsed().as_secs_f64());
        written.push(written_bytes() - bytes);
    }
    times.sort_by(f64::total_cmp);
    written.sort_unstable();
    Syncs {
        seconds: times[SYNCS / 2],
        bytes: written[SYNCS / 2],
        bytes_max: written[SYNCS - 1],
    }
}

fn overwrite(bed: &Bed, _round: u64) -> Syncs {
    measured(|number| {
        bed.write(&bed.overwritten, number % 256, 1);
        bed.sync(&bed.overwritten, true);
    })
}

fn append(bed: &Bed, round: u64) -> Syncs {
    let file = create(&bed.fs, ROOT, &format!("append{round}"));
    bed.sync(&file, false);
    let syncs = measured(|number| {
        bed.write(&file, number, 1);
        bed.sync(&file, false);
    });
    bed.fs.close_file(&file);
    syncs
}

fn append_beside_creates(bed: &Bed, round: u64) -> Syncs {
    let (is_over, made) = (AtomicBool::new(false), AtomicU64::new(0));
    let name = format!("beside{round}");
    let dir = bed
        .fs
        .mkdir(ROOT, name.as_bytes(), 0o755, CALLER)
        .expect("a directory");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let number = made.fetch_add(1, Ordering::Relaxed);
                create_only(&bed.fs, dir.ino, &number.to_string());
            }
        });
        let syncs = append(bed, u64::MAX - round);
        is_over.store(true, Ordering::Relaxed);
        syncs
    })
}

type Workload = (&'static str, fn(&Bed, u64) -> Syncs);

const WORKLOADS: [Workload; 3] = [
    ("overwrite and fdatasync", overwrite),
    ("append and fsync", append),
    ("append and fsync beside creates", append_beside_creates),
];

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn report(name: &str, rounds: &[[Syncs; 2]]) {
    let ratios: Vec<f64> = rounds
        .iter()
        .map(|[empty, large]| large.seconds / empty.seconds)
        .collect();
    let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = ratios.iter().copied().fold(0.0, f64::max);
    let of = |side: usize, pick: fn(&Syncs) -> f64| {
        median(rounds.iter().map(|r| pick(&r[side])).collect())
    };
    let bytes_max = |side: usize| rounds.iter().map(|r| r[side].bytes_max).max().unwrap_or(0);
    println!(
        "| {name} | {:.0}, {:.0} | {:.2} ({least:.2} to {greatest:.2}) | {:.0}, {:.0} | {}, {} |",
        of(0, |s| s.seconds) * 1e6,
        of(1, |s| s.seconds) * 1e6,
        median(ratios),
        of(0, |s| s.bytes as f64),
        of(1, |s| s.bytes as f64),
        bytes_max(0),
        bytes_max(1),
    );
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let Some(dir) = arguments.next() else {
        eprintln!("usage: volumes DIR [INODES] [DIRTY_MIB] [ROUNDS]");
        std::process::exit(2);
    };
    let mut number = |default| {
        arguments
            .next()
            .map_or(default, |text| text.parse().expect("a number"))
    };
    let (inodes, dirty_mib, rounds) = (number(1_000_000), number(1024), number(9));
    let dirty_pages = dirty_mib * MIB / PAGE;
    let size_bytes = (4 << 30) + dirty_mib * MIB + inodes * 1500;
    let size_bytes = size_bytes.next_multiple_of(MIB);
    let path = |name| Path::new(&dir).join(name);
    let frames = |dirty_pages: u64| (dirty_pages * 11).max(65_536);
    let beds = [("empty.volume", 0), ("large.volume", dirty_pages)]
        .map(|(name, dirty_pages)| Bed::new(path(name), frames(dirty_pages), size_bytes));
    beds[1].fill(inodes);
    beds[1].dirty(dirty_pages);
    println!(
        "{inodes} inodes, {dirty_mib} MiB of dirty pages, {rounds} rounds of {SYNCS} syncs. The empty volume is first in each pair.\n"
    );
    println!(
        "| sync | us | ratio (least to greatest) | bytes of a sync | bytes, at most |\n|---|---|---|---|---|"
    );
    for (name, run) in WORKLOADS {
        let mut results = vec![];
        for round in 0..=rounds {
            let pair = match round % 2 {
                0 => [run(&beds[0], round), run(&beds[1], round)],
                _ => {
                    let large = run(&beds[1], round);
                    [run(&beds[0], round), large]
                }
            };
            // The first round warms up.
            if round > 0 {
                results.push(pair);
            }
        }
        report(name, &results);
    }
    let still_dirty = beds[1].slice.usage().dirty;
    assert!(
        still_dirty >= dirty_pages,
        "only {still_dirty} pages are dirty: something has written them back"
    );
    beds.into_iter().for_each(Bed::close);
}
