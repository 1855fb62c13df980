//! Where the threads of a run and their memory are: one seat for each thread.

use jericho_sys::affinity;
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

/// Returns the node that is farthest from `from` among those that `suits`. Returns `None` if there is no other.
fn farthest(topology: &Topology, from: NodeId, suits: impl Fn(NodeId) -> bool) -> Option<NodeId> {
    let distances = topology.node(from).map_or(&[][..], |node| &node.distances);
    let others = topology
        .nodes
        .iter()
        .filter(|node| node.id != from && suits(node.id));
    // Of nodes at the same distance, the next one: so the threads of several nodes do not meet on one.
    let count = topology.nodes.len();
    let key = |id: NodeId| {
        let distance = distances.get(usize::from(id.0)).copied().unwrap_or(0);
        let steps = (usize::from(id.0) + count - usize::from(from.0) % count) % count;
        (distance, std::cmp::Reverse(steps))
    };
    others.map(|node| node.id).max_by_key(|id| key(*id))
}

fn has_cpus(topology: &Topology, id: NodeId) -> bool {
    topology.node(id).is_some_and(|node| !node.cpus.is_empty())
}

/// Returns the node of threads that are local to a node's memory. Fails if this process may not use the CPUs there.
fn local_thread(topology: &Topology, frame: NodeId) -> Result<NodeId> {
    let node = topology.thread_node(frame);
    match has_cpus(topology, node) {
        true => Ok(node),
        false => Err(Error::new(format!(
            "node {} has no CPU that this process may use, so no thread can be local to its memory; widen the CPUs of the process (taskset, numactl, cpuset), or use native",
            node.0
        ))),
    }
}

/// Returns a node whose CPUs or memory are remote, or the only node of a machine with one. Fails if the machine has more nodes, and none suits.
fn remote(
    topology: &Topology,
    from: NodeId,
    what: &str,
    suits: impl Fn(NodeId) -> bool,
) -> Result<NodeId> {
    match farthest(topology, from, suits) {
        Some(node) => Ok(node),
        // Notes of the run say that effects of locality cannot appear here.
        None if topology.nodes.len() == 1 => Ok(from),
        None => Err(Error::new(format!(
            "there is no other node than {} with {what} that this process may use, so nothing can be remote; widen what it may use (taskset, numactl, cpuset), or use best or native",
            from.0
        ))),
    }
}

/// What decides the seats of a run.
#[derive(Clone, Copy, Debug)]
pub struct Places<'a> {
    /// The home nodes of the devices: thread `i` uses the device with the node `device_nodes[i % len]`.
    pub device_nodes: &'a [Option<NodeId>],
    /// Whether these are the home nodes of slices, whose caches have the pages.
    pub is_jericho: bool,
    /// This many threads one after the other are on the same node: [`crate::kind::Kind::threads_together`].
    pub together: usize,
}

