//! The statements of a topology file, checked. Every error has a line and a column.

use std::collections::BTreeMap;
use std::path::Path;

use super::token::{Token, tokens};
use super::value::{At, Word, Wrong, key_value, number, size_bytes};
use crate::TopologyError;
use crate::id::NODES_MAX;
use crate::list::parse_list;
use crate::machine::{DISTANCE_LOCAL, Machine};

/// Largest ACPI distance of a reachable node.
const DISTANCE_MAX: u32 = 254;

/// `node ID [cpus=LIST] [memory=SIZE] [kernel-node=N]`
#[derive(Debug)]
pub(super) struct NodeLine {
    /// CPUs that this process may run on, ascending. Empty if not given.
    pub(super) cpus: Vec<u32>,
    /// `None` if not given.
    pub(super) memory_bytes: Option<u64>,
    /// Position among the machine's nodes; the node has memory. `None` if not given.
    pub(super) kernel_node: Option<usize>,
}

/// All statements of a file. Node numbers are positions in `nodes`.
#[derive(Debug)]
pub(super) struct Statements {
    pub(super) nodes: Vec<NodeLine>,
    /// Complete rows by node, for no node or for all.
    pub(super) distances: BTreeMap<usize, Vec<u32>>,
    pub(super) devices: Vec<(String, usize)>,
    pub(super) nics: Vec<(String, usize)>,
}

/// A reference to a node. It can be checked only when all nodes are known.
struct NodeRef {
    node: usize,
    at: At,
}

struct DistanceRow {
    from: NodeRef,
    values: Vec<(u32, At)>,
    end: At,
}

struct Home {
    name: String,
    at: At,
    node: NodeRef,
}

/// The statements read so far.
struct Parser<'m> {
    machine: &'m Machine,
    nodes: Vec<(NodeLine, At)>,
    distances: Vec<DistanceRow>,
    devices: Vec<Home>,
    nics: Vec<Home>,
}

/// Parses and checks `text`. `path` is for messages only.
pub(super) fn parse(
    path: &Path,
    text: &str,
    machine: &Machine,
) -> Result<Statements, TopologyError> {
    parse_text(text, machine).map_err(|Wrong { at, message }| TopologyError::Line {
        path: path.to_path_buf(),
        line: at.line,
        column: at.column,
        message,
    })
}

fn parse_text(text: &str, machine: &Machine) -> Result<Statements, Wrong> {
    let mut parser = Parser {
        machine,
        nodes: Vec::new(),
        distances: Vec::new(),
        devices: Vec::new(),
        nics: Vec::new(),
    };
    let mut line = 0;
    for line_text in text.lines() {
        line += 1;
        let placed = |Token { text, column }| Word {
            text,
            at: At { line, column },
        };
        let words: Vec<Word> = match tokens(line_text) {
            Ok(tokens) => tokens.into_iter().map(placed).collect(),
            Err(column) => return At { line, column }.wrong("expected a closing `\"`"),
        };
        let end = At {
            line,
            column: line_text.trim_end().chars().count() + 1,
        };
        if let Some((keyword, words)) = words.split_first() {
            parser.statement(*keyword, words, end)?;
        }
    }
    parser.finish(At {
        line: line + 1,
        column: 1,
    })
}

