//! Repairs a table that a client has corrupted.
//!
//! The repair compares the table with the slice's own records: fills, write-backs, pins, quarantine and the dirty index. It runs
//! only on suspicion. Entries that no thread can evict, and frames that no entry names, lead to a lack of frames, so a lack that
//! lasts is suspicious. An impossible state is suspicious too. A repair costs cached pages, and pages that clients wrote but did
//! not report.

use std::time::Instant;

use foldhash::{HashMap, HashMapExt};
use jericho_shm::{Flags, Found, Key, PageState as Word};

use crate::context::SliceContext;
use crate::faults::OWNER_DAEMON;
use crate::latches;
use crate::state::SliceState;

/// Handles an entry whose state says that its page is not filled, although no Get fills it. Removes the entry and returns true.
/// If the slice holds the entry, marks it as filled and returns false.
pub(crate) fn evict_unfilled(state: &mut SliceState, context: &SliceContext, found: Found) -> bool {
    state.damage.suspect(true);
    let entry = context.memory.entry(found.index);
    // The frame may also belong to another page. The repair finds that out.
    if state.is_held(found.index) || !state.take_out(context, found.index, found.state) {
        entry.restore();
        return false;
    }
    true
}

/// Notes whether frames are missing, and returns whether a repair is due: frames were missing for a while, or a state was
/// impossible.
pub(crate) fn is_due(state: &mut SliceState, starved: bool) -> bool {
    let damage = &mut state.damage;
    if starved {
        damage.suspect(false);
    } else if !damage.certain {
        damage.since = None;
        damage.found_nothing = false;
    }
    damage.is_due()
}

/// Repairs the table, unless write-backs are in flight. Returns how many entries and frames were wrong. Clients' reports must
/// have been drained.
pub(crate) fn run(state: &mut SliceState, context: &SliceContext, starved: bool) -> (usize, usize) {
    // Pages in flight use frames that the table may not name. Their transfers end soon.
    if !state.on_the_way.is_empty() {
        return (0, 0);
    }
    let (evicted, frames) = repair(state, context);
    // Repairs are repeated until one finds nothing.
    let again = evicted + frames > 0 || !state.damage.unknown.is_empty();
    state.damage.since = (again || starved).then(Instant::now);
    state.damage.certain = again;
    state.damage.found_nothing = !again;
    (evicted, frames)
}

/// What a repair has seen so far.
struct Survey {
    /// Frames that belong to a page, a fill or the quarantine, or that have no memory.
    used: Vec<bool>,
    /// Pages that are dirty and not in the index, by entry.
    unknown: HashMap<u32, Word>,
}

/// Removes impossible entries and frees the frames that belong to no page. Returns how many entries and frames were wrong.
fn repair(state: &mut SliceState, context: &SliceContext) -> (usize, usize) {
    let memory = &context.memory;
    let mut evicted = 0;
    // A malicious client may change the entry first. The next repair removes it then.
    let mut evict = |state: &mut SliceState, index: u32| {
        evicted += usize::from(state.take_out(context, index, memory.entry(index).state()));
    };
    for index in memory.recount() {
        if !state.is_held(index) {
            evict(state, index);
        }
    }
    let mut survey = Survey {
        // A frame without memory holds no page.
        used: (0..memory.geometry().frames)
            .map(|frame| state.frames.is_absent(frame))
            .collect(),
        unknown: HashMap::new(),
    };
    let kept = state.filling.values().copied();
    for frame in kept.chain(state.latches.quarantined()) {
        survey.used[frame as usize] = true;
    }
    for index in 0..memory.geometry().entries() {
        let Some(key) = memory.entry(index).key() else {
            continue;
        };
        if is_impossible(state, context, index, key, &mut survey) {
            evict(state, index);
        }
    }
    if let (false, Some(broken)) = (survey.unknown.is_empty(), context.on_broken.get()) {
        // The daemon's id names no client, so this call revokes none. It causes a call of `adopt_unreported`, which adds the dirty
        // pages of existing files to the index before the next repair.
        broken(OWNER_DAEMON);
    }
    state.damage.unknown = survey.unknown;
    (evicted, free_unused(state, context, survey.used))
}

/// Checks an entry, unless the slice holds it, and notes in `survey` what the entry uses. Returns whether it must be removed.
fn is_impossible(
    state: &mut SliceState,
    context: &SliceContext,
    index: u32,
    key: Key,
    survey: &mut Survey,
) -> bool {
    let entry = context.memory.entry(index);
    let word = entry.state();
    let frame = survey.used.get_mut(word.frame() as usize);
    if state.is_held(index) {
        if let Some(frame) = frame {
            *frame = true;
        }
        return false;
    }
    let found = context.memory.lookup(key);
    let found_there = found.is_some_and(|found| found.index == index);
    let own_frame = frame.filter(|used| !**used);
    let filled = word.has(Flags::VALID) && !word.has(Flags::FILL);
    let (Some(own_frame), true, true) = (own_frame, filled, found_there) else {
        return true;
    };
    if word.has(Flags::WRITE_BACK) {
        entry.unmark(Flags::WRITE_BACK);
    }
    if word.has(Flags::LATCH) {
        latches::want(state, context, index, word);
    } else if word.has(Flags::DIRTY) && !state.dirty.contains(key.object(), key.page()) {
        if state.damage.unknown.get(&index) == Some(&word) {
            return true;
        }
        survey.unknown.insert(index, word);
        state.latches.unreported.push(key);
    }
    *own_frame = true;
    false
}

/// Frees the frames that belong to nothing. Returns how many frames were wrongly free or used.
fn free_unused(state: &mut SliceState, context: &SliceContext, mut used: Vec<bool>) -> usize {
    // A latch that was broken during the survey moved its page to another frame.
    for index in 0..context.memory.geometry().entries() {
        let entry = context.memory.entry(index);
        if let (Some(_), Some(used)) = (entry.key(), used.get_mut(entry.state().frame() as usize)) {
            *used = true;
        }
    }
    for frame in state.latches.quarantined() {
        used[frame as usize] = true;
    }
    let used = (0..context.memory.geometry().frames).filter(|frame| used[*frame as usize]);
    let changed = state.frames.rebuild(used);
    if state.pins.is_empty() {
        state.latches.end_own_quarantine();
    }
    changed as usize
}
