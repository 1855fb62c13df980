//! Machine files: TOML that people write, with every figure's source in a comment.

use serde::Deserialize;

use crate::check::{
    CPUS_MAX, CopyRates, DEVICES_MAX, Invalid, LINKS_MAX, NODES_MAX, Part, Parts, at_most, build,
};
use crate::machine::{Device, Machine, Node, Traffic};
use crate::probe;
use crate::routes::{Carries, Link};

/// Largest file. Ours have some KiB, and a probe's report of 64 nodes some hundred.
const TEXT_BYTES_MAX: usize = 4 << 20;

/// A machine file that cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{file}: {invalid} (docs/formats/machine.md has the format)")]
pub struct MachineError {
    /// The file, as the caller named it.
    pub file: String,
    /// What is wrong in it.
    pub invalid: Invalid,
}

/// A machine as a file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    native_local_share: Option<f64>,
    thread: Option<Thread>,
    #[serde(default)]
    traffic: Traffic,
    #[serde(default)]
    node: Vec<Nodes>,
    #[serde(default)]
    link: Vec<BothWays>,
    #[serde(default)]
    device: Vec<Devices>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Thread {
    copy_bytes_per_s: f64,
    #[serde(default)]
    time_by_hops: Vec<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nodes {
    #[serde(default = "one")]
    count: usize,
    #[serde(default)]
    host: String,
    cpus: u32,
    read_bytes_per_s: f64,
    write_bytes_per_s: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BothWays {
    nodes: [usize; 2],
    bytes_per_s: f64,
    #[serde(default)]
    one_way: bool,
    #[serde(default = "all")]
    carries: Carries,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Devices {
    #[serde(default = "one")]
    count: usize,
    name: String,
    node: usize,
    read_bytes_per_s: f64,
    write_bytes_per_s: Option<f64>,
}

fn one() -> usize {
    1
}

fn all() -> Carries {
    Carries::All
}

/// Reads a machine from a machine file (TOML) or from a probe's report (JSON). `file` names it in errors.
pub fn parse(file: &str, text: &str) -> Result<Machine, MachineError> {
    let machine = if text.len() > TEXT_BYTES_MAX {
        Err(Invalid::new(
            "the file",
            format!(
                "{} bytes: a machine file has at most {TEXT_BYTES_MAX}",
                text.len()
            ),
        ))
    } else if text.trim_start().starts_with('{') {
        probe::machine(text)
    } else {
        machine(text)
    };
    machine.map_err(|invalid| MachineError {
        file: file.to_owned(),
        invalid,
    })
}

fn machine(text: &str) -> Result<Machine, Invalid> {
    let file: File = toml::from_str(text).map_err(|e| {
        let at = e.span().map_or(0, |span| span.start);
        let before = text.as_bytes().iter().take(at);
        let line = before.filter(|byte| **byte == b'\n').count() + 1;
        Invalid::new(format!("line {line}"), e.message().to_owned())
    })?;
    let mut parts = Parts {
        name: file.name,
        traffic: file.traffic,
        native_local_share: file.native_local_share,
        ..Parts::default()
    };
    if let Some(thread) = file.thread {
        parts.copy = CopyRates::ByHops {
            local: thread.copy_bytes_per_s,
            times: thread.time_by_hops,
        };
    }
    add_nodes(&mut parts, file.node)?;
    add_links(&mut parts, file.link)?;
    add_devices(&mut parts, file.device)?;
    build(parts)
}

fn add_nodes(parts: &mut Parts, entries: Vec<Nodes>) -> Result<(), Invalid> {
    for (i, nodes) in entries.into_iter().enumerate() {
        let field = format!("node[{i}]");
        check_count(&format!("{field}.count"), nodes.count, NODES_MAX)?;
        check_cpus(&format!("{field}.cpus"), nodes.cpus)?;
        // Before they are made: a file may have very many entries, each with a count.
        at_most("node", parts.nodes.len() + nodes.count, NODES_MAX)?;
        let part = Node {
            host: nodes.host,
            cpus: nodes.cpus,
            read_bytes_per_s: nodes.read_bytes_per_s,
            write_bytes_per_s: nodes.write_bytes_per_s.unwrap_or(nodes.read_bytes_per_s),
        };
        let node = Part { field, part };
        parts.nodes.extend(std::iter::repeat_n(node, nodes.count));
    }
    Ok(())
}

fn add_links(parts: &mut Parts, entries: Vec<BothWays>) -> Result<(), Invalid> {
    at_most("link", entries.len(), LINKS_MAX / 2)?;
    for (i, both) in entries.into_iter().enumerate() {
        let [from, to] = both.nodes;
        let link = |from, to| Part {
            field: format!("link[{i}]"),
            part: Link {
                from,
                to,
                bytes_per_s: both.bytes_per_s,
                carries: both.carries,
            },
        };
        parts.links.push(link(from, to));
        if !both.one_way {
            parts.links.push(link(to, from));
        }
    }
    Ok(())
}

fn add_devices(parts: &mut Parts, entries: Vec<Devices>) -> Result<(), Invalid> {
    for (i, devices) in entries.into_iter().enumerate() {
        let field = format!("device[{i}]");
        check_count(&format!("{field}.count"), devices.count, DEVICES_MAX)?;
        at_most("device", parts.devices.len() + devices.count, DEVICES_MAX)?;
        let part = Device {
            name: devices.name,
            node: devices.node,
            read_bytes_per_s: devices.read_bytes_per_s,
            write_bytes_per_s: devices
                .write_bytes_per_s
                .unwrap_or(devices.read_bytes_per_s),
        };
        let device = Part { field, part };
        let devices = std::iter::repeat_n(device, devices.count);
        parts.devices.extend(devices);
    }
    Ok(())
}

fn check_count(field: &str, count: usize, max: usize) -> Result<(), Invalid> {
    if (1..=max).contains(&count) {
        return Ok(());
    }
    Err(Invalid::new(
        field,
        format!("{count} is out of bounds: expected 1 to {max}"),
    ))
}

fn check_cpus(field: &str, cpus: u32) -> Result<(), Invalid> {
    if cpus <= CPUS_MAX {
        return Ok(());
    }
    Err(Invalid::new(
        field,
        format!("{cpus} CPUs: expected 0 to {CPUS_MAX}"),
    ))
}
