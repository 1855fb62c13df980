//! How much memory the nodes have.

use jericho_sys::limits::{Memory, node_available_bytes};
use jericho_topology::{NodeId, Topology};

use super::policy::{NodeView, low_bytes};

/// The memory that can be had.
pub(super) struct Look {
    /// The memory of each node.
    pub nodes: Vec<NodeView>,
    /// Bytes that slices can still allocate on all nodes together. A control group can allow fewer than the nodes have available.
    pub shared_available_bytes: u64,
    /// What a control group can give to slices that begin. `None`: only the nodes limit them.
    pub group_room_bytes: Option<u64>,
}

/// Asks for the memory of nodes.
pub(super) struct Room {
    topology: Topology,
}

impl Room {
    pub fn new(topology: &Topology) -> Room {
        Room {
            topology: topology.clone(),
        }
    }

    /// Returns the memory that can be had. `used_bytes`: what this mount uses of each. The kernel does not know virtual nodes, so the size of such a
    /// node and what the mount uses of it count, too.
    pub fn look(&self, used_bytes: &[u64]) -> Look {
        let nodes = self.topology.nodes.iter().zip(used_bytes);
        // Without /proc, nothing is lent.
        let memory = Memory::read().ok();
        let usable_bytes = memory.as_ref().map_or(0, Memory::usable_bytes);
        let usable_now_bytes = memory.as_ref().map_or(0, Memory::usable_now_bytes);
        let nodes = nodes
            .map(|(node, used)| {
                // A topology file can describe more than the machine has, and a control group can allow less.
                let total_bytes = node.memory_bytes.min(usable_bytes);
                let in_kernel = node.kernel_node.and_then(node_available_bytes);
                let mut available_bytes =
                    in_kernel.map_or(usable_now_bytes, |bytes| bytes.min(usable_now_bytes));
                if self.topology.is_virtual {
                    available_bytes = available_bytes.min(total_bytes.saturating_sub(*used));
                }
                if let Some(ordered) = order(node.id).and_then(|order| order.parse().ok()) {
                    available_bytes = available_bytes.min(ordered);
                }
                NodeView {
                    total_bytes,
                    available_bytes,
                    may_lend: node.memory_bytes > 0,
                    is_refusing: false,
                    may_call_home: true,
                }
            })
            .collect();
        let limit = memory.as_ref().and_then(|memory| memory.limit.as_ref());
        Look {
            nodes,
            shared_available_bytes: usable_now_bytes,
            group_room_bytes: limit
                .map(|limit| usable_now_bytes.saturating_sub(low_bytes(limit.bytes))),
        }
    }

    /// Returns the node that gives a node its memory: the node itself, unless it has none.
    pub fn giver(&self, id: NodeId) -> usize {
        let mut nodes = self.topology.nodes.iter();
        let of = self.topology.node(id);
        let has_own = of.is_none_or(|node| node.memory_bytes > 0);
        let kernel_node = of.and_then(|node| node.kernel_node);
        let gives = nodes.find(|n| n.memory_bytes > 0 && n.kernel_node == kernel_node);
        match gives.filter(|_| !has_own) {
            Some(giver) => giver.id.0.into(),
            None => id.0.into(),
        }
    }
}

/// Returns whether a test has ordered that the kernel takes no memory of a node: a line `NODE refuses`.
pub(super) fn refuses(node: NodeId) -> bool {
    order(node).is_some_and(|order| order == "refuses")
}

/// Returns what a test has ordered for a node. The environment variable `JERICHO_NODE_ROOM` names a file with lines `NODE BYTES` (its available memory) and
/// `NODE refuses`. The daemon reads the file each time, and the test replaces it by a rename. Builds without the feature `faults` take no orders.
fn order(node: NodeId) -> Option<String> {
    if !cfg!(feature = "faults") {
        return None;
    }
    let orders = std::fs::read_to_string(std::env::var_os("JERICHO_NODE_ROOM")?).ok()?;
    orders.lines().find_map(|line| {
        let (of, order) = line.split_once(' ')?;
        (of.parse::<u16>().ok()? == node.0).then(|| order.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_virtual_node_has_at_most_what_is_left_of_its_size() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("topology");
        std::fs::write(&file, "node 0 cpus=0 memory=64M\nnode 1 memory=1000T\n").unwrap();
        let topology = Topology::from_spec(file.to_str().unwrap()).unwrap();
        let room = Room::new(&topology);
        let available = |used: [u64; 2]| {
            let nodes = room.look(&used).nodes.into_iter();
            nodes.map(|node| node.available_bytes).collect::<Vec<_>>()
        };
        let machine = Memory::read().unwrap().total_bytes;
        // The larger one is as large as the machine.
        let nodes = room.look(&[0, 0]).nodes.into_iter();
        let totals = nodes.map(|node| node.total_bytes);
        let usable = Memory::read().unwrap().usable_bytes();
        assert_eq!(totals.collect::<Vec<_>>(), [64 << 20, usable]);
        let [first, second] = available([0, 0])[..] else {
            panic!("two nodes");
        };
        assert!(first <= 64 << 20 && second > first && second <= machine);
        assert_eq!(available([60 << 20, 0])[0], 4 << 20);
        assert_eq!(available([65 << 20, 0])[0], 0);
    }
}
