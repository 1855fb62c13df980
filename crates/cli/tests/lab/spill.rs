//! A slice whose node is short of memory has frames on the nearest node with plenty, as the kernel reports, and gives them back when that node
//! becomes short.

use std::path::Path;
use std::time::{Duration, Instant};

use jericho_sys::limits::node_available_bytes;
use jericho_sys::node_memory::NodeBuffer;
use serde_json::Value;

use crate::guest::{NODES, Volume, ask, content, jericho, tell};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(120);
/// The node that is short, the nearest other one (below), and the nearest one after that.
const SHORT: usize = 0;
const NEAR: usize = 1;
const NEXT: usize = 2;

fn available_bytes(node: usize) -> u64 {
    node_available_bytes(node as u32).expect("a node")
}

/// Returns the bytes of available memory below which Jericho gives memory back to a node.
fn low_bytes(node: usize) -> u64 {
    ask("topology --json")["nodes"][node]["memory_bytes"]
        .as_u64()
        .expect("bytes")
        / 16
}

/// Takes memory of a node until it has only `bytes`.
fn leave(node: usize, bytes: u64) -> Vec<NodeBuffer> {
    let mut taken = vec![];
    // In steps, because the kernel frees cached files meanwhile.
    while available_bytes(node) > bytes + MIB {
        let most = (available_bytes(node) - bytes).min(32 * MIB);
        taken.push(NodeBuffer::new(most as usize, Some(node as u32)).expect("memory of the node"));
    }
    taken
}

/// Returns the cached bytes of a file on each node, from move_pages(2).
fn bytes_on_nodes(volume: &Volume, file: &Path) -> [u64; NODES] {
    let mut bytes = [0; NODES];
    let found = volume.where_is(file);
    for pair in found["resident_bytes_by_kernel_node"]
        .as_array()
        .expect("nodes")
    {
        bytes[pair[0].as_u64().expect("a node") as usize] = pair[1].as_u64().expect("bytes");
    }
    bytes
}

fn lent_frames(stat: &Value, node: usize) -> u64 {
    stat["nodes"][node]["lent_frames"].as_u64().expect("frames")
}

#[test]
#[ignore = "for the guest of make lab"]
fn frames_go_to_the_nearest_node_with_plenty_and_leave_it_when_it_is_short() {
    if ask("topology --json")["nodes"].as_array().map(Vec::len) != Some(NODES) {
        println!("SKIPPED: this machine has other nodes");
        return;
    }
    let volume = Volume::new();
    volume.umount();
    let _of_short = leave(SHORT, low_bytes(SHORT) + 12 * MIB);
    jericho("mount /dev/vda /mnt --cache 240M --spill 64M");
    let stat = volume.stat();
    let at_home = stat["slices"][SHORT]["frames"].as_u64().expect("frames") * 4096;
    println!("\nat home: {at_home}");
    assert!((4 * MIB..16 * MIB).contains(&at_home), "{stat}");
    let files = volume.file_on_each_node(2);
    let file = files[SHORT].with_file_name("large");
    let bytes = content(SHORT, 40);
    std::fs::write(&file, &bytes).expect("write");
    let read = || assert!(std::fs::read(&file).expect("read") == bytes, "other bytes");
    // Rounds until the slice has all that it may have.
    let until = |what: &str, is_so: &dyn Fn(&Value) -> bool| {
        let begun = Instant::now();
        while !is_so(&volume.stat()) {
            assert!(begun.elapsed() < LONG, "never {what}: {}", volume.stat());
            read();
        }
    };
    until("frames on the nearest node", &|stat| {
        lent_frames(stat, NEAR) * 4096 >= 32 * MIB
    });
    read();
    let on_nodes = bytes_on_nodes(&volume, &file);
    tell(
        "MiB of a file of the short node on the nearest node",
        on_nodes[NEAR] as f64 / MIB as f64,
    );
    assert!(on_nodes[NEAR] >= 16 * MIB, "{on_nodes:?}");
    let elsewhere: u64 = on_nodes.iter().sum::<u64>() - on_nodes[SHORT] - on_nodes[NEAR];
    assert_eq!(elsewhere, 0, "{on_nodes:?}");
    // Other slices keep to their nodes.
    for (node, file) in files.iter().enumerate().filter(|(node, _)| *node != SHORT) {
        std::fs::read(file).expect("read");
        let on_nodes = bytes_on_nodes(&volume, file);
        assert_eq!(on_nodes.iter().sum::<u64>(), on_nodes[node], "{on_nodes:?}");
    }
    let _of_near = leave(NEAR, low_bytes(NEAR) - 2 * MIB);
    until("all frames of the nearest node given back", &|stat| {
        lent_frames(stat, NEAR) == 0
    });
    assert_eq!(bytes_on_nodes(&volume, &file)[NEAR], 0);
    until("frames on the next node", &|stat| {
        lent_frames(stat, NEXT) > 0
    });
    read();
    let on_nodes = bytes_on_nodes(&volume, &file);
    assert!(on_nodes[NEXT] > 0 && on_nodes[NEAR] == 0, "{on_nodes:?}");
    volume.umount();
    volume.check();
}
