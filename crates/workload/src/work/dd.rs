//! Concurrent dd: each instance reads a file or device of its own with direct I/O, 512 KiB at a time, in order.

use std::sync::Arc;
use std::time::Instant;

use jericho_storage::Device;
use jericho_sys::node_memory::NodeBuffer;

use crate::buffer;
use crate::case::{Case, Scale};
use crate::direct::{self, Devices, first_request, requests_of};
use crate::error::Result;
use crate::frames::Frames;
use crate::meter::{Done, Meter};
use crate::run::{Progress, Thread, Worker};
use crate::seats::Seat;

/// *Jericho*, III.D: each instance reads a file of 1 GB.
const FILE_BYTES: u64 = 1 << 30;

/// Returns the bytes of the file of each instance.
pub fn file_bytes(threads: usize, scale: Scale) -> u64 {
    scale.file_bytes(FILE_BYTES, threads, 1 << 20)
}

/// Returns the bytes of all files.
pub fn bytes(threads: usize, scale: Scale) -> u64 {
    threads as u64 * file_bytes(threads, scale)
}

pub fn threads<'a>(case: &'a Case<'a>) -> Result<Vec<Thread<'a>>> {
    let bytes = file_bytes(case.seats.len(), case.scale);
    let devices = Devices::open(case)?;
    Ok(case.each(move |index, seat| {
        let dd = Dd::open(case, &devices, index, seat, bytes)?;
        Ok(Box::new(dd) as Box<dyn Worker>)
    }))
}

struct Dd {
    frames: Frames,
    kernel_node: Option<u32>,
    device: Arc<dyn Device>,
    buffer: NodeBuffer,
    /// Number of requests that the device has room for, and the next one.
    requests: u64,
    next: u64,
    /// Whether the thread adds all bytes up that it has read.
    adds: bool,
    sum: u64,
}

impl Dd {
    fn open(case: &Case, devices: &Devices, index: usize, seat: &Seat, bytes: u64) -> Result<Dd> {
        let request_bytes = case.variant.request_bytes;
        let device = devices.of(case, index, bytes)?;
        let target = &case.targets[index % case.targets.len()].path;
        case.engine.note(case.placement, target, &*device, None)?;
        let requests = requests_of(&*device, request_bytes)?;
        let buffer = buffer::on(case.topology, seat.frame, request_bytes)?;
        Ok(Dd {
            frames: Frames::of_buffer(case.topology, seat, buffer.nodes()),
            kernel_node: seat.kernel_node(case.topology),
            buffer,
            device,
            requests,
            next: first_request(case, index, requests),
            adds: direct::adds(case, false),
            sum: 0,
        })
    }
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
        if self.adds {
            let sum = direct::sum(&self.buffer);
            self.sum = std::hint::black_box(self.sum.wrapping_add(sum));
        }
        self.next = (self.next + 1) % self.requests;
        Ok(Progress::More)
    }

    fn frames(&self) -> &Frames {
        &self.frames
    }

    fn confirm(&self) -> Result<Option<bool>> {
        buffer::confirm(self.buffer.nodes(), self.kernel_node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::tests::Story;
    use crate::kind::Kind;

    #[test]
    fn dd_adds_up_its_bytes_only_if_the_name_of_the_placement_says_so() {
        for (name, adds) in [("TLORPLIR", true), ("TLORP0I0", false), ("best", false)] {
            let story = Story::new(Kind::Dd, name);
            let case = story.case();
            let devices = Devices::open(&case).unwrap();
            let mut dd = Dd::open(&case, &devices, 0, &case.seats[0], 1 << 20).unwrap();
            let mut meter = Meter::new().unwrap();
            dd.step(&mut meter).unwrap();
            assert_eq!(meter.read_bytes, 512 << 10);
            assert_eq!(dd.sum > 0, adds, "{name}");
        }
    }
}
