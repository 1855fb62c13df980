//! A program attaches to a volume while signals interrupt its system calls.

use crate::program::{succeed, under_run};
use crate::volume::Volume;

const SOURCE: &str = include_str!("attaching.c");
/// Programs that the test starts. Each attaches once.
const PROGRAMS: usize = 20;

#[test]
fn a_program_attaches_while_signals_interrupt_it() {
    let volume = Volume::mounted("256M", 1, "32M");
    let program = volume.compile("attaching", SOURCE, &["-O1", "-Wall", "-Werror"]);
    let file = volume.at("file");
    std::fs::write(&file, [0; 4096]).expect("a file");
    for number in 0..PROGRAMS {
        let report = volume.outside("report");
        let mut run = under_run(&program);
        let said = succeed(run.arg(&file).env("JERICHO_REPORT", &report));
        assert_eq!(said, "read\n");
        let told = std::fs::read_to_string(&report).expect("the report");
        assert!(
            told.contains("inline") && !told.contains("not to be had"),
            "program {number}: {told}"
        );
        std::fs::remove_file(&report).expect("the report");
    }
    volume.finish();
}
