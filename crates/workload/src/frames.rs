//! Where the memory is that a thread reads and writes: the cached pages of files, and buffers.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use jericho_sys::node_memory::nodes_of_file;
use jericho_topology::{NodeId, Topology};

use crate::buffer;
use crate::case::Case;
use crate::error::{Context, Result};
use crate::seats::Seat;

/// Number of pages of a file that the kernel is asked about.
const PAGES_ASKED: u64 = 64;
const PAGE_BYTES: u64 = 4096;

/// Where the cached pages of a file are.
#[derive(Clone, Debug)]
pub(crate) enum Frames {
    /// All on this node, as the kernel confirms, or as Jericho's slice says.
    On(NodeId),
    /// Shares by the kernel's number of the node.
    Spread(BTreeMap<u32, f64>),
    /// Nobody can tell.
    Unknown,
}

impl Frames {
    /// Asks the kernel where some pages of a file are that it has cached. Fails if they are not on the node of the seat.
    pub(crate) fn of(case: &Case, seat: &Seat, file: &File, path: &Path) -> Result<Frames> {
        // A program cannot see the frames of a Jericho mount. They are in the memory of the slice's home node, which the daemon checks.
        if case.is_jericho() {
            return Ok(seat.device.map_or(Frames::Unknown, Frames::On));
        }
        let bytes = file.metadata().at(path, "ask for its length")?.len();
        let step = (bytes / PAGES_ASKED / PAGE_BYTES).max(1) * PAGE_BYTES;
        let offsets: Vec<usize> = (0..bytes)
            .step_by(step as usize)
            .map(|offset| offset as usize)
            .collect();
        // A filesystem without mappings, or a container, may refuse the question.
        let Ok(nodes) = nodes_of_file(file.as_fd(), bytes as usize, &offsets) else {
            return Ok(Frames::Unknown);
        };
        let expected = seat.kernel_node(case.topology);
        if let (Some(_), Some(node)) = (expected, seat.frame) {
            let name = path.display().to_string();
            buffer::check(Ok(nodes), expected, &name)?;
            return Ok(Frames::On(node));
        }
        let nodes: Vec<u32> = nodes.into_iter().flatten().collect();
        let mut shares = BTreeMap::new();
        let each = 1.0 / nodes.len().max(1) as f64;
        nodes
            .iter()
            .for_each(|node| *shares.entry(*node).or_insert(0.0) += each);
        Ok(Frames::Spread(shares))
    }

    /// Returns the share that is local to a thread on this node.
    pub(crate) fn local_share(&self, topology: &Topology, thread: NodeId) -> Option<f64> {
        match self {
            Frames::On(node) => Some(f64::from(topology.thread_node(*node) == thread)),
            // The kernel does not tell virtual nodes apart.
            Frames::Spread(_) if topology.is_virtual => None,
            Frames::Spread(shares) => {
                let own = topology.node(thread)?.kernel_node?;
                Some(shares.get(&own).copied().unwrap_or(0.0))
            }
            Frames::Unknown => None,
        }
    }
}

/// Returns whether a thread on this node is local to memory that the seat binds. `None`: the kernel chose the memory.
pub(crate) fn buffer_share(topology: &Topology, seat: &Seat, thread: NodeId) -> Option<f64> {
    seat.frame
        .map(|node| f64::from(topology.thread_node(node) == thread))
}

/// Returns the share of the threads' frames that are local to a thread on this node, for a workload in which any thread uses any file. `None`: some are unknown.
pub(crate) fn mean_share(topology: &Topology, seats: &[Seat], thread: NodeId) -> Option<f64> {
    let shares = seats
        .iter()
        .map(|seat| buffer_share(topology, seat, thread));
    let sum = shares.sum::<Option<f64>>()?;
    Some(sum / seats.len().max(1) as f64)
}
