//! Topologies of the nodes that a kernel reports.

mod common;

use common::{FakeMachine, assert_invariants, cpus};
use jericho_topology::{NodeId, Topology, TopologyError, format_human};

const GIB: u64 = 1 << 30;

#[test]
fn a_four_socket_machine_has_four_nodes() {
    let machine = FakeMachine::four_sockets();
    let topology = machine.detect(&cpus(0..16));
    assert_invariants(&topology);
    assert!(!topology.is_virtual);
    assert_eq!(topology.source, "sysfs");
    assert_eq!(topology.nodes.len(), 4);
    let third = &topology.nodes[2];
    assert_eq!(third.cpus, [8, 9, 10, 11]);
    assert_eq!(third.memory_bytes, 16 * GIB);
    assert_eq!(third.distances, [22, 16, 10, 16]);
    assert_eq!(third.kernel_node, Some(2));
    assert_eq!(topology.node_of_cpu(9), Some(NodeId(2)));
    assert_eq!(topology.node_of_cpu(16), None);
    assert_eq!(topology.cpus_of(NodeId(3)), [12, 13, 14, 15]);
    assert_eq!(topology.cpus_of(NodeId(4)), [] as [u32; 0]);
}

#[test]
fn holes_from_offline_cpus_stay_holes() {
    let machine =
        FakeMachine::with_nodes(&[(0, "0-3,8-11", 4, "10 20"), (1, "4-5,14", 4, "20 10")]);
    let topology = machine.detect(&cpus(0..16));
    assert_invariants(&topology);
    assert_eq!(topology.nodes[0].cpus, [0, 1, 2, 3, 8, 9, 10, 11]);
    assert_eq!(topology.nodes[1].cpus, [4, 5, 14]);
    assert_eq!(topology.node_of_cpu(6), None);
    assert_eq!(topology.node_of_cpu(14), Some(NodeId(1)));
}

#[test]
fn threads_for_a_memory_only_node_run_on_its_nearest_cpus() {
    let machine = FakeMachine::with_nodes(&[
        (0, "0-1", 8, "10 21 24"),
        (1, "2-3", 8, "21 10 14"),
        (2, "", 64, "24 14 10"),
    ]);
    let topology = machine.detect(&cpus(0..4));
    assert_invariants(&topology);
    let expander = &topology.nodes[2];
    assert!(expander.is_memory_only());
    assert_eq!(expander.nearest_cpu_node, NodeId(1));
    assert_eq!(expander.kernel_node, Some(2));
    assert_eq!(topology.cpus_of(NodeId(2)), [2, 3]);
    let for_programs = [0, 1, 2].map(|id| topology.thread_node(NodeId(id)).0);
    assert_eq!(for_programs, [0, 1, 1]);
}

#[test]
fn programs_may_run_on_nodes_where_this_process_may_not() {
    let machine = FakeMachine::four_sockets();
    let topology = machine.detect(&cpus(0..4));
    assert!(topology.nodes[2].is_memory_only());
    assert_eq!(topology.cpus_of(NodeId(2)), [0, 1, 2, 3]);
    assert_eq!(topology.thread_node(NodeId(2)), NodeId(2));
}

#[test]
fn a_node_without_memory_uses_the_nearest_memory() {
    let machine = FakeMachine::with_nodes(&[
        (0, "0-1", 8, "10 12 30"),
        (1, "2-3", 0, "30 10 12"),
        (2, "4-5", 8, "30 12 10"),
    ]);
    let topology = machine.detect(&cpus(0..6));
    assert_invariants(&topology);
    assert_eq!(topology.nodes[1].memory_bytes, 0);
    assert_eq!(topology.nodes[1].kernel_node, Some(2));
    assert_eq!(topology.nodes[1].cpus, [2, 3]);
}

#[test]
fn the_kernels_numbers_may_have_holes_and_ids_do_not() {
    let machine = FakeMachine::with_nodes(&[(0, "0-1", 8, "10 20"), (8, "2-3", 8, "20 10")]);
    let topology = machine.detect(&cpus(0..4));
    assert_invariants(&topology);
    assert_eq!(topology.nodes[1].kernel_node, Some(8));
    assert_eq!(topology.node_of_cpu(3), Some(NodeId(1)));
}

#[test]
fn a_kernel_without_nodes_is_one_node_with_all_cpus() {
    let machine = FakeMachine::bare();
    machine.write("sys/devices/system/cpu/online", "0-2\n");
    machine.write(
        "proc/meminfo",
        "MemTotal:        1048576 kB\nMemFree: 5 kB\n",
    );
    let topology = machine.detect(&cpus(0..4));
    assert_invariants(&topology);
    assert_eq!(topology.nodes.len(), 1);
    assert_eq!(topology.nodes[0].cpus, [0, 1, 2]);
    assert_eq!(topology.nodes[0].memory_bytes, GIB);
    assert_eq!(
        topology.nodes[0].kernel_node, None,
        "memory cannot be bound"
    );
}

