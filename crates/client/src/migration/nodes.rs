//! The nodes of this process: the CPUs of each, how idle they are, and what moves between them cost.
//!
//! A process may use several mounted volumes. If their daemons have different topologies, their node numbers mean different
//! things. Threads then migrate only for volumes that agree with the first. The costs of moves are those of the first.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

use jericho_format::threads::MoveCost;
use jericho_sys::affinity::CpuMask;
use jericho_sys::load::{self, CpuTime};

use super::migrator::{MOVE_COST, NODES};

/// Shortest time between two readings of /proc/stat in a process, in nanoseconds.
const READ_EVERY: u64 = 1_000_000_000;
/// Age at which a reading is of no use.
const STALE: u64 = 5 * READ_EVERY;

/// The CPUs of each node.
#[derive(Debug, PartialEq, Eq)]
pub struct Nodes([CpuMask; NODES]);

impl Nodes {
    /// Makes the table from the node of each CPU. Leaves out nodes from [`NODES`] up.
    pub fn new(node_of_cpu: impl Fn(u32) -> u16) -> Nodes {
        let mut nodes = [CpuMask::EMPTY; NODES];
        for cpu in 0..=CpuMask::CPU_MAX {
            if let Some(mask) = nodes.get_mut(usize::from(node_of_cpu(cpu))) {
                mask.insert(cpu);
            }
        }
        Nodes(nodes)
    }

    /// Returns the CPUs of a node.
    pub fn cpus_of(&self, node: usize) -> CpuMask {
        self.0.get(node).copied().unwrap_or_default()
    }

    /// Returns the node of a CPU.
    pub fn node_of(&self, cpu: u32) -> Option<usize> {
        self.0.iter().position(|cpus| cpus.contains(cpu))
    }
}

/// The remote bytes that justify a move, for each node of a thread and each node of the data.
#[derive(Debug)]
pub struct MoveBytes([[f32; NODES]; NODES]);

impl MoveBytes {
    /// Makes the table from the cost of each move.
    pub fn new(cost: impl Fn(usize, usize) -> MoveCost) -> MoveBytes {
        MoveBytes(std::array::from_fn(|from| {
            std::array::from_fn(|to| match cost(from, to) {
                MoveCost::Default => MOVE_COST,
                MoveCost::Bytes(bytes) => bytes as f32,
                MoveCost::Never => f32::INFINITY,
            })
        }))
    }

    /// Returns the bytes that justify a move between two nodes. A thread on an unknown node has the default.
    pub fn of(&self, from: Option<usize>, to: usize) -> f32 {
        let row = from.and_then(|from| self.0.get(from));
        row.and_then(|row| row.get(to))
            .copied()
            .unwrap_or(MOVE_COST)
    }
}

static OF_PROCESS: OnceLock<Nodes> = OnceLock::new();
static MOVE_BYTES: OnceLock<MoveBytes> = OnceLock::new();

/// Takes the nodes of a volume as this process's. Returns false when a different table of another volume came first.
pub fn learn(nodes: Nodes) -> bool {
    // Another thread may have stored its table meanwhile, so this compares with the stored one.
    let known = match OF_PROCESS.get() {
        Some(known) => known,
        None => {
            let copy = Nodes(nodes.0);
            OF_PROCESS.get_or_init(|| copy)
        }
    };
    *known == nodes
}

/// Takes the costs of moves of a volume as this process's, unless it has some.
pub fn learn_costs(bytes: MoveBytes) {
    // Fails if the process has some.
    let _ = MOVE_BYTES.set(bytes);
}

/// Returns the remote bytes that justify a move, as this process knows them.
pub fn move_bytes(from: Option<usize>, to: usize) -> f32 {
    MOVE_BYTES
        .get()
        .map_or(MOVE_COST, |bytes| bytes.of(from, to))
}

/// Returns the nodes of this process; `None` before the first volume.
pub fn of_process() -> Option<&'static Nodes> {
    OF_PROCESS.get()
}

/// The idle shares of the nodes' CPUs between the last two readings.
pub struct Idle {
    /// When `share` was written; 0: never.
    read_at: AtomicU64,
    /// Thousandths plus one; 0: unknown.
    share: [AtomicU32; NODES],
    /// The last reading.
    times: Mutex<[CpuTime; NODES]>,
}

impl Default for Idle {
    fn default() -> Idle {
        Idle::new()
    }
}

