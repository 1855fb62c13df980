//! Measures creates beside the removal of a file with very many extents, and the memory that creates without a sync take.
//!
//! Usage: cargo run --release -p jericho-fs --example removals -- DIR [EXTENTS] [FILES] [ROUNDS]
//!
//! Makes volumes on a file in DIR, which is removed at the end.
//!
//! - Removal: a file of EXTENTS (100,000) extents loses its name and its last reference. Another thread creates files until all of its space is
//!   free. The table has the creates' times, and those of as many creates without a removal before it. The longest batch is that of all rounds.
//! - Memory: FILES (a million) files are created without a sync. The table has the greatest growth of the process's private memory
//!   (RssAnon). The volume's cache of inodes holds 10,000, so the growth is that of batches, of rows in memory, of the
//!   store, which may have 64 MiB, and of memory that is free and that the C library keeps.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use jericho_fs::Fs;
use jericho_fs::types::{Ino, Kind, ROOT};

use common::{CALLER, mount};

const PAGE: u64 = 4096;
const VOLUME_BYTES: u64 = 16 << 30;
const KEEP_SIZE: i32 = 1;
const FILES_IN_A_DIRECTORY: u64 = 10_000;

fn create(fs: &Fs, dir: Ino, name: &str) -> Ino {
    let made = fs.mknod(dir, name.as_bytes(), Kind::File, 0o644, 0, CALLER);
    made.expect("a file").ino
}

/// Creates files until `ends` returns true. Returns the time of each.
fn creates(fs: &Fs, dir: Ino, ends: impl Fn(usize) -> bool) -> Vec<Duration> {
    let mut times = Vec::new();
    while !ends(times.len()) {
        let begin = Instant::now();
        let ino = create(fs, dir, &times.len().to_string());
        times.push(begin.elapsed());
        fs.forget(ino, 1);
    }
    times
}

/// Returns the median, the 99th percentile and the greatest, in milliseconds.
fn shown(mut times: Vec<Duration>) -> String {
    times.sort();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e3;
    format!(
        "{} | {:.3} | {:.3} | {:.3}",
        times.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    )
}

fn measure_removal(fs: &Arc<Fs>, extents: u64, round: u64) {
    let many = create(fs, ROOT, "many");
    let file = fs.open_file(many).expect("an open file");
    for page in 0..extents {
        fs.fallocate(&file, KEEP_SIZE, 2 * page * PAGE, PAGE)
            .expect("room");
    }
    fs.close_file(&file);
    drop(file);
    fs.checkpoint().expect("a checkpoint");
    let dir = |kind: &str| {
        let made = fs.mkdir(ROOT, format!("{kind}{round}").as_bytes(), 0o755, CALLER);
        made.expect("a directory").ino
    };
    let (beside, alone) = (dir("beside"), dir("alone"));
    let is_gone = AtomicBool::new(false);
    let times = std::thread::scope(|scope| {
        let times = scope.spawn(|| creates(fs, beside, |_| is_gone.load(Ordering::Acquire)));
        fs.unlink(ROOT, b"many").expect("an unlink");
        fs.forget(many, 1);
        fs.commit().expect("a commit");
        is_gone.store(true, Ordering::Release);
        times.join().expect("creates")
    });
    let count = times.len();
    fs.checkpoint().expect("a checkpoint");
    println!("| beside a removal | {} |", shown(times));
    let times = creates(fs, alone, |made| made >= count);
    println!("| alone | {} |", shown(times));
}

/// Returns the process's private memory in KiB.
fn private_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    number.expect("RssAnon").parse().expect("a number")
}

fn measure_memory(fs: &Fs, files: u64) {
    let before = private_kib();
    let (mut most, mut dir) = (before, ROOT);
    for number in 0..files {
        if number % FILES_IN_A_DIRECTORY == 0 {
            let made = fs.mkdir(ROOT, format!("memory{number}").as_bytes(), 0o755, CALLER);
            dir = made.expect("a directory").ino;
            most = most.max(private_kib());
        }
        let ino = create(fs, dir, &number.to_string());
        fs.forget(ino, 1);
    }
    println!("| files | growth at most, MiB |\n|---|---|");
    println!("| {files} | {} |", (most.max(private_kib()) - before) >> 10);
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let dir: PathBuf = arguments.next().expect("usage: removals DIR").into();
    let mut number = |default| {
        arguments
            .next()
            .map_or(default, |text| text.parse().expect("a number"))
    };
    let (extents, files, rounds) = (number(100_000), number(1_000_000), number(3));
    let path = dir.join("removals.volume");
    // First, because the allocator keeps what the process has used once.
    with_volume(&path, |fs| measure_memory(fs, files));
    println!(
        "\n{extents} extents\n\n| side | creates | median, ms | 99 %, ms | greatest, ms |\n|---|---|---|---|---|"
    );
    with_volume(&path, |fs| {
        for round in 0..rounds {
            measure_removal(fs, extents, round);
        }
        println!("\nlongest batch: {} bytes", fs.longest_batch_bytes().0);
    });
}

fn with_volume(path: &Path, measure: impl Fn(&Arc<Fs>)) {
    let cache = (16_384, Duration::from_secs(5));
    let (fs, slice) = mount(path, VOLUME_BYTES, cache, 1000);
    measure(&fs);
    fs.close().expect("an unmount");
    slice.close();
    std::fs::remove_file(path).expect("a file to remove");
}
