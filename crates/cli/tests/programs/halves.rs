//! One process stores through a shared mapping to one half of a page while another writes the other half by write(2).

use crate::program::{command, succeed};
use crate::volume::Volume;

const SOURCE: &str = include_str!("halves.c");

/// The writes and the stores that are lost of `pairs`.
fn lost(pairs: u32) -> (u32, u32) {
    let volume = Volume::mounted("256M", 2, "16M");
    let (source, program) = (volume.outside("halves.c"), volume.outside("halves"));
    std::fs::write(&source, SOURCE).expect("the source");
    let mut compiler = command("cc");
    compiler.args(["-O2", "-Wall", "-Werror", "-o"]);
    succeed(compiler.arg(&program).arg(&source));
    let file = volume.at("file");
    std::fs::write(&file, [0; 4096]).expect("a page");
    let said = succeed(command(&program).arg(&file).arg(pairs.to_string()));
    println!("{}", said.trim_end());
    let words: Vec<&str> = said.split_whitespace().collect();
    volume.finish();
    let number = |at: usize| words[at].parse().expect("a number");
    assert_eq!(number(0), pairs);
    (number(2), number(5))
}

#[test]
fn a_store_through_a_mapping_survives_a_write_to_the_other_half_of_its_page() {
    let (_, stores) = lost(2_000);
    assert_eq!(stores, 0);
}

#[test]
#[ignore = "writes are lost: docs/internals/fuse.md, A mapped page that is written"]
fn a_write_survives_a_store_through_a_mapping_to_the_other_half_of_its_page() {
    assert_eq!(lost(15_000), (0, 0));
}
