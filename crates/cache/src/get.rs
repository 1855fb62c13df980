//! Get and Put: the steps of a request for pages (the Jericho paper, section II.D.2).
//!
//! ```text
//!              all there or free frames             fills and clashes over
//!   new ─────────────────────────────▶ (filling) ─────────────────────────▶ execute: pinned pages
//!    │ ▲                                  ▲
//!    │ └── clashed: another fills a page ─┘   (enters again when that fill has ended)
//!    └──── stalled: too few free frames       (enters again, in order, when the evictor has freed some)
//! ```
//!
//! All functions here run under the slice's lock. After the lock is released, the scheduler asks the object where pages are, zeroes
//! holes and plans the reads. It then takes the lock again, records the reads (`fill_started`) and queues them. Callbacks run without
//! the lock.
//!
//! *new* (`enter`) runs inline in the caller's thread. A Get that clashed enters again in the thread that ended the fill, a stalled
//! Get in the thread that freed frames, mostly the evictor. If a writer holds the latch of a granted page, the caller drops the
//! grant and parks the rest of its work (`latched.rs`). Reads end in the pipeline thread, or in the thread of a `Reader`: a
//! thread of the FUSE ring that reads for its own requests.
//!
//! Gets cannot deadlock. A Get takes all frames that it needs in one step, or none. An overwriting Get takes none while it clashes.
//! A Get that waits for frames pins no page.
//! A Get therefore waits only for I/O, which ends, or for a writer that holds a grant and does not wait. A wait for frames is a wait
//! for eviction and, when no clean pages are left, for write-back.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::context::SliceContext;
use crate::effects::Effects;
use crate::object::{Error, Object};
use crate::repair;
use crate::requests::{
    Fill, GetRequest, Intent, PAGES_PER_GET_MAX, PendingGet, PinnedPages, Reading,
};
use crate::state::SliceState;
use crate::transfers::PlannedRead;
use jericho_shm::{Flags, Key};

/// Stands for the entry of a page that is not in the table.
const ABSENT: u32 = u32::MAX;

pub(crate) enum Entered {
    /// All pages are in the table, for Overwrite perhaps still unfilled. Holds their entries.
    Ready(Vec<u32>),
    /// The Get waits under its id, perhaps with a fill to start; or it has ended, and its result is in `Effects`.
    Waits,
    /// The Get would have to wait, but must not.
    WouldWait,
}

/// What the table has of a request's pages.
struct Lookup {
    /// The entry of each page, or `ABSENT`.
    entries: Vec<u32>,
    /// Places in `entries` of the absent pages.
    missing: Vec<usize>,
    /// Entries that other Gets fill.
    clashes: Vec<u32>,
}

/// Runs the *new* stage. `pending` is the Get that may wait; it also receives errors. `None` for a Get that must not wait.
pub(crate) fn enter(
    state: &mut SliceState,
    context: &SliceContext,
    request: &GetRequest,
    pending: Option<Box<PendingGet>>,
    effects: &mut Effects,
) -> Result<Entered, Error> {
    debug_assert!(request.count > 0 && request.count <= PAGES_PER_GET_MAX);
    if let Some(error) = refusal(context, request) {
        let Some(p) = pending else { return Err(error) };
        fail(state, *p, error, effects);
        return Ok(Entered::Waits);
    }
    let Lookup {
        mut entries,
        missing,
        clashes,
    } = look_up(state, context, request);
    let short_of_frames = !missing.is_empty()
        && (missing.len() as u32 > state.frames.free()
            || (!state.stalled.is_empty()
                && pending
                    .as_ref()
                    .is_some_and(|p| !p.has_queued && p.held.is_empty())));
    let fills = !missing.is_empty() && request.intent != Intent::Overwrite;
    if pending.is_none() && (short_of_frames || fills || !clashes.is_empty()) {
        return Ok(Entered::WouldWait);
    }
    let overwrite_clash = request.intent == Intent::Overwrite && !clashes.is_empty();
    if short_of_frames && !overwrite_clash {
        effects.wake_evictor = true;
        let Some(p) = pending else {
            return Ok(Entered::WouldWait);
        };
        stall(state, context, *p, effects);
        return Ok(Entered::Waits);
    }
    let pages = match overwrite_clash {
        true => vec![],
        false => take(state, context, request, &mut entries, missing, effects),
    };
    let Some(mut p) = pending else {
        return Ok(Entered::Ready(entries));
    };
    // Pages pinned by an earlier round stay pinned, because this round has pinned them too.
    p.held.iter().for_each(|index| state.unpin(*index));
    if !fills && clashes.is_empty() {
        p.held = entries;
        grant(state, *p, effects);
        return Ok(Entered::Waits);
    }
    p.held = if overwrite_clash { vec![] } else { entries };
    p.reenter = !clashes.is_empty();
    p.remaining = clashes.len() as u32 + u32::from(fills);
    let get = state.new_id();
    if !clashes.is_empty() {
        context.counts.clashed.fetch_add(1, Relaxed);
        for index in clashes {
            state.clashed.entry(index).or_default().push(get);
        }
    }
    if fills {
        let (object, read_ahead) = (request.object.clone(), p.done.is_none());
        effects.fills.push(Fill {
            get,
            object,
            pages,
            read_ahead,
        });
    }
    state.pending.insert(get, *p);
    Ok(Entered::Waits)
}