#[test]
fn cpus_outside_the_affinity_are_not_assigned_but_keep_their_node() {
    let machine = FakeMachine::four_sockets();
    let topology = machine.detect(&[1, 2, 4]);
    assert_invariants(&topology);
    assert_eq!(
        topology.nodes.len(),
        4,
        "the memory of all four may be used"
    );
    assert_eq!(topology.nodes[0].cpus, [1, 2]);
    assert_eq!(topology.nodes[1].cpus, [4]);
    assert!(topology.nodes[3].is_memory_only());
    assert_eq!(topology.nodes[3].nearest_cpu_node, NodeId(0));
    assert_eq!(
        topology.node_of_cpu(13),
        Some(NodeId(3)),
        "other processes run there"
    );
}

#[test]
fn memory_outside_the_cpuset_is_not_used() {
    let machine = FakeMachine::four_sockets();
    machine.write(
        "proc/self/status",
        "Name:\tx\nMems_allowed:\t5\nMems_allowed_list:\t0,2\n",
    );
    let topology = machine.detect(&cpus(0..8));
    assert_invariants(&topology);
    // For this process, node 1 has CPUs but no memory, node 2 the reverse, node 3 neither.
    assert_eq!(topology.nodes.len(), 3);
    assert_eq!(topology.nodes[1].kernel_node, Some(0));
    assert_eq!(topology.nodes[1].memory_bytes, 0);
    assert!(topology.nodes[2].is_memory_only());
    assert_eq!(topology.nodes[2].kernel_node, Some(2));
    assert_eq!(topology.nodes[2].distances, [22, 16, 10]);
    assert_eq!(topology.node_of_cpu(12), None);
}

#[test]
fn nodes_with_blank_cpu_lists_still_get_cpus() {
    let machine = FakeMachine::with_nodes(&[(0, "", 8, "10")]);
    let topology = machine.detect(&[3, 5]);
    assert_invariants(&topology);
    assert_eq!(topology.nodes[0].cpus, [3, 5]);
}

#[test]
fn an_affinity_without_an_online_cpu_is_an_error() {
    let machine = FakeMachine::laptop(2);
    machine.write("sys/devices/system/cpu/online", "0-1\n");
    let error = Topology::detect_at(machine.root(), &[7]).expect_err("no CPU");
    assert!(matches!(error, TopologyError::NoCpus), "{error}");
}

#[test]
fn a_malformed_file_of_the_kernel_is_named() {
    for (file, text) in [
        ("node1/distance", "20 10 30\n"),
        ("node1/distance", "near far\n"),
        ("node1/cpulist", "2-three\n"),
        ("node1/meminfo", "Node 1 MemFree: 3 kB\n"),
        ("online", "\n"),
        ("online", "0-\n"),
    ] {
        let machine = FakeMachine::with_nodes(&[(0, "0-1", 8, "10 20"), (1, "2-3", 8, "20 10")]);
        machine.write(&format!("sys/devices/system/node/{file}"), text);
        let error = Topology::detect_at(machine.root(), &cpus(0..4)).expect_err(text);
        let message = error.to_string();
        assert!(
            message.contains(file) && message.contains("expected"),
            "{message}"
        );
    }
}

#[test]
fn the_topology_of_this_machine_assigns_exactly_its_affinity() {
    let topology = Topology::detect().expect("a topology");
    assert_invariants(&topology);
    let set = rustix::thread::sched_getaffinity(None).expect("the affinity");
    let assigned: usize = topology.nodes.iter().map(|node| node.cpus.len()).sum();
    assert_eq!(assigned, set.count() as usize);
    assert_eq!(topology, Topology::from_spec("auto").expect("auto"));
    assert_eq!(topology, Topology::from_spec("").expect("nothing"));
}

#[test]
fn the_human_format_is_a_table() {
    let machine = FakeMachine::with_nodes(&[(0, "0-1,4", 8, "10 24"), (3, "", 64, "24 10")]);
    let expected = "\
2 nodes (sysfs)

node  CPUs   memory    kernel node  threads on  distances
0     0-1,4  8.0 GiB   0            itself       10  24
1     -      64.0 GiB  3            node 0       24  10
";
    assert_eq!(format_human(&machine.detect(&cpus(0..8))), expected);
}

#[test]
fn json_has_plain_numbers() {
    let machine = FakeMachine::laptop(2);
    let json = serde_json::to_value(machine.detect(&[0, 1])).expect("JSON");
    let expected = serde_json::json!({
        "nodes": [{
            "id": 0, "cpus": [0, 1], "memory_bytes": 8 * GIB, "distances": [10],
            "kernel_node": 0, "nearest_cpu_node": 0,
        }],
        "is_virtual": false,
        "source": "sysfs",
    });
    assert_eq!(json, expected);
}
