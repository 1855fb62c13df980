//! Counters of a slice. Those that hits touch are spread over cache lines by thread, so that counting
//! shares nothing between cores.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

const SHARDS: usize = 32;

#[repr(align(64))]
#[derive(Default)]
struct Line(AtomicU64);

/// A counter that many threads add to and few read.
#[derive(Default)]
pub(crate) struct Sharded([Line; SHARDS]);

impl Sharded {
    pub fn add(&self, n: u64) {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local!(static SHARD: usize = NEXT.fetch_add(1, Relaxed) % SHARDS);
        SHARD.with(|shard| self.0[*shard].0.fetch_add(n, Relaxed));
    }

    pub fn sum(&self) -> u64 {
        self.0.iter().map(|line| line.0.load(Relaxed)).sum()
    }
}

#[derive(Default)]
pub(crate) struct Counts {
    pub hits: Sharded,
    pub misses: Sharded,
    pub evictions: AtomicU64,
    pub read_bytes: AtomicU64,
    pub read_ahead_bytes: AtomicU64,
    pub written_back_bytes: AtomicU64,
    pub write_backs: AtomicU64,
    pub stalled: AtomicU64,
    pub clashed: AtomicU64,
    pub throttled: AtomicU64,
    pub write_errors: AtomicU64,
    pub searched: AtomicU64,
}

/// Counters of a slice since it was started, and its state.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Frames of the slice.
    pub frames: u64,
    /// Frames that hold a page.
    pub resident: u64,
    /// Pages that are newer than the device.
    pub dirty: u64,
    /// Pages that were found.
    pub hits: u64,
    /// Pages that were not.
    pub misses: u64,
    /// Pages dropped to make room.
    pub evictions: u64,
    /// Bytes read from devices.
    pub read_bytes: u64,
    /// Of those, bytes read ahead of a request.
    pub read_ahead_bytes: u64,
    /// Bytes written to devices.
    pub written_back_bytes: u64,
    /// Write transfers; `written_back_bytes / write_backs` tells how well they coalesce.
    pub write_backs: u64,
    /// Gets that waited for a frame.
    pub stalled: u64,
    /// Gets that waited for I/O of another.
    pub clashed: u64,
    /// Writers that waited at the dirty limit.
    pub throttled: u64,
    /// Write-backs that failed.
    pub write_errors: u64,
}
