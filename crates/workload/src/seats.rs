//! Where the threads of a run and their memory are: one seat for each thread.

use jericho_sys::affinity;
use jericho_sys::limits;
use jericho_sys::node_memory::set_thread_policy;
use jericho_topology::{NodeId, Topology};

use crate::error::{Context, Error, Result};
use crate::placement::{Placement, Side, Use};

/// The place of one thread. `None`: the kernel chooses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seat {
    /// The home node of the device. `None` if it is unknown.
    pub device: Option<NodeId>,
    /// The node of the cached pages; with direct I/O that of the buffer, too.
    pub frame: Option<NodeId>,
    /// The node of the thread.
    pub thread: Option<NodeId>,
}

/// Returns the node that is farthest from `from` among those that `suits`. Returns `from` if there is no other.
fn farthest(topology: &Topology, from: NodeId, suits: impl Fn(NodeId) -> bool) -> NodeId {
    let distances = topology.node(from).map_or(&[][..], |node| &node.distances);
    let others = topology
        .nodes
        .iter()
        .filter(|node| node.id != from && suits(node.id));
    // Of nodes at the same distance, the next one: so the threads of several nodes do not meet on one.
    let count = topology.nodes.len() as u16;
    let key = |id: NodeId| {
        let distance = distances.get(usize::from(id.0)).copied().unwrap_or(0);
        let steps = (id.0 + count - from.0) % count;
        (distance, std::cmp::Reverse(steps))
    };
    others
        .map(|node| node.id)
        .max_by_key(|id| key(*id))
        .unwrap_or(from)
}

/// Returns the seats of `count` threads. Thread `i` uses the device with the home node `device_nodes[i % len]`. If the node of a device is
/// unknown, its threads have the nodes in turn, as those of *Jericho*, figure 10, have: there no device matters.
///
/// `is_jericho` tells that these are the home nodes of slices. A page is in its slice's cache, so placements that move cached pages are refused.
pub fn seats(
    topology: &Topology,
    placement: Placement,
    device_nodes: &[Option<NodeId>],
    count: usize,
    is_jericho: bool,
) -> Result<Vec<Seat>> {
    if is_jericho && (placement.needs_device_node || placement.transfer == Side::Remote) {
        return Err(Error::new(format!(
            "the placement {} says where cached pages are, and a Jericho mount has them on the home node of their slice; use best, worst or native",
            placement.name
        )));
    }
    let has_cpus = |id: NodeId| topology.node(id).is_some_and(|node| !node.cpus.is_empty());
    let has_memory = |id: NodeId| {
        topology
            .node(id)
            .is_some_and(|node| node.kernel_node.is_some() && node.memory_bytes > 0)
    };
    let threads: Vec<NodeId> = topology
        .nodes
        .iter()
        .map(|node| node.id)
        .filter(|id| has_cpus(*id))
        .collect();
    let place = |index: usize| {
        let device = device_nodes
            .get(index % device_nodes.len().max(1))
            .copied()
            .flatten();
        if placement.needs_device_node && device.is_none() {
            return Err(Error::new(format!(
                "the placement {} needs the node of the device, which the kernel does not tell; name it in a topology file, or use proper or worst",
                placement.name
            )));
        }
        let base = match device {
            Some(node) => node,
            None => *threads
                .get(index % threads.len().max(1))
                .ok_or_else(|| Error::new("no node has CPUs that this process may use"))?,
        };
        let frame = match placement.transfer {
            Side::Free => None,
            Side::Local => Some(base),
            // Without a device's node, pages are remote only as the processor sees them.
            Side::Remote if device.is_none() => Some(base),
            Side::Remote => Some(farthest(topology, base, has_memory)),
        };
        let thread = match (placement.usage, frame) {
            (Use::None, Some(frame)) | (Use::Load(Side::Local), Some(frame)) => {
                Some(topology.thread_node(frame))
            }
            (Use::Load(Side::Remote), Some(frame)) => Some(farthest(topology, frame, has_cpus)),
            _ => None,
        };
        Ok(Seat {
            device,
            frame,
            thread,
        })
    };
    (0..count).map(place).collect()
}

