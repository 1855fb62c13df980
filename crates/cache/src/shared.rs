//! What the threads and callers of a slice share: the locked state, the queues between the threads, and the callbacks.
//!
//! No thread waits while it holds the lock. Callbacks, and object calls that may be slow, run after it is released. Only
//! `SliceContext::on_broken` runs under it.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossbeam_queue::SegQueue;
use jericho_storage::{Transfer, Wake};
use parking_lot::{Mutex, MutexGuard};

use crate::context::{Report, SliceContext};
use crate::giving_back::GivingBack;
use crate::object::{Error, Object};
use crate::requests::SyncJob;
use crate::state::SliceState;

/// Time between two visits of the evictor to the dirty pages, while there are some.
pub(crate) const DIRTY_VISIT: Duration = Duration::from_millis(500);

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
    evict_waker: Arc<dyn Wake>,
    /// The evictor visits the dirty pages within `DIRTY_VISIT`, also if no thread wakes it.
    evictor_has_timer: AtomicBool,
    /// The evictor needed frames since the last call of `Slice::take_wish`.
    pub wants_frames: AtomicBool,
    /// The spill ranges that are given back.
    pub giving_back: Mutex<GivingBack>,
    /// See `Slice::set_on_shortage`.
    pub on_shortage: OnceLock<Box<dyn Fn() + Send + Sync>>,
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
            state: Mutex::new(SliceState::new(context.memory.geometry())),
            wants_frames: AtomicBool::new(false),
            giving_back: Mutex::default(),
            on_shortage: OnceLock::new(),
            context,
            reads: SegQueue::new(),
            read_waker,
            jobs: SegQueue::new(),
            evict_waker,
            evictor_has_timer: AtomicBool::new(false),
            report_drain: OnceLock::new(),
            collector: OnceLock::new(),
            on_outage: OnceLock::new(),
        }
    }

    /// Takes the slice's lock.
    pub fn lock(&self) -> MutexGuard<'_, SliceState> {
        self.state.lock()
    }

    /// Returns whether a small sync has not ended. Its last act may be a job for the evictor. If the slice closes, none begins after
    /// this call: the lock orders the call with `small_sync::begin`, which checks `closing`.
    pub fn has_small_syncs(&self) -> bool {
        let _state = self.lock();
        self.context.small_syncs.load(SeqCst) > 0
    }

    /// Wakes the evictor.
    pub fn wake_evictor(&self) {
        self.context.counts.evictor_wakes.fetch_add(1, Relaxed);
        self.evict_waker.wake();
    }

    /// Returns how long the evictor may sleep, if it has to wake up after `timeout`. Without a limit, the first dirty page wakes it.
    pub fn before_sleep(&self, timeout: Option<Duration>) -> Option<Duration> {
        self.evictor_has_timer.store(timeout.is_some(), SeqCst);
        // Pairs with `dirtied`: of the two threads, the one whose load comes last sees the other's store.
        if timeout.is_none() && self.context.dirty_pages.load(SeqCst) > 0 {
            self.evictor_has_timer.store(true, SeqCst);
            return Some(DIRTY_VISIT);
        }
        timeout
    }

    /// Counts `n` pages that became dirty. Wakes the evictor when it must start its timer or write.
    pub fn dirtied(&self, n: u64) {
        let limits = &self.context.limits;
        let before = self.context.dirty_pages.fetch_add(n, SeqCst);
        let background = u64::from(limits.dirty_background);
        let needs_timer = before == 0 && !self.evictor_has_timer.load(SeqCst);
        if needs_timer || (before < background && before + n >= background) {
            self.wake_evictor();
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

    /// Notes that a slice with spill ranges needs frames, and calls the observer of shortages. Must be called without the lock.
    pub fn wish_for_frames(&self) {
        if self.context.memory.geometry().spill_ranges() > 0
            && let Some(on_shortage) = self.on_shortage.get()
            && !self.wants_frames.swap(true, Relaxed)
        {
            on_shortage();
        }
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
