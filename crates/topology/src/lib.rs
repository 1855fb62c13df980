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
//! (topology files, specified in `docs/formats/topology.md`), `locality` (block devices and network interfaces), `nodes` (the
//! topology itself). This crate pins
//! no threads and binds no memory.

#![forbid(unsafe_code)]

mod assemble;
mod assign;
mod error;
mod file;
mod human;
mod id;
mod list;
mod locality;
mod machine;
mod nodes;

use std::path::Path;

pub use error::TopologyError;
pub use human::format_human;
pub use id::{NODES_MAX, NodeId};
pub use machine::possible_cpus;
pub use nodes::{Node, Topology};

use machine::Machine;

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
