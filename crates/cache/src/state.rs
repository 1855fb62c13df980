//! The locked state of a slice: which page is where, and what waits.
//!
//! A page enters, leaves or moves only under the slice's lock: in the slice's own threads, or in a caller of the slice that runs
//! a step inline. Hits take no lock. The steps (`get`, `sync`, `write_back`, `eviction`, `invalidate`, `latched`, `latches`,
//! `outage`, `repair`, `waiting`) are functions from this state and an event to a new state and `Effects`. They do no I/O and do
//! not wait. They run one callback, whose answer they need: `SliceContext::on_broken`. From objects they ask only what `Object`
//! allows under the lock.

use std::collections::VecDeque;
use std::time::Instant;

use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};
use jericho_shm::{Geometry, Key, PageState as Word};

use crate::context::SliceContext;
use crate::dirty::DirtyIndex;
use crate::faults::{Damage, Latches, Outage};
use crate::frames::Frames;
use crate::requests::{Done, Invalidation, Parked, PendingGet, Reading};
use crate::transfers::WriteBack;

pub(crate) struct SliceState {
    pub frames: Frames,
    /// Entries that must not be removed, and how many Gets hold each.
    pub pins: HashMap<u32, u32>,
    /// Entries that are being filled, and their frames. Clients can corrupt the table, so the slice keeps its own record.
    pub filling: HashMap<u32, u32>,
    /// Entries whose pages are in a write transfer or chosen for one. Kept here for the same reason as `filling`.
    pub on_the_way: HashSet<u32>,
    pub dirty: DirtyIndex,
    pub pending: HashMap<u64, PendingGet>,
    /// Gets that wait for an entry's fill to end.
    pub clashed: HashMap<u32, Vec<u64>>,
    /// Gets that wait for frames, in order of arrival.
    pub stalled: VecDeque<u64>,
    pub reading: HashMap<u64, Reading>,
    pub writing: HashMap<u64, WriteBack>,
    /// (object, page) of pages that the evictor has chosen but not yet put into `writing`. Pages of small syncs are in `writing` at
    /// once.
    pub chosen: Vec<(u64, u64)>,
    pub invalidations: Vec<Invalidation>,
    /// Writers that wait for fewer dirty pages.
    pub throttled: VecDeque<Done>,
    /// Time at which the first of the waiting writers began to wait.
    pub throttled_since: Instant,
    /// Set while pages cannot be written back.
    pub outage: Option<Outage>,
    pub latches: Latches,
    /// Gets that wait for a latch.
    pub parked: Vec<Parked>,
    pub damage: Damage,
    pub next_id: u64,
    pub filled_in_epoch: u32,
}

impl SliceState {
    pub fn new(geometry: Geometry) -> SliceState {
        SliceState {
            frames: Frames::new(geometry),
            pins: HashMap::new(),
            filling: HashMap::new(),
            on_the_way: HashSet::new(),
            dirty: DirtyIndex::default(),
            pending: HashMap::new(),
            clashed: HashMap::new(),
            stalled: VecDeque::new(),
            reading: HashMap::new(),
            writing: HashMap::new(),
            chosen: Vec::new(),
            invalidations: Vec::new(),
            throttled: VecDeque::new(),
            throttled_since: Instant::now(),
            outage: None,
            latches: Latches::default(),
            parked: Vec::new(),
            damage: Damage::default(),
            next_id: 1,
            filled_in_epoch: 0,
        }
    }

    /// Returns the first chosen page >= `from` of an object.
    pub fn chosen_first(&self, object: u64, from: u64) -> Option<u64> {
        let chosen = self
            .chosen
            .iter()
            .filter(|(id, page)| *id == object && *page >= from);
        chosen.map(|(_, page)| *page).min()
    }

    pub fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub fn pin(&mut self, index: u32) {
        *self.pins.entry(index).or_insert(0) += 1;
    }

    pub fn unpin(&mut self, index: u32) {
        if let Some(n) = self.pins.get_mut(&index) {
            *n -= 1;
            if *n == 0 {
                self.pins.remove(&index);
            }
        }
    }

    /// Absorbs the reports of dirty pages into the index. Every query of the dirty index must be preceded by this call.
    pub fn drain_reports(&mut self, context: &SliceContext) {
        if context.reports.is_empty() {
            return;
        }
        let now = Instant::now();
        // Takes only the reports that are there now; busy writers could otherwise keep this thread here.
        for _ in 0..context.reports.len() {
            let Some(a) = context.reports.pop() else {
                break;
            };
            self.dirty.add(&a.object, a.first, u64::from(a.count), now);
        }
    }

    /// Takes a frame and enters a page in state FILL, pinned. Returns its entry and frame.
    pub fn insert(&mut self, context: &SliceContext, key: Key) -> (u32, u32) {
        let frame = self.frames.take();
        let index = context.memory.insert(key, frame, context.epoch());
        self.pin(index);
        self.filling.insert(index, frame);
        self.filled_in_epoch += 1;
        if self.filled_in_epoch >= self.frames.present() / 16 {
            self.filled_in_epoch = 0;
            context.memory.next_epoch();
        }
        (index, frame)
    }

    /// Empties an entry, if its state is still `seen`, and keeps its frame used. Returns whether it did. Every page that leaves
    /// the table leaves it here, as every page enters it in `insert`.
    pub fn take_out(&mut self, context: &SliceContext, index: u32, seen: Word) -> bool {
        context.memory.remove(index, seen)
    }

    /// Removes a page from the table and frees its frame, if its state is still `seen`. Returns whether it did.
    pub fn remove(&mut self, context: &SliceContext, index: u32, seen: Word) -> bool {
        let removed = self.take_out(context, index, seen);
        if removed {
            self.free_frame(seen.frame());
        }
        removed
    }

    /// Returns whether the slice itself uses an entry's page, even if the table says otherwise.
    pub fn is_held(&self, index: u32) -> bool {
        self.pins.contains_key(&index)
            || self.on_the_way.contains(&index)
            || self.filling.contains_key(&index)
    }

    /// Takes a frame back. A frame that is free already, or an invalid number, means that a client corrupted the table.
    pub fn free_frame(&mut self, frame: u32) {
        if !self.frames.release(frame) {
            self.damage.suspect(true);
        }
    }
}
