//! Puts a table right that a client has spoilt.
//!
//! What the slice itself knows (what it fills, what it writes, who pinned what, the dirty index) is compared with what the table
//! says. Nothing here runs while all is well: only when frames are wanted and none comes free for a while, which is what
//! entries come to that nobody can evict, and frames that no entry names any more; or when something impossible was
//! met. What it costs is cached pages, and what clients wrote and did not announce.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt};
use jericho_shm::{Flags, Found, State as Word};

use crate::OWNER_DAEMON;
use crate::state::{Shared, State};

/// Suspicions are looked at so long after they arose. A writer announces a page that it made dirty within it.
const PATIENCE: Duration = Duration::from_secs(1);
/// After a look that found nothing, while frames are wanted still: a device that fails has the same effect.
const PATIENCE_IN_VAIN: Duration = Duration::from_secs(30);

/// What speaks for a spoilt table.
#[derive(Default)]
pub(crate) struct Damage {
    since: Option<Instant>,
    /// It is no mere lack of frames.
    certain: bool,
    /// The last look found nothing.
    in_vain: bool,
    /// Pages that are dirty without being in the index, as of the last look.
    unknown: HashMap<u32, Word>,
}

impl Damage {
    pub fn is_suspected(&self) -> bool {
        self.since.is_some()
    }

    fn is_due(&self) -> bool {
        let patience = match self.in_vain && !self.certain {
            true => PATIENCE_IN_VAIN,
            false => PATIENCE,
        };
        self.since.is_some_and(|since| since.elapsed() >= patience)
    }

    pub fn suspect(&mut self, certain: bool) {
        self.since.get_or_insert_with(Instant::now);
        self.certain |= certain;
    }
}

impl State {
    /// An entry says that its page is not filled, and nobody fills it: takes it out, true then, or if somebody holds
    /// it, lets it count as filled.
    pub fn expel_unfilled(&mut self, shared: &Shared, found: Found) -> bool {
        self.damage.suspect(true);
        let entry = shared.memory.entry(found.index);
        // Its frame may be another page's: who that is, is found out by the repair.
        if self.is_held(found.index) || !shared.memory.remove(found.index, found.state) {
            entry.restore();
            return false;
        }
        true
    }

    /// Takes out what can't be, frees the frames of no page. Gives how many entries and frames were wrong.
    fn repair(&mut self, shared: &Shared) -> (usize, usize) {
        let memory = &shared.memory;
        let mut expelled = 0;
        let mut expel = |index: u32| {
            let entry = memory.entry(index);
            // A client that goes on may be quicker: the next time, then.
            expelled += usize::from(memory.remove(index, entry.state()));
        };
        for index in memory.recount() {
            if !self.is_held(index) {
                expel(index);
            }
        }
        let mut used = vec![false; shared.limits.frames as usize];
        let mut unknown = HashMap::new();
        let kept: Vec<u32> = self
            .filling
            .values()
            .copied()
            .chain(self.quarantined())
            .collect();
        kept.into_iter()
            .for_each(|frame| used[frame as usize] = true);
        for index in 0..memory.geometry().entries() {
            let entry = memory.entry(index);
            let Some(key) = entry.key() else { continue };
            let word = entry.state();
            let frame = used.get_mut(word.frame() as usize);
            if self.is_held(index) {
                if let Some(frame) = frame {
                    *frame = true;
                }
                continue;
            }
            let found_there = memory.lookup(key).is_some_and(|found| found.index == index);
            let own_frame = frame.filter(|used| !**used);
            let filled = word.has(Flags::VALID) && !word.has(Flags::FILL);
            let (Some(own_frame), true, true) = (own_frame, filled, found_there) else {
                expel(index);
                continue;
            };
            if word.has(Flags::WRITE_BACK) {
                entry.unmark(Flags::WRITE_BACK);
            }
            if word.has(Flags::LATCH) {
                self.want_latched(shared, index, word);
            } else if word.has(Flags::DIRTY) && !self.dirty.contains(key.object(), key.page()) {
                if self.damage.unknown.get(&index) == Some(&word) {
                    expel(index);
                    continue;
                }
                unknown.insert(index, word);
                self.add_unreported(Some(key));
            }
            *own_frame = true;
        }
        if let (false, Some(broken)) = (unknown.is_empty(), shared.on_broken.get()) {
            // In no client's name: dirty pages of files that there are get into the index before the next look.
            broken(OWNER_DAEMON);
        }
        self.damage.unknown = unknown;
        // A latch that was broken has taken its page to another frame.
        for index in 0..memory.geometry().entries() {
            let entry = memory.entry(index);
            if let (Some(_), Some(used)) =
                (entry.key(), used.get_mut(entry.state().frame() as usize))
            {
                *used = true;
            }
        }
        self.quarantined()
            .for_each(|frame| used[frame as usize] = true);
        let free_before = self.frames.free();
        let numbers = 0..shared.limits.frames;
        let used = numbers.filter(|frame| used[*frame as usize]);
        self.frames.rebuild(shared.limits.frames, used);
        if self.pins.is_empty() {
            self.end_own_quarantine();
        }
        (expelled, self.frames.free().abs_diff(free_before) as usize)
    }
}

impl Shared {
    /// The evictor: repairs the table if it was short of frames for a while with nothing on its way, or has seen something
    /// impossible.
    pub fn repair_if_needed(&self, starved: bool) {
        let due = {
            let mut state = self.lock();
            if starved {
                state.damage.suspect(false);
            } else if !state.damage.certain {
                state.damage.since = None;
                state.damage.in_vain = false;
            }
            state.damage.is_due()
        };
        if !due || self.closing.load(Relaxed) {
            return;
        }
        self.hear_clients();
        let mut state = self.lock();
        state.drain_announced(self);
        // What is on its way uses frames that the table may not name; it ends.
        if !state.on_the_way.is_empty() {
            return;
        }
        let (expelled, frames) = state.repair(self);
        // Until a look finds nothing to do.
        let again = expelled + frames > 0 || !state.damage.unknown.is_empty();
        state.damage.since = (again || starved).then(Instant::now);
        state.damage.certain = again;
        state.damage.in_vain = !again;
        drop(state);
        if expelled + frames > 0 {
            tracing::warn!(
                slice = self.id,
                expelled,
                frames,
                "the table of the cache was put right: a program has written into it what can't be"
            );
        }
    }
}
