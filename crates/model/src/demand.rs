//! What one byte of an operation takes of each resource of a machine.
//!
//! The resources are, in this order: the memory controllers of each node (share of their time), its CPUs (seconds), each direction of each
//! link (bytes), and each device (bytes that it reads, bytes that it writes).

use std::collections::BTreeMap;

use crate::fair::Flow;
use crate::machine::Machine;
use crate::routes::Carries;

/// What is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    Memory(usize),
    Cpus(usize),
    Link(usize),
    DeviceRead(usize),
    DeviceWrite(usize),
}

impl Machine {
    pub(crate) fn index(&self, resource: Resource) -> usize {
        let (nodes, links) = (self.nodes.len(), self.links.len());
        match resource {
            Resource::Memory(node) => node,
            Resource::Cpus(node) => nodes + node,
            Resource::Link(link) => 2 * nodes + link,
            Resource::DeviceRead(device) => 2 * nodes + links + 2 * device,
            Resource::DeviceWrite(device) => 2 * nodes + links + 2 * device + 1,
        }
    }

    /// Returns the capacities of all resources, by index.
    pub(crate) fn capacities(&self) -> Vec<f64> {
        let memory = self.nodes.iter().map(|_| 1.0);
        let cpus = self.nodes.iter().map(|node| f64::from(node.cpus));
        let links = self.links.iter().map(|link| link.bytes_per_s);
        let devices = self.devices.iter();
        let devices = devices.flat_map(|d| [d.read_bytes_per_s, d.write_bytes_per_s]);
        memory.chain(cpus).chain(links).chain(devices).collect()
    }

    /// Returns the name of a resource for users.
    pub(crate) fn name_of(&self, index: usize) -> String {
        let (nodes, links) = (self.nodes.len(), self.links.len());
        if index < nodes {
            return format!("memory of node {index}");
        }
        if index < 2 * nodes {
            return format!("CPUs of node {}", index - nodes);
        }
        if index < 2 * nodes + links {
            let link = &self.links[index - 2 * nodes];
            let kind = match link.carries {
                Carries::Io => "I/O link",
                Carries::All | Carries::Cpu => "link",
            };
            return format!("{kind} {} to {}", link.from, link.to);
        }
        let device = &self.devices[(index - 2 * nodes - links) / 2];
        format!("{} of node {}", device.name, device.node)
    }
}

/// What one byte takes. It is built up from parts of bytes, whose sum is 1 for a complete operation.
#[derive(Clone, Debug)]
pub(crate) struct Demand<'m> {
    machine: &'m Machine,
    uses: BTreeMap<usize, f64>,
    /// Seconds of the thread's own CPU.
    thread_s: f64,
}

impl<'m> Demand<'m> {
    pub fn new(machine: &'m Machine) -> Demand<'m> {
        Demand {
            machine,
            uses: BTreeMap::new(),
            thread_s: 0.0,
        }
    }

    fn take(&mut self, resource: Resource, amount: f64) {
        if amount > 0.0 {
            *self.uses.entry(self.machine.index(resource)).or_default() += amount;
        }
    }

    fn take_route(&mut self, carries: Carries, from: usize, to: usize, amount: f64) {
        if amount <= 0.0 {
            return;
        }
        for (link, part) in self.machine.routes.parts(carries, from, to) {
            self.take(Resource::Link(link), part * amount);
        }
    }

    /// A thread on the node `on` copies a part of a byte from memory of one node to memory of another one.
    pub fn copy(&mut self, on: usize, from: usize, to: usize, part: f64) {
        self.thread_s += self.copy_by_others(on, from, to, part);
    }

    /// Like `copy`, by a thread that is not the one whose rate is wanted. Returns the seconds of its CPU.
    pub fn copy_by_others(&mut self, on: usize, from: usize, to: usize, part: f64) -> f64 {
        let machine = self.machine;
        let traffic = machine.traffic;
        self.take(
            Resource::Memory(from),
            part / machine.nodes[from].read_bytes_per_s,
        );
        self.take_route(Carries::Cpu, from, on, part * traffic.read_with);
        self.take_route(Carries::Cpu, on, from, part * traffic.read_against);
        self.take(
            Resource::Memory(to),
            part / machine.nodes[to].write_bytes_per_s,
        );
        self.take_route(Carries::Cpu, on, to, part * traffic.write_with);
        self.take_route(Carries::Cpu, to, on, part * traffic.write_against);
        let (Some(read), Some(write)) = (machine.copy[on][from], machine.copy[on][to]) else {
            return 0.0;
        };
        // Each of the two sides takes half the time that a copy takes with both sides there.
        let seconds = part * (0.5 / read + 0.5 / write);
        self.take(Resource::Cpus(on), seconds);
        seconds
    }

    /// A thread on the node `on` reads a part of a byte.
    pub fn read(&mut self, on: usize, from: usize, part: f64) {
        let machine = self.machine;
        self.take(
            Resource::Memory(from),
            part / machine.nodes[from].read_bytes_per_s,
        );
        self.take_route(Carries::Cpu, from, on, part * machine.traffic.read_with);
        self.take_route(Carries::Cpu, on, from, part * machine.traffic.read_against);
        if let Some(rate) = machine.copy[on][from] {
            self.take(Resource::Cpus(on), part * 0.5 / rate);
            self.thread_s += part * 0.5 / rate;
        }
    }

    /// Devices of a node, in equal parts, write a part of a byte into memory of the node `to`.
    pub fn transfer_in(&mut self, devices: &[usize], to: usize, part: f64) {
        let each = part / devices.len() as f64;
        for device in devices {
            self.take(Resource::DeviceRead(*device), each);
            self.take_route(Carries::Io, self.machine.devices[*device].node, to, each);
        }
        self.take(
            Resource::Memory(to),
            part / self.machine.nodes[to].write_bytes_per_s,
        );
    }

    /// Devices of a node, in equal parts, read a part of a byte from memory of the node `from`.
    pub fn transfer_out(&mut self, devices: &[usize], from: usize, part: f64) {
        let each = part / devices.len() as f64;
        for device in devices {
            self.take(Resource::DeviceWrite(*device), each);
            self.take_route(Carries::Io, from, self.machine.devices[*device].node, each);
        }
        self.take(
            Resource::Memory(from),
            part / self.machine.nodes[from].read_bytes_per_s,
        );
    }

    /// Returns `count` threads that each do this.
    pub fn flow(self, count: u32) -> Flow {
        Flow {
            uses: self.uses.into_iter().collect(),
            limit: (self.thread_s > 0.0).then(|| 1.0 / self.thread_s),
            count,
        }
    }
}
