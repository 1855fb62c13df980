//! Write-back: which dirty pages go to the device, and what the end of a write changes.
//!
//! All dirty pages of an object are written when `Limits::dirty_age` has passed since its first page became dirty. Pages are also
//! written when more of them are dirty than the background limit, when frames are needed and no clean pages are left, or for a sync.
//!
//! The order, in the evictor's thread: `choose` marks pages WRITE_BACK under the slice's lock. Without the lock, the object gives them
//! places (`Object::allocate`), the transfer runs from the frames (from a copy if the device needs stable writes), and the object
//! learns of its end (`Object::written`); then `clean`. `ended` follows under the lock, and then `Object::write_back_ended` without
//! it. A page may become dirty again meanwhile. A caller's thread does the same in fewer holds of the lock: `small_sync`.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use foldhash::HashSet;
use jericho_shm::{Flags, Key};

use crate::context::SliceContext;
use crate::effects::Effects;
use crate::object::Error;
use crate::state::SliceState;
use crate::transfers::{Attempt, Chosen, Part, TRANSFER_PAGES_MAX, WriteBack};
use crate::{latches, outage};

/// Pages that one `choose` takes from the index, so that the lock is not held for long. `choose_batch` stops at this number: one
/// hold of the lock chooses fewer than twice as many.
const BATCH_PAGES: usize = 1024;

/// Result of one search for dirty pages of an object.
#[derive(Default)]
pub(crate) struct Choice {
    /// Pages that are marked for write-back now.
    pub chosen: Option<Chosen>,
    /// Pages that could not be taken now: latched, or still in flight from the last write-back.
    pub skipped: Vec<u64>,
    /// The page where to continue if there are more.
    pub next: Option<u64>,
}

/// Marks dirty pages of an object in a range for write-back.
pub(crate) fn choose(
    state: &mut SliceState,
    context: &SliceContext,
    id: u64,
    range: Range<u64>,
    sync: Option<u64>,
    attempt: Attempt,
) -> Choice {
    let Some(object) = state.dirty.object(id).cloned() else {
        return Choice::default();
    };
    let candidates = state.dirty.waiting(id, range, BATCH_PAGES);
    let next = (candidates.len() == BATCH_PAGES).then(|| candidates[BATCH_PAGES - 1] + 1);
    let (mut pages, mut retried, mut skipped) = (vec![], vec![], vec![]);
    'page: for page in candidates {
        loop {
            let Some(found) = context.memory.lookup(Key::new(id, page)) else {
                state.dirty.remove(id, page);
                continue 'page;
            };
            if !found.state.has(Flags::DIRTY)
                || found.state.frame() >= context.memory.geometry().frames
            {
                // The page is clean or in flight. A writer that makes it dirty again reports it again.
                state.dirty.remove(id, page);
                continue 'page;
            }
            if found.state.any(Flags::LATCH.with(Flags::WRITE_BACK)) {
                if !found.state.has(Flags::LATCH) && !state.on_the_way.contains(&found.index) {
                    // The slice does not write the page back, so a client set the flag. Skips the page this time, since the
                    // client may set it again at once.
                    context.memory.entry(found.index).unmark(Flags::WRITE_BACK);
                }
                if latches::want(state, context, found.index, found.state) {
                    continue;
                }
                skipped.push(page);
                continue 'page;
            }
            let entry = context.memory.entry(found.index);
            if entry.try_mark(found.state, Flags::WRITE_BACK, Flags::DIRTY) {
                if state.dirty.is_retried(id, page) {
                    retried.push(page);
                }
                state.dirty.remove(id, page);
                state.on_the_way.insert(found.index);
                pages.push((page, found.index, found.state.frame()));
                state.chosen.push((id, page));
                continue 'page;
            }
        }
    }
    let chosen = (!pages.is_empty()).then_some(Chosen {
        object,
        pages,
        retried,
        sync,
        attempt,
    });
    Choice {
        chosen,
        skipped,
        next,
    }
}

/// Chooses pages for one batch of background write-back: pages that have failed and are due, old pages, and any pages while too
/// many are dirty or frames are missing (`starved`). Adds to `busy` the objects whose remaining pages cannot be chosen now.
pub(crate) fn choose_batch(
    state: &mut SliceState,
    context: &SliceContext,
    starved: bool,
    busy: &mut HashSet<u64>,
) -> Vec<Chosen> {
    let mut batch = vec![];
    let mut pages = 0;
    let now = Instant::now();
    let too_many = context.dirty() >= u64::from(context.limits.dirty_background);
    while pages < BATCH_PAGES {
        let (id, attempt) = match state.dirty.retried(busy) {
            Some(id) => (id, Attempt::Again),
            None => match state.dirty.oldest(busy) {
                Some((id, since))
                    if starved || too_many || now - since >= context.limits.dirty_age =>
                {
                    (id, Attempt::First)
                }
                _ => break,
            },
        };
        let choice = choose(state, context, id, 0..u64::MAX, None, attempt);
        if choice.next.is_some() || !choice.skipped.is_empty() {
            // The object's other pages wait behind the other objects, or for their writers.
            state.dirty.requeue(id, now);
            if choice.chosen.is_none() {
                busy.insert(id);
            }
        }
        let Some(chosen) = choice.chosen else {
            continue;
        };
        pages += chosen.pages.len();
        batch.push(chosen);
    }
    batch
}

