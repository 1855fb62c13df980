//! Threads work away from a node with too few CPUs, and come back (machine `two-cpus`: two nodes with one CPU each).
//!
//! All data is on node 0. The cases compare what all threads together do in the same time, by Jericho's count of accesses, and how long they wait for a
//! CPU, by /proc/PID/task/TID/schedstat.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::guest::{Volume, jericho, tell};

/// How long the threads read.
const MILLISECONDS: u64 = 10_000;
/// Time between two looks. A look takes an emulated CPU for some tenths of a second.
const PAUSE: Duration = Duration::from_millis(1500);

/// What a program's threads did.
#[derive(Debug)]
struct Outcome {
    pages: u64,
    /// Share of the threads' time (running and waiting) in which they waited for a CPU.
    wait_share: f64,
    /// Most threads that worked away at one time, as `jericho stat` says.
    away_max: u64,
}

/// Returns a volume with a file of 4 MiB on node 0.
fn volume() -> (Volume, PathBuf) {
    let volume = Volume::new();
    let dir = Path::new("/mnt/data");
    std::fs::create_dir(dir).expect("mkdir");
    jericho(&format!("place {} --node 0", dir.display()));
    let file = dir.join("file");
    std::fs::write(&file, vec![7; 4 << 20]).expect("write");
    (volume, file)
}

/// Starts the program with this number of threads, which begin on CPU 0 and read the file. `kind`: `own` if they stay there, `free` if not.
fn start(policy: &str, threads: usize, kind: &str, ms: u64, file: &Path) -> Child {
    let mut command = Command::new("/usr/bin/jericho");
    command.args(["run", "--threads", policy, "--", "/usr/bin/reader"]);
    command.arg(ms.to_string());
    for _ in 0..threads {
        command.arg(format!("0,{kind},{}", file.display()));
    }
    command.stdout(Stdio::null()).spawn().expect("the reader")
}

/// Returns how long the threads of a process ran and waited for a CPU, in nanoseconds.
fn times(child: &Child) -> [u64; 2] {
    let mut sums = [0, 0];
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{}/task", child.id())) else {
        return sums;
    };
    for task in tasks.flatten() {
        let text = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        for (sum, word) in sums.iter_mut().zip(text.split_whitespace()) {
            *sum += word.parse::<u64>().expect("a number");
        }
    }
    sums
}

fn away(volume: &Volume) -> u64 {
    volume.stat()["threads_away"].as_u64().expect("a number")
}

/// Runs the program to its end.
fn run(volume: &Volume, policy: &str, threads: usize, kind: &str, file: &Path) -> Outcome {
    let before: u64 = volume.accesses().iter().sum();
    let mut child = start(policy, threads, kind, MILLISECONDS, file);
    let (mut last, mut away_max) = ([0, 0], 0);
    while child.try_wait().expect("wait").is_none() {
        // The threads rest for two seconds at the end, so the last times are those of all that they did.
        let now = times(&child);
        if now[0] > last[0] {
            last = now;
        }
        away_max = away_max.max(away(volume));
        std::thread::sleep(PAUSE);
    }
    let outcome = Outcome {
        pages: volume.accesses().iter().sum::<u64>() - before,
        wait_share: last[1] as f64 / (last[0] + last[1]).max(1) as f64,
        away_max,
    };
    println!("\nlab: {threads} threads, {policy}, {kind}: {outcome:?}");
    outcome
}

#[test]
#[ignore = "for the guest of make lab"]
fn threads_do_more_than_where_they_stay_with_their_data_and_wait_less() {
    let (volume, file) = volume();
    for threads in [2, 4] {
        let fixed = run(&volume, "never", threads, "own", &file);
        let always = run(&volume, "always", threads, "free", &file);
        let adaptive = run(&volume, "adaptive", threads, "free", &file);
        let gain = adaptive.pages as f64 / fixed.pages as f64;
        tell(
            &format!("accesses of {threads} threads, adaptive / fixed"),
            gain,
        );
        tell(
            "accesses, adaptive / always",
            adaptive.pages as f64 / always.pages as f64,
        );
        tell("share of time that they wait, fixed", fixed.wait_share);
        tell(
            "share of time that they wait, adaptive",
            adaptive.wait_share,
        );
        // The emulated CPUs are threads of the host, which may have other work.
        assert!(gain > 1.2, "{fixed:?} {adaptive:?}");
        assert!(
            adaptive.wait_share < 0.85 * fixed.wait_share,
            "{fixed:?} {adaptive:?}"
        );
        assert!(adaptive.away_max > 0, "{adaptive:?}");
        assert_eq!(fixed.away_max, 0, "{fixed:?}");
    }
}

#[test]
#[ignore = "for the guest of make lab"]
fn a_thread_that_works_away_comes_back_when_there_is_room() {
    let (volume, file) = volume();
    // The CPU of the data's node is busy for a while.
    let mut busy = start("never", 1, "own", MILLISECONDS, &file);
    let mut free = start("adaptive", 1, "free", 3 * MILLISECONDS, &file);
    let mut was_away = false;
    while busy.try_wait().expect("wait").is_none() {
        was_away |= away(&volume) == 1;
        std::thread::sleep(PAUSE);
    }
    assert!(was_away, "{}", volume.stat());
    // The thread has some seconds to notice that there is room.
    std::thread::sleep(Duration::from_millis(MILLISECONDS / 2));
    let before = volume.accesses();
    std::thread::sleep(Duration::from_millis(MILLISECONDS / 2));
    let [local, remote] = volume.accesses();
    let (local, remote) = (local - before[0], remote - before[1]);
    let share = local as f64 / (local + remote).max(1) as f64;
    tell("share of local accesses after the return", share);
    assert!(
        local > 0 && share > 0.8,
        "{local} {remote} {}",
        volume.stat()
    );
    assert_eq!(away(&volume), 0);
    let status = free.wait().expect("wait");
    assert!(status.success());
}