impl Parser<'_> {
    fn statement(&mut self, keyword: Word, words: &[Word], end: At) -> Result<(), Wrong> {
        match keyword.text {
            "node" => self.node(keyword.at, words, end),
            "distance" => self.distance(words, end),
            "device" => {
                if let Some(name) = words.first().filter(|name| is_relative_path(name.text)) {
                    return name.at.wrong(format!(
                        "expected a path from the root, such as `/dev/nvme0n1`, \
                         or a name without `/`, found {:?}",
                        name.text
                    ));
                }
                home(
                    words,
                    end,
                    "the path or name of a device",
                    &mut self.devices,
                )
            }
            "nic" => home(
                words,
                end,
                "the name of a network interface",
                &mut self.nics,
            ),
            other => keyword.at.wrong(format!(
                "expected `node`, `distance`, `device` or `nic`, found {other:?}"
            )),
        }
    }

    fn node(&mut self, line_at: At, words: &[Word], end: At) -> Result<(), Wrong> {
        let next = self.nodes.len();
        let Some((id, options)) = words.split_first() else {
            return end.wrong(format!(
                "expected the number of the node, which is {next} here"
            ));
        };
        if id.text != next.to_string() {
            return id.at.wrong(format!(
                "expected node {next} (nodes are numbered from 0 in the order written), found {:?}",
                id.text
            ));
        }
        if next == NODES_MAX {
            return id.at.wrong(format!("expected at most {NODES_MAX} nodes"));
        }
        let mut node = NodeLine {
            cpus: Vec::new(),
            memory_bytes: None,
            kernel_node: None,
        };
        let mut seen: Vec<&str> = Vec::new();
        for &option in options {
            let (key, value) = key_value(option, "`cpus=`, `memory=` or `kernel-node=`")?;
            if seen.contains(&key) {
                return option
                    .at
                    .wrong(format!("expected `{key}=` only once in a line"));
            }
            seen.push(key);
            match key {
                "cpus" => node.cpus = self.cpus(value)?,
                "memory" => node.memory_bytes = Some(size_bytes(value)?),
                "kernel-node" => node.kernel_node = Some(self.kernel_node(value)?),
                _ => {
                    return option.at.wrong(format!(
                        "expected `cpus=`, `memory=` or `kernel-node=`, found {:?}",
                        option.text
                    ));
                }
            }
        }
        if node.cpus.is_empty() && node.memory_bytes == Some(0) {
            return line_at.wrong("expected a node with CPUs or memory, found one with neither");
        }
        self.nodes.push((node, line_at));
        Ok(())
    }

    /// Parses a list of CPUs. This process must be allowed to run on each.
    fn cpus(&self, value: Word) -> Result<Vec<u32>, Wrong> {
        let inside = |offset| At {
            column: value.at.column + offset,
            ..value.at
        };
        let placed = match parse_list(value.text) {
            Ok(placed) if placed.is_empty() => {
                return value
                    .at
                    .wrong("expected CPUs such as `0-3,8`, found nothing");
            }
            Ok(placed) => placed,
            Err(error) => return inside(error.offset).wrong(error.message),
        };
        let mut cpus = Vec::with_capacity(placed.len());
        for (offset, cpu) in placed {
            let nodes = &self.machine.nodes;
            if !nodes.iter().any(|node| node.cpus.contains(&cpu)) {
                let is_online = nodes.iter().any(|node| node.cpus_online.contains(&cpu));
                return inside(offset).wrong(match is_online {
                    true => {
                        format!("CPU {cpu} is outside the affinity or the cpuset of this process")
                    }
                    false => format!("CPU {cpu} does not exist in this machine, or is offline"),
                });
            }
            cpus.push(cpu);
        }
        let len = cpus.len();
        cpus.sort_unstable();
        cpus.dedup();
        match cpus.len() == len {
            true => Ok(cpus),
            false => value.at.wrong("expected each CPU only once in a node"),
        }
    }

    /// Returns the position of a kernel node that can provide memory.
    fn kernel_node(&self, value: Word) -> Result<usize, Wrong> {
        let id = number(
            value,
            "the number of a NUMA node of the kernel",
            0,
            u32::MAX,
        )?;
        let nodes = &self.machine.nodes;
        let with_memory = nodes
            .iter()
            .position(|node| node.id == id && node.memory_bytes > 0);
        with_memory.map_or_else(
            || {
                let usable = nodes.iter().filter(|node| node.memory_bytes > 0);
                let usable: Vec<u32> = usable.map(|node| node.id).collect();
                value.at.wrong(format!(
                    "kernel node {id} has no memory that this process may use; those that have: {}",
                    crate::list::format_list(&usable)
                ))
            },
            Ok,
        )
    }

    fn distance(&mut self, words: &[Word], end: At) -> Result<(), Wrong> {
        let Some((from, values)) = words.split_first() else {
            return end.wrong("expected the number of a node and its distances to all nodes");
        };
        let from = node_ref(*from)?;
        if let Some(first) = self.distances.iter().find(|row| row.from.node == from.node) {
            return from.at.wrong(format!(
                "expected one row of distances for node {}, found another one in line {}",
                from.node, first.from.at.line
            ));
        }
        let distance = |&word: &Word| {
            let what = "a distance (10 is local, 20 is twice as far)";
            number(word, what, DISTANCE_LOCAL, DISTANCE_MAX).map(|value| (value, word.at))
        };
        let values = values.iter().map(distance).collect::<Result<Vec<_>, _>>()?;
        self.distances.push(DistanceRow { from, values, end });
        Ok(())
    }

    /// Checks references between statements after all nodes are known. `end` is the end of the file.
    fn finish(self, end: At) -> Result<Statements, Wrong> {
        let count = self.nodes.len();
        if self.nodes.iter().all(|(node, _)| node.cpus.is_empty()) {
            return end.wrong("expected a node with CPUs, such as `node 0 cpus=0`, found none");
        }
        if self
            .nodes
            .iter()
            .all(|(node, _)| node.memory_bytes == Some(0))
        {
            return end.wrong("expected a node with memory, found none");
        }
        let mut distances = BTreeMap::new();
        for row in self.distances {
            let from = existing(&row.from, count)?;
            check_row(&row, count)?;
            distances.insert(from, row.values.iter().map(|&(value, _)| value).collect());
        }
        let without_row = |&at: &usize| !distances.is_empty() && !distances.contains_key(&at);
        if let Some(missing) = (0..count).find(without_row) {
            return self.nodes[missing].1.wrong(format!(
                "expected a `distance {missing}` line too: give distances for all nodes or for none"
            ));
        }
        Ok(Statements {
            nodes: self.nodes.into_iter().map(|(node, _)| node).collect(),
            distances,
            devices: homes(self.devices, count)?,
            nics: homes(self.nics, count)?,
        })
    }
}

