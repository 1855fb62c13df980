//! Whether the kernel's pages of a file allow it to be written inline.
//!
//! The kernel reads pages into its page cache for mappings, executed programs, sendfile and splice. An inline write bypasses that
//! cache, so the kernel's copy would become stale. While the kernel may have pages of a file, that file is therefore not written
//! inline:
//!
//! ```text
//!             a read that fills the page cache
//!   granted ──────────────────────────────────▶ withheld ◀── the file's first inline writer
//!      ▲                                          │  ▲
//!      │      no such read began meanwhile        │  │ one did
//!      └──────────────────────────────────── pages are dropped
//! ```
//!
//! This is the record of a file; `withholding` acts on it. Why each step is right: docs/internals/fast-path.md, *The kernel's pages*.

use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// Number of writes through the kernel after which dropping the kernel's pages pays off. Starts at the minimum and grows towards
/// the maximum while grants prove short.
const WRITES_MIN: u32 = 8;
const WRITES_MAX: u32 = 8192;
/// A grant that ends sooner than this was not worth its cost.
const SHORT: Duration = Duration::from_millis(200);

/// Tracks whether the kernel's pages allow a file to be written inline. No thread blocks while it holds the lock. While the file
/// has writers, the flag NO_WRITE of its slot is cleared only under the same lock.
#[derive(Default)]
pub(crate) struct KernelPages(Mutex<InlineWrites>);

/// Whether a file may be written inline, and what decides when it may again.
#[derive(Default)]
pub(crate) struct InlineWrites {
    /// Inline writes are withheld.
    withheld: bool,
    /// Number of reads into the page cache that have begun.
    fills: u64,
    /// Writes through the kernel since the last fill, by programs that would write inline.
    writes: u32,
    /// Drop the kernel's pages when `writes` reaches this.
    writes_wanted: u32,
    granted_at: Option<Instant>,
    /// A thread is dropping the kernel's pages.
    dropping: bool,
    /// The last writable descriptor is being closed or was closed: no thread grants writes.
    ended: bool,
    /// Number of pending waits for writes of the mount that took no locks and began before the file's first inline writer.
    earlier: u32,
}

impl KernelPages {
    pub fn lock(&self) -> MutexGuard<'_, InlineWrites> {
        self.0.lock()
    }
}

impl InlineWrites {
    /// Withholds inline writes of a file that gets its first inline writer. `may_grant` allows them only after `earlier_ended`. The
    /// caller arranges that `earlier_ended` is called at the end of all writes of the mount that are in progress now.
    pub fn begin(&mut self) {
        self.fills += 1;
        self.withheld = true;
        self.ended = false;
        self.writes_wanted = WRITES_MIN;
        self.granted_at = None;
        self.earlier += 1;
    }

    /// Records the end of the writes that were under way at `begin`.
    pub fn earlier_ended(&mut self) {
        self.earlier -= 1;
    }

    /// Records that a thread drops the kernel's pages. Returns the number of fills, for `may_grant`.
    pub fn begin_drop(&mut self) -> u64 {
        self.dropping = true;
        self.fills
    }

    /// Returns the number of fills, for `may_grant`.
    pub fn fills(&self) -> u64 {
        self.fills
    }

    /// Ends a drop. Returns whether inline writes are granted now. Returns false if a read into the page cache has begun since
    /// the number of fills was `seen`.
    pub fn may_grant(&mut self, seen: u64) -> bool {
        self.dropping = false;
        self.writes = 0;
        let may = self.fills == seen && self.withheld && !self.ended && self.earlier == 0;
        if may {
            self.withheld = false;
            self.granted_at = Some(Instant::now());
        }
        may
    }

    /// Records that a read into the page cache begins. From here on no thread grants writes until the kernel has the pages of this
    /// read and they were dropped again. Returns whether writes are withheld already.
    pub fn begin_fill(&mut self) -> bool {
        self.fills += 1;
        self.writes = 0;
        self.withheld
    }

    /// Withholds inline writes for a read into the page cache. Returns false when another thread has withheld them.
    pub fn withhold(&mut self) -> bool {
        if self.withheld {
            return false;
        }
        self.withheld = true;
        let short = self.granted_at.is_some_and(|at| at.elapsed() < SHORT);
        self.writes_wanted = match short {
            true => (self.writes_wanted * 4).min(WRITES_MAX),
            false => WRITES_MIN,
        };
        true
    }

    /// Forbids grants until the file has a first writer again, or until `allow_grants`.
    pub fn forbid_grants(&mut self) {
        self.fills += 1;
        self.ended = true;
    }

    /// Records that inline writes are withheld from the last writer.
    pub fn withhold_for_close(&mut self) {
        self.withheld = true;
    }

    /// Allows grants again.
    pub fn allow_grants(&mut self) {
        self.ended = false;
    }

    /// Counts a write through the kernel by a program that would write inline. Returns whether the kernel's pages are to be dropped
    /// now; the caller then drops them.
    pub fn count_write(&mut self) -> bool {
        if !self.withheld || self.dropping || self.earlier > 0 {
            return false;
        }
        self.writes += 1;
        self.dropping = self.writes >= self.writes_wanted;
        self.dropping
    }
}
