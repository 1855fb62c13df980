//! Topology files: their meaning, and the places of errors.

mod common;

use common::{FakeMachine, assert_invariants, cpus};
use jericho_topology::{NodeId, TopologyError};
use proptest::prelude::*;

const SPECIFICATION: &str = include_str!("../../../docs/formats/topology.md");

/// Returns the example in the specification.
fn documented_example() -> &'static str {
    let (_, from_start) = SPECIFICATION
        .split_once("```topology\n")
        .expect("an example");
    from_start.split_once("```").expect("the end of it").0
}

#[test]
fn the_example_in_the_specification_is_valid() {
    let machine = FakeMachine::laptop(4);
    let topology = machine
        .file(documented_example(), &cpus(0..4))
        .expect("a good example");
    assert_invariants(&topology);
    assert!(topology.is_virtual);
    assert!(topology.source.starts_with("file:/"), "{}", topology.source);
    assert_eq!(topology.nodes.len(), 3);
    assert_eq!(topology.nodes[0].cpus, [0, 1]);
    assert_eq!(topology.nodes[1].cpus, [2, 3]);
    assert_eq!(topology.nodes[2].memory_bytes, 256 << 30);
    assert_eq!(topology.nodes[1].distances, [21, 10, 28]);
    assert_eq!(topology.nodes[2].nearest_cpu_node, NodeId(0));
    assert_eq!(topology.nodes[2].kernel_node, Some(0));
    assert_eq!(topology.node_of_nic("eth1"), Some(NodeId(1)));
    assert_eq!(topology.node_of_nic("eth2"), None);
}

#[test]
fn every_statement_is_in_the_specification() {
    for statement in ["### `node ", "### `distance ", "### `device ", "### `nic "] {
        assert!(SPECIFICATION.contains(statement), "{statement}");
    }
}

