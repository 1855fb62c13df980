//! Threads of other processes, from /proc.

use std::fs;

use rustix::time::{ClockId, clock_gettime};

/// Most threads and children that `started_since` visits.
const TASKS_MAX: usize = 4096;

/// A thread. The kernel reuses thread ids; id and start time together are unique.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Task {
    /// The kernel's id of the thread.
    pub tid: u32,
    /// The id of its process.
    pub pid: u32,
    /// Start time, in ticks since boot.
    pub start: u64,
}

impl Task {
    /// Returns the thread with this id, and the CPU that it ran on last. Returns `None` when there is none.
    pub fn find(tid: u32) -> Option<(Task, u32)> {
        Task::find_by(tid, read)
    }

    /// Does the work of `find`. `read` returns the contents of a file.
    fn find_by(tid: u32, mut read: impl FnMut(&str) -> Option<String>) -> Option<(Task, u32)> {
        let (stat, status) = (format!("/proc/{tid}/stat"), format!("/proc/{tid}/status"));
        let (start, _) = start_and_cpu(&read(&stat)?)?;
        let pid = field_of(&read(&status)?, "Tgid:")?;
        // If another thread has got the id in between, the start time and the process may be of two threads.
        let (start_after, cpu) = start_and_cpu(&read(&stat)?)?;
        (start == start_after).then_some((Task { tid, pid, start }, cpu))
    }

    /// Returns the CPU on which the thread ran last, or `None` if it has ended.
    pub fn cpu(&self) -> Option<u32> {
        let (start, cpu) = start_and_cpu(&read(&format!("/proc/{}/stat", self.tid))?)?;
        (start == self.start).then_some(cpu)
    }

    /// Returns whether the thread has not ended.
    pub fn is_alive(&self) -> bool {
        self.cpu().is_some()
    }
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// Returns the number after `name` in /proc/N/status.
fn field_of(status: &str, name: &str) -> Option<u32> {
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().parse().ok()
}

/// Returns the id of the process that started a process.
pub(crate) fn parent_id(pid: u32) -> Option<u32> {
    field_of(&read(&format!("/proc/{pid}/status"))?, "PPid:")
}

/// Returns the ids of a process's threads, at most 4096.
pub(crate) fn threads_of(pid: u32) -> impl Iterator<Item = u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    let threads = threads.into_iter().flatten().flatten().take(TASKS_MAX);
    threads.filter_map(|thread| thread.file_name().to_str()?.parse().ok())
}

/// Returns the current time in the ticks of [`Task::start`], which are hundredths of a second. (A container may see another time in /proc/uptime.)
pub(crate) fn now_ticks() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec as u64 * 100 + now.tv_nsec as u64 / 10_000_000
}

/// Returns all threads of `task`'s process that have started at `since` or later, the processes that `task` has started since
/// then, and the descendants of both. They can have inherited state that `task` has had since then. Leaves out processes that
/// older threads of the process have started.
pub(crate) fn started_since(task: &Task, since: u64) -> Vec<Task> {
    let (mut found, mut ahead, mut looked) = (vec![], vec![task.pid], 0);
    while let Some(pid) = ahead.pop() {
        let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
            continue;
        };
        for thread in threads.flatten() {
            looked += 1;
            if looked > TASKS_MAX {
                return found;
            }
            let path = thread.path();
            let tid = thread.file_name().to_str().and_then(|n| n.parse().ok());
            let stat = fs::read_to_string(path.join("stat")).unwrap_or_default();
            let (Some(tid), Some((start, _))) = (tid, start_and_cpu(&stat)) else {
                continue;
            };
            if tid != task.tid {
                if start < since {
                    continue;
                }
                found.push(Task { tid, pid, start });
            }
            let children = fs::read_to_string(path.join("children")).unwrap_or_default();
            // The newest are the last ones.
            let children = children.split_ascii_whitespace().rev();
            for child in children.filter_map(|n| n.parse().ok()) {
                looked += 1;
                if looked > TASKS_MAX {
                    return found;
                }
                // A child that is older did not inherit, and neither did its descendants.
                if Task::find(child).is_some_and(|(child, _)| child.start >= since) {
                    ahead.push(child);
                }
            }
        }
    }
    found
}

/// Parses a line of /proc/N/stat. The name in it may contain blanks and brackets.
fn start_and_cpu(stat: &str) -> Option<(u64, u32)> {
    // The first field after the name is number 3.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let start = fields.nth(22 - 3)?.parse().ok()?;
    let cpu = fields.nth(39 - 22 - 1)?.parse().ok()?;
    Some((start, cpu))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_sys::affinity;

    #[test]
    fn a_thread_is_found_with_its_process_and_cpu() {
        let cpu = affinity::get(None).unwrap()[0];
        std::thread::Builder::new()
            .name("a) 1 (b".into())
            .spawn(move || {
                affinity::set(None, &[cpu]).unwrap();
                let tid = affinity::current_tid();
                let (task, on) = Task::find(tid).unwrap();
                assert_eq!((task.tid, task.pid, on), (tid, std::process::id(), cpu));
                assert!(task.is_alive());
                let before = Task {
                    start: task.start - 1,
                    ..task
                };
                assert!(!before.is_alive(), "another thread with that id");
            })
            .unwrap()
            .join()
            .unwrap();
        assert_eq!(Task::find(u32::MAX), None);
    }

    #[test]
    fn no_thread_is_found_while_its_id_passes_to_another_one() {
        let stat =
            |start: u64| format!("7 (name) S{} {start}{} 3", " 0".repeat(18), " 0".repeat(16));
        let found = |starts: [u64; 2]| {
            let mut starts = starts.into_iter();
            Task::find_by(7, |path| match path {
                "/proc/7/stat" => starts.next().map(stat),
                "/proc/7/status" => Some("Name:\tname\nTgid:\t5\n".into()),
                _ => None,
            })
        };
        let (tid, pid, start) = (7, 5, 90);
        assert_eq!(found([90, 90]), Some((Task { tid, pid, start }, 3)));
        assert_eq!(found([90, 91]), None);
    }

    #[test]
    fn processes_that_a_thread_starts_and_their_children_are_found() {
        let (task, _) = Task::find(affinity::current_tid()).unwrap();
        let since = now_ticks();
        assert!(since >= task.start);
        // A shell that starts another program and waits for it.
        let mut shell = std::process::Command::new("sh")
            .args(["-c", "cat; true"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // The shell's child appears some time later.
        let names = || -> Vec<String> {
            started_since(&task, since)
                .iter()
                .filter_map(|t| fs::read_to_string(format!("/proc/{}/comm", t.tid)).ok())
                .map(|name| name.trim().to_owned())
                .collect()
        };
        let (mut seen, end) = (
            names(),
            std::time::Instant::now() + std::time::Duration::from_secs(60),
        );
        while !seen.iter().any(|name| name == "cat") && std::time::Instant::now() < end {
            seen = names();
        }
        let later = started_since(&task, since + 1_000_000);
        drop(shell.stdin.take());
        shell.wait().unwrap();
        assert_eq!(later, []);
        assert!(
            seen.iter().any(|n| n == "cat") && seen.iter().any(|n| n == "sh"),
            "{seen:?}"
        );
    }
}
