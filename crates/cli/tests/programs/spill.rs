//! Slices whose node is short of memory have frames on another node, and give them back when that node is short, while programs read and write.
//!
//! The nodes are virtual. Their sizes come from a topology file, and orders to the daemon (`crates/daemon/src/spill/room.rs`) say how much memory
//! a node has at the moment.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::appends::inline;
use crate::program::succeed;
use crate::roles;
use crate::volume::{Volume, jericho};

const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;
/// Frames at home of the slice whose node is short: its node has 24 MiB, of which a sixteenth stays free, and it gets whole ranges.
const HOME_FRAMES: u64 = 22 * MIB / PAGE as u64;
/// Frames that it may have elsewhere: its share of the cache is 32 MiB.
const SPILL_FRAMES: u64 = 10 * MIB / PAGE as u64;
const HANG: Duration = Duration::from_secs(240);
/// Steps that each thread makes at least, and the bytes of its file.
const STEPS: u64 = 20_000;
const FILE_PAGES: usize = 3072;
const THREADS: u64 = 2;

/// A volume with two slices. The node of slice 0 is short of memory, and that of slice 1 lends some if ordered so.
struct Short {
    volume: Volume,
}

impl Short {
    fn mounted() -> Short {
        Short::among("node 0 cpus=0 memory=24M\nnode 1 cpus=1 memory=1G\n", "")
    }

    /// Returns the volume mounted with these nodes and orders.
    fn among(nodes: &str, orders: &str) -> Short {
        let volume = Volume::mounted("256M", 2, "64M");
        let dir = volume.make_dir("short");
        succeed(jericho().args(["place", "--slice", "0"]).arg(dir));
        volume.umount();
        let short = Short { volume };
        short.order(orders);
        std::fs::write(short.topology(), nodes).expect("a topology");
        let mut mount = jericho();
        mount.arg("mount").arg(short.volume.file());
        mount.arg(short.volume.mnt());
        mount.args(["--cache", "64M", "--spill", "1G", "--topology"]);
        mount.arg(short.topology()).arg("--log");
        mount.arg(short.volume.outside("log"));
        mount.env("JERICHO_NODE_ROOM", short.orders());
        succeed(&mut mount);
        short
    }

    fn topology(&self) -> PathBuf {
        self.volume.outside("topology")
    }

    fn orders(&self) -> PathBuf {
        self.volume.outside("orders")
    }

    /// Says how much memory nodes have from now on, in lines `NODE BYTES` or `NODE refuses`.
    fn order(&self, orders: &str) {
        let new = self.volume.outside("new orders");
        std::fs::write(&new, orders).expect("orders");
        std::fs::rename(new, self.orders()).expect("rename");
    }

    fn file(&self, name: &str) -> PathBuf {
        self.volume.at("short").join(name)
    }

    /// Returns the frames that slice 0 has on node 1.
    fn spilled(&self) -> u64 {
        let stat = self.volume.stat();
        let Some(spilled) = stat["slices"][0].get("spilled") else {
            return 0;
        };
        let spilled = spilled.as_array().expect("a list");
        assert!(spilled.iter().all(|part| part["node"] == 1), "{stat}");
        spilled
            .iter()
            .map(|part| part["frames"].as_u64().expect("a number"))
            .sum()
    }

    /// Waits until slice 0 has some frames, or none, on node 1. `meanwhile` makes it want some.
    fn wait(&self, has_some: bool, mut meanwhile: impl FnMut()) {
        let deadline = Instant::now() + HANG;
        while (self.spilled() > 0) != has_some {
            assert!(
                Instant::now() < deadline,
                "never {has_some}: {}",
                self.volume.stat()
            );
            meanwhile();
        }
    }
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn a_slice_whose_node_is_short_has_frames_elsewhere_while_others_have_plenty() {
    let short = Short::mounted();
    let stat = short.volume.stat();
    assert_eq!(number(&stat["slices"][0]["frames"]), HOME_FRAMES, "{stat}");
    assert_eq!(number(&stat["slices"][1]["frames"]), 32 * MIB / PAGE as u64);
    let log = short.volume.log();
    assert!(
        log.contains("node 0 has room for 22 MiB of the 32 MiB"),
        "{log}"
    );
    let bytes: Vec<u8> = (0..40 * MIB).map(|at| (at / 4093) as u8).collect();
    let file = short.file("file");
    std::fs::write(&file, &bytes).expect("write");
    let read = || assert!(std::fs::read(&file).expect("read") == bytes, "other bytes");
    short.wait(true, read);
    let deadline = Instant::now() + HANG;
    while short.spilled() < SPILL_FRAMES {
        assert!(Instant::now() < deadline, "{}", short.volume.stat());
        read();
    }
    let stat = short.volume.stat();
    assert_eq!(
        number(&stat["slices"][0]["frames"]),
        HOME_FRAMES + SPILL_FRAMES
    );
    assert_eq!(number(&stat["nodes"][1]["lent_frames"]), SPILL_FRAMES);
    assert_eq!(number(&stat["slices"][0]["spill_taken"]), SPILL_FRAMES);
    let table = succeed(jericho().arg("stat").arg(short.volume.mnt()));
    assert!(
        table.contains("slice 0 has 10.0 MiB of its cache on node 1"),
        "{table}"
    );
    // The node has less than a sixteenth: all goes back, without a request of the slice.
    short.order("1 1000\n");
    short.wait(false, || {});
    let stat = short.volume.stat();
    assert_eq!(number(&stat["slices"][0]["frames"]), HOME_FRAMES, "{stat}");
    assert_eq!(number(&stat["slices"][0]["spill_given_back"]), SPILL_FRAMES);
    // For some rounds of the daemon, although the slice needs frames.
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        read();
        assert_eq!(
            short.spilled(),
            0,
            "nothing is taken from a node without plenty"
        );
    }
    short.order("");
    short.wait(true, read);
    short.volume.finish();
}

