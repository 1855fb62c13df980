//! Empties spill ranges that are given back: each page leaves its frame, without a wait for a device.
//!
//! A clean page is dropped, or moved if many frames are free. A dirty page is moved: it stays dirty, and its write-back is not hurried. A page
//! that is being filled, written back, read by a Get or written by a client stays until that has ended. A dirty page also stays while few frames
//! are free: the limit of dirty pages leaves room for it on the home node, but large writes can exceed the limit for a while.

use std::sync::atomic::Ordering::Relaxed;

use foldhash::HashSet;
use jericho_format::PAGE_BYTES;
use jericho_shm::{Flags, PageState as Word};

use crate::context::SliceContext;
use crate::faults::OWNER_DAEMON;
use crate::latches;
use crate::state::SliceState;

/// Returns whether these leaving ranges have more used frames than fills, write-backs and the quarantine explain. The caller has searched the whole table
/// for their pages, and none is left in them.
pub(crate) fn has_lost_frames(state: &SliceState, ranges: &[u32]) -> bool {
    let recorded = state.filling.values().copied();
    let recorded = recorded.chain(state.latches.quarantined());
    let recorded = recorded.chain(state.latches.in_transfer.values().copied());
    let recorded = recorded.filter(|frame| {
        let range = state.frames.leaving_range_of(*frame);
        range.is_some_and(|range| ranges.contains(&range))
    });
    let recorded: HashSet<u32> = recorded.collect();
    let used = ranges
        .iter()
        .map(|range| state.frames.used_of_leaving(*range));
    used.sum::<u32>() as usize > recorded.len()
}

/// Returns whether the page of an entry is in a range that is leaving, as far as this can be seen.
fn is_leaving(state: &SliceState, context: &SliceContext, index: u32) -> bool {
    let entry = context.memory.entry(index);
    entry.key().is_some() && state.frames.is_leaving(entry.state().frame())
}

/// Has the page of an entry leave its frame, if the frame's range is leaving. Returns false if the page is still there: it is in use, or has no other
/// frame to go to.
pub(crate) fn leave(state: &mut SliceState, context: &SliceContext, index: u32) -> bool {
    if !is_leaving(state, context, index) {
        return true;
    }
    let entry = context.memory.entry(index);
    let word = entry.state();
    if state.is_held(index) {
        return false;
    }
    if word.has(Flags::LATCH) {
        // Takes the latch away if a client has held it for too long. The page then moves, and the frame is kept out of use.
        latches::want(state, context, index, word);
        return false;
    }
    if word.has(Flags::WRITE_BACK) {
        // The slice does not write the page back, so a client has set the flag.
        entry.unmark(Flags::WRITE_BACK);
        return false;
    }
    if !word.has(Flags::VALID) || word.has(Flags::FILL) {
        // A client has corrupted the entry.
        state.damage.suspect(true);
        return false;
    }
    match word.has(Flags::DIRTY) || state.frames.free() > context.limits.free_high {
        true => move_page(state, context, index, word),
        false => drop_page(state, context, index, word),
    }
}

fn drop_page(state: &mut SliceState, context: &SliceContext, index: u32, word: Word) -> bool {
    let removed = state.remove(context, index, word);
    if removed {
        context.counts.evictions.fetch_add(1, Relaxed);
    }
    removed
}

/// Moves a page to another frame, under its latch. Returns false if few frames are free, or another thread has changed the page.
fn move_page(state: &mut SliceState, context: &SliceContext, index: u32, word: Word) -> bool {
    // Keeps the last free frames for reads. The evictor is already freeing frames, because fewer than `free_low` are free.
    if state.frames.free() <= context.limits.free_low / 2 {
        return false;
    }
    let (entry, from, to) = (
        context.memory.entry(index),
        word.frame(),
        state.frames.take(),
    );
    let moved = entry.try_latch(word, OWNER_DAEMON).is_some_and(|latched| {
        let mut bytes = [0; PAGE_BYTES as usize];
        let copied = context.memory.copy_out(from, 0, &mut bytes);
        let copied = copied.and_then(|()| context.memory.copy_in(to, 0, &bytes));
        let to = if copied.is_ok() { to } else { from };
        entry.move_latched(latched, to) && copied.is_ok()
    });
    match moved {
        true => {
            context.counts.spill_moved.fetch_add(1, Relaxed);
            state.free_frame(from);
        }
        false => state.free_frame(to),
    }
    moved
}
