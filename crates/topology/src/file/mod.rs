//! Topology files: nodes described by a user. `docs/formats/topology.md` specifies them.
//!
//! `token` cuts a line into words with their columns. `value` reads single words. `parse` makes statements of them and checks
//! them against the machine. This module makes nodes of the statements.

mod parse;
mod token;
mod value;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::assemble::{Draft, assemble, node_id};
use crate::locality::Locality;
use crate::machine::{Machine, default_distances};
use crate::nodes::Topology;
use crate::{TopologyError, assign};
use parse::{NodeLine, Statements};

/// Maximum size of a topology file. A device or a volume given by mistake is not read into memory.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads a topology file, which must be UTF-8 of at most 1 MiB.
pub(crate) fn read(path: &Path) -> Result<String, TopologyError> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes))
        .map_err(|source| TopologyError::File {
            path: path.to_path_buf(),
            source,
        })?;
    let is_too_long = bytes.len() as u64 > FILE_BYTES_MAX;
    let (message, good_len) = match std::str::from_utf8(&bytes) {
        Ok(text) if !is_too_long => return Ok(text.to_string()),
        Err(error) if !is_too_long => (
            "expected UTF-8 text, found other bytes".to_string(),
            error.valid_up_to(),
        ),
        _ => (
            format!("expected a topology file of at most {FILE_BYTES_MAX} bytes"),
            0,
        ),
    };
    let good = String::from_utf8_lossy(&bytes[..good_len]);
    let line = good.matches('\n').count() + 1;
    let column = good.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    Err(TopologyError::Line {
        path: path.to_path_buf(),
        line,
        column,
        message,
    })
}

/// Returns the topology that `text`, the contents of the file at `path`, describes on `machine`.
pub(crate) fn topology(
    path: &Path,
    text: &str,
    machine: &Machine,
) -> Result<Topology, TopologyError> {
    let statements = parse::parse(path, text, machine)?;
    let Statements {
        nodes,
        mut distances,
        devices,
        nics,
    } = statements;
    let homes = memory_homes(machine, &nodes);
    let mut drafts = Vec::with_capacity(nodes.len());
    for (at, node) in nodes.iter().enumerate() {
        let default_row = || default_distances(at, nodes.len());
        drafts.push(Draft {
            cpus: node.cpus.clone(),
            memory_bytes: node
                .memory_bytes
                .unwrap_or_else(|| assign::memory_share(machine, &homes, at)),
            kernel_node: homes[at].and_then(|home| machine.bindable(home)),
            distances: distances.remove(&at).unwrap_or_else(default_row),
        });
    }
    let mut locality = Locality::new(&machine.root);
    for (device, node) in devices {
        locality.add_device(device, node_id(node));
    }
    for (nic, node) in nics {
        locality.node_by_nic.insert(nic, node_id(node));
    }
    let source = format!("file:{}", path.display());
    Ok(assemble(drafts, &[], true, source, locality))
}

/// Returns for each node the position of the kernel node that provides its memory: the node that the file names, else the node
/// nearest to all its CPUs, else the kernel's memory nodes in turn.
fn memory_homes(machine: &Machine, nodes: &[NodeLine]) -> Vec<Option<usize>> {
    let in_turn = assign::memory_homes(machine, nodes.len());
    let home = |(at, node): (usize, &NodeLine)| {
        node.kernel_node
            .or_else(|| home_of_cpus(machine, &node.cpus))
            .or(in_turn[at])
    };
    nodes.iter().enumerate().map(home).collect()
}

/// Returns the kernel node whose memory is nearest to all `cpus`; `None` without CPUs, or if their nearest nodes differ.
fn home_of_cpus(machine: &Machine, cpus: &[u32]) -> Option<usize> {
    let home_of = |cpu: &u32| {
        let at = machine
            .nodes
            .iter()
            .position(|node| node.cpus.contains(cpu))?;
        machine.memory_home(at)
    };
    let home = home_of(cpus.first()?)?;
    cpus.iter()
        .all(|cpu| home_of(cpu) == Some(home))
        .then_some(home)
}
