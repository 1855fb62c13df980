//! A machine from the report of a probe, which has measured a real one.
//!
//! The report has matrices `matrix[node of the CPUs][node of the memory]`. It does not say how nodes are linked, so each pair of nodes gets a
//! link of its own, with the bandwidth that was measured between the two alone. So if several pairs share a link, the prediction is too high.
//! Fields that the model does not use are ignored.

use std::collections::BTreeSet;

use serde::Deserialize;

use crate::check::{CPUS_MAX, CopyRates, Invalid, NODES_MAX, Part, Parts, RATES, build};
use crate::machine::{Device, Machine, Node};
use crate::routes::{Carries, Link};

type Matrix = Vec<Vec<Option<f64>>>;

#[derive(Deserialize)]
struct Report {
    read_bandwidth_bytes_per_s: Matrix,
    write_bandwidth_bytes_per_s: Matrix,
    one_cpu: Option<OneCpu>,
    latency_ns: Option<Latency>,
    topology: Option<Topology>,
    machine: Option<Hardware>,
    #[serde(default)]
    devices: Vec<Rates>,
}

#[derive(Deserialize)]
struct OneCpu {
    read_bandwidth_bytes_per_s: Matrix,
    write_bandwidth_bytes_per_s: Matrix,
}

/// Either the matrix, or one for memory that nothing else uses and others beside it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Latency {
    Plain(Matrix),
    Loads { unloaded: Matrix },
}

#[derive(Deserialize)]
struct Topology {
    nodes: Vec<Cpus>,
}

#[derive(Deserialize)]
struct Cpus {
    cpus: u32,
    kernel_node: Option<u32>,
}

#[derive(Deserialize)]
struct Hardware {
    #[serde(default)]
    cpu_model: String,
}

#[derive(Deserialize)]
struct Rates {
    #[serde(default)]
    name: String,
    home_node: Option<usize>,
    read_bytes_per_s: Matrix,
}

/// Reads a machine from the JSON text of a report.
pub(crate) fn machine(text: &str) -> Result<Machine, Invalid> {
    let report: Report = serde_json::from_str(text)
        .map_err(|e| Invalid::new(format!("line {}", e.line()), e.to_string()))?;
    let count = report.read_bandwidth_bytes_per_s.len();
    check(&report, count)?;
    let (read, write) = (
        &report.read_bandwidth_bytes_per_s,
        &report.write_bandwidth_bytes_per_s,
    );
    let node = |node: usize| -> Result<Part<Node>, Invalid> {
        let rate = |matrix: &Matrix| best(matrix.iter().map(|row| row[node]));
        let missing = || {
            Invalid::new(
                format!("read_bandwidth_bytes_per_s[..][{node}]"),
                format!(
                    "no figure for the memory of node {node}: probe again with a CPU that may use it, or remove the node"
                ),
            )
        };
        let read_bytes_per_s = rate(read).ok_or_else(missing)?;
        let has_cpus = read[node].iter().any(Option::is_some);
        let cpus = report.topology.as_ref().map(|t| t.nodes[node].cpus);
        let part = Node {
            host: String::new(),
            cpus: cpus.unwrap_or(if has_cpus { CPUS_MAX } else { 0 }),
            read_bytes_per_s,
            write_bytes_per_s: rate(write).unwrap_or(read_bytes_per_s),
        };
        let field = format!("topology.nodes[{node}]");
        Ok(Part { field, part })
    };
    let nodes = (0..count).map(node).collect::<Result<Vec<_>, _>>()?;
    let link = |(from, to): (usize, usize)| {
        let bytes_per_s = best([read[to][from], write[from][to]].into_iter())?;
        let part = Link {
            from,
            to,
            bytes_per_s,
            carries: Carries::All,
        };
        let field = format!("read_bandwidth_bytes_per_s[{to}][{from}]");
        Some(Part { field, part })
    };
    let pairs = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
    let links = pairs
        .filter(|(from, to)| from != to)
        .filter_map(link)
        .collect();
    let devices = report.devices.iter().enumerate();
    let devices = devices.filter_map(|(i, of)| device(of, i)).collect();
    build(Parts {
        name: name(&report),
        nodes,
        links,
        devices,
        copy: CopyRates::Matrix(copy_rates(&report, count)),
        ..Parts::default()
    })
}

fn best(rates: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    rates.flatten().max_by(f64::total_cmp)
}

