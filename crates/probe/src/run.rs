//! The order of the measurements.
//!
//! One node's memory is measured after the other's, so that a probe never holds memory of two nodes. Only one pair of nodes is busy at a time.

use std::path::Path;
use std::sync::Arc;

use jericho_storage::Device;
use jericho_sys::limits::Memory;
use jericho_sys::memory::STREAM_WRITES;
use jericho_sys::process::{cpu_model, kernel_release};
use jericho_topology::{Node, NodeId, Topology};

use crate::buffer::{self, Buffer};
use crate::device;
use crate::digest::digest;
use crate::error::ProbeError;
use crate::memory::{bandwidth, latency, migration};
use crate::plan::{NODES_MAX, Options, Plan};
use crate::report::{
    FORMAT, Latency, Machine, NodeReport, OneCpu, Report, Skipped, TopologyReport, nothing,
};
use crate::streams::Access;
use crate::threads::Reason;
use crate::time;

/// How far a probe is.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Steps that have ended.
    pub done: u32,
    /// All steps.
    pub all: u32,
    /// The step that begins.
    pub what: String,
}

/// Measures the nodes of a topology, and devices. Tells `progress` before each step. Fails before the first measurement, or not at all: what
/// cannot be measured is in [`Report::skipped`].
pub fn run(
    topology: &Topology,
    options: &Options,
    progress: impl FnMut(&Progress),
) -> Result<Report, ProbeError> {
    let count = topology.nodes.len();
    if count > NODES_MAX {
        return Err(ProbeError::Nodes { count });
    }
    let memory = Memory::read().map_err(ProbeError::Memory)?;
    let plan = Plan::new(topology, options);
    let mut devices = vec![];
    let mut report = empty(topology, options, &plan);
    for path in &options.devices {
        let device = device::open(path)?;
        let facts = device::facts(&*device, path, topology);
        report.devices.push(facts);
        devices.push(device);
    }
    report.notes = notes(topology, &report);
    let mut probe = Probe {
        topology,
        plan: &plan,
        memory,
        report,
        done: 0,
        progress,
    };
    for to in &plan.to {
        probe.measure_memory(*to);
    }
    for (index, device) in devices.iter().enumerate() {
        probe.measure_device(index, device);
    }
    Ok(probe.report)
}

/// Returns a report without measurements.
fn empty(topology: &Topology, options: &Options, plan: &Plan) -> Report {
    let count = topology.nodes.len();
    let time_s = time::now_s();
    Report {
        format: FORMAT,
        time_s,
        time: time::text(time_s),
        quick: options.quick,
        topology: TopologyReport {
            digest: digest(topology),
            source: topology.source.clone(),
            is_virtual: topology.is_virtual,
            nodes: topology.nodes.iter().map(node_report(topology)).collect(),
        },
        machine: Machine {
            cpu_model: cpu_model(),
            kernel: kernel_release(),
            last_level_cache_bytes: plan.last_level_cache_bytes,
        },
        write_stores: STREAM_WRITES.into(),
        read_bandwidth_bytes_per_s: nothing(count),
        write_bandwidth_bytes_per_s: nothing(count),
        one_cpu: OneCpu {
            read_bandwidth_bytes_per_s: nothing(count),
            write_bandwidth_bytes_per_s: nothing(count),
        },
        latency_ns: Latency {
            unloaded: nothing(count),
            loaded: nothing(count),
        },
        migration_ns: nothing(count),
        devices: vec![],
        skipped: vec![],
        notes: vec![],
    }
}

fn node_report(topology: &Topology) -> impl Fn(&Node) -> NodeReport {
    |node| NodeReport {
        id: node.id.0,
        cpus: node.cpus.len() as u32,
        has_memory: node.memory_bytes > 0,
        kernel_node: node.kernel_node,
        buffer_bytes: 0,
        huge_bytes: 0,
        loaded_by: match (load_of(topology, node), node.cpus.len()) {
            (load, _) if load.is_empty() => "none",
            (_, 1) => "others",
            _ => "node",
        }
        .into(),
    }
}

/// Returns the CPUs that stream while the first CPU of a node measures the loaded latency: the others of the node, or, if there are none,
/// those of all other nodes.
fn load_of(topology: &Topology, node: &Node) -> Vec<u32> {
    let Some((first, others)) = node.cpus.split_first() else {
        return vec![];
    };
    if !others.is_empty() {
        return others.to_vec();
    }
    let all = topology.nodes.iter().flat_map(|node| &node.cpus).copied();
    let mut load: Vec<u32> = all.filter(|cpu| cpu != first).collect();
    load.sort_unstable();
    load.dedup();
    load
}

/// Returns what a reader should know before the figures.
fn notes(topology: &Topology, report: &Report) -> Vec<String> {
    let mut notes = vec![];
    let mut kernel_nodes: Vec<_> = topology.nodes.iter().map(|node| node.kernel_node).collect();
    kernel_nodes.sort_unstable();
    kernel_nodes.dedup();
    match (topology.nodes.len(), kernel_nodes.len()) {
        (1, _) => notes.push(
            "This machine has one node: effects of locality cannot appear on it.".into(),
        ),
        (_, 1) => notes.push(
            "The memory of all these virtual nodes is on one node of the kernel: effects of locality cannot appear. \
             Differences are those of CPUs, or noise."
                .into(),
        ),
        _ => {}
    }
    if report
        .topology
        .nodes
        .iter()
        .any(|node| node.loaded_by == "others")
    {
        notes.push(
            "A node with one CPU has no other CPUs of its own: during its loaded latency, the CPUs of all other nodes stream.".into(),
        );
    }
    if report
        .topology
        .nodes
        .iter()
        .all(|node| node.loaded_by == "none")
    {
        notes.push("There is one CPU, so there is no loaded latency.".into());
    }
    if cfg!(debug_assertions) {
        notes.push(
            "This build of jericho is not optimized: bandwidths are those of the program.".into(),
        );
    }
    for device in &report.devices {
        if device.description.contains("buffered I/O") {
            notes.push(format!(
                "{} does not accept direct I/O: its rates are those of the page cache.",
                device.name
            ));
        }
    }
    notes
}