#[test]
fn omitted_values_have_the_documented_defaults() {
    let machine = FakeMachine::with_nodes(&[(0, "0-1", 8, "10 20"), (1, "2-3", 16, "20 10")]);
    let text = "node 0 cpus=2\nnode 1 cpus=0,3\nnode 2 kernel-node=1\nnode 3 cpus=0 memory=0\r\n";
    let topology = machine.file(text, &cpus(0..4)).expect("nodes");
    assert_invariants(&topology);
    let kernel_nodes: Vec<_> = topology.nodes.iter().map(|node| node.kernel_node).collect();
    // The first follows its CPU. The CPUs of the second differ, so its turn decides. The third names a node. The
    // fourth has no memory and uses the nearest.
    assert_eq!(kernel_nodes, [Some(1), Some(1), Some(1), Some(1)]);
    assert_eq!(topology.nodes[0].distances, [10, 20, 20, 20]);
    assert_eq!(topology.nodes[0].memory_bytes, (16 << 30) / 3);
    assert_eq!(topology.nodes[3].memory_bytes, 0);
    assert_eq!(
        topology.node_of_cpu(0),
        Some(NodeId(1)),
        "the first of those that share it"
    );
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table: one entry for each fault")]
fn a_wrong_line_is_reported_with_line_and_column() {
    let machine = FakeMachine::laptop(4);
    // CPU 3 exists but is not in the affinity.
    for (text, line, column, hint) in [
        (
            "nod 0",
            1,
            1,
            "expected `node`, `distance`, `device` or `nic`, found \"nod\"",
        ),
        ("\n\n  # x\n  bad line", 4, 3, "found \"bad\""),
        ("node", 1, 5, "the number of the node"),
        ("node 1 cpus=0", 1, 6, "expected node 0"),
        ("node zero", 1, 6, "found \"zero\""),
        ("node 0 cpus=0\nnode 0 cpus=1", 2, 6, "expected node 1"),
        ("node 0 0-3", 1, 8, "`cpus=`, `memory=` or `kernel-node=`"),
        ("node 0 cpu=0", 1, 8, "found \"cpu=0\""),
        ("node 0 cpus=", 1, 13, "found nothing"),
        ("node 0 cpus=0,9", 1, 15, "CPU 9 does not exist"),
        ("node 0 cpus=2,0-9", 1, 15, "CPU 3 is outside the affinity"),
        ("node 0 cpus=3", 1, 13, "CPU 3 is outside the affinity"),
        ("node 0 cpus=0-x", 1, 15, "found \"x\""),
        ("node 0 cpus=2-1", 1, 13, "ascends"),
        ("node 0 cpus=1,1", 1, 13, "only once"),
        ("node 0 cpus=0 cpus=1", 1, 15, "only once"),
        ("node 0 cpus=0 memory=1Q", 1, 22, "a size"),
        ("node 0 cpus=0 memory=G", 1, 22, "a size"),
        ("node 0 cpus=0 memory=1GG", 1, 22, "a size"),
        ("node 0 cpus=0 memory=-1", 1, 22, "a size"),
        ("node 0 cpus=0 memory=99999999T", 1, 22, "a size"),
        ("node 0 cpus=0 kernel-node=7", 1, 27, "those that have: 0"),
        ("node 0 memory=0", 1, 1, "neither"),
        ("", 1, 1, "a node with CPUs"),
        ("# nothing\n", 2, 1, "a node with CPUs"),
        ("node 0 memory=1G", 2, 1, "a node with CPUs"),
        ("node 0 cpus=0 memory=0", 2, 1, "a node with memory"),
        ("node 0 cpus=0\ndistance", 2, 9, "its distances"),
        ("node 0 cpus=0\ndistance 0", 2, 11, "expected 1 distances"),
        ("node 0 cpus=0\ndistance 0 10 20", 2, 15, "found 2"),
        (
            "node 0 cpus=0\ndistance 1 10",
            2,
            10,
            "expected a node of this file",
        ),
        ("node 0 cpus=0\ndistance 0 20", 2, 12, "to itself"),
        ("node 0 cpus=0\ndistance 0 9", 2, 12, "from 10 to 254"),
        (
            "node 0 cpus=0\ndistance 0 10\ndistance 0 10",
            3,
            10,
            "line 2",
        ),
        (
            "node 0 cpus=0\nnode 1 cpus=1\ndistance 0 10 10",
            3,
            15,
            "over 10",
        ),
        (
            "node 0 cpus=0\nnode 1 cpus=1\ndistance 0 10 20",
            2,
            1,
            "distance 1",
        ),
        ("node 0 cpus=0\ndevice", 2, 7, "the path or name"),
        ("node 0 cpus=0\ndevice sda", 2, 11, "`node=N`"),
        ("node 0 cpus=0\ndevice sda 0", 2, 12, "`node=N`"),
        ("node 0 cpus=0\ndevice sda home=0", 2, 12, "`node=N`"),
        ("node 0 cpus=0\ndevice sda node=1", 2, 17, "0 to 0, found 1"),
        (
            "node 0 cpus=0\ndevice sda node=",
            2,
            17,
            "the number of a node",
        ),
        (
            "node 0 cpus=0\ndevice sda node=0 x",
            2,
            19,
            "the end of the line",
        ),
        (
            "node 0 cpus=0\ndevice sda node=0\ndevice sda node=0",
            3,
            8,
            "given in line 2",
        ),
        (
            "node 0 cpus=0\ndevice dev/sda node=0",
            2,
            8,
            "a path from the root",
        ),
        ("node 0 cpus=0\ndevice \"/a b node=0", 2, 8, "closing"),
        ("node 0 cpus=0\nnic \"\" node=0", 2, 5, "found nothing"),
        ("node 0 cpus=0 # é\n  é", 2, 3, "found \"é\""),
    ] {
        let error = machine.file(text, &[0, 1, 2]).expect_err(text);
        let TopologyError::Line {
            line: l,
            column: c,
            message,
            ..
        } = &error
        else {
            panic!("{text:?}: {error:?}");
        };
        assert_eq!((*l, *c), (line, column), "{text:?}: {message}");
        assert!(message.contains(hint), "{text:?}: {message}");
        let shown = error.to_string();
        assert!(
            shown.contains(&format!("nodes.topology:{line}:{column}: ")),
            "{shown}"
        );
    }
}

#[test]
fn a_file_that_is_not_text_is_refused_at_its_first_wrong_byte() {
    let machine = FakeMachine::laptop(2);
    let path = machine.root().join("binary");
    std::fs::write(&path, b"node 0 cpus=0\nnode \xff").expect("a file");
    let error = machine
        .spec(path.to_str().expect("UTF-8"), &[0])
        .expect_err("not text");
    assert!(
        error.to_string().contains("binary:2:6: expected UTF-8"),
        "{error}"
    );
}

#[test]
fn a_volume_given_as_topology_file_is_refused_without_reading_it_whole() {
    let machine = FakeMachine::laptop(2);
    let path = machine.root().join("volume");
    std::fs::File::create(&path)
        .and_then(|file| file.set_len(1 << 40))
        .expect("a sparse file");
    let error = machine
        .spec(path.to_str().expect("UTF-8"), &[0])
        .expect_err("too large");
    assert!(
        error.to_string().contains("at most 1048576 bytes"),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_text_makes_the_parser_panic(
        lines in prop::collection::vec(
            "(node|distance|device|nic|#|\"|é)?( |[0-3]|10|cpus=|memory=|node=|-|,|[KG]|\"|\\PC){0,8}",
            0..6,
        )
    ) {
        let machine = FakeMachine::laptop(4);
        match machine.file(&lines.join("\n"), &cpus(0..4)) {
            Ok(topology) => assert_invariants(&topology),
            Err(TopologyError::Line { line, column, .. }) => {
                prop_assert!(line >= 1 && line <= lines.len() + 1);
                let text = lines.get(line - 1).map_or("", String::as_str);
                prop_assert!(column >= 1 && column <= text.chars().count() + 1);
            }
            Err(error) => prop_assert!(false, "{}", error),
        }
    }
}
