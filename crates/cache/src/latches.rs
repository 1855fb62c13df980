//! Latches that clients hold for too long, and the frames that such clients may still copy into.
//!
//! A client may die or be stopped while it holds a page's latch. No thread of the slice waits for a client without bound: the
//! slice takes the latch away.

use std::time::{Duration, Instant};

use jericho_format::PAGE_BYTES;
use jericho_shm::{Flags, Key, PageState as Word};

use crate::context::SliceContext;
use crate::faults::OWNER_DAEMON;
use crate::state::SliceState;

/// A latch that was held for this long is taken away. A copy of 4 KiB takes less than a microsecond, and a running program is
/// kept from its CPU for far less than this.
pub(crate) const LATCH_MAX: Duration = Duration::from_secs(1);
/// Time between two sweeps over the latches that were seen. A malicious program can make them many.
const SWEEP_PERIOD: Duration = Duration::from_millis(100);
/// An owner that holds this many latches for too long has latched pages that it does not write.
const LATCHES_OF_A_MALICIOUS_OWNER: usize = 256;
/// Attempts to open the latch of a dead client.
const OPEN_TRIES: u32 = 16;

/// Takes the latch of a wanted page away if its owner has held it for too long. Returns whether it did. The page moves to
/// another frame, since the owner may still write into the old one.
pub(crate) fn want(state: &mut SliceState, context: &SliceContext, index: u32, word: Word) -> bool {
    // Includes latches of the daemon. A client can latch a page in the daemon's name, and a thread of the daemon that has
    // lost its latch repeats the write.
    if !word.has(Flags::LATCH) {
        return false;
    }
    let now = Instant::now();
    // Forgets latches of pages that no thread has wanted again.
    let swept = state.latches.swept;
    if state.latches.seen.len() > 1024 && swept.is_none_or(|swept| now - swept >= SWEEP_PERIOD) {
        state.latches.swept = Some(now);
        state
            .latches
            .seen
            .retain(|_, (_, since)| now - *since < 2 * LATCH_MAX);
    }
    let seen = state.latches.seen.entry(index).or_insert((word, now));
    if !seen.0.is_same_holding(word) {
        *seen = (word, now);
    }
    if now - seen.1 < LATCH_MAX {
        return false;
    }
    if state.frames.free() == 0 {
        return break_in_place(state, context, index, word, now);
    }
    let Some(copied) = move_page(state, context, index, word) else {
        return false;
    };
    state
        .latches
        .unreported
        .extend(context.memory.entry(index).key());
    // An unknown owner cannot be copying. A latch in the daemon's name is either forged, or belongs to a daemon thread that
    // has not run for a second. That thread repeats its write, but its old copy could corrupt the frame's next page, so the
    // frame goes into quarantine.
    let known = context.on_broken.get().is_some_and(|b| b(word.owner()));
    if !copied {
        return true;
    }
    if known || word.owner() == OWNER_DAEMON {
        state.latches.quarantine.push((word.owner(), word.frame()));
    } else {
        free_left_frame(state, word.frame());
    }
    true
}

/// Takes a latch away and moves the page to another frame; the caller has checked that one is free. Returns `None` when
/// the latch has changed hands. Otherwise returns whether the old frame number was valid.
fn move_page(
    state: &mut SliceState,
    context: &SliceContext,
    index: u32,
    word: Word,
) -> Option<bool> {
    let frame = state.frames.take();
    let mut bytes = [0; PAGE_BYTES as usize];
    // An invalid frame number means that a client corrupted the entry; the page then reads as zeros.
    let copied = context.memory.copy_out(word.frame(), 0, &mut bytes);
    let filled = context.memory.copy_in(frame, 0, &bytes);
    if filled.is_err() || !context.memory.entry(index).break_latch(word, frame) {
        state.frames.release(frame);
        return None;
    }
    state.latches.seen.remove(&index);
    // Keeps the first frame if this happens again during the transfer: the device reads from the first one.
    if copied.is_ok() && state.on_the_way.contains(&index) {
        state
            .latches
            .in_transfer
            .entry(index)
            .or_insert(word.frame());
    }
    Some(copied.is_ok())
}

