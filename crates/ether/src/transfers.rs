//! Reads and writes of a target's device that a receiving thread begins itself, on io_uring, between the pool of a session and the device. So no other thread wakes for them, and
//! nothing is copied.
//!
//! The payload of a write is in the pool when this begins it. A peer that keeps the rules sends nothing for these pages until it has the completion (rule 2 of
//! `docs/formats/wire.md`). One that breaks them spoils its own data only.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jericho_remote::{Action, Work};
use jericho_storage::{
    Completion, Device, Direction, Queue, Segment, Transfer, open_signalling_queue,
};
use jericho_sys::doorbell::Doorbell;

use crate::workers::{Ended, Job, failed};

/// Transfers in progress; others wait in the queue.
const DEPTH: u32 = 128;

pub(crate) struct Transfers {
    queue: Box<dyn Queue>,
    /// Readable when transfers have ended.
    doorbell: Doorbell,
    works: HashMap<u64, Work>,
    begun: u64,
    completions: Vec<Completion>,
}

impl Transfers {
    /// Returns a queue without transfers, for the thread that uses it first. Returns `None` if the device or the kernel allows blocking calls only.
    pub fn open(device: &Arc<dyn Device>) -> Option<Transfers> {
        let doorbell = Doorbell::new().ok()?;
        let devices = (&[Arc::clone(device)]).into();
        match open_signalling_queue(&devices, DEPTH, &doorbell) {
            Ok(queue) => Some(Transfers {
                queue,
                doorbell,
                works: HashMap::new(),
                begun: 0,
                completions: Vec::new(),
            }),
            Err(error) => {
                tracing::debug!(%error, "threads make the calls of {}", device.name());
                None
            }
        }
    }

    /// Returns what is readable when transfers have ended.
    pub fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// Begins an operation, or returns it if it is no transfer.
    pub fn submit(&mut self, job: Job) -> Option<Job> {
        let (Work::Request { operation, run, .. }, Some(pool)) = (job.work, &job.pool) else {
            return Some(job);
        };
        let direction = match operation.action {
            Action::Read => Direction::Read,
            Action::Write { is_durable: false } => Direction::Write,
            _ => return Some(job),
        };
        self.begun += 1;
        self.works.insert(self.begun, job.work);
        self.queue.submit(Transfer {
            tag: self.begun,
            device: 0,
            direction,
            offset_bytes: operation.offset_bytes,
            segments: vec![Segment {
                mapping: Arc::clone(pool),
                offset: run.bytes().start,
                len: operation.length_bytes as usize,
            }],
        });
        None
    }

    /// Starts the transfers that were submitted, and returns the operations that have ended. `waits`: sleeps until one has ended.
    pub fn poll(&mut self, waits: bool) -> Vec<Ended> {
        if self.queue.in_flight() == 0 {
            return Vec::new();
        }
        let timeout = (!waits).then_some(Duration::ZERO);
        self.queue.wait(&mut self.completions, timeout);
        let ended = self.completions.drain(..).filter_map(|completion| {
            let work = self.works.remove(&completion.tag)?;
            let result = completion.result.map_err(|error| failed(&error));
            Some(Ended { work, result })
        });
        ended.collect()
    }

    /// Waits for the transfers that the device has begun.
    pub fn finish(&mut self) {
        while self.queue.in_flight() > 0 {
            self.poll(true);
        }
    }
}
