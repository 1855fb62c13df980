//! The nodes of this process: the CPUs of each, what moves between them cost, and what a remote byte costs.
//!
//! A process may use several mounted volumes. If their daemons have different topologies, their node numbers mean different
//! things. Threads then migrate only for volumes that agree with the first. The costs of moves are those of the first.

use std::sync::OnceLock;

use jericho_format::threads::MoveCost;
use jericho_sys::affinity::CpuMask;

use super::migrator::{MOVE_COST, NODES};

/// Nanoseconds that a move costs, if nobody has measured it. With [`MOVE_COST`], a remote byte costs 0.05 ns more than a local one.
const MOVE_NS: f32 = 200_000.0;
const REMOTE_NS: f32 = MOVE_NS / MOVE_COST;

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

/// The costs of moves and of remote bytes, for each node of a thread and each node of the data.
#[derive(Debug)]
pub struct MoveBytes {
    /// Remote bytes that justify a move.
    bytes: [[f32; NODES]; NODES],
    /// Nanoseconds that a remote byte costs more than a local one.
    remote_ns: [[f32; NODES]; NODES],
}

impl MoveBytes {
    /// Makes the table from the cost of each move. `move_ns`: what a move takes, in nanoseconds; 0: nobody has measured it.
    pub fn new(cost: impl Fn(usize, usize) -> MoveCost, move_ns: u32) -> MoveBytes {
        let table = |value: &dyn Fn(MoveCost) -> f32| {
            std::array::from_fn(|from| std::array::from_fn(|to| value(cost(from, to))))
        };
        MoveBytes {
            bytes: table(&|cost| match cost {
                MoveCost::Default => MOVE_COST,
                MoveCost::Bytes(bytes) => bytes.max(MoveCost::BYTES_MIN) as f32,
                MoveCost::Never => f32::INFINITY,
            }),
            remote_ns: table(&|cost| remote_ns_of(cost, move_ns)),
        }
    }

    /// Returns the bytes that justify a move between two nodes. A thread on an unknown node has the default.
    pub fn of(&self, from: Option<usize>, to: usize) -> f32 {
        let row = from.and_then(|from| self.bytes.get(from));
        row.and_then(|row| row.get(to))
            .copied()
            .unwrap_or(MOVE_COST)
    }

    /// Returns the nanoseconds that a byte on node `data` costs more for a thread on node `at` than for a thread on `data`.
    pub fn remote_ns(&self, at: usize, data: usize) -> f32 {
        let row = self.remote_ns.get(at).and_then(|row| row.get(data));
        match at == data {
            true => 0.0,
            false => row.copied().unwrap_or(REMOTE_NS),
        }
    }
}

/// Returns the nanoseconds that a remote byte costs more than a local one, if a move takes `move_ns` (0: nobody has measured it) and this number of
/// remote bytes costs as much as a move.
pub fn remote_ns_of(cost: MoveCost, move_ns: u32) -> f32 {
    let move_ns = if move_ns == 0 {
        MOVE_NS
    } else {
        move_ns as f32
    };
    match cost {
        MoveCost::Default => REMOTE_NS,
        MoveCost::Bytes(bytes) => move_ns / bytes.max(1) as f32,
        MoveCost::Never => 0.0,
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

/// Returns the nanoseconds that a byte on node `data` costs more for a thread on node `at` than for a thread on `data`, as this process knows them.
pub fn remote_ns(at: usize, data: usize) -> f32 {
    match MOVE_BYTES.get() {
        Some(bytes) => bytes.remote_ns(at, data),
        None if at == data => 0.0,
        None => REMOTE_NS,
    }
}

/// Returns the nodes of this process; `None` before the first volume.
pub fn of_process() -> Option<&'static Nodes> {
    OF_PROCESS.get()
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
        let cost = |from, to| match (from, to) {
            (0, 1) => MoveCost::Bytes(7 << 20),
            (1, 0) => MoveCost::Never,
            (1, 2) => MoveCost::Bytes(70 << 10),
            _ => MoveCost::Default,
        };
        let bytes = MoveBytes::new(cost, 70_000);
        assert_eq!(bytes.of(Some(0), 1), (7 << 20) as f32);
        assert_eq!(bytes.of(Some(1), 0), f32::INFINITY);
        for (from, to) in [(Some(0), 2), (None, 1), (Some(NODES), 0), (Some(0), NODES)] {
            assert_eq!(bytes.of(from, to), MOVE_COST);
        }
        assert_eq!(bytes.remote_ns(0, 1), 70_000.0 / (7 << 20) as f32);
        // Few bytes make a remote byte dear, and move no thread.
        assert_eq!(bytes.of(Some(1), 2), (1 << 20) as f32);
        assert_eq!(bytes.remote_ns(1, 2), 70_000.0 / (70 << 10) as f32);
        assert_eq!((bytes.remote_ns(1, 0), bytes.remote_ns(3, 3)), (0.0, 0.0));
        let default = MoveBytes::new(|_, _| MoveCost::Default, 0).remote_ns(0, 1);
        assert!((0.04..0.06).contains(&default), "{default}");
    }
}
