//! When the daemon ends, programs under `jericho run` lose access to the cache, because nothing writes it back any more. They also
//! release its memory.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use crate::commands::{LONG, kill, wait_until};
use crate::program::succeed;
use crate::roles::{self, output_of};
use crate::volume::{Volume, jericho};

const PAGE: usize = 4096;
/// Pages of the test's file that are in the cache.
const PAGES: u64 = 64;
/// Offset of a hole in the file that no program has read.
const HOLE_AT: u64 = 512 << 20;
/// Accesses of one series. A program makes a series before the daemon is killed, and one after the first error.
const ACCESSES: u64 = 2000;
/// Memory that a program may keep of emptied segments: pages of zeros that its calls in progress touched afterwards.
const LEFT_KIB_MAX: u64 = 64;

/// A program with a file open on the mount.
struct Program {
    file: Option<File>,
    writes: bool,
    /// The directory in which the program and the test create files as marks for each other.
    marks: PathBuf,
}

impl Program {
    fn file(&self) -> &File {
        self.file.as_ref().expect("the file is open")
    }

    fn access(&self, at: u64) -> Result<(), i32> {
        let mut page = [9; PAGE];
        let done = match self.writes {
            true => self.file().write_at(&page, at),
            false => self.file().read_at(&mut page, at),
        };
        match done {
            Ok(bytes) => {
                assert_eq!(bytes, PAGE);
                Ok(())
            }
            Err(error) => Err(error.raw_os_error().expect("an errno")),
        }
    }

    fn access_all(&self) -> Result<(), i32> {
        (0..ACCESSES).try_for_each(|n| self.access(n % PAGES * PAGE as u64))
    }

    /// Asserts that each access fails with ENOTCONN.
    fn assert_over(&self) {
        for n in 0..ACCESSES {
            let got = self.access(n % PAGES * PAGE as u64);
            assert_eq!(got, Err(libc::ENOTCONN), "access {n}");
        }
    }

    fn mark(&self, name: &str) {
        std::fs::write(self.marks.join(name), "").expect("a mark");
    }

    fn wait_for(&self, name: &str) {
        wait_until(name, || self.marks.join(name).exists());
    }
}

/// Runs as a program of the tests below.
#[test]
#[ignore = "a part of the tests here, which start it as a process of its own"]
fn role() {
    let Some([path, marks, writes, way]) = roles::role() else {
        return;
    };
    let mut options = File::options();
    options.read(true).write(writes == "true");
    let mut program = Program {
        file: Some(options.open(path).expect("open")),
        writes: writes == "true",
        marks: PathBuf::from(marks),
    };
    assert_eq!(program.access_all(), Ok(()));
    match &*way {
        // The daemon may be killed at any time from now on.
        "until told" => {
            program.mark("begun");
            let deadline = Instant::now() + LONG;
            let errno = loop {
                if let Err(errno) = program.access_all() {
                    break errno;
                }
                assert!(Instant::now() < deadline, "no access ever fails");
            };
            assert_eq!(errno, libc::ENOTCONN);
            program.assert_over();
            program.mark("told");
            program.wait_for("mounted again");
            program.assert_over();
        }
        // The test kills the daemon and its keeper before the program continues.
        "untold" => {
            program.mark("begun");
            program.wait_for("killed");
            // Only the kernel's error tells the program that the daemon has ended.
            assert_eq!(program.access(HOLE_AT), Err(libc::ENOTCONN));
            program.assert_over();
        }
        // The test stops the daemon, and kills it while this program's request waits.
        "under way" => {
            program.mark("begun");
            program.wait_for("stopped");
            assert_eq!(program.access(HOLE_AT), Err(libc::ENOTCONN));
        }
        // The test unmounts the volume after the program has closed its file.
        _ => {
            program.file = None;
            program.mark("begun");
            program.wait_for("done");
        }
    }
}

/// A running program. It is killed when dropped.
struct Started {
    child: Child,
    marks: PathBuf,
}