impl Seat {
    /// Binds the calling thread to its node, and the pages that it allocates to the frame's node. Fails with a message that names the node.
    pub fn take(&self, topology: &Topology) -> Result<()> {
        if let Some(node) = self.thread {
            let cpus = topology.cpus_of(node);
            affinity::set(None, cpus).doing(format_args!("run on node {}", node.0))?;
            let allowed = affinity::get(None).doing("read the CPUs of a thread")?;
            if let Some(other) = allowed.iter().find(|cpu| !cpus.contains(cpu)) {
                return Err(Error::new(format!(
                    "the kernel lets a thread of node {} run on CPU {other}",
                    node.0
                )));
            }
        }
        set_thread_policy(self.kernel_node(topology)).doing("set the memory policy of a thread")
    }

    /// Returns the kernel's number of the node that the memory of the seat is bound to.
    pub fn kernel_node(&self, topology: &Topology) -> Option<u32> {
        self.frame.and_then(|node| topology.node(node)?.kernel_node)
    }

    /// Fails if the frame's node has less free memory than this. Otherwise the kernel might end the process for it (MPOL_BIND).
    pub fn check_room(&self, topology: &Topology, bytes: u64) -> Result<()> {
        let Some(node) = self.kernel_node(topology) else {
            return Ok(());
        };
        match limits::node_available_bytes(node) {
            Some(free) if free < bytes => Err(Error::new(format!(
                "node {node} has {} MiB of free memory, and the run needs {} MiB there; use fewer threads",
                free >> 20,
                bytes >> 20
            ))),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology() -> Topology {
        Topology::from_spec("virtual:2").unwrap()
    }

    fn seat(
        name: &str,
        device: Option<u16>,
        is_jericho: bool,
    ) -> Result<(Option<u16>, Option<u16>)> {
        let placement = Placement::named(name).unwrap();
        let nodes = [device.map(NodeId)];
        let seats = seats(&topology(), placement, &nodes, 1, is_jericho)?;
        Ok((
            seats[0].frame.map(|id| id.0),
            seats[0].thread.map(|id| id.0),
        ))
    }

    #[test]
    fn each_placement_puts_frame_and_thread_where_its_name_says() {
        let on = |frame, thread| Ok((Some(frame), Some(thread)));
        assert_eq!(seat("TRLCPL", Some(0), false), on(0, 0));
        assert_eq!(seat("TRLCPR", Some(0), false), on(0, 1));
        assert_eq!(seat("TRRCPL", Some(0), false), on(1, 1));
        assert_eq!(seat("TRRCPR", Some(0), false), on(1, 0));
        assert_eq!(seat("TLORPRIR", Some(1), false), on(1, 0));
        assert_eq!(seat("TRORP0I0", Some(1), false), on(0, 0));
        assert_eq!(seat("best", Some(1), false), on(1, 1));
        assert_eq!(seat("worst", Some(1), false), on(1, 0));
        assert_eq!(seat("bad", Some(1), false), on(0, 1));
        assert_eq!(seat("bad", None, false), on(0, 1));
        assert_eq!(seat("native", Some(1), false), Ok((None, None)));
    }

    #[test]
    fn on_a_jericho_mount_only_threads_move() {
        assert_eq!(seat("best", Some(1), true), Ok((Some(1), Some(1))));
        assert_eq!(seat("worst", Some(1), true), Ok((Some(1), Some(0))));
        for name in ["TRLCPL", "TRRCPL", "bad"] {
            let refused = seat(name, Some(1), true).unwrap_err().to_string();
            assert!(refused.contains("use best, worst or native"), "{refused}");
        }
    }

    #[test]
    fn without_the_devices_node_transfers_are_refused_and_others_take_nodes_in_turn() {
        let refused = seat("TRLCPL", None, false).unwrap_err().to_string();
        assert!(refused.contains("topology file"), "{refused}");
        let best = Placement::named("best").unwrap();
        let taken = seats(&topology(), best, &[None], 3, false).unwrap();
        let threads: Vec<_> = taken.iter().map(|seat| seat.thread.unwrap().0).collect();
        assert_eq!(threads, [0, 1, 0]);
    }

    #[test]
    fn a_thread_that_took_its_seat_runs_there() {
        let topology = topology();
        let seat = Seat {
            device: None,
            frame: Some(NodeId(1)),
            thread: Some(NodeId(1)),
        };
        std::thread::spawn(move || {
            seat.take(&topology).unwrap();
            assert_eq!(affinity::get(None).unwrap(), topology.cpus_of(NodeId(1)));
        })
        .join()
        .unwrap();
    }
}
