//! I/O to devices of another host, in the configurations of the Tyche paper (tables 2 and 3).
//!
//! The first host of the machine is the initiator, the second one the target. The network interfaces of the initiator's first node are
//! connected with those of the target's first node, and so on. A write goes from the application's buffer to the interfaces of one node, and on
//! the target from these into pages of Tyche, without copies (section 2). A read goes the other way, and the initiator copies it once, from
//! pages of Tyche to the buffer. If the target has a storage device, it is emulated in memory, and the target's CPUs copy.

use crate::demand::Demand;
use crate::fair::Flow;
use crate::machine::Machine;
use crate::threads::{PlacementError, in_turn};

/// Where the application's buffers are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Buffers {
    /// On the node of the thread.
    Local,
    /// This share on the first node, for all threads, and the rest on the others.
    OnFirst(f64),
}

/// A configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// The application writes; otherwise it reads.
    pub is_write: bool,
    /// The application's buffers.
    pub buffers: Buffers,
    /// Which of a host's nodes have the interfaces that are used and, if this differs, the memory and threads. `None`: interfaces of all nodes.
    pub one_node: Option<OneNode>,
    /// Requests go to interfaces of the buffer's node; otherwise to all in turn.
    pub is_scheduler_aware: bool,
    /// Tyche's pages and threads are on the node of their interface; otherwise anywhere.
    pub is_tyche_local: bool,
    /// The target copies to or from storage in memory.
    pub has_storage: bool,
}

/// Interfaces of one node only (table 2). Numbers are positions within a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OneNode {
    /// Node of the interfaces.
    pub interfaces: usize,
    /// Node of all memory and threads.
    pub memory: usize,
}

/// Returns the configuration of table 2: three interfaces on the first node, memory and threads there (*Ideal*) or on the second node (*Worst*).
pub(crate) fn table_2(is_ideal: bool, is_write: bool, has_storage: bool) -> Network {
    Network {
        is_write,
        buffers: Buffers::Local,
        one_node: Some(OneNode {
            interfaces: 0,
            memory: usize::from(!is_ideal),
        }),
        is_scheduler_aware: true,
        is_tyche_local: true,
        has_storage,
    }
}

/// Returns *Ideal* of table 3.
pub(crate) fn ideal(is_write: bool) -> Network {
    Network {
        is_write,
        buffers: Buffers::Local,
        one_node: None,
        is_scheduler_aware: true,
        is_tyche_local: true,
        has_storage: true,
    }
}

/// Returns *T-Numa* (`is_tyche_local`) or *No-Opt* of table 3. `on_first` is the share of buffers on the first node.
pub(crate) fn round_robin(is_write: bool, on_first: f64, is_tyche_local: bool) -> Network {
    Network {
        buffers: Buffers::OnFirst(on_first),
        is_scheduler_aware: false,
        is_tyche_local,
        ..ideal(is_write)
    }
}

/// Share of zmIO's buffers on node 0 (section 6.1): 99 % for writes, around 75 % for reads.
pub(crate) fn zmio_on_first(is_write: bool) -> f64 {
    if is_write { 0.99 } else { 0.75 }
}

/// Share of FIO's buffers on node 0: they are balanced (section 6.2).
pub(crate) const FIO_ON_FIRST: f64 = 0.5;

/// Returns the names of all configurations.
pub(crate) fn names() -> Vec<(String, Network)> {
    let mut names = Vec::new();
    for (operation, is_write) in [("writes", true), ("reads", false)] {
        let zmio = zmio_on_first(is_write);
        for (name, network) in [
            ("ideal", ideal(is_write)),
            ("t-numa", round_robin(is_write, zmio, true)),
            ("no-opt", round_robin(is_write, zmio, false)),
            ("t-numa-balanced", round_robin(is_write, FIO_ON_FIRST, true)),
            (
                "no-opt-balanced",
                round_robin(is_write, FIO_ON_FIRST, false),
            ),
            ("ideal-one-node", table_2(true, is_write, false)),
            ("worst-one-node", table_2(false, is_write, false)),
        ] {
            names.push((format!("{name}-{operation}"), network));
        }
    }
    names
}