/// Advances an outage: resumes throttled writers that would wait in vain, ends an outage that is over, and chooses one failed
/// piece for a trial.
pub(crate) fn choose_trial(
    state: &mut SliceState,
    context: &SliceContext,
    now: Instant,
    effects: &mut Effects,
) -> Option<Chosen> {
    outage::fail_throttled_if_hopeless(state, context, now, effects);
    let mut chosen = None;
    if outage::is_probe_due(state, now) {
        // Failed pages that are no longer dirty need no trial.
        while let (None, Some((id, pages))) = (&chosen, state.dirty.probe(TRANSFER_PAGES_MAX)) {
            chosen = choose(state, context, id, pages, None, Attempt::Trial).chosen;
        }
    }
    // A trial in flight decides at its end whether the outage goes on.
    if chosen.is_none() && state.writing.values().all(|w| w.attempt == Attempt::First) {
        outage::end(state, context, now);
    }
    chosen
}

/// Marks the pages of a part as written. The object already knows. Needs no lock.
pub(crate) fn clean(context: &SliceContext, part: &Part) {
    for index in &part.entries {
        context.memory.entry(*index).unmark(Flags::WRITE_BACK);
    }
    context.cleaned(part.entries.len() as u64);
}

/// Removes a write transfer from the records, after its parts were marked with `clean` or `failed`. Returns it.
pub(crate) fn ended(state: &mut SliceState, tag: u64, succeeded: bool) -> Option<WriteBack> {
    // Removed only now: `first_dirty` must find the pages here until the object knows of the write, or the index has the pages
    // again.
    let write = state.writing.remove(&tag)?;
    for part in write.parts.iter() {
        for index in &part.entries {
            latches::transfer_ended(state, *index);
        }
    }
    if succeeded {
        outage::write_back_succeeded(state, write.attempt, Instant::now());
    }
    Some(write)
}

/// Counts a failed write-back and tells the object, unless all pages have failed before. `failed` follows. Needs no lock.
pub(crate) fn note_failure(context: &SliceContext, part: &Part, error: &Error) {
    context.counts.write_errors.fetch_add(1, Relaxed);
    tracing::debug!(slice = context.id, object = part.object.id(), first_page = part.first,
        pages = part.entries.len(), part.is_retry, %error, "write-back failed");
    if part.is_retry {
        return;
    }
    part.object
        .write_failed(part.first, part.entries.len() as u32, error);
}

/// Makes the pages of a part dirty again after their write-back failed, and begins or extends the outage. Throttled writers that
/// would now wait in vain fail.
pub(crate) fn failed(
    state: &mut SliceState,
    context: &SliceContext,
    part: &Part,
    error: &Error,
    now: Instant,
    effects: &mut Effects,
) {
    for index in &part.entries {
        latches::transfer_ended(state, *index);
        let before = context.memory.entry(*index).mark(Flags::DIRTY);
        context.memory.entry(*index).unmark(Flags::WRITE_BACK);
        if before.has(Flags::DIRTY) {
            context.cleaned(1); // The page was counted twice: when it first became dirty, and again in flight.
        }
    }
    let count = part.entries.len() as u64;
    state.dirty.fail(&part.object, part.first, count, now);
    outage::begin_or_extend(state, context, error, now);
    outage::fail_throttled_if_hopeless(state, context, now, effects);
}

/// Returns the first page >= `from` of an object that is dirty or being written back.
pub(crate) fn first_dirty(
    state: &mut SliceState,
    context: &SliceContext,
    object: u64,
    from: u64,
) -> Option<u64> {
    state.drain_reports(context);
    let flight = state
        .writing
        .values()
        .filter_map(|w| w.first_of(object, from))
        .min();
    // The index may also name clean pages, so the state word decides. A page that is chosen but not yet in flight is in neither
    // `writing` nor the index; `chosen_first` finds it.
    let index = state.dirty.find_first(object, from, |page| {
        let found = context.memory.lookup(Key::new(object, page));
        found.is_some_and(|f| f.state.any(Flags::DIRTY.with(Flags::WRITE_BACK)))
    });
    [flight, index, state.chosen_first(object, from)]
        .into_iter()
        .flatten()
        .min()
}

/// Resets the count of dirty pages to 0 when the index is empty, nothing is in flight and no thread is writing. The count is
/// wrong after a client reported pages twice or not at all. Returns whether it was not 0.
pub(crate) fn correct_dirty_count(state: &SliceState, context: &SliceContext) -> bool {
    let count = context.dirty_pages.load(Relaxed);
    let nothing = state.dirty.is_empty()
        && state.writing.is_empty()
        && state.chosen.is_empty()
        && state.pins.is_empty()
        && context.reports.is_empty();
    if count == 0 || !nothing {
        return false;
    }
    // Fails if another thread changes the count at this moment.
    let _ = context
        .dirty_pages
        .compare_exchange(count, 0, Relaxed, Relaxed);
    context.memory.set_throttled(false);
    true
}
