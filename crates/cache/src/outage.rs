//! Outages: times in which pages cannot be written back.
//!
//! ```text
//!   none ── a write-back fails ──▶ outage ── no page has failed for RETRY, and none waits or is being tried again ──▶ none
//! ```
//!
//! What failed stays dirty, and nothing of it is lost. The evictor (the only one who changes the outage) writes
//! one piece of it every `RETRY`; once one can be written, all are tried again. Meanwhile nobody waits in vain:
//! a sync tries its pages at once and has the error, and writers that are held back because too much is dirty get
//! it, too. They wait on only while write-back of other pages makes room for them. Where the cause is a lack of
//! space, `Slice::no_room` tells it to those who are about to write new pages, before the cache is full of what has
//! no place.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::object::Error;
use crate::slice::Slice;
use crate::state::{After, Shared, State};

/// Pages whose write-back failed are tried again after this time.
pub(crate) const RETRY: Duration = Duration::from_secs(1);

/// The observer hears of the end when nothing has failed for this time, so that it does not hear of every page that still
/// finds room.
pub(crate) const CALM: Duration = Duration::from_secs(5);

/// Hears of the begin of an outage (with its cause) and of its end (`None`). Called by the slice's evictor.
pub type Observer = Box<dyn Fn(Option<&Error>) + Send + Sync>;

pub(crate) struct Outage {
    /// Why the last write-back failed that did.
    error: Error,
    failed_at: Instant,
    /// When a write-back last succeeded, or the outage began.
    written_at: Instant,
    probe_at: Instant,
}

impl State {
    /// A write-back failed.
    pub fn write_back_failed(&mut self, shared: &Shared, error: &Error, now: Instant) {
        let (written_at, probe_at) = self
            .outage
            .as_ref()
            .map_or((now, now + RETRY), |o| (o.written_at, o.probe_at));
        let outage = Outage {
            error: error.clone(),
            failed_at: now,
            written_at,
            probe_at,
        };
        let errno = if is_no_room(error) { error.errno() } else { 0 };
        shared.no_room.store(errno, Relaxed);
        self.outage = Some(outage);
    }

    /// A write-back succeeded. `failed_before`: of pages that could not be written before, so that the others may be tried
    /// again.
    pub fn write_back_succeeded(&mut self, failed_before: bool, now: Instant) {
        if let Some(outage) = &mut self.outage {
            outage.written_at = now;
            if failed_before {
                self.dirty.retry_all();
            }
        }
    }

    /// Whether a piece of what failed is to be tried now.
    pub fn is_probe_due(&mut self, now: Instant) -> bool {
        let due = self.outage.as_mut().filter(|o| o.probe_at <= now);
        if let Some(outage) = due {
            outage.probe_at = now + RETRY;
            return true;
        }
        false
    }

    /// Ends an outage that is over. Not to be called while pages that failed are being tried again.
    pub fn end_outage(&mut self, shared: &Shared, now: Instant) {
        let quiet = |o: &Outage| now.saturating_duration_since(o.failed_at) >= RETRY;
        if self.outage.as_ref().is_some_and(quiet) && self.dirty.failed_pages() == 0 {
            shared.no_room.store(0, Relaxed);
            self.outage = None;
        }
    }

    /// Gives the cause of the outage to writers that wait for fewer dirty pages, if the pages that cannot be written
    /// are too many for that, or none could be written for a while.
    pub fn end_vain_waits(&mut self, shared: &Shared, now: Instant, after: &mut After) {
        let Some(outage) = &self.outage else { return };
        let since = self.throttled_since.max(outage.written_at);
        let idle = now.saturating_duration_since(since) >= RETRY;
        if idle || self.dirty.failed_pages() >= u64::from(shared.limits.dirty_max) {
            let error = &outage.error;
            let waiting = self.throttled.drain(..);
            after
                .done
                .extend(waiting.map(|resume| (resume, Err(error.clone()))));
        }
    }
}

fn is_no_room(error: &Error) -> bool {
    matches!(error.errno(), 28 | 122) // ENOSPC, EDQUOT
}

impl Slice {
    /// `observer` hears of each begin and end of a time in which pages cannot be written back. It must not wait for the
    /// slice. Set once.
    pub fn set_on_outage(&self, observer: Observer) {
        let _ = self.shared.on_outage.set(observer);
    }

    /// Why new pages should not be written now: there is no space to write them back to. What has its place may still be
    /// overwritten.
    pub fn no_room(&self) -> Option<Error> {
        if self.shared.no_room.load(Relaxed) == 0 {
            return None;
        }
        let state = self.shared.lock();
        state.outage.as_ref().map(|outage| outage.error.clone())
    }
}

/// Tells the observer. Without the lock.
pub(crate) fn tell(shared: &Shared, error: Option<&Error>) {
    if let Some(observer) = shared.on_outage.get() {
        observer(error);
        return;
    }
    match error {
        Some(error) => tracing::error!(slice = shared.id, %error, "write-back fails"),
        None => tracing::info!(slice = shared.id, "write-back goes on"),
    }
}
