//! The part of a slice that gets memory for spill ranges and gives it back, for the daemon's policy. One thread calls all of it, except `set_on_shortage`.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::effects::Effects;
use crate::giving_back::{GivingBack, Partly};
use crate::scheduler::perform;
use crate::shared::SliceShared;
use crate::slice::Slice;
use crate::spill;
use crate::state::SliceState;
use crate::waiting;

/// Entries that leave in one critical section.
const AT_ONCE: usize = 32;
/// Entries that are searched between two looks at the time.
const SEARCHED_AT_ONCE: u32 = 1 << 16;
/// Pause before pages that are in use are visited again. It doubles each time.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(16);

/// Searches a part of the table, and has the pages that it finds in leaving ranges leave. Returns whether the whole table has now been searched for a
/// range.
fn search(giving: &mut GivingBack, shared: &Arc<SliceShared>, until: Instant) -> bool {
    let first = giving.next;
    let memory = &shared.context.memory;
    let entries = memory.geometry().entries();
    let end = entries.min(first.saturating_add(SEARCHED_AT_ONCE));
    // Searches without the lock, because threads that read from the device take it often.
    let is_in_ranges = |index: &u32| {
        let frame = memory.entry(*index).state().frame();
        let range = memory.geometry().range_of(frame);
        range.is_some_and(|range| giving.is_searched_for(range))
    };
    let found: Vec<u32> = (first..end).filter(is_in_ranges).collect();
    giving.unvisited.extend(found);
    if end == entries {
        // The search does not end while further ranges begin to leave in time.
        giving.visit_left_behind();
    }
    visit(giving, shared, until);
    giving.advance(if end < entries { end } else { 0 })
}

/// Frees the memory of the leaving ranges that are empty. Returns these ranges.
fn release_emptied(giving: &mut GivingBack, shared: &Arc<SliceShared>) -> Vec<u32> {
    let emptied = shared.lock().frames.take_emptied();
    let memory = &shared.context.memory;
    let mut gone = vec![];
    for (at, range) in emptied.iter().copied().enumerate() {
        // Needs no lock: only `take_range` makes an absent frame free, and this thread calls it.
        if let Err(error) = memory.release_range(range) {
            if !giving.has_failed {
                tracing::warn!(slice = shared.context.id, %error, "cannot give memory back");
            }
            giving.has_failed = true;
            shared.lock().frames.put_emptied_back(&emptied[at..]);
            return gone;
        }
        giving.has_failed = false;
        shared.lock().frames.end_leaving(range);
        memory.set_node_of_range(range, None);
        giving.ranges.remove(&range);
        let frames = memory.geometry().spill_range(range).len() as u64;
        let counts = &shared.context.counts;
        counts.spill_given_back.fetch_add(frames, Relaxed);
        gone.push(range);
    }
    gone
}

/// Frees the memory of unused frames in leaving ranges that still hold pages. Leaves out the ranges for which the table has not been searched yet:
/// most of their frames are used, and each call of the kernel would free a few.
fn release_unused(giving: &mut GivingBack, shared: &Arc<SliceShared>) {
    let memory = &shared.context.memory;
    for (range, partly) in &mut giving.ranges {
        if partly.from.is_some() {
            continue;
        }
        let frames = memory.geometry().spill_range(*range);
        let first = frames.start;
        let unused: Vec<u32> = {
            let state = shared.lock();
            let used = state.frames.used_of_leaving(*range);
            if partly.used.replace(used) == Some(used) {
                continue;
            }
            let unused = frames.filter(|frame| state.frames.is_absent(*frame));
            unused.filter(|frame| partly.lose(frame - first)).collect()
        };
        for run in unused.chunk_by(|a, b| a + 1 == *b) {
            // Best effort: the whole range loses its memory later.
            let _ = memory.release_frames(run[0]..run[run.len() - 1] + 1);
        }
    }
}

/// Returns whether ranges for which the whole table was searched have lost frames. All pages that were found have left.
fn has_lost_frames(giving: &GivingBack, state: &SliceState) -> bool {
    let searched = giving.ranges.keys().copied();
    let searched: Vec<u32> = searched
        .filter(|range| !giving.is_searched_for(*range))
        .collect();
    spill::has_lost_frames(state, &searched)
}

/// Has the pages of unvisited entries leave until a time, if they are in leaving ranges. Those that cannot leave are left behind.
fn visit(giving: &mut GivingBack, shared: &Arc<SliceShared>, until: Instant) {
    let context = &shared.context;
    let entries = std::mem::take(&mut giving.unvisited);
    for (at, some) in entries.chunks(AT_ONCE).enumerate() {
        // A program can make visits long, for example by latches of many pages.
        if at > 0 && Instant::now() >= until {
            giving.unvisited.extend(&entries[at * AT_ONCE..]);
            return;
        }
        let mut effects = Effects::default();
        let mut state = shared.lock();
        for index in some {
            if !spill::leave(&mut state, context, *index) {
                giving.left_behind.push(*index);
            }
        }
        if state.frames.free() < context.limits.free_low {
            effects.wake_evictor = true;
        }
        drop(state);
        perform(shared, effects);
    }
}

impl Slice {
    /// Sets the observer of shortages; may be called once. The evictor of a slice with spill ranges calls the observer when it needs frames, and again
    /// only after `take_wish`. The evictor holds no lock then. The observer must not wait.
    pub fn set_on_shortage(&self, on_shortage: Box<dyn Fn() + Send + Sync>) {
        let _ = self.shared.on_shortage.set(on_shortage);
    }

