//! The machine `opteron` is that of the cost model.

use std::collections::BTreeSet;

use crate::guest::ask;

/// The description of the same machine, with a bandwidth for each link.
const MODEL: &str = include_str!("../../../model/machines/opteron.toml");
const NODES: usize = 8;

/// Returns the pairs of nodes that a link joins.
fn links() -> BTreeSet<(usize, usize)> {
    let pairs = MODEL.lines().filter_map(|line| {
        let pair = line.strip_prefix("nodes = [")?.strip_suffix(']')?;
        let (a, b) = pair.split_once(", ")?;
        Some((a.parse().ok()?, b.parse().ok()?))
    });
    pairs.collect()
}

#[test]
#[ignore = "for the guest of make lab"]
fn jericho_finds_the_distances_of_the_four_opterons() {
    let (topology, links) = (ask("topology --json"), links());
    assert_eq!(links.len(), 18, "links in the description of the model");
    let nodes = topology["nodes"].as_array().expect("nodes");
    assert_eq!(nodes.len(), NODES, "{topology}");
    for (from, node) in nodes.iter().enumerate() {
        let distances = (0..NODES).map(|to| match (from, to) {
            _ if from == to => 10,
            _ if links.contains(&(from.min(to), from.max(to))) => 16,
            _ => 22,
        });
        let distances: Vec<u64> = distances.collect();
        assert_eq!(node["distances"], serde_json::json!(distances), "{node}");
        assert_eq!(node["cpus"], serde_json::json!([from]), "{node}");
    }
}
