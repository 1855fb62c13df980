//! Threads go to their data, by policy, and get their CPUs back.

use std::path::Path;

use crate::guest::{NODES, Volume, jericho, node_of, tell};
use crate::reader::{Task, Thread, read};

const ALL: &str = "0-7";
/// Of a thread's second half, on the node where it should be. The rest is for a scheduler that is free to move it.
const SHARE: f64 = 0.8;

/// A thread that begins on the node after that of its file.
fn beside<'a>(files: &'a [std::path::PathBuf], node: usize) -> Task<'a> {
    Task {
        begins_on: (node + 1) % NODES,
        is_placed_by_program: false,
        file: &files[node],
    }
}

/// One thread that reads a file of node 2 and begins on node 3.
fn one(policy: Option<&str>, file: &Path) -> Thread {
    let task = Task {
        begins_on: 3,
        is_placed_by_program: false,
        file,
    };
    let thread = read(policy, &[task]).remove(0);
    println!("\n{policy:?}: {thread:?}");
    assert_eq!(node_of(thread.first_cpu), 3);
    assert_eq!(thread.allowed[0], ALL);
    thread
}

#[test]
#[ignore = "for the guest of make lab"]
fn adaptive_takes_a_thread_to_its_data_and_gives_its_cpus_back() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(4);
    let thread = one(Some("adaptive"), &files[2]);
    // What a move costs, and not much more.
    let moved_soon = thread.moved_after.is_some_and(|bytes| bytes <= 16 << 20);
    assert!(moved_soon, "{thread:?}");
    assert!(thread.share_on(2) > SHARE, "{thread:?}");
    assert_eq!(thread.allowed[2], ALL);
}

#[test]
#[ignore = "for the guest of make lab"]
fn never_leaves_a_thread_where_it_is() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(4);
    let thread = one(Some("never"), &files[2]);
    // The scheduler may move it some day, as it may anybody.
    let moved_soon = thread.moved_after.is_some_and(|bytes| bytes <= 16 << 20);
    assert!(!moved_soon, "{thread:?}");
    assert_eq!(thread.allowed[1..], [ALL, ALL]);
}

#[test]
#[ignore = "for the guest of make lab"]
fn always_takes_a_thread_there_at_once_and_keeps_it() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(4);
    let thread = one(Some("always"), &files[2]);
    // The first read goes through the kernel and finds out whose file it is.
    assert!(
        thread.moved_after.is_some_and(|bytes| bytes <= 256 << 10),
        "{thread:?}"
    );
    assert_eq!(thread.share_on(2), 1.0, "{thread:?}");
    assert_eq!(thread.allowed[1..], ["2,6", ALL]);
}

#[test]
#[ignore = "for the guest of make lab"]
fn a_thread_that_its_program_has_placed_is_never_moved() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(4);
    for policy in [Some("adaptive"), Some("always"), None] {
        let task = Task {
            is_placed_by_program: true,
            ..beside(&files, 2)
        };
        let thread = read(policy, &[task]).remove(0);
        assert_eq!(thread.moved_after, None, "{policy:?}: {thread:?}");
        assert_eq!(thread.allowed, ["3", "3", "3"], "{policy:?}");
    }
}

#[test]
#[ignore = "for the guest of make lab"]
fn a_thread_that_reads_through_the_kernel_is_taken_there_by_the_daemon() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(4);
    jericho(&format!("place {} --placement always", files[2].display()));
    let thread = one(None, &files[2]);
    // It sleeps for each answer, and where it wakes up is the scheduler's choice: nothing holds it there.
    assert_ne!(volume.stat()["threads_moved"], 0);
    assert!(thread.share_on(2) > 0.0, "{thread:?}");
    assert_eq!(thread.allowed[2], ALL);
}

/// Share of local accesses of a program with a thread for each node, which all begin elsewhere.
fn share_local(volume: &Volume, files: &[std::path::PathBuf], policy: &str) -> f64 {
    let before = volume.accesses();
    let tasks: Vec<Task> = (0..NODES).map(|node| beside(files, node)).collect();
    let threads = read(Some(policy), &tasks);
    let [local, remote] = volume.accesses();
    let (local, remote) = ((local - before[0]) as f64, (remote - before[1]) as f64);
    let share = local / (local + remote);
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
    // All begin elsewhere; the scheduler may take some to their data by chance.
    assert!(never < 0.75, "never: {never}");
    assert!(adaptive >= 0.9, "adaptive: {adaptive}");
    assert!(always >= 0.9, "always: {always}");
}
