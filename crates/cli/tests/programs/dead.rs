//! Calls under `jericho run` that are in progress when the daemon is killed all fail with ENOTCONN, over both transports. Without
//! the library, the error depends on the state of the request in the kernel.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::commands::{LONG, kill, wait_until};
use crate::program::{command, succeed, under_run};
use crate::roles::{self, output_of};
use crate::volume::Volume;

const PAUSE: Duration = Duration::from_millis(5);

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/dead.py")
}

/// Returns the processes that have this argument: the interpreter, and the commands that started it.
fn processes(argument: &str) -> Vec<u64> {
    let all = fs::read_dir("/proc").expect("proc is mounted");
    let pids = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let with = |pid: &u64| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments
            .split(|byte| *byte == 0)
            .any(|one| one == argument.as_bytes())
    };
    pids.filter(with).collect()
}

/// Returns how many threads of the processes wait in the kernel for a daemon, and the current system calls of all threads.
fn waiting(pids: &[u64]) -> (usize, Vec<String>) {
    let tasks = pids
        .iter()
        .filter_map(|pid| fs::read_dir(format!("/proc/{pid}/task")).ok());
    let at: Vec<String> = tasks
        .flat_map(|tasks| tasks.flatten())
        .filter_map(|task| fs::read_to_string(task.path().join("syscall")).ok())
        .collect();
    let count = at
        .iter()
        .filter(|line| {
            let call = line.split(' ').next().and_then(|n| n.parse().ok());
            call.is_some_and(|call| ASKING.contains(&call))
        })
        .count();
    (count, at)
}

/// Returns whether SIGSTOP has stopped all threads of a process. The threads stop only when one of them has got a CPU to take the
/// signal. Until then the others continue.
fn is_stopped(pid: u64) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process exists");
    let stats = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("stat")).ok());
    // The state follows the name, which is in parentheses.
    let state = |stat: String| stat.rsplit_once(") ")?.1.chars().next();
    stats.into_iter().all(|stat| state(stat) == Some('T'))
}

/// The numbers of the system calls that the program makes, and of those that the library makes for them.
const ASKING: &[i64] = &[
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_lseek,
    libc::SYS_sendfile,
    libc::SYS_copy_file_range,
    libc::SYS_statx,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_truncate,
    libc::SYS_ioctl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_creat,
];

#[test]
fn calls_in_progress_when_the_daemon_is_killed_all_say_enotconn() {
    let volume = Volume::mounted("256M", 2, "16M");
    let root = volume.make_dir("root");
    let calls = succeed(command("python3").arg(script()));
    let calls: usize = calls.trim().parse().expect("the number of calls");
    for call in 0..calls {
        let dir = root.join(call.to_string());
        fs::create_dir(&dir).expect("mkdir");
        for name in ["file", "other"] {
            let file = File::create(dir.join(name)).expect("create");
            file.write_all_at(&[7; 10_000], 0).expect("write");
            file.set_len(4 << 20).expect("ftruncate");
            file.sync_all().expect("fsync");
        }
    }
    let marks = volume.outside("marks");
    fs::create_dir(&marks).expect("mkdir");
    let mut program = under_run("python3");
    program.arg(script()).arg(&root).arg(&marks);
    let mut child = roles::start(&mut program);
    let daemon = volume.daemon_pid();
    let deadline = Instant::now() + LONG;
    while !(0..calls).all(|n| marks.join(format!("ready{n}")).exists()) {
        let ended = child.try_wait().expect("wait").is_some();
        assert!(
            !ended && Instant::now() < deadline,
            "{}",
            output_of(&mut child)
        );
        std::thread::sleep(PAUSE);
    }
    kill("STOP", daemon);
    let deadline = Instant::now() + LONG;
    // If the daemon never stops, the wait for all calls below fails.
    while !is_stopped(daemon) && Instant::now() < deadline {
        std::thread::sleep(PAUSE);
    }
    fs::write(marks.join("stopped"), "").expect("a mark");
    // Waits until all calls wait for the daemon. The test kills the daemon even if that fails, because all processes that access the
    // mount would wait for the stopped daemon.
    let pids = processes(&marks.display().to_string());
    let deadline = Instant::now() + LONG;
    let all_wait = loop {
        let (count, at) = waiting(&pids);
        if count >= calls {
            break Ok(());
        }
        if Instant::now() > deadline {
            break Err(format!("{count} of {calls} wait: {at:#?}"));
        }
        std::thread::sleep(PAUSE);
    };
    kill("KILL", daemon);
    all_wait.expect("all wait");
    let status = roles::wait_for_end(&mut child, "the program", LONG);
    let ended = Path::new("/proc").join(daemon.to_string());
    wait_until("the daemon's end", || !ended.exists());
    volume.detach();
    assert!(status.success(), "{}", output_of(&mut child));
    volume.check();
}
