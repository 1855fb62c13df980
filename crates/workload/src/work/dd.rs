//! Concurrent dd: each instance reads a file or device of its own with direct I/O, 512 KiB at a time, in order.

use std::sync::Arc;
use std::time::Instant;

use jericho_storage::Device;
use jericho_sys::node_memory::NodeBuffer;
use jericho_topology::{NodeId, Topology};

use crate::buffer;
use crate::case::Case;
use crate::direct::open_direct;
use crate::error::{Error, Result};
use crate::frames::buffer_share;
use crate::meter::{Done, Meter};
use crate::run::{Progress, Thread, Worker};
use crate::seats::Seat;

/// *Jericho*, III.D: each instance reads a file of 1 GB.
const FILE_BYTES: u64 = 1 << 30;

pub fn threads<'a>(case: &'a Case<'a>) -> Result<Vec<Thread<'a>>> {
    let request_bytes = case.variant.request_bytes;
    let bytes = case.scale.file_bytes(FILE_BYTES, case.seats.len(), 1 << 20);
    Ok(case.each(move |index, seat| {
        let device = open_direct(case, index, bytes)?;
        let length = device.size_bytes() / request_bytes as u64 * request_bytes as u64;
        if length == 0 {
            return Err(Error::new(format!(
                "{}: is smaller than one request of {request_bytes} bytes",
                device.name()
            )));
        }
        // Threads that share a device read different parts of it.
        let sharing = case.seats.len().div_ceil(case.targets.len().max(1)) as u64;
        let part = (index / case.targets.len().max(1)) as u64;
        let begin = match case.scratch {
            Some(_) => 0,
            None => length / sharing * part / request_bytes as u64 * request_bytes as u64,
        };
        Ok(Box::new(Dd {
            topology: case.topology.clone(),
            seat: seat.clone(),
            buffer: buffer::on(case.topology, seat.frame, request_bytes)?,
            device,
            length,
            next: begin,
        }) as Box<dyn Worker>)
    }))
}

struct Dd {
    topology: Topology,
    seat: Seat,
    device: Arc<dyn Device>,
    buffer: NodeBuffer,
    length: u64,
    next: u64,
}

impl Worker for Dd {
    fn step(&mut self, meter: &mut Meter) -> Result<Progress> {
        let began = Instant::now();
        self.device.read_at(self.next, &mut self.buffer)?;
        let bytes = self.buffer.len() as u64;
        meter.count(Done {
            read_bytes: bytes,
            written_bytes: 0,
            began,
        });
        self.next = (self.next + bytes) % self.length;
        Ok(Progress::More)
    }

    fn local_share(&self, thread: NodeId) -> Option<f64> {
        buffer_share(&self.topology, &self.seat, thread)
    }
}
