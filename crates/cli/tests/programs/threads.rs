//! The daemon migrates threads that read through the mount to their data, and later gives them their CPUs back.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::program::{succeed, under_run};
use crate::volume::{Volume, jericho};

const OWN_MASK: &str = include_str!("own_mask.c");

/// Limit of every wait, longer than the slowest machine needs.
const PATIENCE: Duration = Duration::from_secs(120);

fn own_cpus() -> CpuSet {
    sched_getaffinity(None).expect("affinity")
}

/// Returns a volume with a file on each of two nodes, with the policy that threads always follow the file.
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

fn migrations(volume: &Volume) -> u64 {
    volume.stat()["threads_moved"].as_u64().expect("a number")
}

#[test]
fn only_the_reading_thread_is_migrated_to_its_data() {
    let (volume, files) = volume();
    let all = own_cpus();
    if all.count() < 2 {
        eprintln!("not tested: there is one CPU");
        return;
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut page, end) = ([0; 4096], Instant::now() + PATIENCE);
            // The thread is on one of the two nodes, so one of the files is on the other node. The mask may change back before the
            // thread looks at it, so the daemon's count says whether the thread was migrated.
            while migrations(&volume) == 0 {
                assert!(Instant::now() < end, "never migrated, {}", volume.stat());
                for file in &files {
                    for _ in 0..500 {
                        file.read_exact_at(&mut page, 0).expect("read");
                        let seen = own_cpus();
                        let lost =
                            (0..CpuSet::MAX_CPU).any(|cpu| seen.is_set(cpu) && !all.is_set(cpu));
                        assert!(!lost, "{seen:?} has more than {all:?}");
                    }
                }
            }
            // The thread uses no file any more, so its CPUs must come back.
            while own_cpus() != all && Instant::now() < end {
                std::thread::yield_now();
            }
            assert_eq!(own_cpus(), all, "the thread's CPUs after the migration");
        });
    });
    assert_eq!(own_cpus(), all);
    drop(files);
    volume.finish();
}

#[test]
fn a_thread_that_its_program_has_bound_is_not_migrated() {
    let (volume, files) = volume();
    let all = own_cpus();
    let first = (0..CpuSet::MAX_CPU)
        .find(|cpu| all.is_set(*cpu))
        .expect("a CPU");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut first_only = CpuSet::new();
            first_only.set(first);
            sched_setaffinity(None, &first_only).expect("affinity");
            let mut page = [0; 4096];
            for round in 0..4000 {
                files[round % 2].read_exact_at(&mut page, 0).expect("read");
                assert_eq!(own_cpus(), first_only);
            }
        });
    });
    assert_eq!(migrations(&volume), 0);
    drop(files);
    volume.finish();
}

#[test]
fn a_program_sees_and_sets_its_own_mask_by_syscall_too() {
    let (volume, files) = volume();
    if own_cpus().count() != 2 {
        eprintln!("not tested: the program wants one CPU for each of two nodes");
        return;
    }
    drop(files);
    let program = volume.compile("own_mask", OWN_MASK, &["-O2", "-Wall", "-Werror"]);
    let mut command = under_run(&program);
    let said = succeed(command.args(["0", "1"].map(|node| volume.at(&format!("on-{node}/file")))));
    assert_eq!(said.trim(), "own");
    volume.finish();
}

#[test]
fn no_thread_is_migrated_when_the_policy_is_never() {
    let (volume, files) = volume();
    for node in 0..2 {
        let file = volume.at(&format!("on-{node}/file"));
        succeed(jericho().args(["place", "--threads", "never"]).arg(file));
    }
    let mut page = [0; 4096];
    for round in 0..4000 {
        files[round / 500 % 2]
            .read_exact_at(&mut page, 0)
            .expect("read");
    }
    assert_eq!(migrations(&volume), 0);
    drop(files);
    volume.finish();
}
