//! The companions of a thread: the threads that probably use the data that it reads and writes.
//!
//! These are the other threads of its process, and the first thread of the process that started its process. (An emulator reads a disk in helper threads. The
//! threads that run the guest's instructions use the bytes.) A thread that uses files itself goes where its own data is, so it is nobody's companion.
//!
//! If threads of one process use data of several nodes, its companions stay where they are. Otherwise each would pull them to its own node.

use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};

use crate::tasks::{self, Task};

/// Shortest time between two moves of a process's companions.
const BRING_EVERY: Duration = Duration::from_millis(250);
/// Time for which a thread's use of data counts after an order.
const USED_FOR: Duration = Duration::from_secs(2);
/// Most companions of a thread.
const COMPANIONS_MAX: usize = 256;
/// Most companions of all threads whose masks are narrow at once. Each one takes time at the end, for a look at all threads of its process.
pub(super) const NARROW_COMPANIONS_MAX: usize = 16;
/// Most threads and processes that are remembered. Further ones have no companions.
const KNOWN_MAX: usize = 4096;

/// A process whose threads use data.
struct Process {
    /// The node of the data.
    node: usize,
    /// When its threads last used data of that node, and of another one.
    used: Instant,
    used_another: Option<Instant>,
    brought: Option<Instant>,
}

/// What is known of threads that use data.
#[derive(Default)]
pub(super) struct Companions {
    processes: HashMap<u32, Process>,
    /// Threads that use data themselves.
    users: HashMap<u32, Instant>,
}

impl Companions {
    /// Records that a thread uses data of a node. Returns whether its companions should come there now.
    pub fn uses(&mut self, task: &Task, node: usize, now: Instant) -> bool {
        if self.processes.len().max(self.users.len()) >= KNOWN_MAX {
            return false;
        }
        self.users.insert(task.tid, now);
        let process = self.processes.entry(task.pid).or_insert(Process {
            node,
            used: now,
            used_another: None,
            brought: None,
        });
        if process.node != node {
            if now < process.used + USED_FOR {
                process.used_another = Some(now);
                return false;
            }
            process.node = node;
        }
        process.used = now;
        let is_recent = |at: Option<Instant>, time: Duration| at.is_some_and(|at| now < at + time);
        if is_recent(process.used_another, USED_FOR) || is_recent(process.brought, BRING_EVERY) {
            return false;
        }
        process.brought = Some(now);
        true
    }

    /// Returns the companions of a thread, each with the CPU on which it ran last. Finds each one when it is its turn. The parent comes first.
    pub fn of(&self, task: &Task, now: Instant) -> impl Iterator<Item = (Task, u32)> + use<> {
        let is_user = |tid: &u32| {
            let used = self.users.get(tid);
            *tid == task.tid || used.is_some_and(|used| now < *used + USED_FOR)
        };
        let pid = task.pid;
        let others = tasks::threads_of(pid).filter(|tid| !is_user(tid));
        let others: Vec<u32> = others.take(COMPANIONS_MAX).collect();
        let others = others.into_iter().filter_map(Task::find);
        // An id may have passed on to another process.
        let others = others.filter(move |(task, _)| task.pid == pid);
        let parent = parent_of(pid).filter(|(parent, _)| !is_user(&parent.tid));
        parent.into_iter().chain(others)
    }

    /// Forgets threads and processes that have used nothing for a while.
    pub fn forget(&mut self, now: Instant) {
        self.users.retain(|_, used| now < *used + USED_FOR);
        self.processes
            .retain(|_, process| now < process.used + USED_FOR);
    }
}

/// Returns the first thread of the process that started a process, and its CPU, if the process belongs to the same user, and is neither the first process of the
/// system nor this one.
fn parent_of(pid: u32) -> Option<(Task, u32)> {
    use std::os::unix::fs::MetadataExt;

    let parent = tasks::parent_id(pid)?;
    let found = Task::find(parent)?;
    // Compares after it has found the thread, because the id may pass on to another process.
    let user = |pid: u32| Some(fs::metadata(format!("/proc/{pid}")).ok()?.uid());
    let is_fit = parent > 1 && parent != std::process::id() && user(parent)? == user(pid)?;
    (is_fit && tasks::parent_id(pid)? == parent).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(tid: u32) -> Task {
        Task {
            tid,
            pid: 100,
            start: 1,
        }
    }

    #[test]
    fn companions_come_at_most_four_times_a_second_and_only_to_data_of_one_node() {
        let (mut companions, base) = (Companions::default(), Instant::now());
        let mut uses =
            |tid, node, ms| companions.uses(&task(tid), node, base + Duration::from_millis(ms));
        assert!(uses(1, 0, 0));
        assert!(!uses(1, 0, 249));
        assert!(uses(2, 0, 250), "once for the whole process");
        assert!(!uses(2, 1, 600), "a thread uses another node");
        assert!(!uses(1, 0, 2000));
        assert!(uses(1, 0, 2600), "it no longer does");
        assert!(uses(1, 1, 4600), "the process has gone on to other data");
        assert!(!uses(1, 1, 4800));
    }

    #[test]
    fn companions_are_the_threads_of_the_process_and_its_parent_but_no_thread_that_uses_data() {
        let (send, stop) = std::sync::mpsc::channel::<()>();
        let (send_tid, tid) = std::sync::mpsc::channel();
        let other = std::thread::spawn(move || {
            send_tid.send(jericho_sys::affinity::current_tid()).unwrap();
            let _ = stop.recv();
        });
        let (tid, now) = (tid.recv().unwrap(), Instant::now());
        let (me, _) = Task::find(jericho_sys::affinity::current_tid()).unwrap();
        let mut companions = Companions::default();
        let found = |companions: &Companions| -> Vec<u32> {
            let found = companions.of(&me, now);
            found.map(|(task, _)| task.tid).collect()
        };
        let before = found(&companions);
        assert!(
            before.contains(&tid) && !before.contains(&me.tid),
            "{before:?}"
        );
        let (user, _) = Task::find(tid).unwrap();
        companions.uses(&user, 0, now);
        assert!(!found(&companions).contains(&tid));
        drop(send);
        other.join().unwrap();
        // This process is the parent of a child, and does not take itself for a companion.
        let mut child = std::process::Command::new("sh")
            .args(["-c", "sleep 60 & read line"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        assert_eq!(parent_of(child.id()), None);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
