//! What the threads of a slice share, under which lock.
//!
//! `Shared.state` is the slice's lock: every change of which page is where is made under it, by the slice's
//! own threads or by a caller of the slice that runs a stage inline. Hits take no lock. Nothing
//! waits while it holds the lock; object calls that may be slow and callbacks are made without it,
//! from an `After` that the locked part has filled.

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
    /// Pages that writers made dirty and that the index has not taken in yet.
    pub announced: SegQueue<Announcement>,
    /// Reads for the pipeline to start.
    pub reads: SegQueue<Transfer>,
    pub read_waker: Arc<dyn Wake>,
    /// Work for the evictor.
    pub jobs: SegQueue<Job>,
    pub evict_waker: Arc<dyn Wake>,
    pub closing: AtomicBool,
    /// Length of `State::parked`; briefly, more.
    pub parked: AtomicUsize,
    /// See `Slice::set_announcer` and `set_on_broken`.
    pub announcer: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// See `Slice::set_collector`.
    pub collector: OnceLock<Box<dyn Fn() + Send + Sync>>,
    pub on_broken: OnceLock<Box<dyn Fn(u16) -> bool + Send + Sync>>,
    /// See `Slice::set_on_outage`.
    pub on_outage: OnceLock<Observer>,
    /// The errno that writers of new data get at once, or 0. See `outage`.
    pub no_room: AtomicI32,
    pub counts: Counts,
}

pub(crate) struct Announcement {
    pub object: Arc<dyn Object>,
    pub first: u64,
    pub count: u32,
}

pub(crate) struct State {
    pub frames: Frames,
    /// Entries that may not be removed, and by how many Gets they are held.
    pub pins: HashMap<u32, u32>,
    /// Entries that are being filled, and their frames: what the table says of that may be a lie.
    pub filling: HashMap<u32, u32>,
    /// Entries whose pages are on their way to the device, or chosen for that: likewise.
    pub on_the_way: HashSet<u32>,
    pub dirty: DirtyIndex,
    pub pending: HashMap<u64, Pending>,
    /// Gets that wait for an entry's fill to end.
    pub clashed: HashMap<u32, Vec<u64>>,
    /// Gets that wait for frames, first come first served.
    pub stalled: VecDeque<u64>,
    pub reading: HashMap<u64, Reading>,
    pub writing: HashMap<u64, WriteBack>,
    /// (object, page) of pages that the evictor has chosen and not yet put into `writing`.
    pub chosen: Vec<(u64, u64)>,
    pub invalidations: Vec<Invalidation>,
    /// Writers that wait until there are fewer dirty pages.
    pub throttled: VecDeque<Done>,
    /// When the first of the waiting writers began to wait.
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

/// What is to be done once the lock is released.
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

    /// The first chosen page of an object from `from` on.
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

    /// Takes in what writers announced. Must precede every question to the dirty index.
    pub fn drain_announced(&mut self, shared: &Shared) {
        if shared.announced.is_empty() {
            return;
        }
        let now = Instant::now();
        // Bounded by what is there now, or busy writers could keep us here.
        for _ in 0..shared.announced.len() {
            let Some(a) = shared.announced.pop() else {
                break;
            };
            self.dirty.add(&a.object, a.first, u64::from(a.count), now);
        }
    }

    /// Takes a frame and enters a page in state FILL, pinned.
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

    /// Takes a page out of the table and frees its frame, if its state is still `seen`.
    pub fn remove(&mut self, shared: &Shared, index: u32, seen: Word) -> bool {
        let removed = shared.memory.remove(index, seen);
        if removed {
            self.give_frame(seen.frame());
        }
        removed
    }

    /// Whether the slice does something with an entry's page, whatever the table says of that.
    pub fn is_held(&self, index: u32) -> bool {
        self.pins.contains_key(&index)
            || self.on_the_way.contains(&index)
            || self.filling.contains_key(&index)
    }

    /// Takes a frame back. That two pages had it, or that there is none such, says that the table is spoilt.
    pub fn give_frame(&mut self, frame: u32) {
        if !self.frames.give(frame) {
            self.damage.suspect(true);
        }
    }

    /// The fill of an entry has ended: whoever waited for it is one step further.
    pub fn fill_ended(&mut self, shared: &Arc<Shared>, index: u32, after: &mut After) {
        self.filling.remove(&index);
        for id in self.clashed.remove(&index).unwrap_or_default() {
            crate::get::step(self, shared, id, None, after);
        }
    }

    /// After frames were freed, I/O ended or pins went away: everybody who waited for that.
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
    /// Coarse time of the LRU: moves on each time a sixteenth of the slice was filled anew.
    pub fn epoch(&self) -> u8 {
        self.memory.epoch()
    }

    pub fn dirty(&self) -> u64 {
        self.dirty_pages.load(Ordering::Relaxed)
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// `n` pages became dirty. Wakes the evictor when there is something to time or to write.
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
        // Never below nothing: clients may have announced less than they wrote.
        let less = |count: u64| Some(count.saturating_sub(n));
        let before = self
            .dirty_pages
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, less)
            .unwrap_or_default();
        if before.saturating_sub(n) < u64::from(self.limits.dirty_max) {
            self.memory.set_throttled(false);
        }
    }

    /// Whether a state is that of a clean page that nobody is changing or moving.
    pub fn is_idle(word: Word) -> bool {
        word.has(Flags::VALID) && !word.any(Flags::DIRTY.with(Flags::LATCH).with(Flags::WRITE_BACK))
    }
}

/// Does what a locked part left to be done. Callbacks may come back to the slice.
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