/// Returns the seats of `count` threads. The papers' transfers put memory and threads relative to the device. The other placements give threads the
/// nodes in turn, as *Jericho*, figures 10 and 13, does, wherever the device is: else all threads would share the CPUs of the device's node.
///
/// On a Jericho mount a page is in its slice's cache, so placements that move cached pages are refused.
pub fn seats(
    topology: &Topology,
    placement: Placement,
    places: Places,
    count: usize,
) -> Result<Vec<Seat>> {
    let Places {
        device_nodes,
        is_jericho,
        together,
    } = places;
    if is_jericho && placement.needs_device_node {
        return Err(Error::new(format!(
            "the placement {} says where cached pages are, and a Jericho mount has them on the home node of their slice; use best, worst or native",
            placement.name
        )));
    }
    let has_memory = |id: NodeId| {
        topology
            .node(id)
            .is_some_and(|node| node.kernel_node.is_some() && node.memory_bytes > 0)
    };
    let threads: Vec<NodeId> = topology
        .nodes
        .iter()
        .map(|node| node.id)
        .filter(|id| has_cpus(topology, *id))
        .collect();
    let in_turn = |index: usize| {
        let turn = index / together.max(1);
        let node = threads.get(turn % threads.len().max(1)).copied();
        node.ok_or_else(|| Error::new("no node has CPUs that this process may use"))
    };
    let place = |index: usize| {
        let device = device_nodes
            .get(index % device_nodes.len().max(1))
            .copied()
            .flatten();
        if let Some(absent) = device.filter(|node| topology.node(*node).is_none()) {
            return Err(Error::new(format!(
                "the data is at home on node {}, and the topology {} has no such node; name the topology of the mount with --topology",
                absent.0, topology.source
            )));
        }
        let base = match device {
            Some(node) if is_jericho || placement.needs_device_node => node,
            None if placement.needs_device_node => {
                return Err(Error::new(format!(
                    "the placement {} needs the node of the device, which the kernel does not tell; name it in a topology file, or use proper or worst",
                    placement.name
                )));
            }
            _ => in_turn(index)?,
        };
        let frame = match placement.transfer {
            Side::Free => None,
            Side::Local => Some(base),
            Side::Remote => Some(remote(topology, base, "memory", has_memory)?),
        };
        let thread = match (placement.usage, frame) {
            (Use::None, Some(frame)) | (Use::Load(Side::Local), Some(frame)) => {
                Some(local_thread(topology, frame)?)
            }
            (Use::Load(Side::Remote), Some(frame)) => {
                // The CPUs nearest to memory without CPUs are local to it.
                let near = topology.thread_node(frame);
                let suits = |id: NodeId| id != near && has_cpus(topology, id);
                Some(remote(topology, frame, "CPUs", suits)?)
            }
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
    /// Binds the calling thread to its node. Fails with a message that names the node.
    pub fn take(&self, topology: &Topology) -> Result<()> {
        if let Some(node) = self.thread {
            let cpus = topology.node(node).map_or(&[][..], |node| &node.cpus);
            affinity::set(None, cpus).doing(format_args!("run on node {}", node.0))?;
        }
        self.confirm(topology).map(drop)
    }

    /// Binds all pages that the calling thread allocates from now on to the frame's node: those of the page cache, and those of its heap.
    pub fn bind_pages(&self, topology: &Topology) -> Result<()> {
        // A container may forbid the call, so it is made only where a placement needs it.
        match self.kernel_node(topology) {
            Some(node) => set_thread_policy(Some(node)).doing(format_args!(
                "set the memory policy of a thread to node {node} (in a container, that needs CAP_SYS_NICE)"
            )),
            None => Ok(()),
        }
    }

    /// Ends [`Seat::bind_pages`]: pages come from the node of the thread again.
    pub fn unbind_pages(&self) -> Result<()> {
        match self.frame {
            Some(_) => set_thread_policy(None).doing("reset the memory policy of a thread"),
            None => Ok(()),
        }
    }

    /// Runs `access`, and binds the pages of the page cache that it allocates to the frame's node. For threads with memory of their own, which is no
    /// part of the paper's placements of cached pages.
    pub(crate) fn with_bound_pages<T>(
        &self,
        topology: &Topology,
        access: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if self.frame.is_none() {
            return access();
        }
        self.bind_pages(topology)?;
        let result = access();
        self.unbind_pages()?;
        result
    }

    /// Asks the kernel where the calling thread may run. Returns `None` if the seat says nothing about that. Fails if it is another node.
    pub fn confirm(&self, topology: &Topology) -> Result<Option<bool>> {
        self.confirm_of(topology, None)
    }

    /// Does the same as [`Seat::confirm`] for another thread or process. `None`: the calling thread.
    pub(crate) fn confirm_of(&self, topology: &Topology, id: Option<u32>) -> Result<Option<bool>> {
        let Some(node) = self.thread else {
            return Ok(None);
        };
        let cpus = topology.node(node).map_or(&[][..], |node| &node.cpus);
        let allowed = affinity::get(id).doing("read the CPUs of a thread")?;
        match allowed.iter().find(|cpu| !cpus.contains(cpu)) {
            None => Ok(Some(true)),
            Some(other) => Err(Error::new(format!(
                "the kernel lets a thread of node {} run on CPU {other}",
                node.0
            ))),
        }
    }

    /// Returns the kernel's number of the node that the memory of the seat is bound to.
    pub fn kernel_node(&self, topology: &Topology) -> Option<u32> {
        self.frame.and_then(|node| topology.node(node)?.kernel_node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology() -> Topology {
        Topology::from_spec("virtual:2").unwrap()
    }

    fn seats_of(
        topology: &Topology,
        name: &str,
        device: Option<u16>,
        count: usize,
    ) -> Result<Vec<Seat>> {
        let places = Places {
            device_nodes: &[device.map(NodeId)],
            is_jericho: false,
            together: 1,
        };
        seats(topology, Placement::named(name)?, places, count)
    }

    /// Returns the nodes of frame and thread of each of four threads that use a device on node 1.
    fn four(name: &str) -> Vec<(u16, u16)> {
        let seats = seats_of(&topology(), name, Some(1), 4).unwrap();
        let pair = |seat: &Seat| (seat.frame.unwrap().0, seat.thread.unwrap().0);
        seats.iter().map(pair).collect()
    }

    #[test]
    fn the_papers_transfers_put_frame_and_thread_where_their_names_say() {
        assert_eq!(four("TRLCPL"), [(1, 1); 4]);
        assert_eq!(four("TRLCPR"), [(1, 0); 4]);
        assert_eq!(four("TRRCPL"), [(0, 0); 4]);
        assert_eq!(four("TRRCPR"), [(0, 1); 4]);
        assert_eq!(four("TLORPRIR"), [(1, 0); 4]);
        assert_eq!(four("TRORP0I0"), [(0, 0); 4]);
    }

    #[test]
    fn the_other_placements_use_all_nodes_wherever_the_device_is() {
        assert_eq!(four("best"), [(0, 0), (1, 1), (0, 0), (1, 1)]);
        assert_eq!(four("proper"), four("best"));
        assert_eq!(four("worst"), [(0, 1), (1, 0), (0, 1), (1, 0)]);
        assert_eq!(four("bad"), four("worst"));
        let native = seats_of(&topology(), "native", Some(1), 1).unwrap();
        assert_eq!((native[0].frame, native[0].thread), (None, None));
    }

    #[test]
    fn on_a_jericho_mount_only_threads_move() {
        let slice = |name| {
            let places = Places {
                device_nodes: &[Some(NodeId(1))],
                is_jericho: true,
                together: 1,
            };
            seats(&topology(), Placement::named(name)?, places, 2)
        };
        for (name, thread) in [("best", 1), ("worst", 0), ("bad", 0)] {
            for seat in slice(name).unwrap() {
                assert_eq!(
                    (seat.frame, seat.thread),
                    (Some(NodeId(1)), Some(NodeId(thread))),
                    "{name}"
                );
            }
        }
        for name in ["TRLCPL", "TRRCPL"] {
            let refused = slice(name).unwrap_err().to_string();
            assert!(refused.contains("use best, worst or native"), "{refused}");
        }
    }

    #[test]
    fn a_slice_on_a_node_that_the_topology_lacks_is_refused() {
        let one = Topology::from_spec("virtual:1").unwrap();
        for name in ["best", "worst", "native"] {
            let places = Places {
                device_nodes: &[Some(NodeId(0)), Some(NodeId(3))],
                is_jericho: true,
                together: 1,
            };
            let refused = seats(&one, Placement::named(name).unwrap(), places, 2);
            let refused = refused.unwrap_err().to_string();
            assert!(refused.contains("node 3"), "{refused}");
            assert!(refused.contains("virtual:1"), "{refused}");
        }
        assert_eq!(farthest(&topology(), NodeId(7), |_| true), Some(NodeId(1)));
    }

    #[test]
    fn threads_of_a_pair_are_on_one_node() {
        let places = Places {
            device_nodes: &[None],
            is_jericho: false,
            together: crate::kind::Kind::Stream.threads_together(),
        };
        let taken = seats(&topology(), Placement::named("best").unwrap(), places, 6).unwrap();
        let threads: Vec<_> = taken.iter().map(|seat| seat.thread.unwrap().0).collect();
        assert_eq!(threads, [0, 0, 1, 1, 0, 0]);
    }

    #[test]
    fn without_the_devices_node_transfers_are_refused() {
        let refused = seats_of(&topology(), "TRLCPL", None, 1);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("topology file"), "{refused}");
        assert!(seats_of(&topology(), "best", None, 1).is_ok());
    }

    #[test]
    fn nothing_is_called_remote_or_local_that_cannot_be() {
        // As with taskset on the CPUs of node 0: node 1 has CPUs, but none for this process.
        let mut confined = topology();
        confined.nodes[1].cpus.clear();
        confined.nodes[1].nearest_cpu_node = NodeId(0);
        for name in ["worst", "bad", "TRLCPR"] {
            let refused = seats_of(&confined, name, Some(0), 1).unwrap_err();
            assert!(refused.to_string().contains("no other node"), "{refused}");
        }
        let refused = seats_of(&confined, "TRLCPL", Some(1), 1).unwrap_err();
        assert!(
            refused.to_string().contains("node 1 has no CPU"),
            "{refused}"
        );
        let best = seats_of(&confined, "best", Some(1), 2).unwrap();
        assert!(best.iter().all(|seat| seat.thread == Some(NodeId(0))));
        // Effects of locality cannot appear on one node, which a note of the run says.
        let one = Topology::from_spec("virtual:1").unwrap();
        assert_eq!(
            seats_of(&one, "worst", None, 1).unwrap()[0].thread,
            Some(NodeId(0))
        );
        let absent = Seat {
            thread: Some(NodeId(1)),
            ..Seat::default()
        };
        assert!(
            std::thread::spawn(move || absent.take(&confined))
                .join()
                .unwrap()
                .is_err()
        );
    }

    #[test]
    fn memory_without_cpus_is_remote_to_all_but_the_nearest_cpus() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "node 0 cpus=0 memory=1G\nnode 1 memory=1G\ndevice /dev/null node=0\n";
        std::fs::write(file.path(), text).unwrap();
        let expander = Topology::from_spec(file.path().to_str().unwrap()).unwrap();
        let near = seats_of(&expander, "TRRCPL", Some(0), 1).unwrap();
        assert_eq!(
            (near[0].frame, near[0].thread),
            (Some(NodeId(1)), Some(NodeId(0)))
        );
        for name in ["TRRCPR", "worst"] {
            let refused = seats_of(&expander, name, Some(0), 1).unwrap_err();
            assert!(refused.to_string().contains("no other node"), "{refused}");
        }
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
