//! `virtual:N` and the other forms of a specification.

mod common;

use std::collections::BTreeSet;

use common::{FakeMachine, assert_invariants, cpus};
use jericho_topology::TopologyError;
use proptest::prelude::*;

#[test]
fn two_nodes_on_a_laptop_split_its_cpus_and_memory() {
    let machine = FakeMachine::laptop(4);
    let topology = machine.spec("virtual:2", &cpus(0..4)).expect("two nodes");
    assert_invariants(&topology);
    assert!(topology.is_virtual);
    assert_eq!(topology.source, "virtual:2");
    assert_eq!(topology.nodes[0].cpus, [0, 1]);
    assert_eq!(topology.nodes[1].cpus, [2, 3]);
    for node in &topology.nodes {
        assert_eq!(node.memory_bytes, 4 << 30);
        assert_eq!(node.kernel_node, Some(0));
    }
    assert_eq!(topology.nodes[0].distances, [10, 20]);
}

#[test]
fn more_nodes_than_cpus_share_them_round_robin() {
    let machine = FakeMachine::laptop(2);
    let topology = machine.spec("virtual:5", &[0, 1]).expect("five nodes");
    assert_invariants(&topology);
    let assigned: Vec<_> = topology
        .nodes
        .iter()
        .map(|node| node.cpus.clone())
        .collect();
    assert_eq!(assigned, [[0], [1], [0], [1], [0]]);
}

#[test]
fn virtual_nodes_on_a_real_machine_keep_their_cpus_near_their_memory() {
    let machine = FakeMachine::with_nodes(&[(0, "0-3", 8, "10 31"), (1, "4-7", 8, "31 10")]);
    let topology = machine.spec("virtual:4", &cpus(0..8)).expect("four nodes");
    assert_invariants(&topology);
    let kernel_nodes: Vec<_> = topology.nodes.iter().map(|node| node.kernel_node).collect();
    assert_eq!(kernel_nodes, [Some(0), Some(1), Some(0), Some(1)]);
    let assigned: Vec<_> = topology
        .nodes
        .iter()
        .map(|node| node.cpus.clone())
        .collect();
    assert_eq!(assigned, [[0, 1], [4, 5], [2, 3], [6, 7]]);
    assert_eq!(topology.nodes[0].distances, [10, 31, 20, 31]);
}

#[test]
fn a_kernel_without_nodes_can_have_virtual_ones() {
    let machine = FakeMachine::bare();
    let topology = machine.spec("virtual:3", &[0, 1]).expect("three nodes");
    assert_invariants(&topology);
    assert!(topology.nodes.iter().all(|node| node.kernel_node.is_none()));
}

#[test]
fn the_error_of_a_wrong_specification_names_the_right_forms() {
    let machine = FakeMachine::laptop(2);
    for (spec, hint) in [
        ("virtual:0", "from 1 to 1024"),
        ("virtual:x", "found \"x\""),
        ("virtual:", "from 1 to 1024"),
        ("virtual:-1", "from 1 to 1024"),
        ("virtual:+2", "from 1 to 1024"),
        ("virtual:1025", "from 1 to 1024"),
        ("virtual:99999999999999999999", "from 1 to 1024"),
        ("file:", "expected the path"),
    ] {
        let error = machine.spec(spec, &[0, 1]).expect_err(spec);
        assert!(matches!(error, TopologyError::Spec { .. }), "{error:?}");
        let message = error.to_string();
        assert!(
            message.contains(spec) && message.contains(hint),
            "{message}"
        );
    }
}

#[test]
fn a_topology_file_that_is_missing_or_a_mistyped_word_is_named() {
    let machine = FakeMachine::laptop(2);
    for spec in ["/nowhere/nodes", "file:/nowhere/nodes", "virtul:4"] {
        let message = machine.spec(spec, &[0, 1]).expect_err(spec).to_string();
        let path = spec.strip_prefix("file:").unwrap_or(spec);
        assert!(
            message.contains(path) && message.contains("virtual:N"),
            "{message}"
        );
    }
    let dir = machine.root().to_str().expect("UTF-8");
    let message = machine
        .spec(dir, &[0, 1])
        .expect_err("a directory")
        .to_string();
    assert!(
        message.contains("cannot read the topology file"),
        "{message}"
    );
}

/// Generates up to four kernel nodes with up to five CPUs each, some without CPUs, some without memory.
fn machines() -> impl Strategy<Value = Vec<(u32, u64)>> {
    prop::collection::vec((0..=5_u32, 0..=4_u64), 1..=4).prop_filter("somewhere to run", |nodes| {
        nodes.iter().any(|node| node.0 > 0)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_allowed_cpu_is_assigned_and_every_node_has_one(
        nodes in machines(),
        allowed_seed in any::<u32>(),
        count in 1..=40_usize,
    ) {
        let mut lists = Vec::new();
        let mut next = 0;
        for (cpus, _) in &nodes {
            let list: Vec<_> = (next..next + cpus).map(|cpu| cpu.to_string()).collect();
            lists.push(list.join(","));
            next += cpus;
        }
        let row = |at| (0..nodes.len()).map(|to| if to == at { "10 " } else { "20 " }).collect();
        let rows: Vec<String> = (0..nodes.len()).map(row).collect();
        let described: Vec<_> = (0..nodes.len())
            .map(|at| (at as u32, lists[at].as_str(), nodes[at].1, rows[at].as_str()))
            .collect();
        let machine = FakeMachine::with_nodes(&described);
        let mut allowed: BTreeSet<u32> =
            (0..next).filter(|cpu| allowed_seed >> cpu & 1 == 1).collect();
        allowed.insert(allowed_seed % next);
        let affinity: Vec<u32> = allowed.iter().copied().collect();

        let topology = machine.spec(&format!("virtual:{count}"), &affinity).expect("nodes");
        assert_invariants(&topology);
        prop_assert_eq!(topology.nodes.len(), count);
        let mut assigned: Vec<u32> = Vec::new();
        for node in &topology.nodes {
            prop_assert!(!node.cpus.is_empty());
            assigned.extend(&node.cpus);
        }
        let distinct: BTreeSet<u32> = assigned.iter().copied().collect();
        prop_assert_eq!(&distinct, &allowed);
        if count <= allowed.len() {
            prop_assert_eq!(assigned.len(), allowed.len(), "each is assigned only once");
        }
    }
}
