//! With `--with-parent`, the threads that use what another thread reads come to the node of the data with it.
//!
//! The program has the shape of an emulator: a helper thread reads a file, and other threads use the bytes. The helpers live shortly: each reads for some
//! tenths of a second, and another one follows.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use crate::program::succeed;
use crate::roles;
use crate::volume::{Volume, jericho};

/// Limit of every wait, longer than the slowest machine needs.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a helper thread lives.
const HELPER_LIFE: Duration = Duration::from_millis(600);
const PIECE: usize = 64 << 10;
/// Threads that use the bytes.
const USERS: usize = 2;

/// Returns the CPUs of the test, of which each of the two virtual nodes has a half. Returns `None` if there is only one.
fn cpus() -> Option<Vec<usize>> {
    let own = sched_getaffinity(None).expect("affinity");
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|cpu| own.is_set(*cpu))
        .collect();
    if cpus.len() < 2 {
        eprintln!("not tested: there is one CPU");
        return None;
    }
    Some(cpus)
}

fn only(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}

/// Uses pieces until no more come, and creates the file `moved` when it finds that its mask keeps it on the data's node, and that it runs there. Moves itself to
/// a CPU of the other node from time to time, as the scheduler could.
fn use_pieces(pieces: &Mutex<Receiver<Vec<u8>>>, moved: &str, home: usize, other: usize) {
    let all = sched_getaffinity(None).expect("affinity");
    let mut sum = 0u64;
    for count in 0.. {
        let Ok(piece) = pieces.lock().expect("pieces").recv() else {
            break;
        };
        sum = piece.iter().fold(sum, |sum, byte| sum + u64::from(*byte));
        let mask = sched_getaffinity(None).expect("affinity");
        if mask != all && mask.is_set(home) && sched_getcpu() == home {
            std::fs::write(moved, "").expect("a mark");
        }
        if count % 64 == 0 && mask == all {
            sched_setaffinity(None, &only(other)).expect("affinity");
            sched_setaffinity(None, &all).expect("affinity");
        }
    }
    assert!(sum > 0);
    let deadline = Instant::now() + PATIENCE;
    while sched_getaffinity(None).expect("affinity") != all {
        assert!(Instant::now() < deadline, "the mask does not come back");
        std::thread::yield_now();
    }
}

/// Runs as the program: reads a file until a file `done` appears.
#[test]
#[ignore = "a part of the tests here, which start it as a process of its own"]
fn role() {
    let Some([path, done, moved, home, other]) = roles::role() else {
        return;
    };
    let cpu = |text: &str| text.parse::<usize>().expect("a CPU");
    let (home, other) = (cpu(&home), cpu(&other));
    let (send, pieces) = channel();
    let pieces = Mutex::new(pieces);
    let deadline = Instant::now() + PATIENCE;
    std::thread::scope(|scope| {
        for _ in 0..USERS {
            scope.spawn(|| use_pieces(&pieces, &moved, home, other));
        }
        while !Path::new(&done).exists() && Instant::now() < deadline {
            let (send, file) = (send.clone(), File::open(&path).expect("open"));
            let helper = scope.spawn(move || {
                let (mut piece, begun) = (vec![0; PIECE], Instant::now());
                for count in 0.. {
                    let at = count % 16 * PIECE as u64;
                    file.read_exact_at(&mut piece, at).expect("read");
                    // The users have time to sleep.
                    if count % 64 == 0 {
                        send.send(piece.clone()).expect("users");
                    }
                    if begun.elapsed() > HELPER_LIFE {
                        break;
                    }
                }
            });
            helper.join().expect("the helper");
        }
        drop(send);
    });
}

fn count(volume: &Volume, name: &str) -> u64 {
    volume.stat()[name].as_u64().expect("a number")
}

/// Returns a volume with a file of a MiB on the second node, and the program's arguments.
fn volume(cpus: &[usize]) -> (Volume, [String; 5]) {
    let volume = Volume::mounted("256M", 2, "32M");
    let dir = volume.make_dir("data");
    succeed(
        jericho()
            .arg("place")
            .arg(&dir)
            .args(["--node", "1", "--threads", "always"]),
    );
    let file = dir.join("file");
    std::fs::write(&file, vec![7; 16 * PIECE]).expect("write");
    // `virtual:2` gives the first half of the CPUs to node 0.
    let (home, other) = (cpus[cpus.len() - 1], cpus[0]);
    let role = [
        file.display().to_string(),
        volume.outside("done").display().to_string(),
        volume.outside("moved").display().to_string(),
        home.to_string(),
        other.to_string(),
    ];
    (volume, role)
}

/// Mounts the volume again, so that companions move.
fn mount_with_parent(volume: &Volume) {
    volume.umount();
    let mut command = jericho();
    command.arg("mount").arg(volume.file()).arg(volume.mnt());
    let options = ["--cache", "32M", "--topology", "virtual:2", "--with-parent"];
    command.args(options).arg("--log");
    succeed(command.arg(volume.outside("log")));
}

/// Starts the program. `options`: of `jericho run`; `None`: without the library.
fn start(role: &[String; 5], options: Option<&[&str]>) -> Child {
    let role = role.each_ref().map(String::as_str);
    let mut command: Command = match options {
        Some(options) => roles::command_under("companions::role", &role, options),
        None => roles::command("companions::role", &role, false),
    };
    roles::start(&mut command)
}

/// Lets the program run until `is_enough`.
fn run_until(volume: &Volume, mut program: Child, is_enough: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_enough() {
        let is_running = program.try_wait().expect("wait").is_none();
        if !is_running || Instant::now() > deadline {
            let _ = program.kill();
            panic!("{}\n{}", roles::output_of(&mut program), volume.stat());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    std::fs::write(volume.outside("done"), "").expect("a mark");
    let status = roles::wait_for_end(&mut program, "the program", PATIENCE);
    let said = roles::output_of(&mut program);
    assert!(status.success(), "{said}");
    std::fs::remove_file(volume.outside("done")).expect("the mark");
}

/// Lets the program run until the threads that use the bytes have come to the node of the data.
fn run_until_moved(volume: &Volume, program: Child) {
    run_until(volume, program, || volume.outside("moved").exists());
    assert!(count(volume, "companions_moved") > 0);
}

#[test]
fn without_the_option_of_the_mount_no_other_thread_is_moved() {
    let Some(cpus) = cpus() else { return };
    let (volume, role) = volume(&cpus);
    let begun = Instant::now();
    let program = start(&role, Some(&["--threads", "always", "--with-parent"]));
    run_until(&volume, program, || begun.elapsed() > 3 * HELPER_LIFE);
    assert_eq!(count(&volume, "companions_moved"), 0);
    assert!(!volume.outside("moved").exists());
    volume.finish();
}

#[test]
fn threads_that_use_the_data_come_with_the_thread_that_reads_inline() {
    let Some(cpus) = cpus() else { return };
    let (volume, role) = volume(&cpus);
    mount_with_parent(&volume);
    let program = start(&role, Some(&["--threads", "always", "--with-parent"]));
    run_until_moved(&volume, program);
    volume.finish();
}

#[test]
fn threads_that_use_the_data_come_with_the_thread_that_reads_through_the_kernel() {
    let Some(cpus) = cpus() else { return };
    let (volume, role) = volume(&cpus);
    mount_with_parent(&volume);
    let program = start(&role, None);
    run_until_moved(&volume, program);
    volume.finish();
}