pub(crate) fn flows(
    machine: &Machine,
    network: Network,
    threads: u32,
) -> Result<Vec<Flow>, PlacementError> {
    let lacks = |what| PlacementError::Lacks {
        machine: machine.name.clone(),
        what,
    };
    let hosts = machine.hosts();
    let [initiator, target] = hosts.as_slice() else {
        return Err(lacks("two hosts"));
    };
    let has_devices = |g: usize| {
        let of = |host: &[usize]| {
            host.get(g)
                .is_some_and(|n| !machine.devices_of(*n).is_empty())
        };
        of(initiator) && of(target)
    };
    if initiator.len() != target.len() || initiator.len() < 2 {
        return Err(lacks("two hosts with as many nodes, and at least two"));
    }
    let is_used = |g: &usize| network.one_node.is_none_or(|one| one.interfaces == *g);
    if !(0..initiator.len()).filter(is_used).all(has_devices) {
        return Err(lacks("devices on the nodes of both hosts"));
    }
    let paths = Paths {
        machine,
        network,
        initiator,
        target,
    };
    let nodes: Vec<usize> = (0..initiator.len()).collect();
    let flow = |(node, count)| paths.demand(node).flow(count);
    Ok(in_turn(&nodes, threads).map(flow).collect())
}

/// The paths of requests. Nodes are positions within a host.
struct Paths<'a> {
    machine: &'a Machine,
    network: Network,
    initiator: &'a [usize],
    target: &'a [usize],
}

impl<'a> Paths<'a> {
    /// Returns what a byte of a thread on this node takes.
    fn demand(&self, thread: usize) -> Demand<'a> {
        let mut demand = Demand::new(self.machine);
        for (buffer, by_buffer) in self.buffers(thread) {
            for (interfaces, by_interfaces) in self.interfaces(buffer) {
                let part = by_buffer * by_interfaces;
                for (pages, by_pages) in self.pages(interfaces) {
                    let part = part * by_pages;
                    if self.network.is_write {
                        self.write_at_initiator(&mut demand, buffer, interfaces, part);
                    } else {
                        self.read_at_initiator(&mut demand, buffer, interfaces, pages, part);
                    }
                    self.at_target(&mut demand, interfaces, pages, part);
                }
            }
        }
        demand
    }

    fn all(&self) -> Vec<(usize, f64)> {
        let count = self.initiator.len();
        (0..count).map(|node| (node, 1.0 / count as f64)).collect()
    }

    fn buffers(&self, thread: usize) -> Vec<(usize, f64)> {
        match (self.network.one_node, self.network.buffers) {
            (Some(one), _) => vec![(one.memory, 1.0)],
            (None, Buffers::Local) => vec![(thread, 1.0)],
            (None, Buffers::OnFirst(share)) => {
                let rest = (1.0 - share) / (self.initiator.len() - 1).max(1) as f64;
                let part = |node| if node == 0 { share } else { rest };
                (0..self.initiator.len())
                    .map(|node| (node, part(node)))
                    .collect()
            }
        }
    }

    fn interfaces(&self, buffer: usize) -> Vec<(usize, f64)> {
        match self.network.one_node {
            Some(one) => vec![(one.interfaces, 1.0)],
            None if self.network.is_scheduler_aware => vec![(buffer, 1.0)],
            None => self.all(),
        }
    }

    /// Returns where Tyche's pages are, on both hosts.
    fn pages(&self, interfaces: usize) -> Vec<(usize, f64)> {
        match self.network.one_node {
            Some(one) => vec![(one.memory, 1.0)],
            None if self.network.is_tyche_local => vec![(interfaces, 1.0)],
            None => self.all(),
        }
    }

    fn devices(&self, node: usize) -> Vec<usize> {
        self.machine.devices_of(node)
    }

    fn write_at_initiator(&self, demand: &mut Demand, buffer: usize, interfaces: usize, part: f64) {
        let devices = self.devices(self.initiator[interfaces]);
        demand.transfer_out(&devices, self.initiator[buffer], part);
    }

    fn read_at_initiator(
        &self,
        demand: &mut Demand,
        buffer: usize,
        interfaces: usize,
        pages: usize,
        part: f64,
    ) {
        let devices = self.devices(self.initiator[interfaces]);
        let pages = self.initiator[pages];
        demand.transfer_in(&devices, pages, part);
        demand.copy_by_others(pages, pages, self.initiator[buffer], part);
    }

    fn at_target(&self, demand: &mut Demand, interfaces: usize, pages: usize, part: f64) {
        let devices = self.devices(self.target[interfaces]);
        if self.network.is_write {
            demand.transfer_in(&devices, self.target[pages], part);
        } else {
            demand.transfer_out(&devices, self.target[pages], part);
        }
        if !self.network.has_storage {
            return;
        }
        let everywhere = self.network.one_node.is_none() && !self.network.is_tyche_local;
        let storage = if everywhere {
            self.all()
        } else {
            vec![(pages, 1.0)]
        };
        for (storage, by_storage) in storage {
            let (pages, storage) = (self.target[pages], self.target[storage]);
            let (from, to) = if self.network.is_write {
                (pages, storage)
            } else {
                (storage, pages)
            };
            demand.copy_by_others(pages, from, to, part * by_storage);
        }
    }
}
