//! A report of a probe of the machine. Mounts that begin later take the costs of moves from it.
//!
//! All emulated memory is equally near, so a real probe would find that no move pays. The figures of this report follow the distances. From them the
//! daemon computes the least bytes that a report can make a move pay from, 1 MiB. By default a thread must use 4 MiB in a few hundred milliseconds,
//! and emulated CPUs that many threads share do not copy that much.
//!
//! The bandwidth of near memory is about what an emulated CPU copies: 2 GB/s on a quiet host, and here 0.5 GB/s for a busy one. With the bandwidth of a
//! real machine, remote memory would cost next to nothing beside the CPU time of the emulated copy, and threads would work away from their data at
//! each short wait for a CPU.

use std::fs;

use jericho_topology::Topology;
use serde_json::{Value, json};

use crate::guest::Volume;
use crate::shape::Shape;

const DIR: &str = "/var/lib/jericho";

pub fn write_report(shape: &Shape) {
    let topology = Topology::detect().expect("nodes");
    let matrix = |value: &dyn Fn(u64) -> Value| -> Value {
        let row = |row: &Vec<u64>| row.iter().map(|d| value(*d)).collect::<Value>();
        shape.distances.iter().map(row).collect()
    };
    let bandwidths = matrix(&|distance| json!(5_000_000_000 / distance));
    let latencies = matrix(&|distance| json!(10.0 * distance as f64));
    let costs = matrix(&|_| json!(10_000.0));
    let node = |id: usize| {
        json!({
            "id": id, "cpus": shape.cpus[id].len(), "has_memory": true, "kernel_node": id,
            "buffer_bytes": 1 << 20, "huge_bytes": 0, "loaded_by": "node",
        })
    };
    let report = json!({
        "format": 1, "time_s": 0, "time": "1970-01-01T00:00:00Z", "quick": false,
        "topology": {
            "digest": jericho_probe::digest(&topology), "source": topology.source,
            "is_virtual": false, "nodes": (0..shape.nodes()).map(node).collect::<Value>(),
        },
        "machine": {
            "cpu_model": jericho_sys::process::cpu_model(), "kernel": "", "last_level_cache_bytes": 1 << 20,
        },
        "write_stores": "ordinary stores",
        "read_bandwidth_bytes_per_s": bandwidths,
        "write_bandwidth_bytes_per_s": bandwidths,
        "one_cpu": {
            "read_bandwidth_bytes_per_s": bandwidths, "write_bandwidth_bytes_per_s": bandwidths,
        },
        "latency_ns": { "unloaded": latencies, "loaded": latencies },
        "migration_ns": costs,
        "devices": [], "skipped": [], "notes": [],
    });
    fs::create_dir_all(DIR).expect("mkdir");
    fs::write(format!("{DIR}/probe.json"), report.to_string()).expect("a report");
}

/// Fails if the mount does not take the costs of moves from the report.
pub fn check_costs(volume: &Volume) {
    let costs = volume.stat()["move_costs"].to_string();
    assert!(costs.contains("probe of"), "{costs}");
}
