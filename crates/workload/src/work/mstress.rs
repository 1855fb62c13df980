//! mstress: threads that copy memory, as STREAM's *copy* does. It is a workload, and it loads memory beside other workloads (*Implications*, figure 4).

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

/// Bytes of the two buffers of a thread. Larger than the last cache of a CPU.
pub const BUFFER_BYTES: usize = 256 << 20;
/// Bytes of one step.
const STEP_BYTES: usize = 1 << 20;
/// Most threads beside a workload: figure 4(c) has up to eight instances of zmIO.
const BESIDE_MAX: usize = 8;

/// Returns the threads of the workload.
pub fn threads<'a>(case: &'a Case<'a>) -> Vec<Thread<'a>> {
    case.each(move |_, seat| Ok(Box::new(Mstress::new(case, seat)?) as Box<dyn Worker>))
}

/// Returns the nodes on which memory is loaded beside a workload, one for each thread: that of the cached pages or buffer of each thread of the workload, but of
/// at most [`BESIDE_MAX`] threads and of each node once.
fn nodes_beside(case: &Case) -> Vec<Option<NodeId>> {
    let frames = case.seats.iter().map(|seat| seat.frame);
    let mut nodes: Vec<Option<NodeId>> = frames.clone().take(BESIDE_MAX).collect();
    for node in frames {
        if !nodes.contains(&node) {
            nodes.push(node);
        }
    }
    nodes
}

/// Returns the memory that the threads beside a workload take, by the kernel's number of the node.
pub fn memory_beside(case: &Case) -> Vec<(Option<u32>, u64)> {
    let kernel_node = |node: NodeId| case.topology.node(node)?.kernel_node;
    let taken = nodes_beside(case).into_iter();
    taken
        .map(|node| (node.and_then(kernel_node), BUFFER_BYTES as u64))
        .collect()
}

/// Returns threads that load memory beside a workload.
pub fn threads_beside<'a>(case: &'a Case<'a>) -> Vec<Thread<'a>> {
    let threads = nodes_beside(case).into_iter().map(|node| {
        let seat = Seat {
            device: None,
            frame: node,
            // This load may be remote to its memory, if the process may not use the CPUs there.
            thread: node
                .and_then(|node| case.topology.node(node))
                .map(|node| node.nearest_cpu_node),
        };
        Thread {
            seat: seat.clone(),
            make: Box::new(move || Ok(Box::new(Mstress::new(case, &seat)?) as Box<dyn Worker>)),
            counts: false,
        }
    });
    threads.collect()
}

struct Mstress {
    /// Both buffers.
    memory: NodeBuffer,
    kernel_node: Option<u32>,
    at: usize,
    frames: Frames,
}

impl Mstress {
    fn new(case: &Case, seat: &Seat) -> Result<Mstress> {
        let mut memory = buffer::on(case.topology, seat.frame, BUFFER_BYTES)?;
        // Some CPUs write zeros twice as fast as other bytes.
        random::pieces(
            case.seed,
            BUFFER_BYTES as u64,
            case.stopping,
            |at, piece| {
                memory[at as usize..][..piece.len()].copy_from_slice(piece);
                Ok(())
            },
        )?;
        Ok(Mstress {
            frames: Frames::of_buffer(case.topology, seat, memory.nodes()),
            kernel_node: seat.kernel_node(case.topology),
            memory,
            at: 0,
        })
    }
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
        buffer::confirm(self.memory.nodes(), self.kernel_node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::tests::Story;
    use crate::kind::Kind;

    #[test]
    fn beside_each_thread_of_zmio_is_one_of_mstress_up_to_the_papers_eight() {
        let beside = |threads| {
            let story = Story::with(Kind::Zmio, "best", threads, 1);
            let case = story.case();
            let nodes = nodes_beside(&case).into_iter().flatten();
            let nodes: Vec<u16> = nodes.map(|node| node.0).collect();
            assert_eq!(memory_beside(&case).len(), nodes.len());
            assert_eq!(threads_beside(&case).len(), nodes.len());
            nodes
        };
        assert_eq!(beside(1), [0]);
        assert_eq!(beside(4), [0, 1, 0, 1]);
        assert_eq!(beside(64), [0, 1, 0, 1, 0, 1, 0, 1]);
    }
}
