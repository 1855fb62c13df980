//! The parts of a machine become one here, after all of them are checked.

use crate::machine::{Device, Machine, Node, Traffic};
use crate::routes::{Carries, Link, Routes};

/// Bounds of numbers of a machine. Larger ones are mistakes, or would make a prediction take for ever.
pub const NODES_MAX: usize = 64;
pub(crate) const CPUS_MAX: u32 = 4096;
pub(crate) const LINKS_MAX: usize = 4096;
pub(crate) const DEVICES_MAX: usize = 1024;
const NAME_CHARS_MAX: usize = 200;
/// A byte a second, and a pebibyte a second.
pub(crate) const RATES: std::ops::RangeInclusive<f64> = 1.0..=(1u64 << 50) as f64;
/// Bounds of factors: times relative to local ones, and bytes on a link for each byte of data.
pub(crate) const FACTORS: std::ops::RangeInclusive<f64> = 0.0..=1000.0;

/// What is wrong with a machine.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct Invalid {
    /// The field, as the file names it.
    pub field: String,
    /// What is wrong, and what to do.
    pub problem: String,
}

impl Invalid {
    pub(crate) fn new(field: impl Into<String>, problem: impl Into<String>) -> Invalid {
        Invalid {
            field: field.into(),
            problem: problem.into(),
        }
    }
}

/// A part of a machine, and the field of the source that describes it, for example `node[0]`. One field may describe several equal parts.
#[derive(Clone, Debug)]
pub(crate) struct Part<T> {
    pub field: String,
    pub part: T,
}

/// The parts of a machine before they are checked.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parts {
    pub name: String,
    pub nodes: Vec<Part<Node>>,
    pub links: Vec<Part<Link>>,
    pub devices: Vec<Part<Device>>,
    pub traffic: Traffic,
    pub copy: CopyRates,
    pub native_local_share: Option<f64>,
}

/// What one thread can copy, as the source of a machine says it.
#[derive(Clone, Debug)]
pub(crate) enum CopyRates {
    /// Local rate, and the time of a byte relative to that, by the number of hops. The last time is also that of more hops.
    ByHops { local: f64, times: Vec<f64> },
    /// `matrix[node of the thread][node of the memory]`.
    Matrix(Vec<Vec<Option<f64>>>),
}

impl Default for CopyRates {
    fn default() -> CopyRates {
        CopyRates::Matrix(Vec::new())
    }
}

impl CopyRates {
    fn matrix(self, nodes: usize, routes: &Routes) -> Vec<Vec<Option<f64>>> {
        let (local, times) = match self {
            CopyRates::Matrix(rows) if rows.is_empty() => return vec![vec![None; nodes]; nodes],
            CopyRates::Matrix(rows) => return rows,
            CopyRates::ByHops { local, times } => (local, times),
        };
        let rate = |from, to| {
            let hops = routes.hops(Carries::Cpu, from, to)?;
            let time = times.get(hops as usize).or(times.last());
            Some(local / time.copied().unwrap_or(1.0))
        };
        let row = |from| (0..nodes).map(|to| rate(from, to)).collect();
        (0..nodes).map(row).collect()
    }
}

/// Returns the machine of these parts, or what is wrong with them.
pub(crate) fn build(parts: Parts) -> Result<Machine, Invalid> {
    check_sizes(&parts)?;
    check_name("name", &parts.name)?;
    check_nodes(&parts)?;
    check_links(&parts)?;
    check_devices(&parts)?;
    check_threads(&parts)?;
    let links = bare(parts.links);
    let routes = Routes::new(parts.nodes.len(), &links);
    let machine = Machine {
        name: parts.name,
        nodes: bare(parts.nodes),
        links,
        devices: bare(parts.devices),
        traffic: parts.traffic,
        copy: parts.copy.matrix(routes.nodes(), &routes),
        native_local_share: parts.native_local_share,
        routes,
    };
    check_routes(&machine)?;
    Ok(machine)
}

fn bare<T>(parts: Vec<Part<T>>) -> Vec<T> {
    parts.into_iter().map(|part| part.part).collect()
}

fn check_routes(machine: &Machine) -> Result<(), Invalid> {
    let has_cpus = |node: usize| machine.nodes[node].cpus > 0;
    for (from, to) in pairs(machine.nodes.len())
        .filter(|(a, b)| machine.is_one_host(*a, *b) && (has_cpus(*a) || has_cpus(*b)))
    {
        for (carries, what) in [
            (Carries::Cpu, "accesses of CPUs"),
            (Carries::Io, "transfers of devices"),
        ] {
            if machine.routes.hops(carries, from, to).is_none() {
                return Err(Invalid::new(
                    "link",
                    format!(
                        "no links lead from node {from} to node {to} for {what}: add a [[link]], or give the nodes different hosts; \
                         in a report of jericho probe the figures of these nodes are missing"
                    ),
                ));
            }
        }
    }
    Ok(())
}

fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count).flat_map(move |from| (0..count).map(move |to| (from, to)))
}

/// Fails if there are too many parts of a kind.
pub(crate) fn at_most(field: &str, count: usize, max: usize) -> Result<(), Invalid> {
    if count > max {
        return Err(Invalid::new(
            field,
            format!("{count} entries: a machine has at most {max}"),
        ));
    }
    Ok(())
}

