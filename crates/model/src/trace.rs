//! A placement trace: what the threads of a real run accessed, and where it was. docs/formats/placement-trace.md has the format.
//!
//! Lines are added up as they come, by thread and places. So memory does not grow with the number of lines, and a trace may have any number.

use std::cell::OnceCell;
use std::collections::BTreeMap;

use serde::Deserialize;

use crate::demand::Demand;
use crate::fair::Flow;
use crate::machine::Machine;
use crate::predict::{Prediction, predict};

/// Longest line.
pub const LINE_BYTES_MAX: usize = 4096;
/// Most threads.
pub const TRACE_THREADS_MAX: usize = 4096;
/// Most different places of all threads.
const PLACES_MAX: usize = 1 << 20;
/// Most bytes of a line.
const BYTES_MAX: u64 = 1 << 50;

/// A trace that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// A line is wrong.
    #[error("line {line}: {problem}")]
    Line {
        /// Its number; the first is 1.
        line: u64,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// No line.
    #[error("the trace has no accesses")]
    Empty,
    /// More threads are wanted than there are.
    #[error("{wanted} threads: the trace has {threads}")]
    Threads {
        /// Threads that are wanted.
        wanted: u32,
        /// Threads of the trace.
        threads: usize,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Operation {
    Read,
    Write,
}

/// A line. The reader ignores unknown fields, so programs may add fields of their own. No field may be missing: a misspelt `frame` would be direct I/O.
#[derive(Deserialize)]
struct Line {
    thread: u64,
    cpu: u32,
    buffer: u32,
    #[serde(deserialize_with = "Option::deserialize")]
    frame: Option<u32>,
    #[serde(deserialize_with = "Option::deserialize")]
    device: Option<u32>,
    bytes: u64,
    op: Operation,
}

/// Places of an access: nodes of the CPU, the buffer, the frame and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Places {
    cpu: usize,
    buffer: usize,
    frame: Option<usize>,
    device: Option<usize>,
    is_write: bool,
}

/// What has been read of a trace.
#[derive(Debug)]
pub struct Trace<'m> {
    machine: &'m Machine,
    lines: u64,
    /// Position of each thread, in the order in which the threads appear.
    positions: BTreeMap<u64, usize>,
    /// Bytes by thread and places.
    bytes: Vec<BTreeMap<Places, u128>>,
    places: usize,
    /// The threads as flows. Several predictions share them, because a long trace takes long to turn into flows.
    flows: OnceCell<Vec<Flow>>,
}