#[test]
fn a_node_that_has_only_cached_files_is_left_out() {
    let nodes = "node 0 cpus=0 memory=24M\nnode 1 cpus=1 memory=1G\nnode 2 memory=1G\n";
    let short = Short::among(nodes, "1 refuses\n");
    let file = short.file("file");
    std::fs::write(&file, vec![1; 40 << 20]).expect("write");
    let deadline = Instant::now() + HANG;
    loop {
        drop(std::fs::read(&file).expect("read"));
        let stat = short.volume.stat();
        let spilled = &stat["slices"][0]["spilled"];
        if *spilled == serde_json::json!([{"node": 2, "frames": SPILL_FRAMES}]) {
            break;
        }
        assert!(Instant::now() < deadline, "{stat}");
    }
    short.volume.finish();
}

#[test]
#[ignore = "a part of the test here, which starts it as a process of its own"]
fn worker() {
    let Some([dir, process]) = roles::role() else {
        return;
    };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (dir, process) = (Path::new(&dir), &process);
            scope.spawn(move || work(dir, &format!("{process}-{thread}"), thread + 1));
        }
    });
}

/// Reads and writes a file of its own, and compares all that it reads, until the directory has a file `stop`.
fn work(dir: &Path, name: &str, seed: u64) {
    let path = dir.join(name);
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path);
    let file = file.expect("open");
    // What each page contains.
    let mut model = vec![0u8; FILE_PAGES];
    file.set_len((FILE_PAGES * PAGE) as u64).expect("a length");
    let mut state = 0x9E37_79B9_7F4A_7C15 ^ seed;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let check = |model: &[u8], first: usize, pages: usize| {
        let mut bytes = vec![0; pages * PAGE];
        file.read_exact_at(&mut bytes, (first * PAGE) as u64)
            .expect("read");
        for (page, found) in bytes.chunks(PAGE).enumerate() {
            let expected = model[first + page];
            let wrong = found.iter().position(|byte| *byte != expected);
            assert_eq!(
                wrong,
                None,
                "page {} of {name}: not {expected}",
                first + page
            );
        }
    };
    let mut steps = 0;
    while steps < STEPS || !dir.join("stop").exists() {
        for _ in 0..256 {
            let pages = [1, 1, 1, 1, 2, 16][random(6)];
            let first = random(FILE_PAGES - pages + 1);
            if random(3) > 0 {
                check(&model, first, pages);
                continue;
            }
            let byte = random(256) as u8;
            let bytes = vec![byte; pages * PAGE];
            file.write_all_at(&bytes, (first * PAGE) as u64)
                .expect("write");
            model[first..first + pages].fill(byte);
        }
        steps += 256;
    }
    (0..FILE_PAGES)
        .step_by(16)
        .for_each(|first| check(&model, first, 16));
}

/// Times that the other node becomes short, and has plenty again, while programs work. `JERICHO_SPILL_ROUNDS` sets more.
fn rounds() -> u64 {
    roles::from_environment("JERICHO_SPILL_ROUNDS").unwrap_or(4)
}

#[test]
fn programs_read_what_they_wrote_while_frames_are_taken_and_given_back() {
    let short = Short::mounted();
    let dir = short.volume.at("short");
    let dir = dir.to_str().expect("UTF-8");
    let mut programs: Vec<(Child, PathBuf)> = ["a", "b"]
        .into_iter()
        .map(|name| {
            let report = short.volume.outside(&format!("report of {name}"));
            let mut command = roles::command("spill::worker", &[dir, name], true);
            (roles::start(command.env("JERICHO_REPORT", &report)), report)
        })
        .collect();
    for _ in 0..rounds() {
        let mut run_on = || {
            for (program, _) in &mut programs {
                let ended = program.try_wait().expect("wait");
                assert_eq!(ended, None, "{}", roles::output_of(program));
            }
        };
        short.order("");
        short.wait(true, &mut run_on);
        short.order("1 1000\n");
        short.wait(false, &mut run_on);
    }
    std::fs::write(short.file("stop"), "").expect("write");
    for (program, report) in &mut programs {
        let status = roles::wait_for_end(program, "a program that reads and writes", HANG);
        assert!(status.success(), "{}", roles::output_of(program));
        let report = std::fs::read_to_string(report).expect("the report");
        assert!(inline(&report) > 100, "{report}");
    }
    let moved = short.volume.total("spill_moved");
    let given_back = short.volume.total("spill_given_back");
    assert!(given_back >= 512 * rounds(), "{given_back}");
    println!("{moved} pages were moved, and {given_back} frames given back");
    assert!(moved > 0);
    short.volume.finish();
}
