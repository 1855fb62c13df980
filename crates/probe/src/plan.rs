//! How much memory a probe uses, and how long it takes.
//!
//! A buffer must exceed the caches, else it measures them. The part for the chain of reads is four times the caches of one CPU. The chain
//! visits each line once before it visits one again, so hardly a line is still in a cache by then. The part for streams is four times the
//! caches of all CPUs of the node that has most, because all of them stream.

use std::path::Path;
use std::time::Duration;

use jericho_topology::{NodeId, Topology};

use crate::caches;

/// Most nodes that are measured.
pub(crate) const NODES_MAX: usize = 64;
/// Repetitions of each measurement. The median counts, so that a short disturbance does not.
pub(crate) const REPETITIONS: u32 = 5;
/// Measurements for each pair of nodes: reads and writes by one CPU and by all, and latency without and with load.
const MEASUREMENTS: u32 = 6;
/// How many of them have streams, which pass the caches first.
const WITH_STREAMS: u32 = 5;
/// Number of moves of a thread of which the median counts.
pub(crate) const MOVES: usize = 15;
/// Time for all pairs together, as far as the shortest and longest times of one measurement permit.
const PAIRS_TIME: Duration = Duration::from_secs(16);
const MEASUREMENT_MIN: Duration = Duration::from_millis(50);
const MEASUREMENT_MAX: Duration = Duration::from_millis(500);
const MEASUREMENT_QUICK: Duration = Duration::from_millis(25);
/// Guesses for the announced time: the rates at which a buffer is prepared and at which streams pass the caches, and the time of a move with its passes.
const PREPARED_BYTES_PER_S: u64 = 512 << 20;
const WARMED_BYTES_PER_S: u64 = 4 << 30;
const MOVE: Duration = Duration::from_millis(1);
/// Bounds of the parts of a buffer.
const PART_BYTES_MIN: u64 = 32 << 20;
const STREAM_BYTES_MAX: u64 = 4 << 30;
const CHAIN_BYTES_MAX: u64 = 2 << 30;
/// The working set whose refill a migration costs: the caches that a CPU does not share, about.
const WORKING_SET_BYTES: u64 = 1 << 20;

/// What the user asks for.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Measure briefly, with smaller buffers.
    pub quick: bool,
    /// Devices to read, as `storage::open_device` takes them.
    pub devices: Vec<std::path::PathBuf>,
}

/// Sizes and times of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Time of one measurement with all its repetitions.
    pub(crate) measurement: Duration,
    /// Bytes of the chain of reads.
    pub(crate) chain_bytes: u64,
    /// Bytes for streams.
    pub(crate) stream_bytes: u64,
    /// Bytes that a moved thread reads again.
    pub(crate) working_set_bytes: u64,
    /// Caches of one CPU.
    pub(crate) last_level_cache_bytes: u64,
    /// Nodes whose CPUs measure.
    pub(crate) from: Vec<NodeId>,
    /// Nodes whose memory is measured.
    pub(crate) to: Vec<NodeId>,
    devices: u32,
}

impl Plan {
    /// Plans a probe of a topology.
    pub fn new(topology: &Topology, options: &Options) -> Plan {
        let ids = |is_in: &dyn Fn(&jericho_topology::Node) -> bool| -> Vec<NodeId> {
            let nodes = topology.nodes.iter().filter(|node| is_in(node));
            nodes.map(|node| node.id).collect()
        };
        let from = ids(&|node| !node.is_memory_only());
        let to = ids(&|node| node.memory_bytes > 0);
        let bytes_of = |cpus: &[u32]| caches::bytes_of(Path::new("/"), cpus);
        let cpus = topology.nodes.iter().map(|node| &node.cpus[..]);
        let of_nodes = cpus.filter(|cpus| !cpus.is_empty());
        let of_node = of_nodes.clone().map(bytes_of).max().unwrap_or_default();
        let of_cpu = of_nodes.map(|cpus| bytes_of(&cpus[..1])).max();
        let of_cpu = of_cpu.unwrap_or_default();
        let times = if options.quick { 2 } else { 4 };
        let pairs = (from.len() * to.len()) as u32;
        let share = PAIRS_TIME / (pairs * MEASUREMENTS).max(1);
        Plan {
            measurement: match options.quick {
                true => MEASUREMENT_QUICK,
                false => share.clamp(MEASUREMENT_MIN, MEASUREMENT_MAX),
            },
            chain_bytes: (times * of_cpu).clamp(PART_BYTES_MIN, CHAIN_BYTES_MAX),
            stream_bytes: (times * of_node).clamp(PART_BYTES_MIN, STREAM_BYTES_MAX),
            working_set_bytes: WORKING_SET_BYTES,
            last_level_cache_bytes: of_cpu,
            devices: options.devices.len() as u32,
            from,
            to,
        }
    }

