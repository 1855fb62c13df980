//! What migration of threads takes from a report: how many remote bytes justify a move.
//!
//! Data is on node D, and a thread on node F has read it. A move of the thread to D pays if it costs less than it saves. It saves, for the bytes that the
//! thread has read in the remembered window, the difference between their cost from F and from D. A byte of a remote page costs more
//!
//! - by a share of the difference of the latencies, because the first line of a page comes at the latency of the memory, and
//! - by the difference of the times in which one CPU reads a byte of a stream, for the lines that follow.
//!
//! `docs/internals/migration.md` has the rule with its reasons.

use jericho_format::PAGE_BYTES;
use jericho_format::threads::MoveCost;
use jericho_topology::{NodeId, Topology};

use crate::report::{Matrix, Report};

/// A remote byte that costs less than this share more than a local one counts as local: measurements scatter as much.
const NOISE: f64 = 0.1;
/// Bounds of what a report can set. Migration takes the cost of a remote byte from the number, so the lower bound is below any real one. No thread
/// moves for less than [`MoveCost::BYTES_MIN`] bytes.
const BYTES: std::ops::RangeInclusive<f64> = (1 << 10) as f64..=(1_u64 << 32) as f64;

/// Returns the remote bytes that justify a move, for each node of a thread and each node of the data: `costs[from][to]`.
/// [`MoveCost::Default`] where the report has no figures, and for a node and itself. [`MoveCost::Never`] from a node on which no thread runs: the mount takes the largest number of a
/// column, and this node must not count.
pub fn move_costs(report: &Report, topology: &Topology) -> Vec<Vec<MoveCost>> {
    let nodes = &topology.nodes;
    let of = |from: NodeId, to: NodeId| match topology.has_threads(from) {
        true => of_pair(report, topology, from, to).unwrap_or_default(),
        false => MoveCost::Never,
    };
    let row = |from: NodeId| nodes.iter().map(|to| of(from, to.id)).collect();
    nodes.iter().map(|from| row(from.id)).collect()
}

/// Returns the cost of a move of a thread on `from` to data on `to`. Returns `None` if the report has no figures for it.
fn of_pair(report: &Report, topology: &Topology, from: NodeId, to: NodeId) -> Option<MoveCost> {
    let near = topology.thread_node(to);
    if from == near {
        return None;
    }
    let ns_per_byte = |cpus: NodeId| {
        let latency = get(&report.latency_ns.unloaded, cpus, to)?;
        let bytes_per_s = get(&report.one_cpu.read_bandwidth_bytes_per_s, cpus, to)?;
        Some(latency / PAGE_BYTES as f64 + 1e9 / bytes_per_s as f64)
    };
    let (remote, local) = (ns_per_byte(from)?, ns_per_byte(near)?);
    let move_ns = get(&report.migration_ns, from, near)?;
    let more = remote - local;
    if more < NOISE * local {
        return Some(MoveCost::Never);
    }
    let bytes = (move_ns / more).clamp(*BYTES.start(), *BYTES.end());
    Some(MoveCost::Bytes(bytes as u64))
}

/// Returns how long a move of a thread takes, in nanoseconds: the mean over all pairs of nodes that were measured. 0: none was.
pub fn move_ns(report: &Report) -> u32 {
    let measured = || report.migration_ns.iter().flatten().flatten();
    let count = measured().count();
    match count {
        0 => 0,
        _ => (measured().sum::<f64>() / count as f64) as u32,
    }
}

fn get<T: Copy>(matrix: &Matrix<T>, from: NodeId, to: NodeId) -> Option<T> {
    *matrix.get(usize::from(from.0))?.get(usize::from(to.0))?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::report;

    fn topology() -> Topology {
        Topology::from_spec("virtual:2").unwrap()
    }

    #[test]
    fn a_move_pays_when_the_remote_bytes_cost_more_than_it() {
        let topology = topology();
        let costs = move_costs(&report(&topology), &topology);
        // 60 ns for each page, and 1/8 - 1/12.5 ns for each byte.
        let more = 60.0 / 4096.0 + 0.125 - 0.08;
        let MoveCost::Bytes(bytes) = costs[0][1] else {
            panic!("{costs:?}");
        };
        let exact = 120_000.0 / more;
        assert!((bytes as f64 - exact).abs() < 2.0, "{bytes} {exact}");
        // On a machine with one CPU, no thread runs on the second node.
        if topology.has_threads(NodeId(1)) {
            assert_eq!(costs[1][0], costs[0][1]);
        }
        assert_eq!(costs[0][0], MoveCost::Default);
    }

    #[test]
    fn a_move_takes_the_mean_of_all_pairs() {
        let mut report = report(&topology());
        report.migration_ns = vec![vec![None, Some(100.0)], vec![Some(300.0), None]];
        assert_eq!(move_ns(&report), 200);
        report.migration_ns = vec![vec![None; 2]; 2];
        assert_eq!(move_ns(&report), 0);
    }

    #[test]
    fn a_difference_within_the_noise_never_pays() {
        let topology = topology();
        let mut report = report(&topology);
        report.latency_ns.unloaded[0][1] = Some(92.0);
        report.one_cpu.read_bandwidth_bytes_per_s[0][1] = Some(12_400_000_000);
        let costs = move_costs(&report, &topology);
        assert_eq!(costs[0][1], MoveCost::Never);
        report.one_cpu.read_bandwidth_bytes_per_s[0][1] = Some(20_000_000_000);
        assert_eq!(move_costs(&report, &topology)[0][1], MoveCost::Never);
    }

    #[test]
    fn a_bad_measurement_stays_within_bounds() {
        let topology = topology();
        let mut report = report(&topology);
        report.migration_ns[0][1] = Some(1.0);
        assert_eq!(
            move_costs(&report, &topology)[0][1],
            MoveCost::Bytes(1 << 10)
        );
        report.migration_ns[0][1] = Some(1e10);
        assert_eq!(
            move_costs(&report, &topology)[0][1],
            MoveCost::Bytes(1 << 32)
        );
    }

    #[test]
    fn a_pair_without_figures_has_the_default() {
        let topology = topology();
        let mut report = report(&topology);
        report.migration_ns[0][1] = None;
        report.latency_ns.unloaded[0][0] = None;
        let costs = move_costs(&report, &topology);
        assert_eq!(costs[0], [MoveCost::Default; 2]);
    }

    /// Returns two nodes, of which the second has no CPUs or shares those of the first.
    fn one_place_for_threads(cpus_of_second: &str) -> Topology {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("topology");
        let cpu = jericho_sys::affinity::get(None).unwrap()[0];
        let cpus = cpus_of_second.replace('X', &cpu.to_string());
        std::fs::write(
            &file,
            format!("node 0 cpus={cpu} memory=1G\nnode 1 {cpus} memory=1G\n"),
        )
        .unwrap();
        Topology::from_spec(file.to_str().unwrap()).unwrap()
    }

    #[test]
    fn data_on_a_node_without_cpus_is_compared_with_its_nearest_cpus() {
        let topology = one_place_for_threads("");
        let costs = move_costs(&report(&topology), &topology);
        assert_eq!(
            costs[0][1],
            MoveCost::Default,
            "the thread is there already"
        );
    }

    #[test]
    fn a_node_on_which_no_thread_runs_does_not_count() {
        for cpus_of_second in ["", "cpus=X"] {
            let topology = one_place_for_threads(cpus_of_second);
            let costs = move_costs(&report(&topology), &topology);
            assert_eq!(costs[1], [MoveCost::Never; 2], "{cpus_of_second:?}");
        }
    }
}
