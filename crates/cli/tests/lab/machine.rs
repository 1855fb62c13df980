//! Jericho finds the machine's nodes with their properties.

use crate::guest::{
    CPUS, DISTANCES, MEMORY_BYTES, MEMORY_ONLY, NEAREST, NODES, Volume, ask, node_of,
};

#[test]
#[ignore = "for the guest of make lab"]
fn all_nodes_are_found_with_their_cpus_distances_and_memory() {
    let topology = ask("topology --json");
    let nodes = topology["nodes"].as_array().expect("nodes");
    assert_eq!(nodes.len(), NODES, "{topology}");
    for (id, node) in nodes.iter().enumerate() {
        let cpus: Vec<usize> = (0..CPUS).filter(|cpu| node_of(*cpu) == id).collect();
        assert_eq!(node["id"], id, "{node}");
        assert_eq!(node["kernel_node"], id, "{node}");
        assert_eq!(node["cpus"], serde_json::json!(cpus), "{node}");
        assert_eq!(
            node["distances"],
            serde_json::json!(DISTANCES[id]),
            "{node}"
        );
        let nearest = if id == MEMORY_ONLY { NEAREST } else { id };
        assert_eq!(node["nearest_cpu_node"], nearest, "{node}");
        let memory = node["memory_bytes"].as_u64().expect("bytes");
        assert!(
            (MEMORY_BYTES * 3 / 4..=MEMORY_BYTES).contains(&memory),
            "{node}"
        );
    }
    assert_eq!(topology["is_virtual"], false);
}

#[test]
#[ignore = "for the guest of make lab"]
fn a_volume_has_a_slice_for_each_node() {
    let stat = Volume::new().stat();
    let slices = stat["slices"].as_array().expect("slices");
    let nodes: Vec<u64> = slices
        .iter()
        .map(|s| s["node"].as_u64().expect("a node"))
        .collect();
    assert_eq!(nodes, [0, 1, 2, 3, 4], "{stat}");
}