/// Returns why the slice does not take a request.
fn refusal(context: &SliceContext, request: &GetRequest) -> Option<Error> {
    if context.closing.load(Relaxed) {
        return Some(Error::Closed);
    }
    (request.object.slice_of(request.first) != context.id).then_some(Error::Moved)
}

fn look_up(state: &mut SliceState, context: &SliceContext, request: &GetRequest) -> Lookup {
    let (id, first, count) = (request.object.id(), request.first, request.count);
    let mut lookup = Lookup {
        entries: Vec::with_capacity(count as usize),
        missing: vec![],
        clashes: vec![],
    };
    for page in first..first + u64::from(count) {
        let entry = match context.memory.lookup(Key::new(id, page)) {
            None => ABSENT,
            Some(found) if found.state.has(Flags::VALID) => found.index,
            Some(found) if state.filling.contains_key(&found.index) => {
                lookup.clashes.push(found.index);
                found.index
            }
            Some(found) => match repair::evict_unfilled(state, context, found) {
                true => ABSENT,
                false => found.index,
            },
        };
        if entry == ABSENT {
            lookup.missing.push(lookup.entries.len());
        }
        lookup.entries.push(entry);
    }
    lookup
}

/// Queues a Get that needs more frames than are free. Gives read-ahead up, because it does not wait for frames. The Get lets go of
/// pages from an earlier round: otherwise Gets that wait could hold the frames that they wait for.
fn stall(state: &mut SliceState, context: &SliceContext, mut p: PendingGet, effects: &mut Effects) {
    let held = std::mem::take(&mut p.held);
    held.iter().for_each(|index| state.unpin(*index));
    effects.released |= !held.is_empty();
    if p.done.is_none() {
        return;
    }
    context.counts.stalled.fetch_add(1, Relaxed);
    let get = state.new_id();
    state.pending.insert(get, p);
    state.stalled.push_back(get);
}

/// Pins all pages of a request, and inserts the missing ones into the table. Returns the inserted ones as (page, entry, frame).
fn take(
    state: &mut SliceState,
    context: &SliceContext,
    request: &GetRequest,
    entries: &mut [u32],
    missing: Vec<usize>,
    effects: &mut Effects,
) -> Vec<(u64, u32, u32)> {
    let mut pages = Vec::with_capacity(missing.len());
    for index in entries.iter().filter(|index| **index != ABSENT) {
        state.pin(*index);
    }
    for at in missing {
        let page = request.first + at as u64;
        let (index, frame) = state.insert(context, Key::new(request.object.id(), page));
        entries[at] = index;
        pages.push((page, index, frame));
    }
    if state.frames.free() < context.limits.free_low {
        effects.wake_evictor = true;
    }
    pages
}

/// Ends a Get whose pages are all there and held. Read-ahead lets go of them.
fn grant(state: &mut SliceState, p: PendingGet, effects: &mut Effects) {
    let Some(done) = p.done else {
        p.held.iter().for_each(|index| state.unpin(*index));
        return;
    };
    let pages = PinnedPages {
        object: p.request.object,
        first: p.request.first,
        entries: p.held,
    };
    effects.granted.push((done, Ok(pages)));
}

fn fail(state: &mut SliceState, p: PendingGet, error: Error, effects: &mut Effects) {
    p.held.iter().for_each(|index| state.unpin(*index));
    if let Some(done) = p.done {
        effects.granted.push((done, Err(error)));
    }
    effects.released = true;
}

/// Enters a Get that may wait, for the first time or again.
pub(crate) fn enter_waiting(
    state: &mut SliceState,
    context: &SliceContext,
    pending: PendingGet,
    effects: &mut Effects,
) {
    let request = pending.request.clone();
    // `enter` passes errors to the Get's callback.
    let _ = enter(state, context, &request, Some(Box::new(pending)), effects);
}

/// Records that one thing that a Get waited for has ended.
fn step(
    state: &mut SliceState,
    context: &SliceContext,
    get: u64,
    error: Option<Error>,
    effects: &mut Effects,
) {
    let Some(p) = state.pending.get_mut(&get) else {
        return;
    };
    p.remaining -= 1;
    p.error = p.error.take().or(error);
    if p.remaining > 0 {
        return;
    }
    let Some(mut p) = state.pending.remove(&get) else {
        return;
    };
    if let Some(error) = p.error.take() {
        fail(state, p, error, effects);
    } else if p.reenter {
        enter_waiting(state, context, p, effects);
    } else {
        grant(state, p, effects);
    }
}

