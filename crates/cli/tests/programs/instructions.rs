//! What a hit costs the program that reads, in instructions: unlike times, they are the same in every run.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::again;
use crate::program::{succeed, within_limit};
use crate::volume::Volume;

const SOURCE: &str = include_str!("hot.c");
const PAGE: u32 = 4096;
/// So many that what happens once in a run, such as the move of a thread (50,000 instructions), is no more than one or two to
/// a round.
const TIMES: u64 = 40_000;
/// Instructions that a read of a cached page may cost beside the copy of its bytes.
const MOST: u64 = 250;

/// The command and its library as users have them: without optimization nothing could be said about their cost.
fn optimized_jericho() -> PathBuf {
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

/// A program under callgrind, and under `jericho run` where one is given.
struct Counted<'a> {
    jericho: &'a Path,
    program: PathBuf,
    file: PathBuf,
    /// What callgrind writes.
    counts: PathBuf,
}

impl Counted<'_> {
    /// Instructions of one run, and how many reads the kernel saw in its loop.
    fn run(&self, way: &str, times: u64) -> (u64, u64) {
        let mut command = within_limit(self.jericho);
        command.args(["run", "--", "valgrind", "--tool=callgrind"]);
        command.arg(format!("--callgrind-out-file={}", self.counts.display()));
        command.arg(&self.program);
        command.args([way, &times.to_string(), &PAGE.to_string()]);
        let said = succeed(command.arg(&self.file));
        let reads = said.trim().parse().expect("the program prints a number");
        let counts = std::fs::read_to_string(&self.counts).expect("callgrind writes its counts");
        let total = counts
            .lines()
            .find_map(|line| line.strip_prefix("summary: "))
            .and_then(|total| total.trim().parse().ok());
        (total.expect("callgrind gives a sum"), reads)
    }

    /// Instructions of one round of the loop: of twice as many less those of so many, so that all else falls out.
    fn each(&self, way: &str) -> f64 {
        let ((once, reads), (twice, more_reads)) = (self.run(way, TIMES), self.run(way, 2 * TIMES));
        // Valgrind itself reads now and then, and so does who looks at the counter.
        assert!(
            reads < TIMES / 20 && more_reads < TIMES / 20,
            "the kernel saw {reads} and {more_reads} reads: no hits in the program's own thread"
        );
        (twice - once) as f64 / TIMES as f64
    }
}

#[test]
fn a_hit_of_a_page_takes_few_instructions_beside_the_copy() {
    let jericho = optimized_jericho();
    let volume = Volume::mounted("256M", 2, "32M");
    let file = volume.make_dir("dir").join("hot");
    std::fs::write(&file, [7; 4 * PAGE as usize]).expect("write");
    let (source, program) = (volume.outside("hot.c"), volume.outside("hot"));
    std::fs::write(&source, SOURCE).expect("write");
    succeed(
        within_limit("cc")
            .args(["-O2", "-o"])
            .args([&program, &source]),
    );
    let counted = Counted {
        jericho: &jericho,
        program,
        file,
        counts: volume.outside("counts"),
    };
    let (read, copy) = (counted.each("call"), counted.each("copy"));
    println!("a read of a cached page: {read:.0} instructions, {copy:.0} of them the copy");
    assert!(
        read <= copy + MOST as f64,
        "a read of a cached page takes {read:.0} instructions, its copy alone {copy:.0}: {MOST} more are allowed"
    );
    volume.finish();
}
