//! Cases for the machine `controllers`: `jericho probe` and `jericho bench` on nodes and controllers that the kernel knows. Rates mean nothing here. The cases
//! look at the places of threads, buffers and pages, as the kernel tells them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::controllers::{DISKS, node_of};
use crate::guest::{ask, jericho};
use crate::nvdimm::mount;

const NODES: usize = 2;
/// Lines of results.
const LINES: &str = "/tmp/results.jsonl";

/// Returns a disk of a node.
fn disk_on(node: usize) -> String {
    let disk = DISKS.iter().find(|disk| node_of(disk) == node);
    format!("/dev/{}", disk.expect("a disk"))
}

/// Runs `jericho bench` with arguments that are separated by spaces. Returns the results.
fn bench(arguments: &str) -> Vec<Value> {
    let _ = fs::remove_file(LINES);
    jericho(&format!(
        "bench {arguments} --seconds 1 --threads 2 --out {LINES}"
    ));
    let lines = fs::read_to_string(LINES).expect("results");
    let parsed = lines.lines().map(serde_json::from_str);
    let records: Vec<Value> = parsed.collect::<Result<_, _>>().expect("JSON");
    assert!(!records.is_empty());
    records
}

/// Runs a workload under a placement, and checks where the kernel says that threads and memory were. `asked`: what the kernel is asked about. `is_near`: the
/// threads are on the nodes of their memory.
fn check(arguments: &str, asked: &[&str], is_near: bool) -> Vec<Value> {
    let records = bench(arguments);
    for record in &records {
        assert_eq!(record["confirmed"], true, "{arguments}: {record}");
        assert_eq!(record["confirmed_for"], json!(asked), "{arguments}");
        let share = if is_near { 1.0 } else { 0.0 };
        assert_eq!(record["local_share"], share, "{arguments}: {record}");
        for seat in record["seats"].as_array().expect("seats") {
            let is_here = seat["frame"] == seat["thread"];
            assert_eq!(is_here, is_near, "{arguments}: {seat}");
        }
    }
    records
}

/// Returns the nodes in a field of the seats of a result.
fn nodes(record: &Value, field: &str) -> BTreeSet<u64> {
    let seats = record["seats"].as_array().expect("seats").iter();
    seats
        .map(|seat| seat[field].as_u64().expect("a node"))
        .collect()
}

#[test]
#[ignore = "for the guest of make lab"]
fn direct_transfers_are_between_the_nodes_that_their_names_say() {
    for device_node in 0..NODES {
        let disk = disk_on(device_node);
        for (placement, is_frame_near, is_near) in [
            ("TLORPLIR", true, true),
            ("TLORPRIR", true, false),
            ("TRORPLIR", false, true),
            ("TRORPRIR", false, false),
        ] {
            for workload in ["zmio --variant read-64k", "dd"] {
                let arguments = format!("{workload} {disk} --placement {placement}");
                let records = check(&arguments, &["threads", "buffers"], is_near);
                let frame = match is_frame_near {
                    true => device_node,
                    false => 1 - device_node,
                };
                for record in records {
                    let only = |node: usize| BTreeSet::from([node as u64]);
                    assert_eq!(nodes(&record, "device"), only(device_node), "{record}");
                    assert_eq!(nodes(&record, "frame"), only(frame), "{record}");
                    let by_node = record["throughput_bytes_per_s_by_node"].as_object();
                    let by_node: Vec<&String> = by_node.expect("nodes").keys().collect();
                    assert_eq!(by_node, [&device_node.to_string()], "{record}");
                }
            }
        }
    }
}

#[test]
#[ignore = "for the guest of make lab"]
fn cached_pages_and_memory_are_near_under_best_and_far_under_worst() {
    for (placement, is_near) in [("best", true), ("worst", false)] {
        for (workload, memory) in [
            ("scan --variant read", "cached pages"),
            ("mstress", "buffers"),
        ] {
            let arguments = format!("{workload} /tmp --placement {placement}");
            for record in check(&arguments, &["threads", memory], is_near) {
                assert_eq!(nodes(&record, "frame").len(), NODES, "{record}");
            }
        }
    }
}

#[test]
#[ignore = "for the guest of make lab"]
fn the_pages_of_a_volume_are_near_under_best_and_far_under_worst() {
    let devices = DISKS.map(|disk| format!("/dev/{disk}")).join(" ");
    jericho(&format!("format {devices} --force"));
    let _mounted = mount("/dev/vda", "");
    for (placement, is_near) in [("best", true), ("worst", false)] {
        for path in ["mount", "fast"] {
            let arguments =
                format!("scan --variant read /mnt --placement {placement} --path {path}");
            // The daemon has the pages. Their places are in its own counters.
            for record in check(&arguments, &["threads"], is_near) {
                assert_eq!(nodes(&record, "frame").len(), NODES, "{record}");
                if path == "fast" {
                    let pages = &record["inline_pages"];
                    let [near, far] =
                        ["local", "remote"].map(|kind| pages[kind].as_u64().expect("pages"));
                    let near = near as f64 / (near + far) as f64;
                    assert_eq!(near > 0.99, is_near, "{record}");
                    assert_eq!(near < 0.01, !is_near, "{record}");
                }
            }
        }
    }
    jericho(&format!("report {LINES} --out /tmp/page.html"));
    let page = fs::read_to_string("/tmp/page.html").expect("a page");
    assert!(page.contains("emulated"), "the page does not say it");
}

/// Checks that a matrix has a figure for each node and each other node.
fn is_full(matrix: &Value) {
    let rows = matrix.as_array().expect("rows");
    assert_eq!(rows.len(), NODES, "{matrix}");
    for row in rows {
        let values = row.as_array().expect("values").iter();
        let figures = values.filter(|value| value.as_f64().is_some_and(|figure| figure > 0.0));
        assert_eq!(figures.count(), NODES, "{matrix}");
    }
}

#[test]
#[ignore = "for the guest of make lab"]
fn a_probe_measures_each_pair_of_nodes_and_reads_devices_into_each_node() {
    let arguments = format!("probe --quick --json --device {}", disk_on(1));
    let report = ask(&arguments);
    let latency = &report["latency_ns"];
    for matrix in [
        &report["read_bandwidth_bytes_per_s"],
        &report["write_bandwidth_bytes_per_s"],
        &report["one_cpu"]["read_bandwidth_bytes_per_s"],
        &report["one_cpu"]["write_bandwidth_bytes_per_s"],
        &latency["unloaded"],
        &latency["loaded"],
    ] {
        is_full(matrix);
    }
    let device = &report["devices"][0];
    println!("lab: device of the probe: {device}");
    assert_eq!(device["home_node"], 1, "{device}");
    is_full(&device["read_bytes_per_s"]);
    assert!(Path::new("/var/lib/jericho/probe.json").exists());
}