    /// Returns whether the evictor has needed frames since the last call, and clears the wish. The evictor needs frames when few are free, or when a
    /// request waits for one.
    pub fn take_wish(&self) -> bool {
        self.shared.wants_frames.swap(false, Relaxed)
    }

    /// Gives a spill range memory of a kernel node. `node` is the node whose CPUs are local to it. Returns false, and changes nothing, if the
    /// kernel took memory of another node. Fails with the errors of `SliceMemory::back_range`. Panics if the range has memory.
    pub fn take_range(
        &self,
        range: u32,
        kernel_node: Option<u32>,
        node: u16,
    ) -> std::io::Result<bool> {
        let (shared, context) = (&self.shared, &self.shared.context);
        assert!(
            !shared.lock().frames.has_memory(range),
            "the range has memory"
        );
        if !context.memory.back_range(range, kernel_node)? {
            return Ok(false);
        }
        context.memory.set_node_of_range(range, Some(node));
        let taken = context.memory.geometry().spill_range(range).len() as u64;
        context.counts.spill_taken.fetch_add(taken, Relaxed);
        let mut effects = Effects::default();
        let mut state = shared.lock();
        state.frames.add(range);
        waiting::retry(&mut state, context, &mut effects);
        drop(state);
        perform(shared, effects);
        Ok(true)
    }

    /// Gives spill ranges with memory back, as far as their pages can leave within about `time_max`, and goes on with those of earlier calls. Returns
    /// the ranges that have lost all their memory. In the others, unused frames have lost their memory if the whole table has been searched for the range. From the first call on, no page enters
    /// these ranges.
    pub fn give_back(&self, ranges: &[u32], time_max: Duration) -> Vec<u32> {
        let shared = &self.shared;
        let giving = &mut *shared.giving_back.lock();
        for range in ranges {
            if !giving.ranges.contains_key(range) {
                shared.lock().frames.begin_leaving(*range);
                giving.begin(*range);
            }
        }
        let (until, mut pause) = (Instant::now() + time_max, PAUSE_MIN);
        let mut gone = release_emptied(giving, shared);
        while !giving.ranges.is_empty() {
            if !giving.unvisited.is_empty() {
                visit(giving, shared, until);
            } else if giving.is_searching() {
                if search(giving, shared, until) {
                    let mut state = shared.lock();
                    if giving.have_all_left() && has_lost_frames(giving, &state) {
                        state.damage.suspect(true);
                    }
                    drop(state);
                    // It writes pages back, repairs a damaged table, and frees frames for pages that have to move.
                    shared.wake_evictor();
                }
            } else if giving.left_behind.is_empty()
                && giving.is_search_due()
                && has_lost_frames(giving, &shared.lock())
            {
                giving.search_again();
                continue;
            } else {
                std::thread::sleep(pause);
                pause = (2 * pause).min(PAUSE_MAX);
                giving.visit_left_behind();
                visit(giving, shared, until);
            }
            gone.extend(release_emptied(giving, shared));
            if Instant::now() >= until {
                break;
            }
        }
        release_unused(giving, shared);
        gone
    }

    /// Returns how many frames of a leaving range still have memory; 0 for another range. An unused frame has its memory until `give_back` has freed it.
    pub fn frames_left(&self, range: u32) -> u32 {
        let giving = self.shared.giving_back.lock();
        let Some(partly) = giving.ranges.get(&range) else {
            return 0;
        };
        let frames = self.shared.context.memory.geometry().spill_range(range);
        frames.len() as u32 - partly.lost_frames() as u32
    }

    /// Frees memory that accesses to frames without memory have allocated. A reader that looked a page up before it left allocates a page of zeros when
    /// it copies afterwards. A program that locks all its memory (mlockall(2)) allocates all frames. Returns whether there was any.
    pub fn release_strays(&self) -> std::io::Result<bool> {
        let memory = &self.shared.context.memory;
        let geometry = memory.geometry();
        let without: Vec<u32> = {
            let frames = &self.shared.lock().frames;
            let ranges = 0..geometry.spill_ranges();
            ranges.filter(|range| !frames.has_memory(*range)).collect()
        };
        let without = without.into_iter().map(|range| geometry.spill_range(range));
        let leaving = &self.shared.giving_back.lock().ranges;
        let unused: u64 = without.clone().map(|frames| frames.len() as u64).sum();
        let lost: u64 = leaving.values().map(Partly::lost_frames).sum();
        if memory.allocated_frames()? <= u64::from(geometry.frames) - unused - lost {
            return Ok(false);
        }
        let lost = leaving.iter().flat_map(|(range, partly)| {
            let frames = geometry.spill_range(*range);
            let first = frames.start;
            let lost = frames.filter(move |frame| partly.has_lost(frame - first));
            lost.map(|frame| frame..frame + 1)
        });
        let mut frames: Vec<Range<u32>> = without.chain(lost).collect();
        frames.sort_unstable_by_key(|frames| frames.start);
        // Needs no lock: only `take_range` makes an absent frame free, and this thread calls it.
        for run in frames.chunk_by(|a, b| a.end == b.start) {
            memory.release_frames(run[0].start..run[run.len() - 1].end)?;
        }
        Ok(true)
    }
}
