//! Threads that read through the mount are moved to their data, and get their CPUs back.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::program::succeed;
use crate::volume::{Volume, jericho};

/// Longer than anything that is waited for takes on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(120);

fn mine() -> CpuSet {
    sched_getaffinity(None).expect("affinity")
}

/// A volume with a file on each of two nodes, whose threads are to follow it always.
fn volume() -> (Volume, [File; 2]) {
    let volume = Volume::mounted("256M", 2, "32M");
    let files = ["0", "1"].map(|node| {
        let dir = volume.make_dir(&format!("on-{node}"));
        succeed(
            jericho()
                .arg("place")
                .arg(&dir)
                .args(["--node", node, "--threads", "always"]),
        );
        let file = dir.join("file");
        std::fs::write(&file, vec![7; 1 << 20]).expect("write");
        File::open(file).expect("open")
    });
    (volume, files)
}

fn moved(volume: &Volume) -> u64 {
    volume.stat()["threads_moved"].as_u64().expect("a number")
}

#[test]
fn a_thread_is_moved_to_what_it_reads_and_only_that_thread() {
    let (volume, files) = volume();
    let all = mine();
    if all.count() < 2 {
        eprintln!("not tested: there is one CPU");
        return;
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut page, end) = ([0; 4096], Instant::now() + PATIENCE);
            // Wherever it is now: one of the nodes is another one.
            let mut seen = all;
            while seen == all && Instant::now() < end {
                for file in &files {
                    for _ in 0..500 {
                        file.read_exact_at(&mut page, 0).expect("read");
                        seen = mine();
                        if seen != all {
                            break;
                        }
                    }
                }
            }
            assert_ne!(seen, all, "never moved, {}", volume.stat());
            let lost = (0..CpuSet::MAX_CPU).any(|cpu| seen.is_set(cpu) && !all.is_set(cpu));
            assert!(!lost, "{seen:?} has more than {all:?}");
            // It uses nothing any more.
            while mine() != all && Instant::now() < end {
                std::thread::yield_now();
            }
            assert_eq!(mine(), all, "the mask is back");
        });
    });
    assert_eq!(mine(), all);
    assert!(moved(&volume) > 0);
    drop(files);
    volume.finish();
}

#[test]
fn a_thread_that_its_program_has_placed_stays_there() {
    let (volume, files) = volume();
    let all = mine();
    let first = (0..CpuSet::MAX_CPU)
        .find(|cpu| all.is_set(*cpu))
        .expect("a CPU");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut own = CpuSet::new();
            own.set(first);
            sched_setaffinity(None, &own).expect("affinity");
            let mut page = [0; 4096];
            for turn in 0..4000 {
                files[turn % 2].read_exact_at(&mut page, 0).expect("read");
                assert_eq!(mine(), own);
            }
        });
    });
    assert_eq!(moved(&volume), 0);
    drop(files);
    volume.finish();
}

#[test]
fn nobody_is_moved_where_nobody_is_to_be() {
    let (volume, files) = volume();
    for node in 0..2 {
        let file = volume.at(&format!("on-{node}/file"));
        succeed(jericho().args(["place", "--threads", "never"]).arg(file));
    }
    let mut page = [0; 4096];
    for turn in 0..4000 {
        files[turn / 500 % 2]
            .read_exact_at(&mut page, 0)
            .expect("read");
    }
    assert_eq!(moved(&volume), 0);
    drop(files);
    volume.finish();
}
