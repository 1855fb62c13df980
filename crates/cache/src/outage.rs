//! Outages: periods in which pages cannot be written back.
//!
//! ```text
//!   none ── a write-back fails ──▶ outage ── no failure for RETRY, and all failed pages were retried ──▶ none
//! ```
//!
//! Pages whose write-back failed stay dirty; none is lost. Only the evictor changes the outage. It writes one piece of the failed
//! pages every `RETRY`. Once a piece succeeds, it retries all others, and the outage lasts until all were tried.
//!
//! No caller waits in vain during an outage. A sync tries its pages at once and returns the error. Writers that wait because too
//! many pages are dirty also get the error, unless write-back of other pages still makes room for them. When the cause is a lack
//! of space, `Slice::no_room` reports it to callers that are about to write new pages, before the cache fills with pages that
//! cannot be stored.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::object::Error;
use crate::slice::Slice;
use crate::state::{After, Shared, State};

/// Pause before pages whose write-back failed are retried.
pub(crate) const RETRY: Duration = Duration::from_secs(1);

/// The observer learns of the end of an outage when nothing has failed for this long. A single page that finds space
/// does not count as an end.
pub(crate) const CALM: Duration = Duration::from_secs(5);

/// Called by the slice's evictor at the beginning of an outage (with its cause) and at its end (`None`).
pub type Observer = Box<dyn Fn(Option<&Error>) + Send + Sync>;

/// How often the pages of a write-back were tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Attempt {
    First,
    /// They have failed before.
    Again,
    /// They have failed before. If they succeed now, the other failed pages are retried.
    Trial,
}

pub(crate) struct Outage {
    /// Cause of the latest failed write-back.
    error: Error,
    failed_at: Instant,
    /// Time of the last successful write-back, or of the beginning of the outage.
    written_at: Instant,
    probe_at: Instant,
}

impl State {
    /// Records that a write-back failed.
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

    /// Records that a write-back succeeded. After a trial, all failed pages are retried.
    pub fn write_back_succeeded(&mut self, attempt: Attempt, now: Instant) {
        if let Some(outage) = &mut self.outage {
            outage.written_at = now;
            if attempt == Attempt::Trial {
                self.dirty.retry_all();
            }
        }
    }

    /// Returns whether a trial write of failed pages is due.
    pub fn is_probe_due(&mut self, now: Instant) -> bool {
        let due = self.outage.as_mut().filter(|o| o.probe_at <= now);
        if let Some(outage) = due {
            outage.probe_at = now + RETRY;
            return true;
        }
        false
    }

    /// Ends an outage that is over. Must not be called while failed pages are being retried.
    pub fn end_outage(&mut self, shared: &Shared, now: Instant) {
        let quiet = |o: &Outage| now.saturating_duration_since(o.failed_at) >= RETRY;
        if self.outage.as_ref().is_some_and(quiet) && !self.dirty.has_failed() {
            shared.no_room.store(0, Relaxed);
            self.outage = None;
        }
    }

    /// Returns the outage's error to writers that wait for fewer dirty pages, if the failed pages alone exceed the
    /// limit or no write has succeeded for a while.
    pub fn fail_throttled(&mut self, shared: &Shared, now: Instant, after: &mut After) {
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
    /// Sets the observer, which learns of the beginning and end of each outage. The observer must not wait for the
    /// slice. Set once.
    pub fn set_on_outage(&self, observer: Observer) {
        let _ = self.shared.on_outage.set(observer);
    }

    /// Returns why new pages should not be written now: there is no space to write them back to. Pages that have space
    /// on the device may still be overwritten.
    pub fn no_room(&self) -> Option<Error> {
        if self.shared.no_room.load(Relaxed) == 0 {
            return None;
        }
        let state = self.shared.lock();
        state.outage.as_ref().map(|outage| outage.error.clone())
    }
}

/// Calls the observer, or logs without one. Must be called without the lock.
pub(crate) fn notify(shared: &Shared, error: Option<&Error>) {
    if let Some(observer) = shared.on_outage.get() {
        observer(error);
        return;
    }
    match error {
        Some(error) => tracing::error!(slice = shared.id, %error, "write-back fails"),
        None => tracing::info!(slice = shared.id, "write-back works again"),
    }
}
