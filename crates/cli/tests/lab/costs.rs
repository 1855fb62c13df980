//! A report of a probe of the machine. Mounts that begin later take the costs of moves from it.
//!
//! All emulated memory is equally near, so a real probe would find that no move pays. The figures of this report follow the distances. Near memory has about
//! the bandwidth with which an emulated CPU copies on a busy host. Faster memory would be nearly free beside such a CPU, and threads would work away from
//! their data at each short wait.
//!
//! A move takes as long as 1 MiB costs more there, so the daemon computes 1 MiB for each pair of nodes: the least from which a move pays. By default a
//! thread must use 4 MiB in a few hundred milliseconds, and emulated CPUs that many threads share do not copy that much.

use std::fs;
use std::path::Path;

use jericho_topology::Topology;
use serde_json::{Value, json};

use crate::guest::Volume;
use crate::shape::Shape;

const DIR: &str = "/var/lib/jericho";
/// Distance of a node from itself.
const NEAR: u64 = 10;
/// Time in which a CPU reads a byte of its node, in nanoseconds.
const NEAR_NS: f64 = 2.0;
/// Bytes from which a move pays.
const MOVE_BYTES: f64 = (1 << 20) as f64;

/// Returns the time in which a CPU reads a byte at this distance, in nanoseconds.
fn byte_ns(distance: u64) -> f64 {
    NEAR_NS * distance as f64 / NEAR as f64
}

pub fn write_report(shape: &Shape) {
    let topology = Topology::detect().expect("nodes");
    let matrix = |value: &dyn Fn(u64) -> Value| -> Value {
        let row = |row: &Vec<u64>| row.iter().map(|d| value(*d)).collect::<Value>();
        shape.distances.iter().map(row).collect()
    };
    let bandwidths = matrix(&|distance| json!((1e9 / byte_ns(distance)) as u64));
    // The latency costs nothing more at a distance, so the bandwidth alone decides.
    let latencies = matrix(&|_| json!(100.0));
    let costs = matrix(&|distance| match distance {
        NEAR => Value::Null,
        _ => json!((byte_ns(distance) - NEAR_NS) * MOVE_BYTES),
    });
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
    let path = Path::new(DIR).join(jericho_probe::FILE_NAME);
    fs::write(&path, report.to_string()).expect("a report");
    let read = jericho_probe::load(&path, &topology).expect("a report");
    let move_ns = jericho_probe::move_ns(&read.expect("a file"));
    let remote_ns = f64::from(move_ns) / MOVE_BYTES;
    assert!(
        remote_ns > 0.1 * NEAR_NS,
        "remote bytes cost {remote_ns} ns more"
    );
}

/// Fails if the mount does not take the costs of moves from the report.
pub fn check_costs(volume: &Volume) {
    let costs = volume.stat()["move_costs"].to_string();
    assert!(costs.contains("probe of"), "{costs}");
}
