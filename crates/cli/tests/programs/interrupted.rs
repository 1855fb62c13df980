//! A signal handler uses the file whose write it interrupted. It must not wait, and its program must stay on the fast path.

use crate::program::{succeed, under_run};
use crate::volume::Volume;

const SOURCE: &str = include_str!("interrupted.c");
const ROUNDS: &str = "40";

#[test]
fn a_handler_uses_the_file_whose_write_it_interrupted_without_a_wait() {
    let volume = Volume::mounted("256M", 2, "32M");
    let options = ["-O1", "-Wall", "-Werror", "-Wno-unused-result"];
    let program = volume.compile("interrupted", SOURCE, &options);
    let dir = volume.make_dir("interrupted");
    let report = volume.outside("report");
    let said = succeed(
        under_run(&program)
            .arg(ROUNDS)
            .current_dir(&dir)
            .env("JERICHO_REPORT", &report),
    );
    assert_eq!(said, "interrupted\n");
    // A request that finds a page latched for a second revokes the program.
    let log = volume.log();
    assert!(!log.contains("for too long"), "{log}");
    let report = std::fs::read_to_string(report).expect("the report");
    assert!(
        report.contains("inline") && !report.contains("revoked"),
        "{report}"
    );
    volume.finish();
}
