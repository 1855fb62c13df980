//! A daemon without work uses no CPU time, wakes no thread and writes nothing.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::fio::verify;
use crate::volume::Volume;

/// Returns the CPU time that a process has used, in clock ticks of 10 ms.
pub fn cpu_ticks(pid: u64) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the daemon runs");
    // The name in parentheses may hold spaces; utime and stime are the 14th and 15th field of all.
    let (_, after_name) = stat
        .rsplit_once(')')
        .expect("the format of proc_pid_stat(5)");
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    fields[11].parse::<u64>().expect("utime") + fields[12].parse::<u64>().expect("stime")
}

/// What a process has done so far.
#[derive(Debug)]
struct Activity {
    ticks: u64,
    /// Voluntary switches of each thread: how often it went to sleep. The kernel's own workers of io_uring (*iou-wrk*) do not count: once
    /// there is one, it wakes every five seconds.
    sleeps: HashMap<u64, u64>,
    /// Bytes written to devices.
    written_bytes: u64,
}

impl Activity {
    fn of(pid: u64) -> Activity {
        let number = |text: &str, name: &str| -> u64 {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let number = line.expect("a line with this name").trim();
            number.parse().expect("a number")
        };
        let read = |path: String| std::fs::read_to_string(path).expect("the daemon runs");
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the daemon runs");
        // A thread may end meanwhile.
        let status = tasks.filter_map(|task| {
            std::fs::read_to_string(task.expect("a thread").path().join("status")).ok()
        });
        let own = status.filter(|status| !status.starts_with("Name:\tiou-wrk"));
        let sleeps = own.map(|status| {
            let sleeps = number(&status, "voluntary_ctxt_switches:");
            (number(&status, "Pid:"), sleeps)
        });
        Activity {
            ticks: cpu_ticks(pid),
            sleeps: sleeps.collect(),
            written_bytes: number(&read(format!("/proc/{pid}/io")), "write_bytes:"),
        }
    }

    /// Returns whether it has done nothing since `before`. One tick is allowed, for the end of a request.
    fn is_idle_since(&self, before: &Activity) -> bool {
        self.ticks <= before.ticks + 1
            && self.sleeps == before.sleeps
            && self.written_bytes == before.written_bytes
    }
}

#[test]
fn an_idle_daemon_uses_no_cpu_wakes_no_thread_and_writes_nothing() {
    let volume = Volume::mounted("256M", 2, "32M");
    verify(
        &volume.make_dir("fio"),
        &["--rw=randwrite", "--bs=4k", "--size=8M"],
    );
    let pid = volume.daemon_pid();
    // First the daemon must write back the pages that fio left dirty.
    let deadline = Instant::now() + Duration::from_secs(120);
    while volume.total("dirty") > 0 {
        assert!(
            Instant::now() < deadline,
            "pages stay dirty for two minutes without being written back"
        );
        std::thread::sleep(Duration::from_millis(500));
    }
    // A commit follows, and a checkpoint 30 seconds later. Then the daemon must become idle: within 80 seconds there must be ten in
    // which it does nothing.
    let mut found = vec![Activity::of(pid)];
    for span in 0..8 {
        std::thread::sleep(Duration::from_secs(10));
        let now = Activity::of(pid);
        if now.is_idle_since(&found[span]) {
            return volume.finish();
        }
        found.push(now);
    }
    panic!("busy in eight spans of ten idle seconds: {found:#?}");
}