/// Lets stalled Gets enter again, in order, as long as there are frames.
pub(crate) fn retry_stalled(state: &mut SliceState, context: &SliceContext, effects: &mut Effects) {
    while let Some(get) = state.stalled.front().copied() {
        let need = state.pending.get(&get).map_or(0, |p| p.request.count);
        if need > state.frames.free() && !context.closing.load(Relaxed) {
            effects.wake_evictor = true;
            return;
        }
        state.stalled.pop_front();
        if let Some(mut p) = state.pending.remove(&get) {
            p.has_queued = true;
            enter_waiting(state, context, p, effects);
        }
    }
}

/// Publishes the holes of a fill and records its reads, which get their tags.
pub(crate) fn fill_started(
    state: &mut SliceState,
    context: &SliceContext,
    fill: &Fill,
    holes: Vec<u32>,
    reads: &mut [PlannedRead],
    effects: &mut Effects,
) {
    if let Some(p) = state.pending.get_mut(&fill.get) {
        p.remaining += reads.len() as u32;
    }
    for index in holes {
        context.memory.entry(index).publish(Flags::NONE);
        fill_ended(state, context, index, effects);
    }
    let backed = fill.object.may_write_inline();
    for read in reads {
        read.transfer.tag = state.new_id();
        let reading = Reading {
            get: fill.get,
            entries: std::mem::take(&mut read.entries),
            backed,
            check: read.check.take(),
        };
        state.reading.insert(read.transfer.tag, reading);
    }
    step(state, context, fill.get, None, effects);
}

/// Gives up a fill whose object could not tell where its pages are.
pub(crate) fn fill_failed(
    state: &mut SliceState,
    context: &SliceContext,
    fill: &Fill,
    error: Error,
    effects: &mut Effects,
) {
    for (_, index, _) in &fill.pages {
        drop_fill(state, context, *index, effects);
    }
    step(state, context, fill.get, Some(error), effects);
}

/// Ends the fill of an entry. Each Get that waits for it advances a step.
fn fill_ended(state: &mut SliceState, context: &SliceContext, index: u32, effects: &mut Effects) {
    state.filling.remove(&index);
    for id in state.clashed.remove(&index).unwrap_or_default() {
        step(state, context, id, None, effects);
    }
}

/// Removes the page of an entry whose fill failed or was given up. The pins of the entry stay until their holders release them,
/// because pins are counted by entry index and not by page.
fn drop_fill(state: &mut SliceState, context: &SliceContext, index: u32, effects: &mut Effects) {
    let word = context.memory.entry(index).state();
    if word.has(Flags::FILL) && state.take_out(context, index, word) {
        let frame = state.filling.remove(&index);
        state.free_frame(frame.unwrap_or(word.frame()));
    }
    fill_ended(state, context, index, effects);
}

/// Ends a read transfer: publishes its pages, or removes them after an error. With `wrong`, removes only the pages at these places,
/// which are in order.
pub(crate) fn read_ended(
    state: &mut SliceState,
    context: &SliceContext,
    reading: Reading,
    (error, wrong): (Option<Error>, &[usize]),
    effects: &mut Effects,
) {
    let flags = match reading.backed {
        true => Flags::BACKED,
        false => Flags::NONE,
    };
    for (at, index) in reading.entries.into_iter().enumerate() {
        let is_right = !wrong.is_empty() && wrong.binary_search(&at).is_err();
        if error.is_none() || is_right {
            context.memory.entry(index).publish(flags);
            fill_ended(state, context, index, effects);
        } else {
            drop_fill(state, context, index, effects);
        }
    }
    effects.released |= error.is_some();
    step(state, context, reading.get, error, effects);
}

/// Takes pinned pages back (the Put). `dirtied` are the pages that their holder made dirty, in runs of neighbours.
pub(crate) fn put(
    state: &mut SliceState,
    context: &SliceContext,
    object: &Arc<dyn Object>,
    dirtied: &[u64],
    entries: &[u32],
    effects: &mut Effects,
) {
    for pages in dirtied.chunk_by(|a, b| a + 1 == *b) {
        let now = std::time::Instant::now();
        state.dirty.add(object, pages[0], pages.len() as u64, now);
    }
    for index in entries {
        state.unpin(*index);
        let word = context.memory.entry(*index).state();
        if word.has(Flags::FILL) {
            // The writer gave up before it wrote the page.
            drop_fill(state, context, *index, effects);
        } else {
            fill_ended(state, context, *index, effects);
        }
    }
}
