//! Named placements, and the flows of their threads.
//!
//! | names | operation |
//! |---|---|
//! | `best`, `proper`, `native`, `worst` | reads of cached files: a copy from the file's frames to the thread's buffer, which is on the thread's node |
//! | those of 001 (`TLORP0I0`, `TRRCPL`, ...) | reads from devices, direct or through frames |
//! | those of Tyche (`ideal`, `t-numa`, ...) | I/O to devices of another host, in the file `network` |
//!
//! Threads are assigned to the nodes with CPUs in turn.

use crate::demand::Demand;
use crate::fair::Flow;
use crate::machine::Machine;
use crate::network::{self, Network};
use crate::predict::{Prediction, predict, throughput};
use crate::threads::{PlacementError, THREADS_MAX, in_turn};

/// Nodes up to which `worst` tries each assignment of frames to nodes. Above, it tries rotations only.
const EXHAUSTIVE_MAX: usize = 8;

/// Where threads and their data are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Placement {
    /// Frames on the node of the thread that reads them.
    Proper,
    /// This share of the frames on the node of the thread, and the rest spread evenly over the other nodes.
    Native {
        /// Share of local frames, 0 to 1.
        local_share: f64,
    },
    /// Each node's threads read frames of one other node, and no two nodes' threads read those of the same. Of all ways to do this, the slowest.
    Worst,
    /// Reads from devices.
    Devices(Devices),
    /// I/O to another host.
    Network(Network),
}

/// Reads from the devices of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Devices {
    /// The transfer is to memory of another node.
    pub is_transfer_remote: bool,
    /// `None`: direct I/O. Otherwise the thread copies from the frame, and this says whether it and its buffer are on another node than the frame.
    pub is_copy_remote: Option<bool>,
}

/// Returns the names of the placements that a machine can have, in the order in which they are shown.
pub fn names(machine: &Machine) -> Vec<(String, Placement)> {
    let hosts = machine.hosts();
    if hosts.len() == 2 {
        let named = network::names().into_iter();
        return named.map(|(n, p)| (n, Placement::Network(p))).collect();
    }
    let even = 1.0 / hosts[0].len() as f64;
    let local_share = machine.native_local_share.unwrap_or(even);
    let mut names = vec![
        ("proper".to_owned(), Placement::Proper),
        ("native".to_owned(), Placement::Native { local_share }),
        ("best".to_owned(), Placement::Proper),
    ];
    if workers(machine).len() > 1 {
        names.push(("worst".to_owned(), Placement::Worst));
    }
    if hosts.len() == 1 {
        for (name, is_transfer_remote, is_copy_remote) in [
            ("TLORP0I0", false, None),
            ("TRORP0I0", true, None),
            ("TRLCPL", false, Some(false)),
            ("TRLCPR", false, Some(true)),
            ("TRRCPL", true, Some(false)),
            ("TRRCPR", true, Some(true)),
        ] {
            let devices = Devices {
                is_transfer_remote,
                is_copy_remote,
            };
            if seats(machine, devices).is_ok() {
                names.push((name.to_owned(), Placement::Devices(devices)));
            }
        }
    }
    names
}

/// Returns the placement with this name. Upper and lower case are the same.
pub fn named(machine: &Machine, name: &str) -> Result<Placement, PlacementError> {
    let names = names(machine);
    let found = names
        .iter()
        .find(|(known, _)| known.eq_ignore_ascii_case(name));
    let unknown = || PlacementError::Unknown {
        name: name.to_owned(),
        known: names
            .iter()
            .map(|(n, _)| n.as_str())
            .collect::<Vec<_>>()
            .join(", "),
    };
    found.map(|(_, placement)| *placement).ok_or_else(unknown)
}

/// Predicts the throughput of `threads` threads.
pub fn predict_placement(
    machine: &Machine,
    placement: Placement,
    threads: u32,
) -> Result<Prediction, PlacementError> {
    Ok(predict(machine, &flows(machine, placement, threads)?))
}

pub(crate) fn flows(
    machine: &Machine,
    placement: Placement,
    threads: u32,
) -> Result<Vec<Flow>, PlacementError> {
    if !(1..=THREADS_MAX).contains(&threads) {
        return Err(PlacementError::Threads(threads));
    }
    let nodes = workers(machine);
    if nodes.is_empty() {
        return Err(lacks(machine, "CPUs on its first host"));
    }
    let reads = |frames_of: &dyn Fn(usize) -> Vec<(usize, f64)>| {
        let flow = |(node, count)| {
            let mut demand = Demand::new(machine);
            for (frames, part) in frames_of(node) {
                demand.copy(node, frames, node, part);
            }
            demand.flow(count)
        };
        in_turn(&nodes, threads).map(flow).collect()
    };
    match placement {
        Placement::Proper => Ok(reads(&|node| vec![(node, 1.0)])),
        Placement::Native { local_share } => {
            // Nodes without CPUs have frames, too.
            let memory = first_host(machine);
            let others = |node: usize| memory.iter().filter(move |other| **other != node);
            Ok(reads(&|node| match memory.len() {
                1 => vec![(node, 1.0)],
                count => {
                    let part = (1.0 - local_share) / (count - 1) as f64;
                    let remote = others(node).map(|other| (*other, part));
                    remote.chain([(node, local_share)]).collect()
                }
            }))
        }
        Placement::Worst => worst(machine, &nodes, threads),
        Placement::Devices(devices) => from_devices(machine, devices, threads),
        Placement::Network(network) => network::flows(machine, network, threads),
    }
}

