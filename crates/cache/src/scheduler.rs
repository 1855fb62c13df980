//! The scheduler: takes steps of the slice under its lock, and performs their effects without it.
//!
//! Any thread may run it: a caller of the slice, the pipeline, the evictor, a thread with a `Reader`. Reads go to the pipeline's
//! queue or to the thread's own reader; callbacks run in the calling thread.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use jericho_storage::Completion;

use crate::checks::Check;
use crate::effects::Effects;
use crate::object::Error;
use crate::requests::{Fill, GetDone, GetRequest, Latched, Parked, PendingGet, PinnedPages};
use crate::shared::SliceShared;
use crate::transfers::{FillPlan, PlannedRead};
use crate::{get, latched, thread_reads, waiting};

/// Performs what steps have collected. Must be called without the lock. Callbacks may call the slice.
pub(crate) fn perform(shared: &Arc<SliceShared>, mut effects: Effects) {
    debug_assert!(!effects.released, "requests that wait were not retried");
    let wake_evictor = |effects: &mut Effects| {
        if std::mem::take(&mut effects.wake_evictor) {
            shared.wake_evictor();
        }
    };
    wake_evictor(&mut effects);
    loop {
        for fill in std::mem::take(&mut effects.fills) {
            start_fill(shared, &fill, &mut effects);
            // A Get that waited for the fill may wait for frames now.
            wake_evictor(&mut effects);
        }
        for (done, result) in std::mem::take(&mut effects.granted) {
            done(result);
        }
        for (done, result) in std::mem::take(&mut effects.done) {
            done(result);
        }
        if effects.fills.is_empty() && effects.granted.is_empty() && effects.done.is_empty() {
            return;
        }
    }
}

/// Asks the object where pages are, fills those that no device has, and queues the reads.
fn start_fill(shared: &Arc<SliceShared>, fill: &Fill, effects: &mut Effects) {
    let context = &shared.context;
    let plan = match plan_fill(shared, fill) {
        Ok(plan) => plan,
        Err(error) => {
            let mut state = shared.lock();
            get::fill_failed(&mut state, context, fill, error, effects);
            waiting::retry(&mut state, context, effects);
            return;
        }
    };
    let bytes = plan.bytes();
    context.counts.read_bytes.fetch_add(bytes, Relaxed);
    if fill.read_ahead {
        context.counts.read_ahead_bytes.fetch_add(bytes, Relaxed);
    }
    let FillPlan { filled, mut reads } = plan;
    let mut started = false;
    let mut state = shared.lock();
    get::fill_started(&mut state, context, fill, filled, &mut reads, effects);
    for PlannedRead { transfer, .. } in reads {
        let for_pipeline = match fill.read_ahead || fill.pages.len() > thread_reads::PAGES_MAX {
            true => Some(transfer),
            false => thread_reads::keep(shared, transfer),
        };
        if let Some(transfer) = for_pipeline {
            shared.reads.push(transfer);
            started = true;
        }
    }
    waiting::retry_if_released(&mut state, context, effects);
    drop(state);
    if started {
        shared.read_waker.wake();
    }
}

fn plan_fill(shared: &SliceShared, fill: &Fill) -> Result<FillPlan, Error> {
    let mut plan = FillPlan::default();
    for pages in fill.pages.chunk_by(|a, b| a.0 + 1 == b.0) {
        let (first, count) = (pages[0].0, pages.len());
        let (mut runs, mut sums) = (vec![], vec![]);
        let object = &fill.object;
        let check = match object.has_checksums() {
            false => {
                object.resolve(first, count as u32, &mut runs)?;
                None
            }
            true => {
                object.resolve_summed(first, count as u32, &mut runs, &mut sums)?;
                let object = object.clone();
                Some(Check {
                    object,
                    first,
                    sums,
                    frames: vec![],
                })
            }
        };
        let (memory, counts) = (&shared.context.memory, &shared.context.counts);
        plan.add(memory, counts, pages, &runs, check.as_ref())?;
    }
    Ok(plan)
}

/// Gets pages without waiting. Returns `None` if it would have to wait.
pub(crate) fn try_get(
    shared: &Arc<SliceShared>,
    request: GetRequest,
) -> Result<Option<PinnedPages>, Error> {
    let mut effects = Effects::default();
    let context = &shared.context;
    let entered = get::enter(&mut shared.lock(), context, &request, None, &mut effects);
    perform(shared, effects);
    match entered? {
        get::Entered::Ready(entries) => Ok(Some(PinnedPages {
            object: request.object,
            first: request.first,
            entries,
        })),
        get::Entered::WouldWait | get::Entered::Waits => Ok(None),
    }
}

/// Gets pages. `done` runs when they are in the cache; it is `None` for read-ahead.
pub(crate) fn get(shared: &Arc<SliceShared>, request: GetRequest, done: Option<GetDone>) {
    let mut effects = Effects::default();
    let context = &shared.context;
    let mut state = shared.lock();
    let pending = PendingGet::new(request, done);
    get::enter_waiting(&mut state, context, pending, &mut effects);
    waiting::retry_if_released(&mut state, context, &mut effects);
    drop(state);
    perform(shared, effects);
}

/// Ends a read transfer. Runs in the thread that submitted the transfer: the pipeline, or a thread with a reader. The callbacks
/// of its Gets run there too.
pub(crate) fn read_ended(shared: &Arc<SliceShared>, completion: Completion) {
    let mut effects = Effects::default();
    let context = &shared.context;
    let mut state = shared.lock();
    let mut error = completion.result.err().map(Error::from);
    let mut wrong = vec![];
    let reading = state.reading.get(&completion.tag);
    let check = reading.and_then(|reading| reading.check.clone());
    if let Some(check) = check.filter(|_| error.is_none()) {
        // Without the lock: the pages are not valid yet, so no other thread uses their frames.
        drop(state);
        let compared = check.compare_frames(&context.memory, &context.counts);
        (error, wrong) = (compared.error, compared.wrong);
        state = shared.lock();
    }
    let Some(reading) = state.reading.remove(&completion.tag) else {
        return;
    };
    get::read_ended(&mut state, context, reading, (error, &wrong), &mut effects);
    if effects.released || !state.invalidations.is_empty() {
        waiting::retry(&mut state, context, &mut effects);
    }
    drop(state);
    perform(shared, effects);
}

/// Retries all requests that wait.
pub(crate) fn retry_waiting(shared: &Arc<SliceShared>) {
    let mut effects = Effects::default();
    waiting::retry(&mut shared.lock(), &shared.context, &mut effects);
    perform(shared, effects);
}

/// Lets a request wait for a latch. `resume` runs in the pipeline thread, or in the thread that closes the slice.
pub(crate) fn park(shared: &SliceShared, latched: Latched, resume: Box<dyn FnOnce() + Send>) {
    shared.context.counts.clashed.fetch_add(1, Relaxed);
    shared.context.parked.fetch_add(1, SeqCst);
    shared.lock().parked.push(Parked { latched, resume });
    shared.read_waker.wake();
}

/// Resumes the Gets whose latch has changed hands; all Gets when the slice closes.
pub(crate) fn retry_parked(shared: &Arc<SliceShared>) {
    let mut effects = Effects::default();
    latched::retry(&mut shared.lock(), &shared.context, &mut effects);
    perform(shared, effects);
}
