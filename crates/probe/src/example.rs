//! For tests: a report about two nodes that are 60 ns apart, and a buffer.

use jericho_sys::memory::Mapping;
use jericho_topology::Topology;

use crate::buffer::Buffer;
use crate::digest::digest;
use crate::report::{
    FORMAT, Latency, Machine, NodeReport, OneCpu, Report, TopologyReport, nothing,
};
use crate::time;

/// Returns a report about a topology of two nodes.
pub(crate) fn report(topology: &Topology) -> Report {
    let matrix = |local: u64, remote: u64| {
        vec![
            vec![Some(local), Some(remote)],
            vec![Some(remote), Some(local)],
        ]
    };
    let times = |local: f64, remote: f64| {
        vec![
            vec![Some(local), Some(remote)],
            vec![Some(remote), Some(local)],
        ]
    };
    let mut migration_ns = nothing(2);
    (migration_ns[0][1], migration_ns[1][0]) = (Some(120_000.0), Some(120_000.0));
    let time_s = 1_795_707_459;
    Report {
        format: FORMAT,
        time_s,
        time: time::text(time_s),
        quick: false,
        topology: TopologyReport {
            digest: digest(topology),
            source: topology.source.clone(),
            is_virtual: topology.is_virtual,
            nodes: (0..2)
                .map(|id| NodeReport {
                    id,
                    cpus: 8,
                    has_memory: true,
                    kernel_node: Some(u32::from(id)),
                    buffer_bytes: 256 << 20,
                    huge_bytes: 256 << 20,
                    loaded_by: "node".into(),
                })
                .collect(),
        },
        machine: Machine {
            cpu_model: "Example <CPU> & more".into(),
            kernel: "6.18".into(),
            last_level_cache_bytes: 32 << 20,
        },
        write_stores: "non-temporal stores".into(),
        read_bandwidth_bytes_per_s: matrix(80_000_000_000, 40_000_000_000),
        write_bandwidth_bytes_per_s: matrix(40_000_000_000, 20_000_000_000),
        one_cpu: OneCpu {
            read_bandwidth_bytes_per_s: matrix(12_500_000_000, 8_000_000_000),
            write_bandwidth_bytes_per_s: matrix(10_000_000_000, 6_000_000_000),
        },
        latency_ns: Latency {
            unloaded: times(90.0, 150.0),
            loaded: times(200.0, 400.0),
        },
        migration_ns,
        devices: vec![],
        skipped: vec![],
        notes: vec!["A note.".into()],
    }
}

/// Returns a buffer with parts of these lengths, in any memory.
pub(crate) fn buffer(chain: usize, stream: usize) -> Buffer {
    let mapping = Mapping::create("example", chain + stream, false).unwrap();
    Buffer::from_parts(mapping, chain, 0)
}
