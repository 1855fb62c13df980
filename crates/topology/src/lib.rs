//! NUMA nodes, CPUs, distances and device locality: from sysfs, or virtual.
//!
//! A [`Topology`] says which nodes there are, which CPUs and how much memory each has, how far they
//! are from each other, and on which of them a device sits. Everything above this crate speaks of
//! [`NodeId`]s only, so it works the same on a four-socket server, and on a laptop with one node and
//! `--topology virtual:4`.
//!
//! Invariants of every topology:
//! - there is at least one node, and `nodes[i].id == NodeId(i)`: ids are dense. The kernel's numbers
//!   may have holes (a node that is offline or not allowed); they are in [`Node::kernel_node`].
//! - at least one node has CPUs, so [`Topology::cpus_of`] is never empty for a node that exists.
//! - only CPUs in the affinity of the process are dealt out.
//!
//! Reading order: `machine` (what the kernel says), `assemble` (what is made of it), `deal`
//! (`virtual:N`), `file` (topology files, specified in `docs/formats/topology.md`), `locality` (block
//! devices and network interfaces). Absent: threads are not pinned and memory is not bound here.

#![forbid(unsafe_code)]

mod assemble;
mod deal;
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

/// The most nodes a topology can have; no kernel can be built for more.
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

/// CPUs and memory that are near to each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Its position in [`Topology::nodes`].
    pub id: NodeId,
    /// Its CPUs that this process may run on, ascending. Empty for a memory-only node, and for one
    /// whose CPUs all lie outside the affinity.
    pub cpus: Vec<u32>,
    /// Its memory in bytes; 0 if it has none or the cpuset of the process excludes it.
    pub memory_bytes: u64,
    /// Distances to every node in node order, in ACPI units: 10 is local, 20 twice as far.
    pub distances: Vec<u32>,
    /// The kernel's number of the NUMA node that memory of this node is bound to: its own, the
    /// nearest one's for a node without memory, the underlying one's for a virtual node. `None` where
    /// the kernel cannot bind memory.
    pub kernel_node: Option<u32>,
    /// Where threads that work on this node's memory run: the node itself if it has CPUs.
    pub nearest_cpu_node: NodeId,
}

impl Node {
    /// Whether no CPU that this process may run on belongs to the node (a CXL memory expander, say).
    pub fn is_memory_only(&self) -> bool {
        self.cpus.is_empty()
    }
}

/// All nodes of a machine, real or made up, and what sits on which of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Topology {
    /// The nodes; `nodes[i].id` is `NodeId(i)`. Never empty.
    pub nodes: Vec<Node>,
    /// Whether the nodes are made up, by `virtual:N` or a topology file.
    pub is_virtual: bool,
    /// Where it comes from, for people: `sysfs`, `virtual:4`, `file:PATH`.
    pub source: String,
    /// Indexed by CPU number.
    #[serde(skip)]
    node_by_cpu: Vec<Option<NodeId>>,
    #[serde(skip)]
    locality: Locality,
}

impl Topology {
    /// Finds the nodes of this machine that this process may use. Reads sysfs, the affinity of the
    /// main thread, and the cpuset; call it before pinning that thread.
    pub fn detect() -> Result<Topology, TopologyError> {
        Topology::detect_at(Path::new("/"), &machine::process_affinity()?)
    }

    /// Like [`Topology::detect`] with `sys` and `proc` below `root`, for a process that may run on the
    /// CPUs in `affinity`. Where `proc/self/status` is missing, all memory is allowed.
    pub fn detect_at(root: &Path, affinity: &[u32]) -> Result<Topology, TopologyError> {
        Ok(assemble::real(&Machine::read(root, affinity)?))
    }

    /// The topology that a user asked for: `""` or `auto` is [`Topology::detect`], `virtual:N` makes
    /// up N nodes (1 to [`NODES_MAX`]), `file:PATH` or a plain path is a topology file.
    pub fn from_spec(spec: &str) -> Result<Topology, TopologyError> {
        Topology::from_spec_at(spec, Path::new("/"), &machine::process_affinity()?)
    }

    /// Like [`Topology::from_spec`] on the machine that [`Topology::detect_at`] would find. The path
    /// of a topology file is not below `root`.
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
            return Ok(deal::virtual_nodes(&Machine::read(root, affinity)?, count));
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

    /// The node with this id, `None` if the topology has no such node.
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(usize::from(id.0))
    }

    /// The node that a CPU belongs to; the first one where several share it. A table look-up, no
    /// system call. Also answers for CPUs of real nodes outside the affinity of this process, because
    /// other processes run there. `None` if no node has that CPU.
    pub fn node_of_cpu(&self, cpu: u32) -> Option<NodeId> {
        self.node_by_cpu.get(cpu as usize).copied().flatten()
    }

    /// The CPUs for work on a node's memory, ascending: its own, or those of its nearest CPU node if
    /// it has none. Empty only if the topology has no such node.
    pub fn cpus_of(&self, id: NodeId) -> &[u32] {
        let near = self
            .node(id)
            .and_then(|node| self.node(node.nearest_cpu_node));
        near.map_or(&[], |node| &node.cpus)
    }

    /// The node whose CPUs are local to a node's memory for programs, which may run outside of this process's affinity: itself
    /// if any CPU belongs to it, else its nearest CPU node.
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
