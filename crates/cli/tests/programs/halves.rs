//! One process stores to one half of a page through a shared mapping, while another process writes the other half by a system call
//! or inline. Both halves must survive.

use std::path::PathBuf;

use crate::again;
use crate::appends::inline;
use crate::program::{command, succeed, within_limit};
use crate::volume::Volume;

const SOURCE: &str = include_str!("halves.c");
const PAIRS: u32 = 3_000;
/// Pairs of a store and a write in the slower tests. A daemon that copied to a part of a mapped page would lose one store in
/// three copies.
const FEW: u32 = 1_000;

/// Returns the compiled program and a file of one page.
fn program_and_file(volume: &Volume) -> [PathBuf; 2] {
    let program = volume.compile("halves", SOURCE, &["-O2", "-Wall", "-Werror"]);
    let file = volume.at("file");
    std::fs::write(&file, [0; 4096]).expect("a page");
    std::fs::write(&file, [0; 4096]).expect("an overwrite of the page");
    [program, file]
}

/// Runs the program. Returns the numbers of lost writes and of lost stores.
fn lost_writes_and_stores(way: &str, pairs: u32) -> (u32, u32) {
    let volume = Volume::mounted("256M", 2, "16M");
    let [program, file] = program_and_file(&volume);
    // The daemon keeps nothing for a file that no program maps.
    assert_eq!(volume.stat()["mapped_kept"], 0);
    let mut halves = command(&program);
    let said = succeed(halves.arg(&file).arg(pairs.to_string()).arg(way));
    let stat = volume.stat();
    let kept = |name: &str| stat[name].as_u64().expect(name);
    assert!(kept("mapped_kept") > 0);
    assert_eq!(kept("mapped_forgotten"), 0);
    volume.finish();
    parse_lost(&said, pairs)
}

/// Parses the program's output. Returns the numbers of lost writes and of lost stores.
fn parse_lost(said: &str, pairs: u32) -> (u32, u32) {
    println!("{}", said.trim_end());
    let words: Vec<&str> = said.split_whitespace().collect();
    let number = |at: usize| words[at].parse().expect("a number");
    assert_eq!(number(0), pairs);
    (number(2), number(5))
}

#[test]
fn a_write_survives_a_store_through_a_mapping_to_the_other_half_of_its_page() {
    assert_eq!(lost_writes_and_stores("pwrite", PAIRS), (0, 0));
}

#[test]
fn a_store_survives_a_copy_to_the_other_half_of_its_page() {
    assert_eq!(lost_writes_and_stores("copy", FEW), (0, 0));
}

#[test]
fn a_hole_survives_a_store_through_a_mapping_to_the_other_half_of_its_page() {
    assert_eq!(lost_writes_and_stores("punch", FEW), (0, 0));
}

#[test]
fn an_asynchronous_write_survives_a_store_and_the_mapping_shows_it_at_last() {
    assert_eq!(lost_writes_and_stores("aio", PAIRS), (0, 0));
}

/// The program that maps the file runs without the library. So its stores arrive while the daemon withholds and grants the other
/// program's inline writes in turn.
#[test]
fn an_inline_write_survives_a_store_through_a_mapping_to_the_other_half_of_its_page() {
    let volume = Volume::mounted("256M", 2, "16M");
    let [program, file] = program_and_file(&volume);
    let report = volume.outside("report");
    let mut halves = within_limit(&program);
    halves.arg(&file).args([&PAIRS.to_string(), "pwrite"]);
    halves
        .args(again::run_prefix())
        .env("JERICHO_REPORT", &report);
    let said = succeed(&mut halves);
    assert_eq!(parse_lost(&said, PAIRS), (0, 0));
    let stat = volume.stat();
    let count = |name: &str| stat[name].as_u64().expect(name);
    let turns = ["writes_granted", "writes_withheld"].map(count);
    let report = std::fs::read_to_string(report).expect("the report");
    assert!(inline(&report) > 0, "{report}");
    assert!(turns.iter().all(|turns| *turns >= 10), "{turns:?}");
    assert_eq!(count("mapped_forgotten"), 0);
    volume.finish();
}
