//! The threads of each workload.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use jericho_storage::{Device, OpenOptions, open_device};
use jericho_sys::node_memory::nodes_of_file;
use jericho_topology::{NodeId, Topology};

use crate::error::{Context, Error, Result};
use crate::kind::{Kind, Variant};
use crate::placement::Placement;
use crate::run::Thread;
use crate::seats::Seat;
use crate::target::{Scratch, Target};

mod checkpoint;
mod dd;
mod files;
mod fsmark;
mod mstress;
mod random;
mod scan;
mod search;
mod stream;
mod zmio;

/// The sizes of a run.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Bytes that all files of a run may have together, unless the papers' sizes are wanted.
    pub data_bytes: u64,
    /// Takes the papers' sizes.
    pub as_paper: bool,
}

impl Scale {
    /// Returns the bytes of one of `count` files: the paper's, or an equal part of the run's, a multiple of `unit`.
    fn file_bytes(&self, paper: u64, count: usize, unit: u64) -> u64 {
        if self.as_paper {
            return paper;
        }
        let part = self.data_bytes / count.max(1) as u64;
        (part.min(paper) / unit).max(1) * unit
    }
}

/// Everything that the threads of a run need.
pub struct Case<'a> {
    /// The nodes.
    pub topology: &'a Topology,
    /// The workload.
    pub kind: Kind,
    /// Its form.
    pub variant: Variant,
    /// Where it runs.
    pub targets: &'a [Target],
    /// The directories of the instances. `None`: the targets are devices.
    pub scratch: Option<&'a Scratch>,
    /// The placement.
    pub placement: Placement,
    /// The seats of the threads.
    pub seats: &'a [Seat],
    /// The sizes.
    pub scale: Scale,
    /// Makes the same offsets and bytes each time.
    pub seed: u64,
    /// Threads that load the memory of the threads' nodes at the same time: *Implications*, figure 4c.
    pub with_mstress: bool,
}

impl<'a> Case<'a> {
    /// Returns the threads.
    pub fn threads(&'a self) -> Result<Vec<Thread<'a>>> {
        let mut threads = match self.kind {
            Kind::Zmio => zmio::threads(self)?,
            Kind::Fsmark => fsmark::threads(self)?,
            Kind::Checkpoint => checkpoint::threads(self)?,
            Kind::Stream => stream::threads(self)?,
            Kind::Search => search::threads(self)?,
            Kind::Scan => scan::threads(self)?,
            Kind::Dd => dd::threads(self)?,
        };
        if self.with_mstress {
            threads.extend(mstress::threads(self));
        }
        Ok(threads)
    }

    fn scratch(&self) -> Result<&'a Scratch> {
        self.scratch.ok_or_else(|| {
            Error::new(format!(
                "{} needs a directory, not a device",
                self.kind.name()
            ))
        })
    }

    /// Returns the threads, one for each seat, that `make` makes from their number.
    fn each(
        &'a self,
        make: impl Fn(usize, &Seat) -> Result<Box<dyn crate::run::Worker>> + Send + Sync + 'a,
    ) -> Vec<Thread<'a>> {
        let make = Arc::new(make);
        let seats = self.seats.iter().enumerate();
        seats
            .map(|(index, seat)| {
                let (make, own) = (make.clone(), seat.clone());
                Thread {
                    seat: seat.clone(),
                    make: Box::new(move || make(index, &own)),
                    counts: true,
                }
            })
            .collect()
    }
}

