//! The nodes of a machine, real or virtual.

use std::path::Path;

use serde::Serialize;

use crate::id::NodeId;
use crate::locality::Locality;

/// A group of CPUs and memory near each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Position in [`Topology::nodes`].
    pub id: NodeId,
    /// CPUs of the node that this process may run on, ascending. Empty for a memory-only node, and for a node whose CPUs are all
    /// outside of the affinity.
    pub cpus: Vec<u32>,
    /// Memory in bytes; 0 if the node has none or the cpuset of the process excludes it.
    pub memory_bytes: u64,
    /// Distances to all nodes in node order, in ACPI units: 10 is local, 20 is twice as far.
    pub distances: Vec<u32>,
    /// The kernel's number of the NUMA node that memory of this node is bound to: its own, the nearest node's for a node without
    /// memory, the underlying node's for a virtual node. `None` where the kernel cannot bind memory.
    pub kernel_node: Option<u32>,
    /// The node on which threads run that use this node's memory: the node itself if it has CPUs.
    pub nearest_cpu_node: NodeId,
}

impl Node {
    /// Returns whether the node has no CPU that this process may run on (a CXL memory expander, for example).
    pub fn is_memory_only(&self) -> bool {
        self.cpus.is_empty()
    }
}

/// All nodes of a machine, real or virtual, and the home nodes of its devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Topology {
    /// The nodes; `nodes[i].id` is `NodeId(i)`. Never empty.
    pub nodes: Vec<Node>,
    /// Whether the nodes are virtual: from `virtual:N` or a topology file.
    pub is_virtual: bool,
    /// Origin of the topology, for users: `sysfs`, `virtual:4`, `file:PATH`.
    pub source: String,
    /// Node of each CPU, indexed by CPU number.
    #[serde(skip)]
    pub(crate) node_by_cpu: Vec<Option<NodeId>>,
    #[serde(skip)]
    pub(crate) locality: Locality,
}

impl Topology {
    /// Returns the node with this id, `None` if the topology has no such node.
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(usize::from(id.0))
    }

    /// Returns the node of a CPU, the first one if several nodes share the CPU. Reads a table and makes no system call. Knows
    /// also CPUs of real nodes outside of this process's affinity, because other processes run there. Returns `None` if no node
    /// has the CPU.
    pub fn node_of_cpu(&self, cpu: u32) -> Option<NodeId> {
        self.node_by_cpu.get(cpu as usize).copied().flatten()
    }

    /// Returns the CPUs for work on a node's memory, ascending: its own, or those of its nearest CPU node if it has none. Empty
    /// only if the topology has no such node.
    pub fn cpus_of(&self, id: NodeId) -> &[u32] {
        let near = self
            .node(id)
            .and_then(|node| self.node(node.nearest_cpu_node));
        near.map_or(&[], |node| &node.cpus)
    }

    /// Returns the node whose CPUs are local to a node's memory, for programs that may run outside of this process's affinity:
    /// the node itself if any CPU belongs to it, else its nearest CPU node.
    pub fn thread_node(&self, id: NodeId) -> NodeId {
        match self.has_threads(id) {
            true => id,
            false => self.node(id).map_or(id, |node| node.nearest_cpu_node),
        }
    }

    /// Returns whether a thread can run on a node, in this process's affinity or outside of it: whether any CPU belongs to the node. A CPU that several nodes
    /// share belongs to the first of them.
    pub fn has_threads(&self, id: NodeId) -> bool {
        self.node_by_cpu.contains(&Some(id))
    }

    /// Returns the home node of a block device, or of the device that holds the filesystem of a file or directory. For a file
    /// that does not exist yet, uses its directory. Returns `None` if the node is unknown: the kernel does not tell, the devices
    /// below are on different nodes, or the topology is virtual and its file does not name the device. For a device on a node
    /// that this process may not use, returns the nearest allowed one. Makes system calls, so it must not be called for each
    /// request.
    pub fn node_of_block_device(&self, path: &Path) -> Option<NodeId> {
        self.locality.of_path(path, 0)
    }

    /// Returns the home node of a network interface, by name. Has the same limits as [`Topology::node_of_block_device`].
    pub fn node_of_nic(&self, name: &str) -> Option<NodeId> {
        self.locality.of_nic(name, 0)
    }
}