impl Idle {
    /// Returns a table in which no share is known.
    pub const fn new() -> Idle {
        const NO_TIME: CpuTime = CpuTime { busy: 0, idle: 0 };
        Idle {
            read_at: AtomicU64::new(0),
            share: [const { AtomicU32::new(0) }; NODES],
            times: Mutex::new([NO_TIME; NODES]),
        }
    }

    /// Returns the share (0 to 1) of the time between the last two readings in which a node's CPUs were idle. Reads again when
    /// the last reading is a second old. Returns `None` before the second reading, and when the last two readings were too far
    /// apart.
    pub fn share(&self, now: u64, nodes: &Nodes, node: usize) -> Option<f32> {
        let at = self.read_at.load(Relaxed);
        let age = now.saturating_sub(at);
        if at == 0 || age >= READ_EVERY {
            // One thread reads; the others use the stored shares.
            let won = self
                .read_at
                .compare_exchange(at, now.max(1), Relaxed, Relaxed);
            if won.is_ok() {
                self.read(nodes, at != 0 && age < STALE);
            }
        }
        match self.share.get(node)?.load(Relaxed) {
            0 => None,
            known => Some((known - 1) as f32 / 1000.0),
        }
    }

    /// Reads the times. The shares since the last reading are known only if that reading `is_fresh`.
    fn read(&self, nodes: &Nodes, is_fresh: bool) {
        let Ok(mut last) = self.times.try_lock() else {
            return;
        };
        let mut times = [CpuTime::default(); NODES];
        let read = load::cpu_times(|cpu, time| {
            for (sum, cpus) in times.iter_mut().zip(&nodes.0) {
                if cpus.contains(cpu) {
                    sum.busy += time.busy;
                    sum.idle += time.idle;
                }
            }
        });
        for ((share, new), old) in self.share.iter().zip(&times).zip(last.iter()) {
            let idle = new.idle.saturating_sub(old.idle);
            let all = new.busy.saturating_sub(old.busy) + idle;
            let known = read.is_ok() && is_fresh && all > 0;
            let thousandths = (idle * 1000).checked_div(all).unwrap_or(0) as u32;
            share.store(if known { thousandths + 1 } else { 0 }, Relaxed);
        }
        *last = times;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cpu_belongs_to_its_node_in_the_table() {
        let nodes = Nodes::new(|cpu| match cpu {
            0 | 2 => 0,
            1 => 1,
            3 => NODES as u16,
            _ => u16::MAX,
        });
        assert_eq!(nodes.cpus_of(0), [0, 2].into_iter().collect());
        assert_eq!(nodes.cpus_of(1), [1].into_iter().collect());
        assert!(nodes.cpus_of(2).is_empty() && nodes.cpus_of(NODES).is_empty());
    }

    #[test]
    fn a_node_is_found_by_its_cpus_and_a_measured_cost_replaces_the_default() {
        let nodes = Nodes::new(|cpu| if cpu < 4 { cpu as u16 / 2 } else { u16::MAX });
        assert_eq!(
            [1, 2, 4].map(|cpu| nodes.node_of(cpu)),
            [Some(0), Some(1), None]
        );
        let bytes = MoveBytes::new(|from, to| match (from, to) {
            (0, 1) => MoveCost::Bytes(7 << 20),
            (1, 0) => MoveCost::Never,
            _ => MoveCost::Default,
        });
        assert_eq!(bytes.of(Some(0), 1), (7 << 20) as f32);
        assert_eq!(bytes.of(Some(1), 0), f32::INFINITY);
        for (from, to) in [(Some(0), 2), (None, 1), (Some(NODES), 0), (Some(0), NODES)] {
            assert_eq!(bytes.of(from, to), MOVE_COST);
        }
    }

    #[test]
    fn idle_shares_need_two_readings_and_none_that_is_stale() {
        let nodes = Nodes::new(|_| 0);
        let idle = Idle::new();
        assert_eq!(idle.share(1, &nodes, 0), None);
        assert_eq!(idle.share(READ_EVERY / 2, &nodes, 0), None, "too soon");
        // Kernel ticks are long: repeats until the kernel has counted one.
        let mut now = READ_EVERY + 1;
        let share = loop {
            if let Some(share) = idle.share(now, &nodes, 0) {
                break share;
            }
            now += READ_EVERY;
        };
        assert!((0.0..=1.0).contains(&share), "{share}");
        assert_eq!(idle.share(now, &nodes, 1), None, "a node without CPUs");
        assert_eq!(idle.share(now + STALE, &nodes, 0), None, "too long ago");
    }
}
