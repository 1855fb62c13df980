//! Pages that a program reads repeatedly stay in the cache while a scan reads much data once.

use crate::program::{succeed, within_run};
use crate::volume::Volume;

const SOURCE: &str = include_str!("hot_set.c");

const CACHE_MIB: u64 = 64;
/// Reads of the hot set for each 128 KiB of the scan.
const READS: u64 = 512;

/// Reads a hot set inline while a scan reads ten times the cache. Returns how many reads of the hot set there were and how many of
/// them missed.
fn reads_and_misses(hot_mib: u64) -> (u64, u64) {
    let volume = Volume::mounted("256M", 1, "64M");
    let dir = volume.make_dir("dir");
    let (hot, scanned) = (dir.join("hot"), dir.join("scanned"));
    std::fs::write(&hot, vec![7; (hot_mib << 20) as usize]).expect("write");
    // The file is sparse: holes take frames as data does.
    let file = std::fs::File::create(&scanned).expect("create");
    file.set_len((10 * CACHE_MIB) << 20).expect("set_len");
    file.sync_all().expect("sync");
    drop(file);
    let program = volume.compile("hot_set", SOURCE, &["-O2"]);
    let evicted = volume.total("evictions");
    let mut run = within_run(&program);
    let said = succeed(run.args([&hot, &scanned]).arg(READS.to_string()));
    let numbers: Vec<u64> = said
        .split_whitespace()
        .map(|word| word.parse().expect("a number"))
        .collect();
    let (reads, missed) = (numbers[0], numbers[1]);
    println!("{missed} of {reads} reads of a hot set of {hot_mib} MiB missed");
    let evicted = volume.total("evictions") - evicted;
    assert!(evicted > 120_000, "the scan evicted only {evicted} pages");
    volume.finish();
    (reads, missed)
}

#[test]
fn pages_that_are_read_inline_repeatedly_survive_a_scan_of_ten_times_the_cache() {
    let (reads, missed) = reads_and_misses(8);
    assert!(
        missed * 1000 <= reads,
        "{missed} of {reads} reads of the hot set missed"
    );
}

/// A thread has 4,096 reference marks, and marks of different pages overwrite each other. A page whose mark was overwritten in one
/// round of the evictor gets a mark in another round.
#[test]
fn a_hot_set_of_more_pages_than_a_thread_has_marks_survives_the_scan() {
    let (reads, missed) = reads_and_misses(24);
    assert!(
        missed * 100 <= reads,
        "{missed} of {reads} reads of the hot set missed"
    );
}
