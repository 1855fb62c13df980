//! NUMA nodes, CPUs, distances and device locality: from sysfs, or virtual.
//!
//! A [`Topology`] holds the nodes, the CPUs and memory of each node, the distances between nodes, and the home nodes of devices.
//! All crates above this one use [`NodeId`]s only. They work the same on a four-socket server and on a laptop with one node and
//! `--topology virtual:4`.
//!
//! Invariants of every topology:
//! - there is at least one node, and `nodes[i].id == NodeId(i)`: ids are dense. The kernel's numbers may have holes (a node that
//!   is offline or not allowed); they are in [`Node::kernel_node`].
//! - at least one node has CPUs, so [`Topology::cpus_of`] is never empty for a node that exists.
//! - nodes get only CPUs in the affinity of the process.
//!
//! Reading order: `machine` (the kernel's nodes), `assemble` (the topology made of them), `assign` (`virtual:N`), `file`
//! (topology files, specified in `docs/formats/topology.md`), `locality` (block devices and network interfaces). This crate pins
//! no threads and binds no memory.

#![forbid(unsafe_code)]

mod assemble;
mod assign;
mod error;
mod file;
mod human;
mod list;
mod locality;
mod machine;

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

pub use error::TopologyError;
pub use human::format_human;
pub use machine::possible_cpus;

use locality::Locality;
use machine::Machine;

/// Maximum number of nodes of a topology; no kernel supports more.
pub const NODES_MAX: usize = 1024;

/// A node of a [`Topology`]: its position in [`Topology::nodes`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct NodeId(pub u16);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

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
    node_by_cpu: Vec<Option<NodeId>>,
    #[serde(skip)]
    locality: Locality,
}

impl Topology {
    /// Finds the nodes of this machine that this process may use. Reads sysfs, the affinity of the main thread, and the cpuset.
    /// Call it before pinning that thread.
    pub fn detect() -> Result<Topology, TopologyError> {
        Topology::detect_at(Path::new("/"), &machine::process_affinity()?)
    }

    /// Does the same as [`Topology::detect`] with `sys` and `proc` below `root`, for a process that may run on the CPUs in
    /// `affinity`. Without `proc/self/status`, all memory is allowed.
    pub fn detect_at(root: &Path, affinity: &[u32]) -> Result<Topology, TopologyError> {
        Ok(assemble::real(&Machine::read(root, affinity)?))
    }

    /// Returns the topology for a user's specification: `""` or `auto` is [`Topology::detect`], `virtual:N` has N virtual nodes
    /// (1 to [`NODES_MAX`]), `file:PATH` or a plain path is a topology file.
    pub fn from_spec(spec: &str) -> Result<Topology, TopologyError> {
        Topology::from_spec_at(spec, Path::new("/"), &machine::process_affinity()?)
    }

    /// Does the same as [`Topology::from_spec`] on the machine that [`Topology::detect_at`] finds. The path of a topology file is
    /// not below `root`.
    pub fn from_spec_at(
        spec: &str,
        root: &Path,
        affinity: &[u32],
    ) -> Result<Topology, TopologyError> {
        if spec.is_empty() || spec == "auto" {
            return Topology::detect_at(root, affinity);
        }
        if let Some(count) = spec.strip_prefix("virtual:") {
            let count = virtual_count(spec, count)?;
            return Ok(assign::virtual_nodes(
                &Machine::read(root, affinity)?,
                count,
            ));
        }
        let path = spec.strip_prefix("file:").unwrap_or(spec);
        if path.is_empty() {
            let reason = "expected the path of a topology file after `file:`".to_string();
            return Err(TopologyError::Spec {
                spec: spec.to_string(),
                reason,
            });
        }
        let path = Path::new(path);
        let text = file::read(path)?;
        file::topology(path, &text, &Machine::read(root, affinity)?)
    }

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
        match self.node_by_cpu.contains(&Some(id)) {
            true => id,
            false => self.node(id).map_or(id, |node| node.nearest_cpu_node),
        }
    }
}

fn virtual_count(spec: &str, count: &str) -> Result<usize, TopologyError> {
    let digits_only = !count.is_empty() && count.bytes().all(|b| b.is_ascii_digit());
    match count.parse::<usize>() {
        Ok(count) if digits_only && (1..=NODES_MAX).contains(&count) => Ok(count),
        _ => Err(TopologyError::Spec {
            spec: spec.to_string(),
            reason: format!(
                "expected a number of nodes from 1 to {NODES_MAX} after `virtual:`, found {count:?}"
            ),
        }),
    }
}