/// Checks that a row has a distance for each node: the local distance to itself, larger ones to all others.
fn check_row(row: &DistanceRow, count: usize) -> Result<(), Wrong> {
    if row.values.len() != count {
        let at = row.values.get(count).map_or(row.end, |&(_, at)| at);
        return at.wrong(format!(
            "expected {count} distances, one for each node, found {}",
            row.values.len()
        ));
    }
    for (to, &(value, at)) in row.values.iter().enumerate() {
        let is_self = to == row.from.node;
        if is_self && value != DISTANCE_LOCAL {
            return at.wrong(format!(
                "expected {DISTANCE_LOCAL}, the distance of node {to} to itself, found {value}"
            ));
        }
        if !is_self && value == DISTANCE_LOCAL {
            return at.wrong(format!(
                "expected a distance over {DISTANCE_LOCAL} from node {} to node {to}, found {value}",
                row.from.node
            ));
        }
    }
    Ok(())
}

/// Parses the rest of a `device` or `nic` line: a name and `node=N`.
fn home(words: &[Word], end: At, what: &str, homes: &mut Vec<Home>) -> Result<(), Wrong> {
    let [name, node, more @ ..] = words else {
        let after = if words.is_empty() { what } else { "`node=N`" };
        return end.wrong(format!("expected {after}"));
    };
    if let Some(extra) = more.first() {
        return extra.at.wrong(format!(
            "expected the end of the line, found {:?}",
            extra.text
        ));
    }
    if name.text.is_empty() {
        return name.at.wrong(format!("expected {what}, found nothing"));
    }
    if let Some(first) = homes.iter().find(|home| home.name == name.text) {
        let line = first.at.line;
        return name.at.wrong(format!(
            "{:?} has a home already, given in line {line}",
            name.text
        ));
    }
    let (key, value) = key_value(*node, "`node=N`")?;
    if key != "node" {
        return node
            .at
            .wrong(format!("expected `node=N`, found {:?}", node.text));
    }
    homes.push(Home {
        name: name.text.to_string(),
        at: name.at,
        node: node_ref(value)?,
    });
    Ok(())
}

/// Returns whether a path is relative. Its meaning would depend on the directory in which the program was started.
fn is_relative_path(text: &str) -> bool {
    text.contains('/') && !text.starts_with('/')
}

fn homes(homes: Vec<Home>, count: usize) -> Result<Vec<(String, usize)>, Wrong> {
    homes
        .into_iter()
        .map(|home| Ok((home.name, existing(&home.node, count)?)))
        .collect()
}

fn node_ref(word: Word) -> Result<NodeRef, Wrong> {
    let node = number(word, "the number of a node", 0, u32::MAX)?;
    Ok(NodeRef {
        node: node as usize,
        at: word.at,
    })
}

fn existing(node: &NodeRef, count: usize) -> Result<usize, Wrong> {
    match node.node < count {
        true => Ok(node.node),
        false => node.at.wrong(format!(
            "expected a node of this file, 0 to {}, found {}",
            count.saturating_sub(1),
            node.node
        )),
    }
}
