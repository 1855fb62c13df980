//! A daemon without work uses no CPU time.

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

#[test]
fn an_idle_daemon_uses_no_cpu() {
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
    // A group commit may follow. Then the daemon must become idle: within a minute there must be ten seconds with at most one tick,
    // which is allowed for the end of the request above.
    let mut used = Vec::new();
    for _ in 0..6 {
        let before = cpu_ticks(pid);
        std::thread::sleep(Duration::from_secs(10));
        used.push(cpu_ticks(pid) - before);
        if used.last() <= Some(&1) {
            return volume.finish();
        }
    }
    panic!("ticks of 10 ms used in six spans of ten idle seconds: {used:?}");
}
