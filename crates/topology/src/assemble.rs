//! Turns drafts of nodes into a [`Topology`] whose invariants hold: ids are dense, and every node has a memory home and CPUs near
//! it.

use std::collections::BTreeMap;

use crate::id::NodeId;
use crate::locality::Locality;
use crate::machine::{Machine, nearest};
use crate::nodes::{Node, Topology};

/// A node before its nearest nodes are known.
pub(crate) struct Draft {
    pub(crate) cpus: Vec<u32>,
    /// 0 for a node without memory of its own.
    pub(crate) memory_bytes: u64,
    /// The kernel node that memory of this node is bound to. A node without memory gets the nearest node's instead.
    pub(crate) kernel_node: Option<u32>,
    /// Distances to all nodes, in node order.
    pub(crate) distances: Vec<u32>,
}

/// Creates a topology of `drafts` (at least one has CPUs). `elsewhere` are further CPUs, with their nodes, that this process may
/// not run on.
pub(crate) fn assemble(
    drafts: Vec<Draft>,
    elsewhere: &[(u32, NodeId)],
    is_virtual: bool,
    source: String,
    locality: Locality,
) -> Topology {
    let mut nodes = Vec::with_capacity(drafts.len());
    for (at, draft) in drafts.iter().enumerate() {
        let with_cpus = nearest(at, &draft.distances, |to| !drafts[to].cpus.is_empty());
        let with_memory = nearest(at, &draft.distances, |to| drafts[to].memory_bytes > 0);
        nodes.push(Node {
            id: node_id(at),
            cpus: draft.cpus.clone(),
            memory_bytes: draft.memory_bytes,
            distances: draft.distances.clone(),
            kernel_node: with_memory.and_then(|to| drafts[to].kernel_node),
            nearest_cpu_node: node_id(with_cpus.unwrap_or(at)),
        });
    }
    let mut node_by_cpu = BTreeMap::new();
    let assigned = nodes
        .iter()
        .flat_map(|node| node.cpus.iter().map(|&cpu| (cpu, node.id)));
    for (cpu, node) in assigned.chain(elsewhere.iter().copied()) {
        node_by_cpu.entry(cpu).or_insert(node);
    }
    Topology {
        nodes,
        is_virtual,
        source,
        node_by_cpu: dense(&node_by_cpu),
        locality,
    }
}

/// Returns the topology of the real machine. Omits nodes that this process can neither run on nor take memory from.
pub(crate) fn real(machine: &Machine) -> Topology {
    let kernel = &machine.nodes;
    let is_kept = |at: usize| !kernel[at].cpus.is_empty() || kernel[at].memory_bytes > 0;
    let kept: Vec<usize> = (0..kernel.len()).filter(|&at| is_kept(at)).collect();
    let draft = |&at: &usize| Draft {
        cpus: kernel[at].cpus.clone(),
        memory_bytes: kernel[at].memory_bytes,
        kernel_node: machine.bindable(at),
        distances: kept.iter().map(|&to| kernel[at].distances[to]).collect(),
    };
    let drafts = kept.iter().map(draft).collect();

    let mut locality = Locality::new(&machine.root);
    let mut elsewhere = Vec::new();
    for (position, &at) in kept.iter().enumerate() {
        elsewhere.extend(
            kernel[at]
                .cpus_online
                .iter()
                .map(|&cpu| (cpu, node_id(position))),
        );
    }
    for (at, node) in kernel.iter().enumerate().filter(|_| machine.is_numa) {
        // A device may sit on a node that was omitted. Its home is then the nearest node that was kept.
        let home = nearest(at, &node.distances, is_kept);
        if let Some(position) = home.and_then(|home| kept.iter().position(|&at| at == home)) {
            locality
                .node_by_kernel_node
                .insert(node.id, node_id(position));
        }
    }
    let source = if machine.is_numa {
        "sysfs"
    } else {
        "one node: this kernel has no NUMA"
    };
    assemble(drafts, &elsewhere, false, source.to_string(), locality)
}

/// Returns the id of the node at a position. Positions stay far below `u16::MAX`: see `NODES_MAX`.
pub(crate) fn node_id(position: usize) -> NodeId {
    NodeId(u16::try_from(position).expect("no more nodes than a kernel can have"))
}

/// Returns a table indexed by CPU number. Every request looks a CPU up, and an index needs no search and no hashing.
fn dense(node_by_cpu: &BTreeMap<u32, NodeId>) -> Vec<Option<NodeId>> {
    let len = node_by_cpu
        .last_key_value()
        .map_or(0, |(&cpu, _)| cpu as usize + 1);
    let mut table = vec![None; len];
    for (&cpu, &node) in node_by_cpu {
        table[cpu as usize] = Some(node);
    }
    table
}
