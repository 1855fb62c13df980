//! zmIO: asynchronous direct reads or writes. The *status queue* is bounded: when it is full, the thread waits for one to end and then begins the next one.

use std::sync::Arc;
use std::time::Instant;

use jericho_storage::{Completion, Direction, Queue, Transfer, open_queue};
use jericho_sys::memory::{Mapping, Segment};
use jericho_topology::{NodeId, Topology};

use crate::buffer;
use crate::case::Case;
use crate::direct::{first_request, open_direct, requests_of};
use crate::error::{Error, Result};
use crate::frames::buffer_share;
use crate::meter::{Done, Meter};
use crate::placement::Use;
use crate::run::{Progress, Thread, Worker};
use crate::seats::Seat;

/// Places of the status queue.
pub const DEPTH: usize = 32;
/// The paper reads from devices. A file for each instance takes their place in a directory.
pub const FILE_BYTES: u64 = 1 << 30;
/// Bytes that are added up at a time. They stay in the first cache of the CPU.
const CHUNK_BYTES: usize = 4096;

pub fn threads<'a>(case: &'a Case<'a>) -> Result<Vec<Thread<'a>>> {
    let bytes = case.scale.file_bytes(FILE_BYTES, case.seats.len(), 1 << 20);
    Ok(case.each(move |index, seat| {
        let worker = Zmio::open(case, index, seat, bytes)?;
        Ok(Box::new(worker) as Box<dyn Worker>)
    }))
}

struct Zmio {
    topology: Topology,
    seat: Seat,
    queue: Box<dyn Queue>,
    memory: Arc<Mapping>,
    request_bytes: usize,
    /// Number of requests that the device has room for, and the next one.
    requests: u64,
    next: u64,
    /// When the transfer of each place began.
    began: Vec<Instant>,
    free: Vec<usize>,
    ended: Vec<Completion>,
    writes: bool,
    /// Whether the thread adds all bytes up that it has read.
    adds: bool,
    sum: u64,
}

impl Zmio {
    fn open(case: &Case, index: usize, seat: &Seat, bytes: u64) -> Result<Zmio> {
        let device = open_direct(case, index, bytes)?;
        let request_bytes = case.variant.request_bytes;
        let memory = buffer::for_transfers(case.topology, seat, DEPTH * request_bytes)?;
        let requests = requests_of(&*device, request_bytes)?;
        let queue = open_queue(&[device][..], &[], DEPTH as u32);
        let queue = queue.map_err(|error| Error::new(error.to_string()))?;
        Ok(Zmio {
            topology: case.topology.clone(),
            seat: seat.clone(),
            queue,
            memory,
            request_bytes,
            requests,
            next: first_request(case, index, requests),
            began: vec![Instant::now(); DEPTH],
            free: (0..DEPTH).collect(),
            ended: Vec::with_capacity(DEPTH),
            writes: case.variant.writes,
            adds: !case.variant.writes && matches!(case.placement.usage, Use::Load(_)),
            sum: 0,
        })
    }

    fn begin_all(&mut self) {
        while let Some(place) = self.free.pop() {
            self.began[place] = Instant::now();
            self.queue.submit(Transfer {
                tag: place as u64,
                device: 0,
                direction: match self.writes {
                    true => Direction::Write,
                    false => Direction::Read,
                },
                offset_bytes: self.next * self.request_bytes as u64,
                segments: vec![Segment {
                    mapping: self.memory.clone(),
                    offset: place * self.request_bytes,
                    len: self.request_bytes,
                }],
            });
            self.next = (self.next + 1) % self.requests;
        }
    }
}

/// Adds up the bytes of a place, a copy of a piece at a time, because bytes that a device writes cannot be borrowed.
fn add_up(memory: &Mapping, offset: usize, bytes: usize) -> u64 {
    let mut chunk = [0u8; CHUNK_BYTES];
    let pieces = (0..bytes).step_by(CHUNK_BYTES);
    pieces
        .map(|at| {
            let piece = &mut chunk[..CHUNK_BYTES.min(bytes - at)];
            memory.copy_out(offset + at, piece);
            piece.iter().map(|byte| u64::from(*byte)).sum::<u64>()
        })
        .sum()
}

impl Worker for Zmio {
    fn step(&mut self, meter: &mut Meter) -> Result<Progress> {
        self.begin_all();
        self.queue.wait(&mut self.ended, None);
        for completion in std::mem::take(&mut self.ended) {
            completion.result?;
            let place = completion.tag as usize;
            if self.adds {
                let sum = add_up(&self.memory, place * self.request_bytes, self.request_bytes);
                self.sum = std::hint::black_box(self.sum.wrapping_add(sum));
            }
            let bytes = self.request_bytes as u64;
            let (read_bytes, written_bytes) = match self.writes {
                true => (0, bytes),
                false => (bytes, 0),
            };
            meter.count(Done {
                read_bytes,
                written_bytes,
                began: self.began[place],
            });
            self.free.push(place);
        }
        Ok(Progress::More)
    }

    fn local_share(&self, thread: NodeId) -> Option<f64> {
        buffer_share(&self.topology, &self.seat, thread)
    }
}
