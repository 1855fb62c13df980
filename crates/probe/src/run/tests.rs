use std::path::PathBuf;

use crate::report::Matrix;

use super::*;

fn quick(topology: &Topology) -> Report {
    let options = Options {
        quick: true,
        devices: vec![],
    };
    run(topology, &options, |_| {}).unwrap()
}

fn is_full<T>(matrix: &Matrix<T>) -> bool {
    matrix.iter().flatten().all(Option::is_some)
}

#[test]
fn all_pairs_of_two_virtual_nodes_get_plausible_figures() {
    let topology = Topology::from_spec("virtual:2").unwrap();
    let mut steps = vec![];
    let options = Options {
        quick: true,
        devices: vec![],
    };
    let report = run(&topology, &options, |progress| {
        steps.push((progress.done, progress.all));
    });
    let report = report.unwrap();
    report.check().unwrap();
    assert_eq!(report.skipped, []);
    assert_eq!(steps, [(0, 4), (1, 4), (2, 4), (3, 4)]);
    assert!(is_full(&report.read_bandwidth_bytes_per_s));
    assert!(is_full(&report.write_bandwidth_bytes_per_s));
    assert!(is_full(&report.one_cpu.read_bandwidth_bytes_per_s));
    assert!(is_full(&report.one_cpu.write_bandwidth_bytes_per_s));
    assert!(is_full(&report.latency_ns.unloaded));
    assert!(!report.notes.is_empty(), "virtual nodes show no locality");
    let has_other_cpus = topology.nodes[0].cpus != topology.nodes[1].cpus;
    assert_eq!(is_full(&report.latency_ns.loaded), has_other_cpus);
    assert_eq!(report.migration_ns[0][1].is_some(), has_other_cpus);
    assert_eq!(report.migration_ns[0][0], None);
    let pairs = report.latency_ns.unloaded.iter().flatten();
    for (unloaded, loaded) in pairs.zip(report.latency_ns.loaded.iter().flatten()) {
        assert!(loaded.is_none_or(|loaded| loaded >= 0.5 * unloaded.unwrap()));
    }
}

#[test]
fn nodes_without_cpus_have_columns_only_and_nodes_without_memory_have_rows_only() {
    let mut topology = Topology::from_spec("virtual:3").unwrap();
    topology.nodes[1].cpus.clear();
    topology.nodes[1].nearest_cpu_node = NodeId(0);
    topology.nodes[2].memory_bytes = 0;
    let report = quick(&topology);
    report.check().unwrap();
    for (from, row) in report.latency_ns.unloaded.iter().enumerate() {
        for (to, latency) in row.iter().enumerate() {
            assert_eq!(latency.is_some(), from != 1 && to != 2, "{from} to {to}");
        }
    }
}

#[test]
fn a_node_whose_memory_cannot_be_bound_is_skipped_by_name() {
    let mut topology = Topology::from_spec("virtual:2").unwrap();
    topology.nodes[1].kernel_node = Some(999);
    let report = quick(&topology);
    assert_eq!(report.skipped.len(), 1, "{:?}", report.skipped);
    assert_eq!(report.skipped[0].what, "memory of node 1");
    assert!(report.skipped[0].reason.contains("kernel node 999"));
    assert!(report.latency_ns.unloaded[1][0].is_some());
    assert_eq!(report.latency_ns.unloaded[0][1], None);
}

#[test]
fn a_device_that_cannot_be_opened_and_too_many_nodes_end_the_probe_at_once() {
    let topology = Topology::from_spec("virtual:1").unwrap();
    let options = Options {
        quick: true,
        devices: vec![PathBuf::from("/no/such/device")],
    };
    let error = run(&topology, &options, |_| panic!("measures")).unwrap_err();
    assert!(error.to_string().contains("/no/such/device"), "{error}");
    let topology = Topology::from_spec("virtual:65").unwrap();
    let error = run(&topology, &Options::default(), |_| panic!("measures")).unwrap_err();
    assert!(error.to_string().contains("65 nodes"), "{error}");
}

#[test]
fn one_node_is_said_to_show_no_locality() {
    let topology = Topology::from_spec("virtual:1").unwrap();
    let report = empty(
        &topology,
        &Options::default(),
        &Plan::new(&topology, &Options::default()),
    );
    let notes = notes(&topology, &report);
    assert!(notes[0].contains("cannot appear"), "{notes:?}");
}
