//! A machine: nodes, links between them, devices, and the rate of one thread.
//!
//! Every [`Machine`] comes from `check`: indexes are in bounds, rates are positive and bounded, and the nodes of a host reach each other.

use crate::routes::{Link, Routes};

/// A machine, or several that are connected by a network.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Name for users.
    pub name: String,
    /// The nodes; indexes are their numbers.
    pub nodes: Vec<Node>,
    /// The directions of the links.
    pub links: Vec<Link>,
    /// Storage controllers and network interfaces.
    pub devices: Vec<Device>,
    /// Bytes on links for each byte of data.
    pub traffic: Traffic,
    /// `copy[n][m]`: bytes that one thread on node n copies in a second while it has the machine alone, from memory of m to memory of m. `None`: the thread is never the limit.
    pub copy: Vec<Vec<Option<f64>>>,
    /// Share of accesses that are local in the placement *native*.
    pub native_local_share: Option<f64>,
    pub(crate) routes: Routes,
}

/// A node.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Nodes of one host have the same name. Hosts are connected by their network interfaces only.
    pub host: String,
    /// Its CPUs.
    pub cpus: u32,
    /// Bytes per second that its memory controllers read at most.
    pub read_bytes_per_s: f64,
    /// Bytes per second that its memory controllers write at most.
    pub write_bytes_per_s: f64,
}

/// A storage controller or a network interface.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Name for users.
    pub name: String,
    /// Node that it is attached to.
    pub node: usize,
    /// From the device to memory.
    pub read_bytes_per_s: f64,
    /// From memory to the device.
    pub write_bytes_per_s: f64,
}

/// Bytes that a link carries for one byte of data: the data, headers, and messages that keep caches coherent.
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Traffic {
    /// A thread reads memory of another node: from the memory to the thread.
    pub read_with: f64,
    /// The same, in the other direction.
    pub read_against: f64,
    /// A thread writes memory of another node: from the thread to the memory.
    pub write_with: f64,
    /// The same, in the other direction.
    pub write_against: f64,
}

impl Default for Traffic {
    fn default() -> Traffic {
        Traffic {
            read_with: 1.0,
            read_against: 0.0,
            write_with: 1.0,
            write_against: 0.0,
        }
    }
}

impl Machine {
    /// Returns the nodes of each host, in the order in which the hosts appear.
    pub fn hosts(&self) -> Vec<Vec<usize>> {
        let mut hosts: Vec<(&str, Vec<usize>)> = Vec::new();
        for (node, of) in self.nodes.iter().enumerate() {
            match hosts.iter_mut().find(|(name, _)| *name == of.host) {
                Some((_, nodes)) => nodes.push(node),
                None => hosts.push((&of.host, vec![node])),
            }
        }
        hosts.into_iter().map(|(_, nodes)| nodes).collect()
    }

    /// Returns whether two nodes are of one host.
    pub(crate) fn is_one_host(&self, a: usize, b: usize) -> bool {
        self.nodes[a].host == self.nodes[b].host
    }

    /// Returns the node with CPUs after this one, of all nodes of its host: the next one that has some. `None`: no other node of the host has CPUs.
    pub(crate) fn next_worker(&self, node: usize) -> Option<usize> {
        let count = self.nodes.len();
        let after = (1..count).map(|by| (node + by) % count);
        after
            .filter(|other| self.is_one_host(node, *other))
            .find(|other| self.nodes[*other].cpus > 0)
    }

    /// Returns the indexes of the devices of a node.
    pub(crate) fn devices_of(&self, node: usize) -> Vec<usize> {
        let devices = self.devices.iter().enumerate();
        devices
            .filter(|(_, d)| d.node == node)
            .map(|(i, _)| i)
            .collect()
    }
}
