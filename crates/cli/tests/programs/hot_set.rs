//! What a program reads repeatedly stays in the cache while another reads much data once.

use crate::program::{succeed, within_limit, within_run};
use crate::volume::Volume;

const SOURCE: &str = include_str!("hot_set.c");

#[test]
fn what_is_read_inline_all_the_time_stays_under_a_scan_of_ten_times_the_cache() {
    let volume = Volume::mounted("256M", 1, "32M");
    let dir = volume.make_dir("dir");
    let (hot, scanned) = (dir.join("hot"), dir.join("scanned"));
    std::fs::write(&hot, vec![7; 8 << 20]).expect("write");
    // Holes take frames as data does.
    let file = std::fs::File::create(&scanned).expect("create");
    file.set_len(320 << 20).expect("set_len");
    file.sync_all().expect("sync");
    drop(file);
    let (source, program) = (volume.outside("hot_set.c"), volume.outside("hot_set"));
    std::fs::write(&source, SOURCE).expect("write");
    let mut cc = within_limit("cc");
    succeed(cc.args(["-O2", "-o"]).args([&program, &source]));
    let evicted = volume.total("evictions");
    let mut run = within_run(&program);
    let said = succeed(run.args([&hot, &scanned]).arg("512"));
    let numbers: Vec<u64> = said
        .split_whitespace()
        .map(|word| word.parse().expect("a number"))
        .collect();
    let (reads, missed) = (numbers[0], numbers[1]);
    println!("{missed} of {reads} reads of the hot set missed");
    let evicted = volume.total("evictions") - evicted;
    assert!(evicted > 60_000, "the scan evicted {evicted} pages only");
    assert!(
        missed * 1000 <= reads,
        "{missed} of {reads} reads of the hot set missed"
    );
    volume.finish();
}
