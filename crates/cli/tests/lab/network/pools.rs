//! Pages of the pools of frames, and the threads of the network, are on the nodes of the interfaces: of a daemon with a slice on another host, and of
//! `jericho serve`.

use serde_json::Value;

use super::hosts::{LAYOUTS, Layout, NODES, Target, Told, node_of_pair};
use super::kernel::{Placed, pools, threads};
use crate::guest::{ask, content, jericho};

const MNT: &str = "/mnt";
const VOLUME: &str = "tyche://hostb/pools";

/// A mounted volume on a device of the target.
struct Mounted;

impl Mounted {
    fn new(layout: Layout) -> Mounted {
        let network = format!("--nic {}", layout.interfaces('i').join(","));
        jericho(&format!("format {VOLUME} --force --slices 2 {network}"));
        jericho(&format!("mount {VOLUME} {MNT} --cache 64M {network}"));
        Mounted
    }

    fn stat(&self) -> Value {
        ask(&format!("stat {MNT} --json"))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = std::process::Command::new("/usr/bin/jericho")
            .args(["umount", MNT])
            .output();
    }
}

fn assert_pages(of: &str, layout: Layout, placed: &Placed) {
    let (right, all) = placed.right();
    println!(
        "lab: pool pages, {layout}, {of}: {all} touched, {right} on the node of their interfaces: {:?}",
        placed.pages
    );
    assert!(all > 100, "{of}: {placed:?}");
    assert_eq!(right, all, "{of}: {placed:?}");
    for node in 0..NODES {
        let has_pages = placed.pages[node].iter().sum::<u64>() > 0;
        assert_eq!(has_pages, layout.of(node) > 0, "{of}: {placed:?}");
    }
}

/// Asserts that threads run on one node each, and that each is a node of interfaces.
fn assert_threads(of: &str, layout: Layout, pid: u64, prefix: &str) {
    let threads = threads(pid, prefix);
    println!("lab: threads, {layout}, {of}: {threads:?}");
    // The record is on the filesystem of the host.
    for thread in threads
        .iter()
        .filter(|thread| thread.name != "serve-record")
    {
        let [node] = thread.may_run_on[..] else {
            panic!("{of}: {thread:?}");
        };
        assert!(layout.nodes().contains(&node), "{thread:?}");
        assert_eq!(thread.ran_on, node, "{thread:?}");
    }
}

#[test]
#[ignore = "for the guest of make lab"]
fn pages_and_threads_of_both_hosts_are_on_the_nodes_of_the_interfaces() {
    for layout in LAYOUTS {
        let target = Target::serve("/dev/pmem0", "pools", layout, Told::Truth);
        let mounted = Mounted::new(layout);
        for directory in 0..4 {
            let path = format!("{MNT}/{directory}");
            std::fs::create_dir(&path).expect("mkdir");
            std::fs::write(format!("{path}/file"), content(directory, 8)).expect("write");
        }
        jericho(&format!("sync {MNT}"));
        let stat = mounted.stat();
        let daemon = stat["pid"].as_u64().expect("a process");
        assert_pages("initiator", layout, &pools(daemon));
        assert_pages("target", layout, &pools(target.pid()));
        assert_threads("initiator", layout, daemon, "remote");
        assert_threads("target", layout, target.pid(), "serve");
        assert_threads("initiator", layout, daemon, "send-");
        assert_threads("target", layout, target.pid(), "send-");
        let receivers = threads(daemon, "remote").len();
        assert_eq!(receivers, layout.nodes().len());
        let channels = stat["network"][0]["channels"].as_array().expect("channels");
        assert_eq!(channels.len(), layout.pairs().len(), "{stat}");
        let (mut local, mut remote) = (0, 0);
        for (channel, pair) in channels.iter().zip(layout.pairs()) {
            assert_eq!(channel["nic"], format!("i{pair}"), "{channel}");
            assert_eq!(channel["node"], node_of_pair(pair), "{channel}");
            assert_eq!(channel["is_up"], true, "{channel}");
            local += channel["local_bytes"].as_u64().expect("bytes");
            remote += channel["remote_bytes"].as_u64().expect("bytes");
        }
        let share = local as f64 / (local + remote) as f64;
        println!(
            "lab: daemon, {layout}: {local} bytes by channels of the thread's node, {remote} by others: {share:.4}"
        );
        if layout.nodes().len() > 1 {
            assert!(share >= 0.99, "{stat}");
        }
        jericho(&format!("umount {MNT}"));
        jericho(&format!(
            "check {VOLUME} --nic {}",
            layout.interfaces('i').join(",")
        ));
    }
}
