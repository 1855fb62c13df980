//! What the threads and callers of a slice share: the locked state, the queues between the threads, and the callbacks.
//!
//! No thread waits while it holds the lock. Callbacks, and object calls that may be slow, run after it is released. Only
//! `SliceContext::on_broken` runs under it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use crossbeam_queue::SegQueue;
use jericho_storage::{Transfer, Wake};
use parking_lot::{Mutex, MutexGuard};

use crate::context::{Report, SliceContext};
use crate::object::{Error, Object};
use crate::requests::SyncJob;
use crate::state::SliceState;

/// Called by the slice's evictor at the beginning of an outage (with its cause) and at its end (`None`).
pub type Observer = Box<dyn Fn(Option<&Error>) + Send + Sync>;

pub(crate) struct SliceShared {
    pub context: SliceContext,
    state: Mutex<SliceState>,
    /// Reads for the pipeline to start.
    pub reads: SegQueue<Transfer>,
    pub read_waker: Arc<dyn Wake>,
    /// Work for the evictor.
    pub jobs: SegQueue<SyncJob>,
    pub evict_waker: Arc<dyn Wake>,
    /// See `Slice::set_report_drain`.
    pub report_drain: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// See `Slice::set_collector`.
    pub collector: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// See `Slice::set_on_outage`.
    pub on_outage: OnceLock<Observer>,
}

impl SliceShared {
    pub fn new(
        context: SliceContext,
        read_waker: Arc<dyn Wake>,
        evict_waker: Arc<dyn Wake>,
    ) -> SliceShared {
        SliceShared {
            state: Mutex::new(SliceState::new(context.limits.frames)),
            context,
            reads: SegQueue::new(),
            read_waker,
            jobs: SegQueue::new(),
            evict_waker,
            report_drain: OnceLock::new(),
            collector: OnceLock::new(),
            on_outage: OnceLock::new(),
        }
    }

    /// Takes the slice's lock.
    pub fn lock(&self) -> MutexGuard<'_, SliceState> {
        self.state.lock()
    }

    /// Counts `n` pages that became dirty. Wakes the evictor when it must start its timer or write.
    pub fn dirtied(&self, n: u64) {
        let limits = &self.context.limits;
        let before = self.context.dirty_pages.fetch_add(n, Ordering::AcqRel);
        let background = u64::from(limits.dirty_background);
        if before == 0 || (before < background && before + n >= background) {
            self.evict_waker.wake();
        }
        if before + n >= u64::from(limits.dirty_max) {
            self.context.memory.set_throttled(true);
        }
    }

    /// Takes a report that pages were made dirty inline.
    pub fn report(&self, object: &Arc<dyn Object>, first: u64, count: u32) {
        self.context.reports.push(Report {
            object: object.clone(),
            first,
            count,
        });
        self.dirtied(u64::from(count));
    }

    /// Takes in what clients have reported. Must not be called with the lock held.
    pub fn drain_clients(&self) {
        if let Some(report_drain) = self.report_drain.get() {
            report_drain();
        }
    }

    /// Calls the observer of outages, or logs without one. Must be called without the lock.
    pub fn notify_outage(&self, error: Option<&Error>) {
        if let Some(observer) = self.on_outage.get() {
            observer(error);
            return;
        }
        match error {
            Some(error) => tracing::error!(slice = self.context.id, %error, "write-back fails"),
            None => tracing::info!(slice = self.context.id, "write-back works again"),
        }
    }
}
