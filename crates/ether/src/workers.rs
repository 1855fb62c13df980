//! Threads that make the blocking calls of a target's device: some for each node that has network interfaces.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar};
use std::thread::JoinHandle;

use jericho_remote::{Action, Operation, Run, Work, WorkError};
use jericho_storage::{AlignedBuffer, Device, IoError};
use jericho_sys::memory::Mapping;
use jericho_sys::{errno, service};
use jericho_topology::Topology;

use crate::lock::{LockStatus, TimedLock};
use crate::placement;

/// Number of threads for each node: enough for the depth at which a disk reaches its rate.
const THREADS: usize = 8;

/// An operation of the device, and the pool that has its data.
pub(crate) struct Job {
    pub work: Work,
    pub pool: Option<Arc<Mapping>>,
}

/// The end of an operation. The data of a read is in the pool.
pub(crate) struct Ended {
    pub work: Work,
    pub result: Result<(), WorkError>,
}

/// The operations that wait, by node. A thread takes those of its node only, so the device's data stays on the node of the network interface.
pub(crate) struct Workers {
    device: Arc<dyn Device>,
    queues: Vec<Queue>,
}

struct Queue {
    node: Option<u32>,
    /// Pages of a pool that are on the node.
    pages: Range<u32>,
    jobs: TimedLock<Jobs>,
    changed: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    is_closed: bool,
}

impl Workers {
    /// Returns queues without operations, one for each node of the network interfaces. `own` are the nodes with the pages of a pool that are there.
    pub fn new(
        device: Arc<dyn Device>,
        nodes: &[Option<u32>],
        own: &[(u32, Range<u32>)],
    ) -> Workers {
        let pages = |node| {
            let of_node = own.iter().find(|(other, _)| Some(*other) == node);
            of_node.map_or(0..0, |(_, pages)| pages.clone())
        };
        let queue = |(node, _)| Queue {
            node,
            pages: pages(node),
            jobs: TimedLock::new(Jobs::default()),
            changed: Condvar::new(),
        };
        let groups = placement::groups(nodes);
        Workers {
            device,
            queues: groups.into_iter().map(queue).collect(),
        }
    }

    /// Starts the threads. `end` takes the end of each operation.
    pub fn start<E>(
        self: &Arc<Workers>,
        topology: &Arc<Topology>,
        end: E,
    ) -> io::Result<Vec<JoinHandle<()>>>
    where
        E: Fn(Ended) + Clone + Send + 'static,
    {
        let mut threads = Vec::new();
        for queue in 0..self.queues.len() {
            for _ in 0..THREADS {
                let (workers, topology) = (Arc::clone(self), Arc::clone(topology));
                let end = end.clone();
                let name = format!("serve-io-{}", threads.len());
                threads.push(service::spawn(name, move || {
                    let queue = &workers.queues[queue];
                    placement::pin(&topology, queue.node);
                    let mut buffer = AlignedBuffer::new(0);
                    while let Some(job) = queue.next() {
                        end(workers.perform(job, &mut buffer));
                    }
                })?);
            }
        }
        Ok(threads)
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Returns whether the device needs no thread for its operations.
    pub fn is_instant(&self) -> bool {
        self.device.is_instant()
    }

    /// Queues an operation for the threads of the node of its pages in the pool, or of the first node.
    pub fn submit(&self, job: Job) {
        let has_pages = |queue: &&Queue| match job.work {
            Work::Request { run, .. } => queue.pages.contains(&run.page),
            Work::Flush { .. } => false,
        };
        let queue = self.queues.iter().find(has_pages);
        let queue = queue.unwrap_or(&self.queues[0]);
        queue.jobs.lock().waiting.push_back(job);
        queue.changed.notify_one();
    }

    /// Ends the threads, after the operations that they have begun.
    pub fn close(&self) {
        for queue in &self.queues {
            queue.jobs.lock().is_closed = true;
            queue.changed.notify_all();
        }
    }

    /// Returns what is known of the locks of waiting operations, by node.
    pub fn locks(&self) -> Vec<(Option<u32>, LockStatus)> {
        let status = |queue: &Queue| (queue.node, queue.jobs.status());
        self.queues.iter().map(status).collect()
    }

    /// Performs an operation in this thread. `buffer` is memory for its data, which this makes larger if necessary. So the device never writes from memory that a frame
    /// changes meanwhile.
    pub fn perform(&self, Job { work, pool }: Job, buffer: &mut AlignedBuffer) -> Ended {
        let (operation, run) = match work {
            Work::Flush { .. } => (Operation::flush(), Run { page: 0, pages: 0 }),
            Work::Request { operation, run, .. } => (operation, run),
        };
        let data = run.bytes();
        if !data.is_empty() && pool.is_none() {
            // There was no memory for the pool, so what the session has sent is not there.
            let result = Err(WorkError {
                errno: errno::ENOMEM as u16,
                loses_writes: false,
            });
            return Ended { work, result };
        }
        if buffer.as_slice().len() < data.len() {
            *buffer = AlignedBuffer::new(data.len());
        }
        let bytes = &mut buffer.as_mut_slice()[..data.len()];
        if let (true, Some(pool)) = (operation.is_change(), &pool) {
            pool.copy_out(data.start, bytes);
        }
        let result = perform(&*self.device, &operation, bytes);
        if let (Action::Read, Ok(()), Some(pool)) = (operation.action, &result, &pool) {
            pool.copy_in(data.start, bytes);
        }
        Ended { work, result }
    }
}

impl Queue {
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

fn perform(device: &dyn Device, operation: &Operation, data: &mut [u8]) -> Result<(), WorkError> {
    let (offset, length) = (operation.offset_bytes, operation.length_bytes);
    let result = match operation.action {
        Action::Read => device.read_at(offset, data),
        Action::Write { is_durable: false } => device.write_at(offset, data),
        Action::Write { is_durable: true } => device.write_durable(offset, data),
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

/// Returns what an initiator learns of an error of the device, which this logs.
pub(crate) fn failed(error: &IoError) -> WorkError {
    tracing::warn!(%error, "an operation of the device failed");
    WorkError {
        errno: u16::try_from(error.errno()).unwrap_or(errno::EIO as u16),
        loses_writes: error.operation == "flush",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::null_device;

    #[test]
    fn without_memory_for_the_pool_reads_and_writes_fail_and_flushes_do_not() {
        let workers = Workers::new(null_device(1 << 20), &[None], &[]);
        let end = |work| {
            let job = Job { work, pool: None };
            workers.perform(job, &mut AlignedBuffer::new(0)).result
        };
        for action in [Action::Read, Action::Write { is_durable: false }] {
            let work = Work::Request {
                session: 1,
                slot: 0,
                sequence: 1,
                export: 0,
                operation: Operation {
                    action,
                    offset_bytes: 0,
                    length_bytes: 4096,
                },
                run: Run { page: 0, pages: 1 },
            };
            assert_eq!(end(work).map_err(|error| error.errno), Err(12));
        }
        assert_eq!(end(Work::Flush { export: 0 }), Ok(()));
    }
}
