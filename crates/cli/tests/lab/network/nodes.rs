//! The nodes of interfaces and of persistent memory.

use std::fs;

use super::hosts::{NODES, PAIRS, Told, cpus_of, node_of_pair};
use super::kernel::node_of_interface;
use crate::guest::ask;

#[test]
#[ignore = "for the guest of make lab"]
fn interfaces_and_persistent_memory_are_on_two_nodes() {
    let topology = ask("topology --json");
    let nodes = topology["nodes"].as_array().expect("nodes");
    assert_eq!(nodes.len(), NODES, "{topology}");
    for (id, node) in nodes.iter().enumerate() {
        assert_eq!(node["cpus"], serde_json::json!(cpus_of(id)), "{node}");
    }
    for pair in 0..PAIRS {
        for host in ['i', 't'] {
            let interface = format!("{host}{pair}");
            assert_eq!(node_of_interface(&interface), node_of_pair(pair));
        }
    }
    let truth = jericho_topology::Topology::from_spec(&Told::Truth.spec()).expect("nodes");
    for pair in 0..PAIRS {
        let node = truth.node_of_nic(&format!("i{pair}")).map(|node| node.0);
        assert_eq!(node, Some(node_of_pair(pair) as u16), "i{pair}");
    }
    for node in 0..NODES {
        let file = format!("/sys/block/pmem{node}/device/numa_node");
        let text = fs::read_to_string(&file).expect("a node");
        assert_eq!(text.trim(), node.to_string(), "{file}");
    }
}