/// Returns a name for people. It says when the memory of several nodes is one memory: the model does not know that.
fn name(report: &Report) -> String {
    let model = report.machine.as_ref().map(|machine| &machine.cpu_model);
    let model = model.filter(|model| !model.is_empty());
    let mut name = model.map_or("probed", |model| model).to_owned();
    let nodes = report.topology.as_ref().map_or(&[][..], |of| &of.nodes);
    let kernel_nodes: BTreeSet<_> = nodes.iter().map(|node| node.kernel_node).collect();
    let are_known = nodes.iter().all(|node| node.kernel_node.is_some());
    if are_known && kernel_nodes.len() < nodes.len() {
        name +=
            " (virtual nodes that share memory: what several of them have together is too high)";
    }
    name
}

/// Returns a device with a home node. The report has its reads only, so writes count as fast.
fn device(rates: &Rates, index: usize) -> Option<Part<Device>> {
    let read_bytes_per_s = best(rates.read_bytes_per_s.iter().flatten().copied())?;
    let part = Device {
        name: rates.name.clone(),
        node: rates.home_node?,
        read_bytes_per_s,
        write_bytes_per_s: read_bytes_per_s,
    };
    let field = format!("devices[{index}]");
    Some(Part { field, part })
}

/// Returns what one CPU copies. A copy reads and writes each byte. Where one CPU was not measured, the ratio of the latencies stands in.
fn copy_rates(report: &Report, count: usize) -> Matrix {
    let measured = |from: usize, to: usize| {
        let one = report.one_cpu.as_ref()?;
        let read = one.read_bandwidth_bytes_per_s[from][to]?;
        let write = one.write_bandwidth_bytes_per_s[from][to]?;
        Some(1.0 / (1.0 / read + 1.0 / write))
    };
    let by_latency = |from: usize, to: usize| {
        let latency = match report.latency_ns.as_ref()? {
            Latency::Plain(matrix) | Latency::Loads { unloaded: matrix } => matrix,
        };
        Some(measured(from, from)? * latency[from][from]? / latency[from][to]?)
    };
    let rate = |from, to| measured(from, to).or_else(|| by_latency(from, to));
    (0..count)
        .map(|from| (0..count).map(|to| rate(from, to)).collect())
        .collect()
}

/// Checks that all matrices have a value, or none, for each pair of nodes.
fn check(report: &Report, count: usize) -> Result<(), Invalid> {
    if !(1..=NODES_MAX).contains(&count) {
        return Err(Invalid::new(
            "read_bandwidth_bytes_per_s",
            format!("{count} nodes: expected 1 to {NODES_MAX}"),
        ));
    }
    let mut matrices = vec![
        (
            "read_bandwidth_bytes_per_s",
            &report.read_bandwidth_bytes_per_s,
        ),
        (
            "write_bandwidth_bytes_per_s",
            &report.write_bandwidth_bytes_per_s,
        ),
    ];
    if let Some(one) = &report.one_cpu {
        matrices.push((
            "one_cpu.read_bandwidth_bytes_per_s",
            &one.read_bandwidth_bytes_per_s,
        ));
        matrices.push((
            "one_cpu.write_bandwidth_bytes_per_s",
            &one.write_bandwidth_bytes_per_s,
        ));
    }
    match &report.latency_ns {
        Some(Latency::Plain(matrix) | Latency::Loads { unloaded: matrix }) => {
            matrices.push(("latency_ns", matrix));
        }
        None => {}
    }
    for (field, matrix) in matrices {
        if matrix.len() != count || matrix.iter().any(|row| row.len() != count) {
            return Err(Invalid::new(
                field,
                format!("not a value (or null) for each pair of {count} nodes: probe again"),
            ));
        }
        let bad = |value: &&f64| !value.is_finite() || **value <= 0.0 || **value > *RATES.end();
        if let Some(value) = matrix.iter().flatten().flatten().find(bad) {
            return Err(Invalid::new(
                field,
                format!(
                    "{value} is not a measured value: expected a number above 0 and at most {:e}, or null",
                    RATES.end()
                ),
            ));
        }
    }
    let homes = report.devices.iter().map(|device| device.home_node);
    if let Some((index, node)) = homes
        .enumerate()
        .find_map(|(index, home)| Some((index, home.filter(|node| *node >= count)?)))
    {
        return Err(Invalid::new(
            format!("devices[{index}].home_node"),
            format!("there is no node {node}: the nodes are 0 to {}", count - 1),
        ));
    }
    match &report.topology {
        Some(topology) if topology.nodes.len() != count => Err(Invalid::new(
            "topology.nodes",
            format!(
                "{} nodes, but the matrices have {count}: probe again",
                topology.nodes.len()
            ),
        )),
        _ => Ok(()),
    }
}
