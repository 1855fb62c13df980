//! State that the threads of a slice share, and its lock.
//!
//! `Shared.state` is the slice's lock. The table of pages changes only under it: in the slice's own threads, or in a caller of
//! the slice that runs a stage inline. Hits take no lock. No thread waits while it holds the lock. Callbacks, and object calls
//! that may be slow, run after it is released: the locked part collects them in an `After`.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crossbeam_queue::SegQueue;
use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};
use jericho_shm::{Flags, Key, SliceMemory, State as Word};
use jericho_storage::{Transfer, Wake};
use parking_lot::{Mutex, MutexGuard};

use crate::clients::Latches;
use crate::counters::Counts;
use crate::dirty::DirtyIndex;
use crate::evictor::{Job, WriteBack};
use crate::frames::Frames;
use crate::get::{Fill, GetDone, Grant, Pending, Reading};
use crate::invalidate::Invalidation;
use crate::latched::Parked;
use crate::object::{Error, Object};
use crate::outage::{Observer, Outage};
use crate::repair::Damage;
use crate::{Done, Limits};

pub(crate) struct Shared {
    pub id: u16,
    pub memory: SliceMemory,
    pub limits: Limits,
    pub state: Mutex<State>,
    /// Pages that are dirty or being written back.
    pub dirty_pages: AtomicU64,
    /// Reports of dirty pages that the index has not absorbed yet.
    pub reports: SegQueue<Report>,
    /// Reads for the pipeline to start.
    pub reads: SegQueue<Transfer>,
    pub read_waker: Arc<dyn Wake>,
    /// Work for the evictor.
    pub jobs: SegQueue<Job>,
    pub evict_waker: Arc<dyn Wake>,
    pub closing: AtomicBool,
    /// Length of `State::parked`; for a moment it may be larger.
    pub parked: AtomicUsize,
    /// See `Slice::set_report_drain`.
    pub report_drain: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// See `Slice::set_collector`.
    pub collector: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// See `Slice::set_on_broken`.
    pub on_broken: OnceLock<Box<dyn Fn(u16) -> bool + Send + Sync>>,
    /// See `Slice::set_on_outage`.
    pub on_outage: OnceLock<Observer>,
    /// The errno that writers of new data get at once, or 0. See `outage`.
    pub no_room: AtomicI32,
    pub counts: Counts,
}

pub(crate) struct Report {
    pub object: Arc<dyn Object>,
    pub first: u64,
    pub count: u32,
}

