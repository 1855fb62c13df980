//! Concurrent dd: each instance reads a file or device of its own with direct I/O, 512 KiB at a time, in order.

use std::sync::Arc;
use std::time::Instant;

use jericho_storage::Device;
use jericho_sys::node_memory::NodeBuffer;
use jericho_topology::{NodeId, Topology};

use crate::buffer;
use crate::case::Case;
use crate::direct::{first_request, open_direct, requests_of};
use crate::error::Result;
use crate::frames::buffer_share;
use crate::meter::{Done, Meter};
use crate::run::{Progress, Thread, Worker};
use crate::seats::Seat;

/// *Jericho*, III.D: each instance reads a file of 1 GB.
pub const FILE_BYTES: u64 = 1 << 30;

pub fn threads<'a>(case: &'a Case<'a>) -> Result<Vec<Thread<'a>>> {
    let request_bytes = case.variant.request_bytes;
    let bytes = case.scale.file_bytes(FILE_BYTES, case.seats.len(), 1 << 20);
    Ok(case.each(move |index, seat| {
        let device = open_direct(case, index, bytes)?;
        let requests = requests_of(&*device, request_bytes)?;
        Ok(Box::new(Dd {
            topology: case.topology.clone(),
            seat: seat.clone(),
            buffer: buffer::on(case.topology, seat.frame, request_bytes)?,
            device,
            requests,
            next: first_request(case, index, requests),
        }) as Box<dyn Worker>)
    }))
}

struct Dd {
    topology: Topology,
    seat: Seat,
    device: Arc<dyn Device>,
    buffer: NodeBuffer,
    /// Number of requests that the device has room for, and the next one.
    requests: u64,
    next: u64,
}

impl Worker for Dd {
    fn step(&mut self, meter: &mut Meter) -> Result<Progress> {
        let began = Instant::now();
        let bytes = self.buffer.len() as u64;
        self.device.read_at(self.next * bytes, &mut self.buffer)?;
        meter.count(Done {
            read_bytes: bytes,
            written_bytes: 0,
            began,
        });
        self.next = (self.next + 1) % self.requests;
        Ok(Progress::More)
    }

    fn local_share(&self, thread: NodeId) -> Option<f64> {
        buffer_share(&self.topology, &self.seat, thread)
    }
}
