//! Threads that make the blocking calls of a target's device.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar};
use std::thread::JoinHandle;

use jericho_remote::{Action, Operation, Work, WorkError};
use jericho_storage::{AlignedBuffer, Device, IoError};
use jericho_sys::{errno, service};

use crate::lock::{LockStatus, TimedLock};

/// Number of threads: enough for the depth at which a disk reaches its rate.
const THREADS: usize = 8;

/// An operation of the device, with the memory of its data.
pub(crate) struct Job {
    pub work: Work,
    pub data: AlignedBuffer,
}

/// The end of an operation. A read has its data.
pub(crate) struct Ended {
    pub work: Work,
    pub data: AlignedBuffer,
    pub result: Result<(), WorkError>,
}

pub(crate) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    device: Arc<dyn Device>,
    jobs: TimedLock<Jobs>,
    changed: Condvar,
    ended: TimedLock<Vec<Ended>>,
    /// A byte in it wakes the owner.
    bell: UnixStream,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    is_closed: bool,
}

impl Workers {
    /// Starts threads. `bell` is non-blocking, and becomes readable at its other end when operations have ended.
    pub fn start(device: Arc<dyn Device>, bell: UnixStream) -> io::Result<Workers> {
        let shared = Arc::new(Shared {
            device,
            jobs: TimedLock::new(Jobs::default()),
            changed: Condvar::new(),
            ended: TimedLock::new(Vec::new()),
            bell,
        });
        let mut workers = Workers {
            shared,
            threads: Vec::new(),
        };
        for number in 0..THREADS {
            let shared = Arc::clone(&workers.shared);
            let thread = service::spawn(format!("serve-io-{number}"), move || shared.work())?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// Begins an operation. Returns its end if the device needs no thread for it.
    pub fn submit(&self, job: Job) -> Option<Ended> {
        if self.shared.device.is_instant() {
            return Some(self.shared.perform(job));
        }
        self.shared.jobs.lock().waiting.push_back(job);
        self.shared.changed.notify_one();
        None
    }

    /// Returns what is known of the locks of waiting and of ended operations.
    pub fn locks(&self) -> (LockStatus, LockStatus) {
        (self.shared.jobs.status(), self.shared.ended.status())
    }

    /// Returns the operations that have ended since the last call.
    pub fn take_ended(&self) -> Vec<Ended> {
        std::mem::take(&mut *self.shared.ended.lock())
    }
}

impl Drop for Workers {
    /// Waits for the operations that have begun.
    fn drop(&mut self) {
        self.shared.jobs.lock().is_closed = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A panic in a thread has ended the process.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        while let Some(job) = self.next() {
            let ended = self.perform(job);
            let was_empty = {
                let mut all = self.ended.lock();
                all.push(ended);
                all.len() == 1
            };
            if was_empty {
                // EAGAIN: many bytes are there already.
                let _ = (&self.bell).write(&[1]);
            }
        }
    }

    fn perform(&self, mut job: Job) -> Ended {
        let result = perform(&*self.device, &job.work, &mut job.data);
        Ended {
            work: job.work,
            data: job.data,
            result,
        }
    }

    fn next(&self) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        loop {
            if jobs.is_closed {
                return None;
            }
            if let Some(job) = jobs.waiting.pop_front() {
                return Some(job);
            }
            jobs = jobs.wait(&self.changed);
        }
    }
}

fn perform(device: &dyn Device, work: &Work, data: &mut AlignedBuffer) -> Result<(), WorkError> {
    let operation = match work {
        Work::Flush { .. } => Operation::flush(),
        Work::Request { operation, .. } => *operation,
    };
    let (offset, length) = (operation.offset_bytes, operation.length_bytes);
    let result = match operation.action {
        Action::Read => device.read_at(offset, data.as_mut_slice()),
        Action::Write { is_durable: false } => device.write_at(offset, data.as_slice()),
        Action::Write { is_durable: true } => device.write_durable(offset, data.as_slice()),
        // A device makes zeros durable in any case.
        Action::WriteZeroes { .. } => device.write_zeros(offset, length.into()),
        Action::Discard => match device.discard(offset, length.into()) {
            // The contents are unspecified after a discard, so they may as well stay.
            Err(error) if error.is_unsupported() => Ok(()),
            discarded => discarded,
        },
        Action::Flush => device.flush(),
    };
    result.map_err(|error| failed(&error))
}

fn failed(error: &IoError) -> WorkError {
    tracing::warn!(%error, "an operation of the device failed");
    WorkError {
        errno: u16::try_from(error.errno()).unwrap_or(errno::EIO as u16),
        loses_writes: error.operation == "flush",
    }
}