impl Started {
    fn begin(volume: &Volume, file: &Path, name: &str, writes: bool, way: &str) -> Started {
        let marks = volume.outside(name);
        std::fs::create_dir(&marks).expect("mkdir");
        let text = |path: &Path| path.display().to_string();
        let role = [&*text(file), &text(&marks), &writes.to_string(), way];
        let mut started = Started {
            child: roles::start(&mut roles::command("keeper::role", &role, true)),
            marks,
        };
        started.wait_for("begun");
        started
    }

    fn mark(&self, name: &str) {
        std::fs::write(self.marks.join(name), "").expect("a mark");
    }

    fn wait_for(&mut self, name: &str) {
        let deadline = Instant::now() + 2 * LONG;
        while !self.marks.join(name).exists() {
            let ended = self.child.try_wait().expect("wait");
            let late = Instant::now() > deadline;
            if ended.is_some() || late {
                let _ = self.child.kill();
                panic!("not {name}: {ended:?}\n{}", output_of(&mut self.child));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn end(mut self) {
        let status = roles::wait_for_end(&mut self.child, "the program", 2 * LONG);
        assert!(status.success(), "{}", output_of(&mut self.child));
    }

    /// Returns whether a thread of the process is in pwrite(2). Writes the current system calls of its threads to `calls`.
    fn is_writing(&self, calls: &mut String) -> bool {
        let tasks = format!("/proc/{}/task", self.child.id());
        let tasks = std::fs::read_dir(tasks).expect("the process runs");
        *calls = tasks
            .flatten()
            .filter_map(|task| std::fs::read_to_string(task.path().join("syscall")).ok())
            .collect();
        let pwrite = format!("{} ", libc::SYS_pwrite64);
        calls.lines().any(|call| call.starts_with(&pwrite))
    }

    /// Returns how many KiB of the volume's segments the process has in memory, without the process's own area.
    fn segments_kib(&self) -> u64 {
        let path = format!("/proc/{}/smaps", self.child.id());
        let smaps = std::fs::read_to_string(path).expect("the process runs");
        assert!(!smaps.is_empty(), "the process has ended");
        let (mut is_segment, mut sum) = (false, 0);
        for line in smaps.lines() {
            let first = line.split_whitespace().next().unwrap_or_default();
            if !first.ends_with(':') {
                is_segment = line.contains("/memfd:jericho") && !line.contains("-area-");
            } else if is_segment && first == "Rss:" {
                let kib = line.split_whitespace().nth(1);
                sum += kib.and_then(|kib| kib.parse::<u64>().ok()).expect("KiB");
            }
        }
        sum
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn volume_with_file() -> (Volume, PathBuf) {
    let volume = Volume::mounted("256M", 2, "16M");
    let file = volume.at("file");
    make(&file);
    (volume, file)
}

fn make(file: &Path) {
    let open = File::create(file).expect("create");
    open.write_all_at(&vec![7; PAGES as usize * PAGE], 0)
        .expect("write");
    open.set_len(HOLE_AT + (1 << 20)).expect("ftruncate");
    open.sync_all().expect("fsync");
}

/// Returns the state and the parent of a process; `None` when it does not exist.
fn process(pid: u64) -> Option<(char, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut words = stat.rsplit(')').next()?.split_whitespace();
    let state = words.next()?.chars().next()?;
    Some((state, words.next()?.parse().ok()?))
}

fn has_ended(pid: u64) -> bool {
    process(pid).is_none_or(|(state, _)| state == 'Z')
}

/// Returns the process id of a daemon's keeper.
fn keeper_of(daemon: u64) -> Option<u64> {
    let pids = std::fs::read_dir("/proc").expect("proc is mounted");
    let mut pids = pids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.find(|pid: &u64| {
        let args = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let is_keeper = args.split(|byte| *byte == 0).nth(1) == Some(b"keeper");
        is_keeper && process(*pid).is_some_and(|(state, parent)| parent == daemon && state != 'Z')
    })
}

#[test]
fn programs_lose_access_when_the_daemon_is_killed_and_stay_without_it() {
    let (volume, file) = volume_with_file();
    let mut reader = Started::begin(&volume, &file, "reader", false, "until told");
    let mut writer = Started::begin(&volume, &file, "writer", true, "until told");
    let daemon = volume.daemon_pid();
    // The daemon may list the client that made the file for a moment longer.
    wait_until("two programs are inline", || {
        volume.stat()["clients"].as_array().map(Vec::len) == Some(2)
    });
    let keeper = keeper_of(daemon).expect("a keeper");
    for program in [&reader, &writer] {
        assert!(program.segments_kib() > 2 * LEFT_KIB_MAX);
    }
    volume.crash();
    reader.wait_for("told");
    writer.wait_for("told");
    for program in [&reader, &writer] {
        wait_until("the memory is given back", || {
            program.segments_kib() <= LEFT_KIB_MAX
        });
    }
    wait_until("the keeper ends", || has_ended(keeper));
    volume.mount();
    std::fs::write(&file, vec![8; PAGES as usize * PAGE]).expect("write");
    for program in [reader, writer] {
        program.mark("mounted again");
        program.end();
    }
    volume.finish();
}

#[test]
fn programs_lose_the_memory_of_a_slice_that_was_added_when_the_daemon_is_killed() {
    let volume = Volume::mounted("256M", 2, "16M");
    let new = volume.outside("new");
    let mut add = jericho();
    add.arg("add").arg(volume.mnt()).arg(&new);
    succeed(add.args(["--size", "96M"]));
    let dir = volume.at("dir");
    std::fs::create_dir(&dir).expect("mkdir");
    succeed(jericho().args(["place", "--slice", "2"]).arg(&dir));
    let file = dir.join("file");
    make(&file);
    let mut program = Started::begin(&volume, &file, "program", true, "until told");
    assert!(program.segments_kib() > 2 * LEFT_KIB_MAX);
    volume.crash();
    program.wait_for("told");
    wait_until("the memory is given back", || {
        program.segments_kib() <= LEFT_KIB_MAX
    });
    volume.mount();
    program.mark("mounted again");
    program.end();
    volume.finish();
}

#[test]
fn programs_release_the_memory_of_an_unmounted_volume() {
    let (volume, file) = volume_with_file();
    let program = Started::begin(&volume, &file, "program", true, "until unmounted");
    assert!(program.segments_kib() > 2 * LEFT_KIB_MAX);
    volume.umount();
    wait_until("the memory is given back", || {
        program.segments_kib() <= LEFT_KIB_MAX
    });
    program.mark("done");
    program.end();
    volume.check();
}

#[test]
fn programs_get_the_kernels_error_when_daemon_and_keeper_are_both_killed() {
    let (volume, file) = volume_with_file();
    let program = Started::begin(&volume, &file, "program", false, "untold");
    let keeper = keeper_of(volume.daemon_pid()).expect("a keeper");
    kill("STOP", keeper);
    volume.crash();
    kill("KILL", keeper);
    program.mark("killed");
    program.end();
    volume.check();
}

#[test]
fn a_keeper_that_dies_is_replaced_by_one_that_knows_all_programs() {
    let (volume, file) = volume_with_file();
    let mut program = Started::begin(&volume, &file, "program", true, "until told");
    let daemon = volume.daemon_pid();
    let first = keeper_of(daemon).expect("a keeper");
    kill("KILL", first);
    let mut second = None;
    wait_until("another keeper", || {
        second = keeper_of(daemon).filter(|pid| *pid != first && has_segments(*pid));
        second.is_some()
    });
    // The new keeper must also get the area of the program that attached before it started.
    let area = "-area-";
    let second = second.expect("a keeper");
    wait_until("the area of the program", || {
        descriptors(second).iter().any(|name| name.contains(area))
    });
    // This keeper started while the volume was mounted, so it could have inherited the device or the lock.
    assert_has_no_device_or_lock(&volume, second);
    volume.crash();
    program.wait_for("told");
    program.mark("mounted again");
    program.end();
    volume.check();
}

/// A stopped daemon, which answers no request. It is killed when dropped, because every process that accesses the mount would wait
/// for it.
struct StoppedDaemon(u64);

impl StoppedDaemon {
    fn stop(pid: u64) -> StoppedDaemon {
        kill("STOP", pid);
        StoppedDaemon(pid)
    }
}

impl Drop for StoppedDaemon {
    fn drop(&mut self) {
        kill("KILL", self.0);
    }
}

#[test]
fn a_write_in_progress_when_the_daemon_is_killed_fails_with_enotconn() {
    let (volume, file) = volume_with_file();
    let program = Started::begin(&volume, &file, "program", true, "under way");
    let daemon = volume.daemon_pid();
    let stopped = StoppedDaemon::stop(daemon);
    program.mark("stopped");
    let mut calls = String::new();
    let deadline = Instant::now() + LONG;
    while !program.is_writing(&mut calls) {
        assert!(
            Instant::now() < deadline,
            "the program does not write: {calls}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(stopped);
    program.end();
    wait_until("the daemon's end", || has_ended(daemon));
    volume.detach();
    volume.check();
}

/// Returns the names to which the descriptors of a process refer.
fn descriptors(pid: u64) -> Vec<String> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd"));
    let fds = fds.map(|fds| fds.flatten().collect::<Vec<_>>());
    let links = fds.unwrap_or_default().into_iter();
    links
        .filter_map(|fd| std::fs::read_link(fd.path()).ok())
        .map(|name| name.display().to_string())
        .collect()
}

/// Asserts that a keeper holds neither the FUSE device nor the volume's lock. With the device it would keep programs waiting, and
/// with the lock the next daemon.
fn assert_has_no_device_or_lock(volume: &Volume, keeper: u64) {
    let log = volume.outside("log").display().to_string();
    for name in descriptors(keeper) {
        let known = [
            "/memfd:jericho",
            "socket:",
            "anon_inode:",
            "pidfd:",
            "/dev/null",
        ];
        let is_known = known.iter().any(|known| name.starts_with(known)) || name == log;
        assert!(is_known && !name.contains("uring"), "{name}");
    }
}

fn has_segments(pid: u64) -> bool {
    descriptors(pid)
        .iter()
        .any(|name| name.contains("/memfd:jericho"))
}

#[test]
fn a_keeper_has_segments_and_no_device_or_lock_and_blocks_signals_that_stop_the_daemon() {
    let (volume, file) = volume_with_file();
    let _program = Started::begin(&volume, &file, "program", true, "until unmounted");
    let daemon = volume.daemon_pid();
    let keeper = keeper_of(daemon).expect("a keeper");
    assert_has_no_device_or_lock(&volume, keeper);
    // The keeper has a session of its own, so signals to the daemon's process group do not reach it.
    let session = |pid: u64| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process runs");
        let words: Vec<String> = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .map(str::to_owned)
            .collect();
        words[3].clone()
    };
    assert_ne!(session(keeper), session(daemon));
    for signal in ["TERM", "INT", "HUP"] {
        kill(signal, keeper);
    }
    // The signals are pending, because the keeper blocks them.
    let status =
        std::fs::read_to_string(format!("/proc/{keeper}/status")).expect("the keeper runs");
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    let pending = u64::from_str_radix(pending.expect("a mask").trim(), 16).expect("a mask");
    assert_eq!(pending, 1 << (15 - 1) | 1 << (2 - 1) | 1, "{pending:x}");
    // The daemon stops cleanly and takes the keeper with it.
    volume.umount();
    wait_until("the keeper ends", || has_ended(keeper));
}
