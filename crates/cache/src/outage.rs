//! Outages: periods in which pages cannot be written back.
//!
//! ```text
//!   none ── a write-back fails ──▶ outage ── no failure for RETRY, and all failed pages were retried ──▶ none
//! ```
//!
//! Pages whose write-back failed stay dirty; none is lost. A failed small sync may begin an outage. Everything else is the evictor's: it reports the outage and ends it. It writes one piece of the failed
//! pages every `RETRY`. Once a piece succeeds, it retries all others, and the outage lasts until all were tried.
//!
//! No caller waits in vain during an outage. A sync tries its pages at once and returns the error. Writers that wait because too
//! many pages are dirty also get the error, unless write-back of other pages still makes room for them. When the cause is a lack
//! of space, `Slice::no_room` reports it to callers that are about to write new pages, before the cache fills with pages that
//! cannot be stored.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::context::SliceContext;
use crate::effects::Effects;
use crate::faults::Outage;
use crate::object::Error;
use crate::state::SliceState;
use crate::transfers::Attempt;

/// Pause before pages whose write-back failed are retried.
const RETRY: Duration = Duration::from_secs(1);

/// Records that a write-back failed.
pub(crate) fn begin_or_extend(
    state: &mut SliceState,
    context: &SliceContext,
    error: &Error,
    now: Instant,
) {
    let (written_at, probe_at) = state
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
    context.no_room.store(errno, Relaxed);
    state.outage = Some(outage);
}

/// Records that a write-back succeeded. After a trial, all failed pages are retried.
pub(crate) fn write_back_succeeded(state: &mut SliceState, attempt: Attempt, now: Instant) {
    if let Some(outage) = &mut state.outage {
        outage.written_at = now;
        if attempt == Attempt::Trial {
            state.dirty.retry_all();
        }
    }
}

/// Returns whether a trial write of failed pages is due.
pub(crate) fn is_probe_due(state: &mut SliceState, now: Instant) -> bool {
    let due = state.outage.as_mut().filter(|o| o.probe_at <= now);
    if let Some(outage) = due {
        outage.probe_at = now + RETRY;
        return true;
    }
    false
}

/// Ends an outage that is over. Must not be called while failed pages are being retried.
pub(crate) fn end(state: &mut SliceState, context: &SliceContext, now: Instant) {
    let quiet = |o: &Outage| now.saturating_duration_since(o.failed_at) >= RETRY;
    if state.outage.as_ref().is_some_and(quiet) && !state.dirty.has_failed() {
        context.no_room.store(0, Relaxed);
        state.outage = None;
    }
}

/// Returns the outage's error to writers that wait for fewer dirty pages, if the failed pages alone reach the limit or no write
/// has succeeded for `RETRY` while they waited.
pub(crate) fn fail_throttled_if_hopeless(
    state: &mut SliceState,
    context: &SliceContext,
    now: Instant,
    effects: &mut Effects,
) {
    let Some(outage) = &state.outage else { return };
    let since = state.throttled_since.max(outage.written_at);
    let idle = now.saturating_duration_since(since) >= RETRY;
    if idle || state.dirty.failed_pages() >= u64::from(context.limits.dirty_max) {
        let error = &outage.error;
        let waiting = state.throttled.drain(..);
        effects
            .done
            .extend(waiting.map(|resume| (resume, Err(error.clone()))));
    }
}

fn is_no_room(error: &Error) -> bool {
    matches!(error.errno(), 28 | 122) // ENOSPC, EDQUOT
}