impl<'m> Trace<'m> {
    /// Begins a trace of a run on a machine.
    pub fn new(machine: &'m Machine) -> Trace<'m> {
        Trace {
            machine,
            lines: 0,
            positions: BTreeMap::new(),
            bytes: Vec::new(),
            places: 0,
            flows: OnceCell::new(),
        }
    }

    /// Adds the next line. Empty lines count, and have no access.
    pub fn add(&mut self, line: &[u8]) -> Result<(), TraceError> {
        self.lines += 1;
        self.flows.take();
        let at = self.lines;
        self.add_access(line)
            .map_err(|problem| TraceError::Line { line: at, problem })
    }

    fn add_access(&mut self, line: &[u8]) -> Result<(), String> {
        if line.len() > LINE_BYTES_MAX {
            return Err(format!(
                "more than {LINE_BYTES_MAX} bytes: write one access a line"
            ));
        }
        if line.trim_ascii().is_empty() {
            return Ok(());
        }
        let line: Line = serde_json::from_slice(line).map_err(|e| problem_of(&e))?;
        let places = self.places_of(&line)?;
        if !(1..=BYTES_MAX).contains(&line.bytes) {
            return Err(format!(
                "bytes: {} is out of bounds: expected 1 to {BYTES_MAX}",
                line.bytes
            ));
        }
        let next = self.positions.len();
        let position = *self.positions.entry(line.thread).or_insert(next);
        if position >= TRACE_THREADS_MAX {
            return Err(format!(
                "thread {} is one too many: expected at most {TRACE_THREADS_MAX}",
                line.thread
            ));
        }
        if position == self.bytes.len() {
            self.bytes.push(BTreeMap::new());
        }
        let bytes = self.bytes[position].entry(places).or_insert_with(|| {
            self.places += 1;
            0
        });
        *bytes = bytes.saturating_add(line.bytes.into());
        if self.places > PLACES_MAX {
            return Err(format!(
                "more than {PLACES_MAX} combinations of thread and nodes"
            ));
        }
        Ok(())
    }

    fn places_of(&self, line: &Line) -> Result<Places, String> {
        let machine = self.machine;
        let node = |field: &str, node: u32| {
            let found = usize::try_from(node)
                .ok()
                .filter(|n| *n < machine.nodes.len());
            found.ok_or_else(|| {
                format!(
                    "{field}: the machine has no node {node}: its nodes are 0 to {}",
                    machine.nodes.len() - 1
                )
            })
        };
        let optional = |field, of: Option<u32>| of.map(|n| node(field, n)).transpose();
        let places = Places {
            cpu: node("cpu", line.cpu)?,
            buffer: node("buffer", line.buffer)?,
            frame: optional("frame", line.frame)?,
            device: optional("device", line.device)?,
            is_write: matches!(line.op, Operation::Write),
        };
        if machine.nodes[places.cpu].cpus == 0 {
            return Err(format!("cpu: node {} has no CPUs", places.cpu));
        }
        if places.frame.is_none() && places.device.is_none() {
            return Err("frame and device are null: expected at least one of them".to_owned());
        }
        if let Some(device) = places.device
            && machine.devices_of(device).is_empty()
        {
            return Err(format!(
                "device: the machine has no device on node {device}: add a [[device]] to its file"
            ));
        }
        let others = [Some(places.buffer), places.frame, places.device];
        if let Some(other) = others
            .into_iter()
            .flatten()
            .find(|n| !machine.is_one_host(places.cpu, *n))
        {
            return Err(format!(
                "nodes {} and {other} are of two hosts: a trace is of one",
                places.cpu
            ));
        }
        Ok(places)
    }

    /// Returns how many threads there are.
    pub fn threads(&self) -> usize {
        self.bytes.len()
    }

    /// Predicts the throughput of the first `threads` threads of the trace, if each goes on with its mix of accesses.
    pub fn predict(&self, threads: u32) -> Result<Prediction, TraceError> {
        if self.bytes.is_empty() {
            return Err(TraceError::Empty);
        }
        let wanted = threads as usize;
        if wanted == 0 || wanted > self.bytes.len() {
            return Err(TraceError::Threads {
                wanted: threads,
                threads: self.bytes.len(),
            });
        }
        let all = || self.bytes.iter().map(|bytes| self.flow(bytes)).collect();
        Ok(predict(
            self.machine,
            &self.flows.get_or_init(all)[..wanted],
        ))
    }

    /// Returns a thread whose bytes are of all its accesses, in their proportions.
    fn flow(&self, bytes: &BTreeMap<Places, u128>) -> Flow {
        let all: u128 = bytes.values().sum();
        let mut demand = Demand::new(self.machine);
        for (places, bytes) in bytes {
            let part = *bytes as f64 / all as f64;
            add(&mut demand, self.machine, places, part);
        }
        demand.flow(1)
    }
}

/// Returns what is wrong with the JSON of a line. The error counts lines from the start of its text, which is one line of the trace: only the column counts.
fn problem_of(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let problem = text.split(" at line ").next().unwrap_or(&text);
    let column = error.column();
    format!("{problem}, at column {column} (docs/formats/placement-trace.md has the format)")
}

/// Adds an access: a copy between buffer and frame, and a transfer between frame and device. Without a frame, the transfer is direct.
fn add(demand: &mut Demand, machine: &Machine, places: &Places, part: f64) {
    let memory = places.frame.unwrap_or(places.buffer);
    if let Some(device) = places.device {
        let devices = machine.devices_of(device);
        if places.is_write {
            demand.transfer_out(&devices, memory, part);
        } else {
            demand.transfer_in(&devices, memory, part);
        }
    }
    if let Some(frame) = places.frame {
        let (from, to) = if places.is_write {
            (places.buffer, frame)
        } else {
            (frame, places.buffer)
        };
        demand.copy(places.cpu, from, to, part);
    }
}
