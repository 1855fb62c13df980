//! One process stores through a shared mapping to one half of a page while another writes the other half by a system call.

use crate::program::{command, succeed};
use crate::volume::Volume;

const SOURCE: &str = include_str!("halves.c");
const PAIRS: u32 = 3_000;
/// Of the slower ones. Of copies one in three lost a store when the daemon copied to a part of a mapped page.
const FEW: u32 = 1_000;

/// The writes and the stores that are lost.
fn lost(way: &str, pairs: u32) -> (u32, u32) {
    let volume = Volume::mounted("256M", 2, "16M");
    let (source, program) = (volume.outside("halves.c"), volume.outside("halves"));
    std::fs::write(&source, SOURCE).expect("the source");
    let mut compiler = command("cc");
    compiler.args(["-O2", "-Wall", "-Werror", "-o"]);
    succeed(compiler.arg(&program).arg(&source));
    let file = volume.at("file");
    std::fs::write(&file, [0; 4096]).expect("a page");
    std::fs::write(&file, [0; 4096]).expect("a page that is there");
    // Nothing is kept of a file that nobody maps.
    assert_eq!(volume.stat()["mapped_kept"], 0);
    let mut halves = command(&program);
    let said = succeed(halves.arg(&file).arg(pairs.to_string()).arg(way));
    println!("{}", said.trim_end());
    let words: Vec<&str> = said.split_whitespace().collect();
    let stat = volume.stat();
    let kept = |name: &str| stat[name].as_u64().expect(name);
    assert!(kept("mapped_kept") > 0);
    assert_eq!(kept("mapped_forgotten"), 0);
    volume.finish();
    let number = |at: usize| words[at].parse().expect("a number");
    assert_eq!(number(0), pairs);
    (number(2), number(5))
}

#[test]
fn a_write_survives_a_store_through_a_mapping_to_the_other_half_of_its_page() {
    assert_eq!(lost("pwrite", PAIRS), (0, 0));
}

#[test]
fn a_store_survives_a_copy_to_the_other_half_of_its_page() {
    assert_eq!(lost("copy", FEW), (0, 0));
}

#[test]
fn a_hole_survives_a_store_through_a_mapping_to_the_other_half_of_its_page() {
    assert_eq!(lost("punch", FEW), (0, 0));
}

#[test]
fn an_asynchronous_write_survives_it_too_and_the_mapping_shows_it_at_last() {
    assert_eq!(lost("aio", PAIRS), (0, 0));
}