/// A probe in progress.
struct Probe<'a, P> {
    topology: &'a Topology,
    plan: &'a Plan,
    memory: Memory,
    report: Report,
    done: u32,
    progress: P,
}

impl<P: FnMut(&Progress)> Probe<'_, P> {
    fn begin(&mut self, what: String) {
        (self.progress)(&Progress {
            done: self.done,
            all: self.plan.steps(),
            what,
        });
        self.done += 1;
    }

    fn skip(&mut self, what: String, reason: Reason) {
        self.report.skipped.push(Skipped { what, reason });
    }

    fn measure_memory(&mut self, to: NodeId) {
        let Some(node) = self.topology.node(to) else {
            return;
        };
        let buffer = match Buffer::new(node, self.plan, &self.memory) {
            Ok(buffer) => buffer,
            Err(reason) => {
                self.done += self.plan.from.len() as u32;
                return self.skip(format!("memory of node {to}"), reason);
            }
        };
        let facts = &mut self.report.topology.nodes[usize::from(to.0)];
        facts.buffer_bytes = buffer.mapping.len() as u64;
        facts.huge_bytes = buffer.huge_bytes as u64;
        for from in &self.plan.from {
            self.begin(format!("node {from} to memory of node {to}"));
            if let Err(reason) = self.measure_pair(*from, to, &buffer) {
                self.skip(format!("node {from} to memory of node {to}"), reason);
            }
        }
        self.measure_migration(node, &buffer);
    }

    fn measure_pair(&mut self, from: NodeId, to: NodeId, buffer: &Buffer) -> Result<(), Reason> {
        let Some(node) = self.topology.node(from) else {
            return Ok(());
        };
        let (cpus, time) = (&node.cpus[..], self.plan.measurement);
        let (row, column) = (usize::from(from.0), usize::from(to.0));
        let (first, load) = (cpus[0], load_of(self.topology, node));
        let report = &mut self.report;
        // Latency first: the streams of writes leave the caches full of dirty lines.
        let unloaded = latency(first, &[], buffer, time)?;
        report.latency_ns.unloaded[row][column] = Some(unloaded);
        if !load.is_empty() {
            let loaded = latency(first, &load, buffer, time)?;
            report.latency_ns.loaded[row][column] = Some(loaded);
        }
        let one = &mut report.one_cpu;
        for (matrix, cpus, access) in [
            (
                &mut one.read_bandwidth_bytes_per_s,
                &cpus[..1],
                Access::Read,
            ),
            (&mut report.read_bandwidth_bytes_per_s, cpus, Access::Read),
            (
                &mut one.write_bandwidth_bytes_per_s,
                &cpus[..1],
                Access::Write,
            ),
            (&mut report.write_bandwidth_bytes_per_s, cpus, Access::Write),
        ] {
            matrix[row][column] = Some(bandwidth(cpus, buffer, access, time)?);
        }
        Ok(())
    }

    /// Measures moves from a node to each other node, of a thread whose memory is on the first.
    fn measure_migration(&mut self, from: &Node, buffer: &Buffer) {
        let working_set = self.plan.working_set_bytes as usize;
        for to in &self.topology.nodes {
            if to.id == from.id {
                continue;
            }
            match migration(&from.cpus, &to.cpus, buffer, working_set) {
                Ok(cost) => {
                    let (row, column) = (usize::from(from.id.0), usize::from(to.id.0));
                    self.report.migration_ns[row][column] = cost;
                }
                Err(reason) => self.skip(
                    format!("moves from node {} to node {}", from.id, to.id),
                    reason,
                ),
            }
        }
    }

    fn measure_device(&mut self, index: usize, device: &Arc<dyn Device>) {
        let name = self.report.devices[index].name.clone();
        for to in &self.plan.to {
            let Some(node) = self.topology.node(*to) else {
                continue;
            };
            let buffer = match buffer::bound(node, device::BUFFER_BYTES) {
                Ok((mapping, _)) => Arc::new(mapping),
                Err(reason) => {
                    self.done += self.plan.from.len() as u32;
                    self.skip(format!("{name} into memory of node {to}"), reason);
                    continue;
                }
            };
            for from in &self.plan.from {
                self.begin(format!("{name} by node {from} into memory of node {to}"));
                let cpus = &self.topology.nodes[usize::from(from.0)].cpus;
                match device::read_rate(device, cpus, &buffer, self.plan.measurement) {
                    Ok(rate) => {
                        let (row, column) = (usize::from(from.0), usize::from(to.0));
                        self.report.devices[index].read_bytes_per_s[row][column] = Some(rate);
                    }
                    Err(reason) => {
                        let name = Path::new(&name).display();
                        self.skip(
                            format!("{name} by node {from} into memory of node {to}"),
                            reason,
                        );
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
