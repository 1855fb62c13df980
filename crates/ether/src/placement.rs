//! Where threads and memory of network interfaces belong: the NUMA nodes.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use jericho_format::PAGE_BYTES;
use jericho_sys::memory::Mapping;
use jericho_sys::{affinity, rseq};
use jericho_topology::{NodeId, Topology};

/// Returns the nodes of this machine.
pub(crate) fn topology() -> io::Result<Topology> {
    Topology::detect().map_err(io::Error::other)
}

/// Returns the node of the CPU on which the calling thread runs.
pub(crate) fn current_node(topology: &Topology) -> Option<u32> {
    topology.node_of_cpu(rseq::current_cpu()).map(number)
}

/// Returns the node of each network interface.
pub(crate) fn nodes_of(topology: &Topology, interfaces: &[String]) -> Vec<Option<u32>> {
    let node = |name: &String| topology.node_of_nic(name).map(number);
    interfaces.iter().map(node).collect()
}

/// Returns the interfaces, by their place in a list, that one thread serves: those of a node. Interfaces whose node is not known belong to the
/// thread of the first node.
pub(crate) fn groups(nodes: &[Option<u32>]) -> Vec<(Option<u32>, Vec<u16>)> {
    let mut groups: BTreeMap<Option<u32>, Vec<u16>> = BTreeMap::new();
    for (nic, node) in (0..).zip(nodes) {
        groups.entry(*node).or_default().push(nic);
    }
    let unknown = groups.remove(&None);
    let mut groups: Vec<(Option<u32>, Vec<u16>)> = groups.into_iter().collect();
    match (groups.first_mut(), unknown) {
        (Some((_, first)), Some(unknown)) => first.extend(unknown),
        (None, Some(unknown)) => groups.push((None, unknown)),
        (_, None) => {}
    }
    groups
}

/// Lets the calling thread run on the CPUs of a node only.
pub(crate) fn pin(topology: &Topology, node: Option<u32>) {
    let Some(id) = node.and_then(id) else {
        return;
    };
    if let Err(error) = affinity::set(None, topology.cpus_of(id)) {
        tracing::warn!(%error, "a thread of the network does not run on node {}", id.0);
    }
}

/// Returns the kernel's number of a node.
pub(crate) fn kernel_node(topology: &Topology, node: Option<u32>) -> Option<u32> {
    let node = topology.node(id(node?)?)?;
    node.kernel_node
}

/// Returns memory for a pool of pages, of which some belong to nodes. Fails if there is none.
pub(crate) fn pool(
    topology: &Topology,
    pages: u32,
    own: &[(u32, Range<u32>)],
) -> io::Result<Mapping> {
    let page_bytes = PAGE_BYTES as usize;
    let pool = Mapping::create("jericho-pool", pages as usize * page_bytes, false)?;
    for (node, range) in own {
        let Some(kernel_node) = kernel_node(topology, Some(*node)) else {
            continue;
        };
        let bytes = range.start as usize * page_bytes..range.end as usize * page_bytes;
        if let Err(error) = pool.prefer(bytes, kernel_node) {
            tracing::warn!(%error, "the memory for frames of node {node} may be on another one");
        }
    }
    Ok(pool)
}

fn number(node: NodeId) -> u32 {
    node.0.into()
}

fn id(node: u32) -> Option<NodeId> {
    u16::try_from(node).ok().map(NodeId)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_of_a_node_share_a_thread() {
        let one = |nodes: &[Option<u32>]| groups(nodes);
        assert_eq!(one(&[None, None]), [(None, vec![0, 1])]);
        assert_eq!(
            one(&[Some(1), Some(0), None, Some(1)]),
            [(Some(0), vec![1, 2]), (Some(1), vec![0, 3])]
        );
    }
}
