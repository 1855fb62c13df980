//! What the steps of a slice use beside its locked state: the memory, limits and counters. None of it needs the lock.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossbeam_queue::SegQueue;
use jericho_shm::SliceMemory;

use crate::counters::Counts;
use crate::object::Object;
use crate::requests::PAGES_PER_GET_MAX;

/// Thresholds at which the slice's threads start and stop working.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Frames on the home node. Frames elsewhere may be given back at any time, so they raise no limit of dirty pages.
    pub home_frames: u32,
    /// Eviction starts below `free_low` free frames and stops at `free_high`.
    pub free_low: u32,
    pub free_high: u32,
    /// Write-back starts at this number of dirty pages; writers wait at `dirty_max`.
    pub dirty_background: u32,
    pub dirty_max: u32,
    /// Time from an object's first dirty page until its dirty pages are written back.
    pub dirty_age: Duration,
}

impl Limits {
    pub fn new(home_frames: u32, dirty_age: Duration) -> Limits {
        let free_low = (home_frames / 64).max(PAGES_PER_GET_MAX / 2);
        Limits {
            home_frames,
            free_low,
            free_high: (home_frames / 32).max(free_low + PAGES_PER_GET_MAX),
            dirty_background: home_frames / 10,
            dirty_max: home_frames * 3 / 10,
            dirty_age,
        }
    }
}

/// Callback that learns of an owner whose latch was taken away. See `Slice::set_on_broken`.
pub(crate) type OnBroken = Box<dyn Fn(u16) -> bool + Send + Sync>;

/// Pages that a writer made dirty inline.
pub(crate) struct Report {
    pub object: Arc<dyn Object>,
    pub first: u64,
    pub count: u32,
}

pub(crate) struct SliceContext {
    pub id: u16,
    pub memory: SliceMemory,
    pub limits: Limits,
    /// Pages that are dirty or being written back.
    pub dirty_pages: AtomicU64,
    /// Reports of dirty pages that the index has not absorbed yet.
    pub reports: SegQueue<Report>,
    pub closing: AtomicBool,
    /// Length of `SliceState::parked`. For a moment the counter may be too large.
    pub parked: AtomicUsize,
    /// Small syncs whose transfer, with all that follows it, has not ended. Increased under the lock of a slice that does not close.
    pub small_syncs: AtomicUsize,
    pub on_broken: OnceLock<OnBroken>,
    /// The errno that writers of new data get at once, or 0. See `outage`.
    pub no_room: AtomicI32,
    pub counts: Counts,
}

impl SliceContext {
    pub fn new(id: u16, memory: SliceMemory, limits: Limits) -> SliceContext {
        SliceContext {
            id,
            memory,
            limits,
            dirty_pages: 0.into(),
            reports: SegQueue::new(),
            closing: AtomicBool::new(false),
            parked: 0.into(),
            small_syncs: 0.into(),
            on_broken: OnceLock::new(),
            no_room: 0.into(),
            counts: Counts::default(),
        }
    }

    /// Returns the LRU's coarse time. It advances each time a sixteenth of the slice's frames with memory has been
    /// filled.
    pub fn epoch(&self) -> u8 {
        self.memory.epoch()
    }

    /// Returns the number of pages that are dirty or being written back.
    pub fn dirty(&self) -> u64 {
        self.dirty_pages.load(Ordering::Relaxed)
    }

    /// Counts `n` pages that became clean or left the cache.
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
}