    /// Returns about how long the probe takes.
    pub fn duration(&self) -> Duration {
        let pairs = (self.from.len() * self.to.len()) as u32;
        let of_bytes =
            |bytes: u64, per_s: u64| Duration::from_secs_f64(bytes as f64 / per_s as f64);
        let prepared = (self.chain_bytes + self.stream_bytes) * self.to.len() as u64;
        let warmed = self.chain_bytes / 2 * u64::from(pairs * WITH_STREAMS);
        self.measurement * pairs * (MEASUREMENTS + self.devices)
            + of_bytes(prepared, PREPARED_BYTES_PER_S)
            + of_bytes(warmed, WARMED_BYTES_PER_S)
            + MOVE * pairs * MOVES as u32
    }

    /// Returns the number of steps that `Progress` counts.
    pub(crate) fn steps(&self) -> u32 {
        (self.from.len() * self.to.len()) as u32 * (1 + self.devices)
    }

    /// Returns the sizes of chain and stream for a node that may lend `room_bytes`, each a multiple of 2 MiB. Returns `None` if the room is
    /// less than half of the plan, because the caches would hold too much of the buffer.
    pub(crate) fn parts(&self, room_bytes: u64) -> Option<(usize, usize)> {
        const UNIT: u64 = 2 << 20;
        let planned = self.chain_bytes + self.stream_bytes;
        if room_bytes < planned / 2 {
            return None;
        }
        let share = (room_bytes as f64 / planned as f64).min(1.0);
        let part = |bytes: u64| ((bytes as f64 * share) as u64 / UNIT * UNIT).max(UNIT) as usize;
        Some((part(self.chain_bytes), part(self.stream_bytes)))
    }

    /// Returns the least room for `parts`.
    pub(crate) fn room_min(&self) -> u64 {
        (self.chain_bytes + self.stream_bytes) / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(spec: &str, quick: bool) -> Plan {
        let topology = Topology::from_spec(spec).unwrap();
        let options = Options {
            quick,
            devices: vec![],
        };
        Plan::new(&topology, &options)
    }

    #[test]
    fn two_nodes_take_at_most_half_a_minute_and_a_quick_probe_a_few_seconds() {
        assert!(plan("virtual:2", false).duration() < Duration::from_secs(30));
        assert!(plan("virtual:2", true).duration() < Duration::from_secs(5));
        let many = plan("virtual:32", false);
        assert_eq!(many.measurement, MEASUREMENT_MIN);
    }

    #[test]
    fn buffers_exceed_the_caches_and_shrink_with_the_memory_of_their_node() {
        let plan = plan("virtual:2", false);
        assert!(plan.chain_bytes >= 4 * plan.last_level_cache_bytes.min(CHAIN_BYTES_MAX / 4));
        let (chain, stream) = plan.parts(u64::MAX).unwrap();
        let planned = plan.chain_bytes + plan.stream_bytes;
        assert!(planned - (chain + stream) as u64 <= 4 << 20);
        let (chain, stream) = plan.parts(plan.room_min()).unwrap();
        assert!((chain + stream) as u64 <= planned / 2);
        assert_eq!(plan.parts(plan.room_min() - 1), None);
        assert_eq!(plan.parts(0), None);
    }
}