/// Takes a page's latch away from its client, at the client's own request. Returns false when the client has to ask again.
pub(crate) fn give_up(
    state: &mut SliceState,
    context: &SliceContext,
    index: u32,
    word: Word,
) -> bool {
    // While a write-back is in flight, the device reads from the frame that the page would leave.
    if state.frames.free() == 0 || state.on_the_way.contains(&index) {
        return false;
    }
    match move_page(state, context, index, word) {
        Some(true) => state.latches.quarantine.push((word.owner(), word.frame())),
        Some(false) => {}
        None => return false,
    }
    true
}

/// Takes a latch away without a free frame: the page keeps its frame. Does so only for an owner that holds more latches than
/// programs have running threads: such an owner cannot be copying into all of these frames, so it is malicious.
fn break_in_place(
    state: &mut SliceState,
    context: &SliceContext,
    index: u32,
    word: Word,
    now: Instant,
) -> bool {
    let held = state.latches.seen.values();
    let held = held
        .filter(|(seen, since)| seen.owner() == word.owner() && now - *since >= LATCH_MAX)
        .count();
    if held < LATCHES_OF_A_MALICIOUS_OWNER
        || !context.memory.entry(index).break_latch(word, word.frame())
    {
        return false;
    }
    state
        .latches
        .unreported
        .extend(context.memory.entry(index).key());
    if let Some(broken) = context.on_broken.get() {
        broken(word.owner());
    }
    true
}

/// Returns the page of an entry if it is dirty and the dirty index does not have it. Reports must have been
/// drained.
pub(crate) fn unknown_dirty(state: &SliceState, context: &SliceContext, index: u32) -> Option<Key> {
    let entry = context.memory.entry(index);
    let key = entry.key()?;
    let unknown =
        entry.state().has(Flags::DIRTY) && !state.dirty.contains(key.object(), key.page());
    unknown.then_some(key)
}

/// Takes back a frame that its page has left, unless the device still reads from it.
pub(crate) fn free_left_frame(state: &mut SliceState, frame: u32) {
    if !state
        .latches
        .in_transfer
        .values()
        .any(|left| *left == frame)
    {
        state.free_frame(frame);
    }
}

/// Records that the page of an entry is no longer in a write transfer.
pub(crate) fn transfer_ended(state: &mut SliceState, index: u32) {
    state.on_the_way.remove(&index);
    let Some(frame) = state.latches.in_transfer.remove(&index) else {
        return;
    };
    if !state.latches.quarantined().any(|kept| kept == frame) {
        free_left_frame(state, frame);
    }
}

/// Opens the latch of a dead client on an entry. The page keeps its frame and its bytes, and becomes dirty. Returns whether the client
/// held the latch.
pub(crate) fn open(context: &SliceContext, index: u32, owner: u16) -> bool {
    let entry = context.memory.entry(index);
    // Retries because the end of a write-back may change the word. Nothing else changes a latched entry unless a client is
    // malicious.
    for _ in 0..OPEN_TRIES {
        let word = entry.state();
        if !word.has(Flags::LATCH) || word.owner() != owner {
            return false;
        }
        if entry.break_latch(word, word.frame()) {
            return true;
        }
    }
    false
}

/// Frees the quarantined frames of a dead client.
pub(crate) fn free_quarantine(state: &mut SliceState, owner: u16) {
    for (holder, frame) in std::mem::take(&mut state.latches.quarantine) {
        if holder == owner {
            free_left_frame(state, frame);
        } else {
            state.latches.quarantine.push((holder, frame));
        }
    }
}

/// Frees a quarantined frame after a thread of the client has ended its copy into it. Returns whether the frame was in the client's
/// quarantine.
pub(crate) fn copy_ended(state: &mut SliceState, owner: u16, frame: u32) -> bool {
    let quarantine = &mut state.latches.quarantine;
    let Some(at) = quarantine.iter().position(|kept| *kept == (owner, frame)) else {
        return false;
    };
    quarantine.swap_remove(at);
    free_left_frame(state, frame);
    true
}