/// Opens the device of an instance, or a file in its directory, for direct I/O. Fills a new file with `bytes` bytes.
fn open_direct(case: &Case, index: usize, bytes: u64) -> Result<Arc<dyn Device>> {
    let Some(scratch) = case.scratch else {
        let target = &case.targets[index % case.targets.len()];
        let options = OpenOptions {
            read_only: !case.variant.writes,
            ..OpenOptions::default()
        };
        let device = open_device(&target.path, options);
        return device.map_err(|error| Error::new(error.to_string()));
    };
    let options = OpenOptions {
        create_size: Some(bytes),
        ..OpenOptions::default()
    };
    let path = scratch.dir(index).join(format!("data.{index}"));
    let device = open_device(&path, options).map_err(|error| Error::new(error.to_string()))?;
    // Space that was never written is read without the device.
    let mut chunk = jericho_storage::AlignedBuffer::new(1 << 20);
    random::fill(case.seed ^ index as u64, chunk.as_mut_slice());
    let mut at = 0;
    while at < bytes {
        let part = (bytes - at).min(1 << 20) as usize;
        device.write_at(at, &chunk.as_slice()[..part])?;
        at += part as u64;
    }
    device.flush()?;
    Ok(device)
}

/// Number of pages of a file that the kernel is asked about.
const PAGES_ASKED: u64 = 64;
const PAGE_BYTES: u64 = 4096;

/// Where the cached pages of a file are.
#[derive(Clone, Debug)]
enum Frames {
    /// All on this node, as the kernel confirms, or as Jericho's slice says.
    On(NodeId),
    /// Shares by the kernel's number of the node.
    Spread(BTreeMap<u32, f64>),
    /// Nobody can tell.
    Unknown,
}

impl Frames {
    /// Asks the kernel where some pages of a file are that it has cached. Fails if they are not on the node of the seat.
    fn of(case: &Case, seat: &Seat, file: &File, path: &Path) -> Result<Frames> {
        // A program cannot see the frames of a Jericho mount. They are in the memory of the slice's home node, which the daemon checks.
        if case.targets.iter().any(|target| target.is_jericho) {
            return Ok(seat.device.map_or(Frames::Unknown, Frames::On));
        }
        let bytes = file.metadata().at(path, "ask for its length")?.len();
        let step = (bytes / PAGES_ASKED / PAGE_BYTES).max(1) * PAGE_BYTES;
        let offsets: Vec<usize> = (0..bytes)
            .step_by(step as usize)
            .map(|offset| offset as usize)
            .collect();
        // A filesystem without mappings, or a container, may refuse the question.
        let Ok(nodes) = nodes_of_file(file.as_fd(), bytes as usize, &offsets) else {
            return Ok(Frames::Unknown);
        };
        let nodes: Vec<u32> = nodes.into_iter().flatten().collect();
        if let (Some(expected), Some(node)) = (seat.kernel_node(case.topology), seat.frame) {
            return match nodes.iter().find(|found| **found != expected) {
                None => Ok(Frames::On(node)),
                Some(other) => Err(Error::new(format!(
                    "{}: a cached page that was to be on node {expected} is on node {other}, as move_pages(2) says; was the file cached before?",
                    path.display()
                ))),
            };
        }
        let mut shares = BTreeMap::new();
        let each = 1.0 / nodes.len().max(1) as f64;
        nodes
            .iter()
            .for_each(|node| *shares.entry(*node).or_insert(0.0) += each);
        Ok(Frames::Spread(shares))
    }

    /// Returns the share that is local to a thread on this node.
    fn local_share(&self, topology: &Topology, thread: NodeId) -> Option<f64> {
        match self {
            Frames::On(node) => Some(f64::from(topology.thread_node(*node) == thread)),
            // The kernel does not tell virtual nodes apart.
            Frames::Spread(_) if topology.is_virtual => None,
            Frames::Spread(shares) => {
                let own = topology.node(thread)?.kernel_node?;
                Some(shares.get(&own).copied().unwrap_or(0.0))
            }
            Frames::Unknown => None,
        }
    }
}

/// Returns whether a thread on this node is local to memory that the seat binds. `None`: the kernel chose the memory.
fn buffer_share(topology: &Topology, seat: &Seat, thread: NodeId) -> Option<f64> {
    seat.frame
        .map(|node| f64::from(topology.thread_node(node) == thread))
}
