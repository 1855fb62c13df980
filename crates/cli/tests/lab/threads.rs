//! Threads migrate to their data as their policy says, and get their CPUs back.

use std::path::Path;

use crate::guest::{CPU_NODES, MEMORY_ONLY, NEAREST, Volume, jericho, tell};
use crate::reader::{Task, Thread, read};

const ALL: &str = "0-7";
/// Least share of the second half of a thread's time on the right node. The scheduler may move the thread for the rest.
const SHARE_MIN: f64 = 0.8;
/// Most bytes that a thread has read when its first inline access has ended. The library attaches a process once its calls have
/// read 512 KiB; until then the calls go through the kernel. The next call finds the file.
const AT_ONCE: u64 = (512 << 10) + 2 * (64 << 10);
/// Several times the bytes that a thread must read before its migration is worth the cost.
const SOON: u64 = 16 << 20;

/// Returns the task of a thread that begins on the node after that of its file.
fn task_elsewhere<'a>(files: &'a [std::path::PathBuf], node: usize) -> Task<'a> {
    Task {
        begins_on: (node + 1) % CPU_NODES,
        is_placed_by_program: false,
        file: &files[node],
    }
}

/// Runs one thread that begins on node 3 and reads a file.
fn run_one(policy: Option<&str>, file: &Path) -> Thread {
    let task = Task {
        begins_on: 3,
        is_placed_by_program: false,
        file,
    };
    let thread = read(policy, &[task]).remove(0);
    println!("\n{policy:?}: {thread:?}");
    assert_eq!(thread.allowed[0], ALL);
    thread
}

#[test]
#[ignore = "for the guest of make lab"]
fn adaptive_migrates_a_thread_to_its_data_and_gives_its_cpus_back() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(4);
    let thread = run_one(Some("adaptive"), &files[2]);
    // The thread migrates soon after its reads are worth the cost.
    let came_soon = thread.came_to(2).is_some_and(|bytes| bytes <= SOON);
    assert!(came_soon, "{thread:?}");
    assert!(thread.share_on(2) > SHARE_MIN, "{thread:?}");
    assert_eq!(thread.allowed[2], ALL);
}

#[test]
#[ignore = "for the guest of make lab"]
fn the_policy_never_leaves_a_thread_where_it_is() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(4);
    let thread = run_one(Some("never"), &files[2]);
    // The first read goes through the kernel, which may wake the thread up on any CPU, and the scheduler may move it later.
    let was_taken = thread
        .came_to(2)
        .is_some_and(|bytes| (AT_ONCE + 1..SOON).contains(&bytes));
    assert!(!was_taken, "{thread:?}");
    assert_eq!(thread.allowed[1..], [ALL, ALL]);
}

#[test]
#[ignore = "for the guest of make lab"]
fn always_migrates_a_thread_at_once_and_keeps_it_there() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(4);
    let thread = run_one(Some("always"), &files[2]);
    let came_at_once = thread.came_to(2).is_some_and(|bytes| bytes <= AT_ONCE);
    assert!(came_at_once, "{thread:?}");
    assert_eq!(thread.share_on(2), 1.0, "{thread:?}");
    assert_eq!(thread.allowed[1..], ["2,6", ALL]);
}

#[test]
#[ignore = "for the guest of make lab"]
fn a_thread_that_its_program_has_bound_is_not_migrated() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(4);
    for policy in [Some("adaptive"), Some("always"), None] {
        let task = Task {
            is_placed_by_program: true,
            ..task_elsewhere(&files, 2)
        };
        let thread = read(policy, &[task]).remove(0);
        assert_eq!(thread.steps.len(), 1, "{policy:?}: {thread:?}");
        assert_eq!(thread.allowed, ["3", "3", "3"], "{policy:?}");
    }
}

#[test]
#[ignore = "for the guest of make lab"]
fn the_daemon_migrates_a_thread_that_reads_through_the_kernel() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(4);
    jericho(&format!("place {} --threads always", files[2].display()));
    let thread = run_one(None, &files[2]);
    // The thread sleeps for each answer, and the scheduler chooses the CPU where it wakes up. So it need not stay on the node.
    assert_ne!(volume.stat()["threads_moved"], 0);
    assert!(thread.share_on(2) > 0.0, "{thread:?}");
    assert_eq!(thread.allowed[2], ALL);
}

#[test]
#[ignore = "for the guest of make lab"]
fn data_on_a_node_without_cpus_attracts_threads_to_the_nearest_node_with_cpus() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(4);
    let before = volume.accesses();
    let thread = run_one(Some("adaptive"), &files[MEMORY_ONLY]);
    assert!(thread.share_on(NEAREST) > SHARE_MIN, "{thread:?}");
    assert_eq!(thread.allowed[2], ALL);
    let share = share_since(&volume, before);
    assert!(share >= 0.9, "{share} were local");
    jericho(&format!(
        "place {} --threads always",
        files[MEMORY_ONLY].display()
    ));
    run_one(None, &files[MEMORY_ONLY]);
    assert_ne!(volume.stat()["threads_moved"], 0);
}

#[test]
#[ignore = "for the guest of make lab"]
fn threads_migrate_to_nodes_where_the_daemon_may_not_run() {
    let volume = Volume::new();
    volume.umount();
    volume.mount_on_cpus_of(0);
    let files = volume.file_on_each_node(4);
    let before = volume.accesses();
    let thread = run_one(Some("adaptive"), &files[2]);
    assert!(
        thread.came_to(2).is_some_and(|bytes| bytes <= SOON),
        "{thread:?}"
    );
    let share = share_since(&volume, before);
    assert!(share >= 0.9, "{share} were local");
}

/// Returns the share of local accesses since `before`.
fn share_since(volume: &Volume, before: [u64; 2]) -> f64 {
    let [local, remote] = volume.accesses();
    let (local, remote) = ((local - before[0]) as f64, (remote - before[1]) as f64);
    local / (local + remote)
}

/// Runs a program with a thread for each node's file. All threads begin on other nodes. Returns the share of local accesses.
fn share_local(volume: &Volume, files: &[std::path::PathBuf], policy: &str) -> f64 {
    let before = volume.accesses();
    let tasks: Vec<Task> = (0..CPU_NODES)
        .map(|node| task_elsewhere(files, node))
        .collect();
    let threads = read(Some(policy), &tasks);
    let share = share_since(volume, before);
    tell(&format!("share of local accesses, {policy}"), share);
    println!("{threads:?}");
    share
}

#[test]
#[ignore = "for the guest of make lab"]
fn with_a_thread_for_each_node_accesses_become_local() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(4);
    let [never, adaptive, always] =
        ["never", "adaptive", "always"].map(|policy| share_local(&volume, &files, policy));
    // All threads begin on other nodes. The scheduler may move some to their data by chance.
    assert!(never < 0.75, "never: {never}");
    assert!(adaptive >= 0.9, "adaptive: {adaptive}");
    assert!(always >= 0.9, "always: {always}");
}
