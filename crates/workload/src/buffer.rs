//! Buffers of a run, on nodes, as the kernel confirms.

use jericho_sys::node_memory::NodeBuffer;
use jericho_topology::{NodeId, Topology};

use crate::error::{Context, Error, Result};

/// Allocates a buffer on a node (`None`: where the kernel puts it) and asks the kernel where its pages are. Fails if one is elsewhere.
pub fn on(topology: &Topology, node: Option<NodeId>, bytes: usize) -> Result<NodeBuffer> {
    let kernel_node = node.and_then(|id| topology.node(id)?.kernel_node);
    let what = || match kernel_node {
        Some(node) => format!("allocate {bytes} bytes on node {node}"),
        None => format!("allocate {bytes} bytes"),
    };
    let buffer = NodeBuffer::new(bytes, kernel_node).doing(what())?;
    if let Some(expected) = kernel_node {
        let found = match buffer.nodes() {
            Ok(nodes) => nodes,
            // A container may forbid the question (EPERM, ENOSYS). The policy holds all the same.
            Err(_) => return Ok(buffer),
        };
        if let Some(other) = found.into_iter().flatten().find(|node| *node != expected) {
            return Err(Error::new(format!(
                "a page that is bound to node {expected} is on node {other}, as move_pages(2) says; the run would measure another placement"
            )));
        }
    }
    Ok(buffer)
}
