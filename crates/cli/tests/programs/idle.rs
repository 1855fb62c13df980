//! A daemon without work uses no CPU time, wakes no thread and writes nothing.

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
    /// Voluntary switches of all threads: how often one of them went to sleep.
    sleeps: u64,
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
        let sleeps = tasks.map(|task| {
            let path = task.expect("a thread").path().join("status");
            // A thread may end meanwhile.
            let status = std::fs::read_to_string(path).ok();
            status.map_or(0, |status| number(&status, "voluntary_ctxt_switches:"))
        });
        Activity {
            ticks: cpu_ticks(pid),
            sleeps: sleeps.sum(),
            written_bytes: number(&read(format!("/proc/{pid}/io")), "write_bytes:"),
        }
    }

    /// Returns what it has done since `before`.
    fn since(self, before: &Activity) -> Activity {
        Activity {
            ticks: self.ticks - before.ticks,
            sleeps: self.sleeps.abs_diff(before.sleeps),
            written_bytes: self.written_bytes - before.written_bytes,
        }
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
    // which it does nothing. One tick is allowed for the end of the request above.
    let mut used = Vec::new();
    for _ in 0..8 {
        let before = Activity::of(pid);
        std::thread::sleep(Duration::from_secs(10));
        let now = Activity::of(pid).since(&before);
        if now.ticks <= 1 && now.sleeps == 0 && now.written_bytes == 0 {
            return volume.finish();
        }
        used.push(now);
    }
    panic!("in eight spans of ten idle seconds: {used:?}");
}
