//! Reads the state of processes from /proc.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;

/// Returns the state of a process; `None` when it does not exist.
pub fn state_of(pid: u64) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.trim_start().chars().next()
}

pub fn has_ended(pid: u64) -> bool {
    state_of(pid).is_none_or(|state| state == 'Z')
}

/// Returns the inodes of the memory segments that a process has open.
pub fn memory_of(pid: u64) -> BTreeSet<u64> {
    let Ok(fds) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return BTreeSet::new();
    };
    fds.flatten()
        .filter(|fd| {
            let name = fs::read_link(fd.path()).unwrap_or_default();
            name.to_string_lossy().starts_with("/memfd:jericho")
        })
        .filter_map(|fd| Some(fs::metadata(fd.path()).ok()?.ino()))
        .collect()
}

/// Returns the processes that have one of these inodes open.
pub fn openers_of(memory: &BTreeSet<u64>) -> Vec<u64> {
    let pids = fs::read_dir("/proc").expect("proc is mounted").flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| !memory_of(*pid).is_disjoint(memory))
        .collect()
}

/// Returns how many KiB of a volume's segments a process has in memory, without the process's own area.
pub fn segments_kib(pid: u64) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("the process runs");
    assert!(!smaps.is_empty(), "the process has ended");
    let (mut is_segment, mut sum) = (false, 0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if !first.ends_with(':') {
            is_segment = line.contains("/memfd:jericho") && !line.contains("-area-");
        } else if is_segment && first == "Rss:" {
            let kib = words.next().and_then(|kib| kib.parse::<u64>().ok());
            sum += kib.expect("KiB");
        }
    }
    sum
}
