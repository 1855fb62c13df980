//! mstress: threads that stream through memory beside a workload, as STREAM's *copy* does. One for each node that the workload uses.

use std::collections::BTreeSet;
use std::time::Instant;

use jericho_sys::node_memory::NodeBuffer;
use jericho_topology::NodeId;

use crate::buffer;
use crate::case::Case;
use crate::error::Result;
use crate::frames::Frames;
use crate::meter::{Done, Meter};
use crate::random;
use crate::run::{Progress, Thread, Worker};
use crate::seats::Seat;

/// Larger than the last cache of a CPU.
const BUFFER_BYTES: usize = 256 << 20;
/// Bytes of one step.
const STEP_BYTES: usize = 1 << 20;

/// Returns the nodes on which memory is loaded.
fn nodes(case: &Case) -> BTreeSet<Option<NodeId>> {
    case.seats.iter().map(|seat| seat.frame).collect()
}

/// Returns the memory that it takes, by the kernel's number of the node.
pub fn memory(case: &Case) -> Vec<(Option<u32>, u64)> {
    let kernel_node = |node: NodeId| case.topology.node(node)?.kernel_node;
    let taken = nodes(case).into_iter();
    taken
        .map(|node| (node.and_then(kernel_node), BUFFER_BYTES as u64))
        .collect()
}

pub fn threads<'a>(case: &'a Case<'a>) -> Vec<Thread<'a>> {
    let threads = nodes(case).into_iter().map(|node| Thread {
        seat: Seat {
            device: None,
            frame: node,
            // This load may be remote to its memory, if the process may not use the CPUs there.
            thread: node
                .and_then(|node| case.topology.node(node))
                .map(|node| node.nearest_cpu_node),
        },
        make: Box::new(move || {
            let mut memory = buffer::on(case.topology, node, BUFFER_BYTES)?;
            // Some CPUs write zeros twice as fast as other bytes.
            random::fill(case.seed, &mut memory);
            Ok(Box::new(Mstress {
                memory,
                at: 0,
                frames: node.map_or(Frames::Unknown, Frames::On),
            }) as Box<dyn Worker>)
        }),
        counts: false,
    });
    threads.collect()
}

struct Mstress {
    memory: NodeBuffer,
    at: usize,
    frames: Frames,
}

impl Worker for Mstress {
    fn step(&mut self, meter: &mut Meter) -> Result<Progress> {
        let began = Instant::now();
        let (from, to) = self.memory.split_at_mut(BUFFER_BYTES / 2);
        let range = self.at..self.at + STEP_BYTES;
        to[range.clone()].copy_from_slice(&from[range]);
        std::hint::black_box(&to[self.at]);
        self.at = (self.at + STEP_BYTES) % (BUFFER_BYTES / 2);
        meter.count(Done {
            read_bytes: STEP_BYTES as u64,
            written_bytes: STEP_BYTES as u64,
            began,
        });
        Ok(Progress::More)
    }

    fn frames(&self) -> &Frames {
        &self.frames
    }

    fn confirm(&self) -> Result<Option<bool>> {
        Ok(None)
    }
}
