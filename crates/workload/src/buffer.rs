//! Buffers of a run, on nodes, as the kernel confirms.

use std::io;
use std::sync::Arc;

use jericho_storage::BLOCK_BYTES;
use jericho_sys::memory::Mapping;
use jericho_sys::node_memory::NodeBuffer;
use jericho_topology::{NodeId, Topology};

use crate::error::{Context, Error, Result};
use crate::seats::Seat;

/// Allocates a buffer on a node (`None`: where the kernel puts it) and asks the kernel where its pages are. Fails if one is elsewhere.
pub fn on(topology: &Topology, node: Option<NodeId>, bytes: usize) -> Result<NodeBuffer> {
    let kernel_node = node.and_then(|id| topology.node(id)?.kernel_node);
    let what = || match kernel_node {
        Some(node) => format!("allocate {bytes} bytes on node {node}"),
        None => format!("allocate {bytes} bytes"),
    };
    let buffer = NodeBuffer::new(bytes, kernel_node).doing(what())?;
    check(buffer.nodes(), kernel_node, "a buffer")?;
    Ok(buffer)
}

/// Allocates memory on the seat's node for asynchronous transfers, with the same check.
pub fn for_transfers(topology: &Topology, seat: &Seat, bytes: usize) -> Result<Arc<Mapping>> {
    let memory = Mapping::create("jericho-bench", bytes, false).doing("create buffers")?;
    let node = seat.kernel_node(topology);
    if let Some(node) = node {
        memory
            .bind(0..bytes, node)
            .doing(format_args!("bind buffers to node {node}"))?;
    }
    memory.populate(0..bytes).doing("allocate buffers")?;
    check(nodes_of(&memory), node, "a buffer")?;
    Ok(Arc::new(memory))
}

/// Returns the kernel's node of each page of some memory.
pub(crate) fn nodes_of(memory: &Mapping) -> io::Result<Vec<Option<u32>>> {
    let pages = (0..memory.len()).step_by(BLOCK_BYTES as usize);
    memory.nodes_of(&pages.collect::<Vec<usize>>())
}

/// Compares the nodes of pages again, after a run. Returns whether the kernel has told them, and `None` if nothing is expected.
pub(crate) fn confirm(
    found: io::Result<Vec<Option<u32>>>,
    expected: Option<u32>,
) -> Result<Option<bool>> {
    let told = found.is_ok();
    check(found, expected, "a buffer")?;
    Ok(expected.map(|_| told))
}

/// Compares the nodes of pages, as move_pages(2) has told them, with the node that they were bound to, if they were. Fails if a page is elsewhere: the run
/// would measure another placement. A container may forbid the question; then the policy holds all the same.
pub(crate) fn check(
    found: io::Result<Vec<Option<u32>>>,
    expected: Option<u32>,
    what: &str,
) -> Result<()> {
    let (Ok(found), Some(expected)) = (found, expected) else {
        return Ok(());
    };
    match found.into_iter().flatten().find(|node| *node != expected) {
        None => Ok(()),
        Some(other) => Err(Error::new(format!(
            "{what} has a page on node {other} instead of {expected}, as move_pages(2) says; the run would measure another placement"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_on_another_node_than_it_was_bound_to_is_refused() {
        let nodes = || Ok(vec![Some(0), None, Some(1)]);
        let refused = check(nodes(), Some(0), "a buffer").unwrap_err().to_string();
        assert!(refused.contains("on node 1 instead of 0"), "{refused}");
        check(Ok(vec![Some(0), None]), Some(0), "a buffer").unwrap();
        check(nodes(), None, "a buffer").unwrap();
        check(
            Err(io::ErrorKind::PermissionDenied.into()),
            Some(0),
            "a buffer",
        )
        .unwrap();
    }

    #[test]
    fn both_kinds_of_buffers_are_on_the_node_that_was_asked_for() {
        let topology = Topology::from_spec("virtual:2").unwrap();
        let seat = Seat {
            frame: Some(NodeId(1)),
            ..Seat::default()
        };
        let node = seat.kernel_node(&topology);
        let buffer = on(&topology, seat.frame, 8192).unwrap();
        check(buffer.nodes(), node, "a buffer").unwrap();
        let memory = for_transfers(&topology, &seat, 8192).unwrap();
        assert_eq!(memory.bound_node(4096).unwrap(), node);
    }
}
