//! Reads that a thread performs itself, instead of the slice's pipeline.
//!
//! A thread that serves requests sleeps until the next request. It can wait for the device in the same sleep, which saves waking
//! the pipeline for each miss and being woken by it. Such a thread owns a `Reader` of the slice. The transfers of its Gets go
//! into a list of the thread, which `poll` submits. Completions pass through the slice as in the pipeline. The pipeline still
//! does read-ahead and long reads: there, two threads gain more than the wake-up costs.
//!
//! Other threads may wait for a fill that this thread has started, and hold locks meanwhile. A thread that invalidates pages is
//! one of them. While a thread's reader is not idle, the thread must therefore wait only for things that the slice's own threads
//! may wait for. Otherwise both threads wait for ever.

use std::sync::Arc;
use std::time::Duration;

use jericho_storage::{Completion, Queue, QueueError};
use jericho_sys::doorbell::Doorbell;

use crate::scheduler;
use crate::shared::SliceShared;
use crate::slice::Slice;
use crate::thread_reads::{self, Requested};

/// Maximum number of transfers of one thread in flight; further ones wait.
const DEPTH: u32 = 64;

/// Performs the reads of the thread that created it.
pub struct Reader {
    shared: Arc<SliceShared>,
    /// The list of this thread in `thread_reads`. It is not `Send`, so a reader stays in its thread.
    requested: Requested,
    queue: Box<dyn Queue>,
    completions: Vec<Completion>,
}

impl Slice {
    /// Creates a reader for the calling thread, which must not have one of this slice. Completions ring `doorbell` when the
    /// thread sleeps. Fails if io_uring is refused.
    pub fn reader(&self, doorbell: &Doorbell) -> Result<Reader, QueueError> {
        let queue = jericho_storage::open_signalling_queue(&self.devices, DEPTH, doorbell)?;
        Ok(Reader {
            shared: self.shared.clone(),
            requested: thread_reads::register(&self.shared),
            queue,
            completions: vec![],
        })
    }
}

impl Reader {
    /// Submits requested transfers and polls for completions. Returns whether `run` has work.
    pub fn poll(&mut self) -> bool {
        self.submit();
        if self.completions.is_empty() && self.queue.in_flight() > 0 {
            self.queue.wait(&mut self.completions, Some(Duration::ZERO));
        }
        !self.completions.is_empty()
    }

    /// Returns whether no read is in flight or requested.
    pub fn is_idle(&self) -> bool {
        self.queue.in_flight() == 0
            && self.completions.is_empty()
            && self.requested.borrow().is_empty()
    }

    /// Ends the completed reads, and runs the callbacks of their Gets.
    pub fn run(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        for completion in completions.drain(..) {
            scheduler::read_ended(&self.shared, completion);
            self.submit();
        }
        self.completions = completions;
    }

    fn submit(&mut self) {
        for transfer in self.requested.borrow_mut().drain(..) {
            self.queue.submit(transfer);
        }
    }
}

impl Drop for Reader {
    /// Ends the reads in flight, because programs or other Gets wait for them.
    fn drop(&mut self) {
        while !self.is_idle() {
            self.submit();
            if self.completions.is_empty() {
                self.queue.wait(&mut self.completions, None);
            }
            self.run();
        }
        thread_reads::unregister(&self.shared);
    }
}
