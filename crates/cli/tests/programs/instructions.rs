//! The cost of a cache hit for the reading or writing program, in instructions and in locked instructions. Unlike times, these
//! counts are the same in every run.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::again;
use crate::program::{succeed, within_limit};
use crate::volume::Volume;

const SOURCE: &str = include_str!("hot.c");
const PAGE: u32 = 4096;
/// Rounds of a run. An event that happens once in a run, for example a thread's migration (50,000 instructions), adds one or two
/// instructions to the average round.
const TIMES: u64 = 40_000;
/// Instructions that a read and a write of a cached page may cost beside the copy of its bytes.
const READ_MOST: u64 = 250;
const WRITE_MOST: u64 = 340;
/// Locked instructions of a write: it takes and releases its page's latch.
const LATCH: f64 = 2.0;
/// Other locked instructions per round, on average: in some rounds the page is clean because it was written back, or the thread is
/// migrated.
const NOW_AND_THEN: f64 = 0.02;

/// Builds the command and its library in release mode, as users have them, and returns the command. The cost of unoptimized code
/// has no meaning.
fn build_optimized_jericho() -> PathBuf {
    let target = Path::new(again::run_prefix()[0]).ancestors().nth(2);
    let target = target.expect("the command lies in TARGET/PROFILE");
    let mut build = Command::new(std::env::var_os("CARGO").expect("cargo runs the tests"));
    build.args([
        "build",
        "--release",
        "-p",
        "jericho-cli",
        "-p",
        "jericho-preload",
    ]);
    succeed(build.arg("--target-dir").arg(target));
    target.join("release/jericho")
}

/// A program that runs under callgrind and `jericho run`.
struct Counted<'a> {
    jericho: &'a Path,
    program: PathBuf,
    file: PathBuf,
    /// The file to which callgrind writes its counts.
    counts: PathBuf,
}

impl Counted<'_> {
    /// Returns the instructions and locked instructions of one run, and how many calls of the program's loop reached the kernel.
    fn run(&self, way: &str, times: u64) -> ([u64; 2], u64) {
        let mut command = within_limit(self.jericho);
        command.args(["run", "--", "valgrind", "--tool=callgrind"]);
        command.arg("--collect-bus=yes");
        command.arg(format!("--callgrind-out-file={}", self.counts.display()));
        command.arg(&self.program);
        command.args([way, &times.to_string(), &PAGE.to_string()]);
        let said = succeed(command.arg(&self.file));
        let calls = said.trim().parse().expect("the program prints a number");
        let counts = std::fs::read_to_string(&self.counts).expect("callgrind writes its counts");
        let line = |name: &str| counts.lines().find_map(|line| line.strip_prefix(name));
        assert_eq!(line("events: "), Some("Ir Ge"), "what callgrind counts");
        let sums = line("summary: ").expect("callgrind gives sums");
        let mut sums = sums.split(' ').map(|sum| sum.parse().expect("a sum"));
        ([(); 2].map(|()| sums.next().expect("two sums")), calls)
    }

    /// Returns the instructions and locked instructions of one round of the loop. They come from the difference between a run of
    /// `TIMES` rounds and one of twice as many, in which the costs of start and end cancel out.
    fn each(&self, way: &str) -> [f64; 2] {
        let ((once, calls), (twice, more_calls)) = (self.run(way, TIMES), self.run(way, 2 * TIMES));
        // Valgrind makes a few calls, and the program makes a few to read the counter.
        assert!(
            calls < TIMES / 20 && more_calls < TIMES / 20,
            "the kernel saw {calls} and {more_calls} calls: the library did not serve the hits"
        );
        [0, 1].map(|sum| (twice[sum] as f64 - once[sum] as f64) / TIMES as f64)
    }
}

#[test]
fn a_hit_of_a_page_takes_few_instructions_beside_the_copy() {
    let jericho = build_optimized_jericho();
    let volume = Volume::mounted("256M", 2, "32M");
    let file = volume.make_dir("dir").join("hot");
    std::fs::write(&file, [7; 4 * PAGE as usize]).expect("write");
    let program = volume.compile("hot", SOURCE, &["-O2"]);
    let counted = Counted {
        jericho: &jericho,
        program,
        file,
        counts: volume.outside("counts"),
    };
    let [copy, _] = counted.each("copy");
    let ways = [
        ("read", "call", READ_MOST, 0.0),
        ("write", "put", WRITE_MOST, LATCH),
    ];
    for (what, way, most, latch) in ways {
        let [all, locked] = counted.each(way);
        println!(
            "a {what} of a cached page: {all:.0} instructions, {copy:.0} of them the copy, {locked:.3} locked"
        );
        assert!(
            all <= copy + most as f64,
            "a {what} of a cached page takes {all:.0} instructions, its copy alone {copy:.0}: {most} more are allowed"
        );
        assert!(
            (locked - latch).abs() < NOW_AND_THEN,
            "a {what} of a cached page has {locked:.3} locked instructions in place of {latch}"
        );
    }
    volume.finish();
}
