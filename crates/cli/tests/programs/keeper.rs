//! What programs under `jericho run` see when the daemon ends: no access to a cache that nothing writes back. They also do not
//! keep its memory.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use crate::roles::{self, LONG, kill, said_by, wait_until};
use crate::volume::Volume;

const PAGE: usize = 4096;
/// Pages of the file that is in the cache.
const PAGES: u64 = 64;
/// Position of a hole in the file that no program has read.
const HOLE_AT: u64 = 512 << 20;
/// Accesses before the daemon is killed, and after the program has seen the error.
const ACCESSES: u64 = 2000;
/// Memory of emptied segments that a program may still have: pages of zeros that its calls in progress touched afterwards.
const LEFT_KIB_MAX: u64 = 64;

/// A program with a file open on the mount.
struct Program {
    file: Option<File>,
    writes: bool,
    /// Where the program and the test leave marks for each other.
    marks: PathBuf,
}

impl Program {
    fn file(&self) -> &File {
        self.file.as_ref().expect("it is open")
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

    /// Checks that no access is served and that each fails in the same way.
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

/// A program that the tests below start.
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
                assert!(Instant::now() < deadline, "it is never told");
            };
            assert_eq!(errno, libc::ENOTCONN);
            program.assert_over();
            program.mark("told");
            program.wait_for("mounted again");
            program.assert_over();
        }
        // Both are killed before the program continues.
        "untold" => {
            program.mark("begun");
            program.wait_for("killed");
            // The kernel's error is the program's only notice.
            assert_eq!(program.access(HOLE_AT), Err(libc::ENOTCONN));
            program.assert_over();
        }
        // The daemon is stopped, and killed while a request waits for it.
        "under way" => {
            program.mark("begun");
            program.wait_for("stopped");
            assert_eq!(program.access(HOLE_AT), Err(libc::ENOTCONN));
        }
        // Unmounted after the program has closed its file.
        _ => {
            program.file = None;
            program.mark("begun");
            program.wait_for("done");
        }
    }
}

/// A running program; ends with the test.
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
                panic!("not {name}: {ended:?}\n{}", said_by(&mut self.child));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn end(mut self) {
        let status = roles::wait_for_end(&mut self.child, "the program", 2 * LONG);
        assert!(status.success(), "{}", said_by(&mut self.child));
    }

    /// Returns whether a thread of the process is in pwrite(2). `calls`: the system calls of its threads.
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

    /// Returns how many KiB of the volume's segments, without its own area, the process has in memory.
    fn segments_kib(&self) -> u64 {
        let path = format!("/proc/{}/smaps", self.child.id());
        let smaps = std::fs::read_to_string(path).expect("the process runs");
        assert!(!smaps.is_empty(), "the process has ended");
        let (mut ours, mut sum) = (false, 0);
        for line in smaps.lines() {
            let first = line.split_whitespace().next().unwrap_or_default();
            if !first.ends_with(':') {
                ours = line.contains("/memfd:jericho") && !line.contains("-area-");
            } else if ours && first == "Rss:" {
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
    let open = File::create(&file).expect("create");
    open.write_all_at(&vec![7; PAGES as usize * PAGE], 0)
        .expect("write");
    open.set_len(HOLE_AT + (1 << 20)).expect("ftruncate");
    open.sync_all().expect("fsync");
    (volume, file)
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

/// Returns the keeper of a daemon.
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
fn programs_are_told_when_the_daemon_is_killed_and_see_nothing_of_it_again() {
    let (volume, file) = volume_with_file();
    let mut reader = Started::begin(&volume, &file, "reader", false, "until told");
    let mut writer = Started::begin(&volume, &file, "writer", true, "until told");
    let daemon = volume.daemon_pid();
    // One that has made the file is forgotten a moment after its end.
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
fn an_unmounted_volume_holds_no_memory_though_programs_still_have_it_mapped() {
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
fn programs_whose_daemon_and_keeper_were_both_killed_are_told_by_the_kernel() {
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
fn a_keeper_that_dies_is_replaced_and_the_new_one_knows_all_programs() {
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
    // Also of the program that came before it.
    let area = "-area-";
    let second = second.expect("a keeper");
    wait_until("the area of the program", || {
        descriptors(second).iter().any(|name| name.contains(area))
    });
    // It was started while the volume was mounted.
    assert_has_no_device_or_lock(&volume, second);
    volume.crash();
    program.wait_for("told");
    program.mark("mounted again");
    program.end();
    volume.check();
}

/// A daemon that answers no request until it is killed. It is killed in any case, because a process that looks at its mount would
/// wait too.
struct Stopped(u64);

impl Stopped {
    fn daemon(pid: u64) -> Stopped {
        kill("STOP", pid);
        Stopped(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        kill("KILL", self.0);
    }
}

#[test]
fn a_write_that_was_under_way_when_the_daemon_was_killed_fails_like_all_others() {
    let (volume, file) = volume_with_file();
    let program = Started::begin(&volume, &file, "program", true, "under way");
    let daemon = volume.daemon_pid();
    let stopped = Stopped::daemon(daemon);
    program.mark("stopped");
    let mut calls = String::new();
    let deadline = Instant::now() + LONG;
    while !program.is_writing(&mut calls) {
        assert!(Instant::now() < deadline, "it does not write: {calls}");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(stopped);
    program.end();
    wait_until("the daemon's end", || has_ended(daemon));
    volume.detach();
    volume.check();
}

/// Returns what the descriptors of a process refer to.
fn descriptors(pid: u64) -> Vec<String> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd"));
    let fds = fds.map(|fds| fds.flatten().collect::<Vec<_>>());
    let links = fds.unwrap_or_default().into_iter();
    links
        .filter_map(|fd| std::fs::read_link(fd.path()).ok())
        .map(|name| name.display().to_string())
        .collect()
}

/// A keeper with the mount's channel would keep programs waiting; one with the volume's lock would keep the next
/// daemon waiting.
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
fn a_keeper_has_segments_and_no_device_or_lock_and_outlives_what_stops_the_daemon() {
    let (volume, file) = volume_with_file();
    let _program = Started::begin(&volume, &file, "program", true, "until unmounted");
    let daemon = volume.daemon_pid();
    let keeper = keeper_of(daemon).expect("a keeper");
    assert_has_no_device_or_lock(&volume, keeper);
    // Its own session: a signal to the daemon's process group does not reach it.
    let session = |pid: u64| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
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
    // The signals have arrived and are blocked.
    let status = std::fs::read_to_string(format!("/proc/{keeper}/status")).expect("it runs");
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    let pending = u64::from_str_radix(pending.expect("a mask").trim(), 16).expect("a mask");
    assert_eq!(pending, 1 << (15 - 1) | 1 << (2 - 1) | 1, "{pending:x}");
    // The daemon stops cleanly and takes the keeper with it.
    volume.umount();
    wait_until("the keeper ends", || has_ended(keeper));
}
