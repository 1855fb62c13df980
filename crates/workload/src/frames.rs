//! Where the memory is that a thread reads and writes: the cached pages of files, and buffers.

use std::collections::BTreeMap;

use jericho_topology::{NodeId, Topology};

use crate::seats::Seat;

/// Where memory is: cached pages of a file, or a buffer.
#[derive(Clone, Debug, PartialEq)]
pub enum Frames {
    /// All on this node, as the kernel confirms, or as Jericho's slice says.
    On(NodeId),
    /// Shares by node, 1 together.
    Spread(BTreeMap<NodeId, f64>),
    /// Nobody can tell.
    Unknown,
}

impl Frames {
    /// Returns the shares of pages on these nodes of the kernel.
    pub(crate) fn spread(topology: &Topology, kernel_nodes: impl Iterator<Item = u32>) -> Frames {
        // The kernel does not tell virtual nodes apart.
        if topology.is_virtual {
            return Frames::Unknown;
        }
        let id = |kernel_node: u32| {
            let mut nodes = topology.nodes.iter();
            let found = nodes.find(|node| node.kernel_node == Some(kernel_node));
            found.map(|node| node.id)
        };
        let nodes: Option<Vec<NodeId>> = kernel_nodes.map(id).collect();
        nodes.map_or(Frames::Unknown, Frames::evenly)
    }

    /// Returns the shares of pages on these nodes, one for each page.
    fn evenly(nodes: Vec<NodeId>) -> Frames {
        if nodes.is_empty() {
            return Frames::Unknown;
        }
        let mut shares = BTreeMap::new();
        let each = 1.0 / nodes.len() as f64;
        nodes
            .iter()
            .for_each(|node| *shares.entry(*node).or_insert(0.0) += each);
        Frames::Spread(shares)
    }

    /// Returns where a buffer is: as the seat binds it, else as the kernel says of its pages.
    pub(crate) fn of_buffer(
        topology: &Topology,
        seat: &Seat,
        pages: std::io::Result<Vec<Option<u32>>>,
    ) -> Frames {
        match (Frames::bound_by(seat), pages) {
            // A container may forbid the question.
            (Frames::Unknown, Ok(nodes)) => Frames::spread(topology, nodes.into_iter().flatten()),
            (bound, _) => bound,
        }
    }

    /// Returns where the memory is that the seat binds.
    pub(crate) fn bound_by(seat: &Seat) -> Frames {
        seat.frame.map_or(Frames::Unknown, Frames::On)
    }

    /// Returns where the threads' frames are together, for a workload in which any thread uses any file.
    pub(crate) fn of_all(seats: &[Seat]) -> Frames {
        let nodes: Option<Vec<NodeId>> = seats.iter().map(|seat| seat.frame).collect();
        nodes.map_or(Frames::Unknown, Frames::evenly)
    }

    /// Returns the share on each node. Empty if it is unknown.
    pub fn shares(&self) -> Vec<(NodeId, f64)> {
        match self {
            Frames::On(node) => vec![(*node, 1.0)],
            Frames::Spread(shares) => shares.iter().map(|(node, share)| (*node, *share)).collect(),
            Frames::Unknown => Vec::new(),
        }
    }

    /// Returns the share that is local to a thread on this node. `None`: unknown.
    pub fn local_share(&self, topology: &Topology, thread: NodeId) -> Option<f64> {
        let shares = self.shares();
        let local = shares
            .iter()
            .filter(|(node, _)| topology.thread_node(*node) == thread);
        (!shares.is_empty()).then(|| local.map(|(_, share)| share).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(frame: Option<u16>) -> Seat {
        Seat {
            frame: frame.map(NodeId),
            ..Seat::default()
        }
    }

    #[test]
    fn files_of_all_threads_are_local_in_proportion() {
        let topology = Topology::from_spec("virtual:2").unwrap();
        let seats = [seat(Some(0)), seat(Some(1)), seat(Some(1)), seat(Some(1))];
        let all = Frames::of_all(&seats);
        assert_eq!(all.local_share(&topology, NodeId(1)), Some(0.75));
        assert_eq!(all.shares(), [(NodeId(0), 0.25), (NodeId(1), 0.75)]);
        let unknown = Frames::of_all(&[seat(Some(0)), seat(None)]);
        assert_eq!(unknown.local_share(&topology, NodeId(0)), None);
        let own = Frames::bound_by(&seats[1]);
        assert_eq!(own.local_share(&topology, NodeId(1)), Some(1.0));
        assert_eq!(own.local_share(&topology, NodeId(0)), Some(0.0));
    }

    #[test]
    fn pages_that_the_kernel_placed_have_shares_on_real_nodes_only() {
        let virtual_nodes = Topology::from_spec("virtual:2").unwrap();
        let pages = [0, 0, 0, 0];
        let spread = Frames::spread(&virtual_nodes, pages.into_iter());
        assert_eq!(spread, Frames::Unknown);
        let real = Topology::detect().unwrap();
        let Some(kernel_node) = real.nodes[0].kernel_node else {
            return;
        };
        let spread = Frames::spread(&real, [kernel_node; 4].into_iter());
        assert_eq!(spread.shares(), [(real.nodes[0].id, 1.0)]);
        let strange = Frames::spread(&real, [kernel_node, 4000].into_iter());
        assert_eq!(strange, Frames::Unknown);
    }
}