pub(crate) struct State {
    pub frames: Frames,
    /// Entries that must not be removed, and how many Gets hold each.
    pub pins: HashMap<u32, u32>,
    /// Entries that are being filled, and their frames. Clients can corrupt the table, so the slice keeps its own record.
    pub filling: HashMap<u32, u32>,
    /// Entries whose pages are in a write transfer or chosen for one. Kept here for the same reason as `filling`.
    pub on_the_way: HashSet<u32>,
    pub dirty: DirtyIndex,
    pub pending: HashMap<u64, Pending>,
    /// Gets that wait for an entry's fill to end.
    pub clashed: HashMap<u32, Vec<u64>>,
    /// Gets that wait for frames, in order of arrival.
    pub stalled: VecDeque<u64>,
    pub reading: HashMap<u64, Reading>,
    pub writing: HashMap<u64, WriteBack>,
    /// (object, page) of pages that the evictor has chosen but not yet put into `writing`.
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

/// Work to do after the lock is released.
#[derive(Default)]
pub(crate) struct After {
    pub fills: Vec<Fill>,
    pub granted: Vec<(GetDone, Result<Grant, Error>)>,
    pub done: Vec<(Done, Result<(), Error>)>,
    pub wake_evictor: bool,
}

impl State {
    pub fn new(frames: u32) -> State {
        State {
            frames: Frames::new(frames),
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
    pub fn drain_reports(&mut self, shared: &Shared) {
        if shared.reports.is_empty() {
            return;
        }
        let now = Instant::now();
        // Takes only the reports that are there now; busy writers could otherwise keep this thread here.
        for _ in 0..shared.reports.len() {
            let Some(a) = shared.reports.pop() else {
                break;
            };
            self.dirty.add(&a.object, a.first, u64::from(a.count), now);
        }
    }

    /// Takes a frame and enters a page in state FILL, pinned. Returns its entry and frame.
    pub fn insert(&mut self, shared: &Shared, key: Key) -> (u32, u32) {
        let frame = self.frames.take();
        let index = shared.memory.insert(key, frame, shared.epoch());
        self.pin(index);
        self.filling.insert(index, frame);
        self.filled_in_epoch += 1;
        if self.filled_in_epoch >= shared.limits.frames / 16 {
            self.filled_in_epoch = 0;
            shared.memory.next_epoch();
        }
        (index, frame)
    }

    /// Empties an entry, if its state is still `seen`, and keeps its frame used. Returns whether it did. Every page that leaves
    /// the table leaves it here, as every page enters it in `insert`.
    pub fn take_out(&mut self, shared: &Shared, index: u32, seen: Word) -> bool {
        shared.memory.remove(index, seen)
    }

    /// Removes a page from the table and frees its frame, if its state is still `seen`. Returns whether it did.
    pub fn remove(&mut self, shared: &Shared, index: u32, seen: Word) -> bool {
        let removed = self.take_out(shared, index, seen);
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

    /// Ends the fill of an entry. Each Get that waits for it advances a step.
    pub fn fill_ended(&mut self, shared: &Arc<Shared>, index: u32, after: &mut After) {
        self.filling.remove(&index);
        for id in self.clashed.remove(&index).unwrap_or_default() {
            crate::get::step(self, shared, id, None, after);
        }
    }

    /// Retries all requests that wait. Called after frames were freed, I/O ended or pins were released.
    pub fn retry_waiting(&mut self, shared: &Arc<Shared>, after: &mut After) {
        crate::invalidate::retry(self, shared, after);
        crate::get::retry_stalled(self, shared, after);
        while !self.throttled.is_empty() && shared.dirty() < u64::from(shared.limits.dirty_max) {
            let resume = self.throttled.pop_front();
            after.done.extend(resume.map(|resume| (resume, Ok(()))));
        }
    }
}

impl Shared {
    /// Returns the LRU's coarse time. It advances each time that pages were filled into a sixteenth of the slice's frames.
    pub fn epoch(&self) -> u8 {
        self.memory.epoch()
    }

    pub fn dirty(&self) -> u64 {
        self.dirty_pages.load(Ordering::Relaxed)
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Counts `n` pages that became dirty. Wakes the evictor when it must start its timer or write.
    pub fn dirtied(&self, n: u64) {
        let before = self.dirty_pages.fetch_add(n, Ordering::AcqRel);
        let background = u64::from(self.limits.dirty_background);
        if before == 0 || (before < background && before + n >= background) {
            self.evict_waker.wake();
        }
        if before + n >= u64::from(self.limits.dirty_max) {
            self.memory.set_throttled(true);
        }
    }

    pub fn cleaned(&self, n: u64) {
        // Saturates at 0, because clients may have reported fewer pages than they wrote.
        let less = |count: u64| Some(count.saturating_sub(n));
        let before = self
            .dirty_pages
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, less)
            .unwrap_or_default();
        if before.saturating_sub(n) < u64::from(self.limits.dirty_max) {
            self.memory.set_throttled(false);
        }
    }

    /// Returns whether a state is that of a clean page that no thread is changing or moving.
    pub fn is_idle(word: Word) -> bool {
        word.has(Flags::VALID) && !word.any(Flags::DIRTY.with(Flags::LATCH).with(Flags::WRITE_BACK))
    }
}

/// Does the work that a locked part has collected. Callbacks may call the slice.
pub(crate) fn run(shared: &Arc<Shared>, mut after: After) {
    if after.wake_evictor {
        shared.evict_waker.wake();
    }
    loop {
        for fill in std::mem::take(&mut after.fills) {
            crate::get::start_fill(shared, fill, &mut after);
        }
        for (done, result) in std::mem::take(&mut after.granted) {
            done(result);
        }
        for (done, result) in std::mem::take(&mut after.done) {
            done(result);
        }
        if after.fills.is_empty() && after.granted.is_empty() && after.done.is_empty() {
            return;
        }
    }
}