/// Checks a name: it is shown on terminals.
fn check_name(field: &str, name: &str) -> Result<(), Invalid> {
    if name.chars().count() <= NAME_CHARS_MAX && !name.contains(char::is_control) {
        return Ok(());
    }
    Err(Invalid::new(
        field,
        format!("expected one line of at most {NAME_CHARS_MAX} characters"),
    ))
}

pub(crate) fn check_rate(field: impl FnOnce() -> String, rate: f64) -> Result<(), Invalid> {
    if RATES.contains(&rate) {
        return Ok(());
    }
    Err(Invalid::new(
        field(),
        format!(
            "{rate} is not a rate: expected bytes per second from 1 to {:e}",
            RATES.end()
        ),
    ))
}

pub(crate) fn check_factor(field: impl FnOnce() -> String, factor: f64) -> Result<(), Invalid> {
    if FACTORS.contains(&factor) {
        return Ok(());
    }
    Err(Invalid::new(
        field(),
        format!("{factor} is out of bounds: expected 0 to {}", FACTORS.end()),
    ))
}

fn check_node(field: impl FnOnce() -> String, node: usize, count: usize) -> Result<(), Invalid> {
    if node < count {
        return Ok(());
    }
    Err(Invalid::new(
        field(),
        format!(
            "there is no node {node}: the nodes are 0 to {}",
            count.saturating_sub(1)
        ),
    ))
}

fn check_sizes(parts: &Parts) -> Result<(), Invalid> {
    if parts.nodes.is_empty() {
        return Err(Invalid::new("node", "there is no node: add a [[node]]"));
    }
    at_most("node", parts.nodes.len(), NODES_MAX)?;
    at_most("link", parts.links.len(), LINKS_MAX)?;
    at_most("device", parts.devices.len(), DEVICES_MAX)
}

fn check_nodes(parts: &Parts) -> Result<(), Invalid> {
    for Part { field, part: node } in &parts.nodes {
        if node.cpus > CPUS_MAX {
            return Err(Invalid::new(
                format!("{field}.cpus"),
                format!("{} CPUs: expected 0 to {CPUS_MAX}", node.cpus),
            ));
        }
        check_rate(
            || format!("{field}.read_bytes_per_s"),
            node.read_bytes_per_s,
        )?;
        check_rate(
            || format!("{field}.write_bytes_per_s"),
            node.write_bytes_per_s,
        )?;
    }
    if parts.nodes.iter().all(|node| node.part.cpus == 0) {
        return Err(Invalid::new("node", "no node has CPUs: set cpus of one"));
    }
    Ok(())
}

fn check_links(parts: &Parts) -> Result<(), Invalid> {
    let count = parts.nodes.len();
    for Part { field, part: link } in &parts.links {
        let nodes = || format!("{field}.nodes");
        check_node(nodes, link.from, count)?;
        check_node(nodes, link.to, count)?;
        if link.from == link.to {
            return Err(Invalid::new(
                nodes(),
                format!(
                    "a link from node {0} to node {0}: name two nodes",
                    link.from
                ),
            ));
        }
        if parts.nodes[link.from].part.host != parts.nodes[link.to].part.host {
            return Err(Invalid::new(
                nodes(),
                "the nodes are of two hosts: these are connected by devices only",
            ));
        }
        check_rate(|| format!("{field}.bytes_per_s"), link.bytes_per_s)?;
    }
    Ok(())
}

fn check_devices(parts: &Parts) -> Result<(), Invalid> {
    for Part {
        field,
        part: device,
    } in &parts.devices
    {
        check_name(&format!("{field}.name"), &device.name)?;
        check_node(|| format!("{field}.node"), device.node, parts.nodes.len())?;
        check_rate(
            || format!("{field}.read_bytes_per_s"),
            device.read_bytes_per_s,
        )?;
        check_rate(
            || format!("{field}.write_bytes_per_s"),
            device.write_bytes_per_s,
        )?;
    }
    Ok(())
}

fn check_threads(parts: &Parts) -> Result<(), Invalid> {
    for (field, factor) in [
        ("traffic.read_with", parts.traffic.read_with),
        ("traffic.read_against", parts.traffic.read_against),
        ("traffic.write_with", parts.traffic.write_with),
        ("traffic.write_against", parts.traffic.write_against),
    ] {
        check_factor(|| field.to_owned(), factor)?;
    }
    match &parts.copy {
        CopyRates::ByHops { local, times } => {
            check_rate(|| "thread.copy_bytes_per_s".to_owned(), *local)?;
            for (hops, time) in times.iter().enumerate() {
                let is_time = (0.01..=*FACTORS.end()).contains(time);
                if !is_time || times.len() > NODES_MAX {
                    return Err(Invalid::new(
                        format!("thread.time_by_hops[{hops}]"),
                        format!(
                            "{time} is no time: expected 0.01 to {}, 1 for local memory, and {NODES_MAX} times at most",
                            FACTORS.end()
                        ),
                    ));
                }
            }
        }
        CopyRates::Matrix(rows) => {
            for rate in rows.iter().flatten().flatten() {
                check_rate(|| "one_cpu".to_owned(), *rate)?;
            }
        }
    }
    match parts.native_local_share {
        Some(share) if !(0.0..=1.0).contains(&share) => Err(Invalid::new(
            "native_local_share",
            format!("{share} is not a share: expected 0 to 1"),
        )),
        _ => Ok(()),
    }
}