fn first_host(machine: &Machine) -> Vec<usize> {
    machine.hosts().into_iter().next().unwrap_or_default()
}

/// Returns the nodes with CPUs of the first host.
fn workers(machine: &Machine) -> Vec<usize> {
    let mut nodes = first_host(machine);
    nodes.retain(|node| machine.nodes[*node].cpus > 0);
    nodes
}

fn lacks(machine: &Machine, what: &'static str) -> PlacementError {
    PlacementError::Lacks {
        machine: machine.name.clone(),
        what,
    }
}

fn worst(machine: &Machine, nodes: &[usize], threads: u32) -> Result<Vec<Flow>, PlacementError> {
    if nodes.len() < 2 {
        return Err(lacks(machine, "second node with CPUs"));
    }
    let all: Vec<Vec<Flow>> = in_turn(nodes, threads)
        .map(|(node, count)| {
            let flow = |frames: &usize| {
                let mut demand = Demand::new(machine);
                demand.copy(node, *frames, node, 1.0);
                demand.flow(count)
            };
            nodes.iter().map(flow).collect()
        })
        .collect();
    let mut slowest: Option<(f64, Vec<Flow>)> = None;
    let mut consider = |frames: &[usize]| {
        let flows: Vec<Flow> = all
            .iter()
            .zip(frames)
            .map(|(of, f)| of[*f].clone())
            .collect();
        let rate = throughput(machine, &flows);
        if slowest.as_ref().is_none_or(|(slow, _)| rate < *slow) {
            slowest = Some((rate, flows));
        }
    };
    if nodes.len() <= EXHAUSTIVE_MAX {
        remote_assignments(&mut Vec::new(), nodes.len(), &mut consider);
    } else {
        for by in 1..nodes.len() {
            let frames: Vec<usize> = (0..nodes.len()).map(|i| (i + by) % nodes.len()).collect();
            consider(&frames);
        }
    }
    Ok(slowest.map(|(_, flows)| flows).unwrap_or_default())
}

/// Calls `consider` with each permutation of the numbers below `count` that leaves none in its place.
fn remote_assignments(frames: &mut Vec<usize>, count: usize, consider: &mut impl FnMut(&[usize])) {
    if frames.len() == count {
        return consider(frames);
    }
    for next in 0..count {
        if next != frames.len() && !frames.contains(&next) {
            frames.push(next);
            remote_assignments(frames, count, consider);
            frames.pop();
        }
    }
}

/// Where the requests of a node's devices go.
struct Seat {
    /// The node of the devices.
    devices: usize,
    /// The node of the memory that they fill.
    memory: usize,
    /// The node of the thread, and of its buffer, if the thread copies.
    thread: Option<usize>,
}

/// Returns a seat for each node with devices. Fails if a node that the placement needs is missing.
fn seats(machine: &Machine, devices: Devices) -> Result<Vec<Seat>, PlacementError> {
    let mut nodes: Vec<usize> = machine.devices.iter().map(|d| d.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    if nodes.is_empty() || machine.nodes.len() < 2 {
        return Err(lacks(machine, "devices and second node"));
    }
    let next = |node| {
        let next = machine.next_worker(node);
        next.ok_or_else(|| lacks(machine, "second node with CPUs"))
    };
    let seat = |node| {
        let memory = match devices.is_transfer_remote {
            true => next(node)?,
            false => node,
        };
        let thread = match devices.is_copy_remote {
            None => None,
            Some(true) => Some(next(memory)?),
            Some(false) if machine.nodes[memory].cpus == 0 => {
                return Err(lacks(machine, "CPUs on a node with devices"));
            }
            Some(false) => Some(memory),
        };
        Ok(Seat {
            devices: node,
            memory,
            thread,
        })
    };
    nodes.into_iter().map(seat).collect()
}

fn from_devices(
    machine: &Machine,
    devices: Devices,
    threads: u32,
) -> Result<Vec<Flow>, PlacementError> {
    let seats = seats(machine, devices)?;
    let places: Vec<usize> = (0..seats.len()).collect();
    let flow = |(place, count): (usize, u32)| {
        let seat = &seats[place];
        let mut demand = Demand::new(machine);
        demand.transfer_in(&machine.devices_of(seat.devices), seat.memory, 1.0);
        if let Some(thread) = seat.thread {
            demand.copy(thread, seat.memory, thread, 1.0);
        }
        demand.flow(count)
    };
    Ok(in_turn(&places, threads).map(flow).collect())
}
