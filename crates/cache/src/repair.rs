//! Repairs a table that a client has corrupted.
//!
//! The repair compares the table with the slice's own records: fills, write-backs, pins, quarantine and the dirty index. It runs
//! only on suspicion. Entries that no thread can evict, and frames that no entry names, lead to a lack of frames, so a lack that
//! lasts is suspicious. An impossible state is suspicious too. A repair costs cached pages, and pages that clients wrote but did
//! not report.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt};
use jericho_shm::{Flags, Found, State as Word};

use crate::OWNER_DAEMON;
use crate::state::{Shared, State};

/// Time between a suspicion and the repair. A correct writer reports a page that it made dirty within this time.
const PATIENCE: Duration = Duration::from_secs(1);
/// The same after a repair that found nothing while frames are still missing. A failing device has the same effect.
const PATIENCE_NOTHING_FOUND: Duration = Duration::from_secs(30);

/// Evidence of a corrupted table.
#[derive(Default)]
pub(crate) struct Damage {
    since: Option<Instant>,
    /// An impossible state was seen; it is not only a lack of frames.
    certain: bool,
    /// The last repair found nothing.
    found_nothing: bool,
    /// Pages that were dirty at the last repair and not in the index.
    unknown: HashMap<u32, Word>,
}

impl Damage {
    pub fn is_suspected(&self) -> bool {
        self.since.is_some()
    }

    fn is_due(&self) -> bool {
        let patience = match self.found_nothing && !self.certain {
            true => PATIENCE_NOTHING_FOUND,
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
    /// Handles an entry whose state says that its page is not filled, although no Get fills it. Removes the entry and returns
    /// true. If the slice holds the entry, marks it as filled and returns false.
    pub fn evict_unfilled(&mut self, shared: &Shared, found: Found) -> bool {
        self.damage.suspect(true);
        let entry = shared.memory.entry(found.index);
        // The frame may also belong to another page. The repair finds that out.
        if self.is_held(found.index) || !self.take_out(shared, found.index, found.state) {
            entry.restore();
            return false;
        }
        true
    }

    /// Removes impossible entries and frees the frames that belong to no page. Returns how many entries and frames were wrong.
    fn repair(&mut self, shared: &Shared) -> (usize, usize) {
        let memory = &shared.memory;
        let mut evicted = 0;
        // A malicious client may change the entry first. The next repair removes it then.
        let mut evict = |state: &mut State, index: u32| {
            evicted += usize::from(state.take_out(shared, index, memory.entry(index).state()));
        };
        for index in memory.recount() {
            if !self.is_held(index) {
                evict(self, index);
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
                evict(self, index);
                continue;
            };
            if word.has(Flags::WRITE_BACK) {
                entry.unmark(Flags::WRITE_BACK);
            }
            if word.has(Flags::LATCH) {
                self.want_latched(shared, index, word);
            } else if word.has(Flags::DIRTY) && !self.dirty.contains(key.object(), key.page()) {
                if self.damage.unknown.get(&index) == Some(&word) {
                    evict(self, index);
                    continue;
                }
                unknown.insert(index, word);
                self.add_unreported(Some(key));
            }
            *own_frame = true;
        }
        if let (false, Some(broken)) = (unknown.is_empty(), shared.on_broken.get()) {
            // Names no client. Dirty pages of existing files get into the index before the next repair.
            broken(OWNER_DAEMON);
        }
        self.damage.unknown = unknown;
        // A latch that was broken above moved its page to another frame.
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
        (evicted, self.frames.free().abs_diff(free_before) as usize)
    }
}

impl Shared {
    /// Repairs the table if frames were missing for a while, or after an impossible state. Does nothing while write-backs are in
    /// flight. The evictor calls it.
    pub fn repair_if_needed(&self, starved: bool) {
        let due = {
            let mut state = self.lock();
            if starved {
                state.damage.suspect(false);
            } else if !state.damage.certain {
                state.damage.since = None;
                state.damage.found_nothing = false;
            }
            state.damage.is_due()
        };
        if !due || self.closing.load(Relaxed) {
            return;
        }
        self.drain_clients();
        let mut state = self.lock();
        state.drain_reports(self);
        // Pages in flight use frames that the table may not name. Their transfers end soon.
        if !state.on_the_way.is_empty() {
            return;
        }
        let (evicted, frames) = state.repair(self);
        // Repairs are repeated until one finds nothing.
        let again = evicted + frames > 0 || !state.damage.unknown.is_empty();
        state.damage.since = (again || starved).then(Instant::now);
        state.damage.certain = again;
        state.damage.found_nothing = !again;
        drop(state);
        if evicted + frames > 0 {
            tracing::warn!(
                slice = self.id,
                evicted,
                frames,
                "repaired the table of the cache, which a program had corrupted"
            );
        }
    }
}
