//! Inline writes and the kernel's pages of a file.
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
//! Why each step is right: docs/internals/fast-path.md, *The kernel's pages*.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use jericho_format::PAGE_BYTES;
use jericho_fs::fs::{File, Layout};
use jericho_shm::SlotInfo;
use parking_lot::Mutex;

use super::{Fast, SlotFile};
use crate::handle::Handle;
use crate::mounted::Mounted;

/// Number of writes through the kernel after which dropping the kernel's pages pays off. Starts at the minimum and grows towards
/// the maximum while grants prove short.
const WRITES_MIN: u32 = 8;
const WRITES_MAX: u32 = 8192;
/// A grant that ends sooner than this was not worth its cost.
const SHORT: Duration = Duration::from_millis(200);

/// Tracks whether the kernel's pages allow a file to be written inline. No thread blocks while it holds the lock.
#[derive(Default)]
pub(crate) struct KernelPages(Mutex<Pages>);

#[derive(Default)]
struct Pages {
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

impl Fast {
    /// Prepares a file for its first inline writer. The kernel may have older pages, and the mount may be in the middle of writes
    /// that take no locks: withholds inline writes until the pages are dropped and those writes have ended.
    pub(super) fn begin_writes(&self, file: &Arc<SlotFile>) {
        let mut pages = file.kernel_pages.0.lock();
        pages.fills += 1;
        pages.withheld = true;
        pages.ended = false;
        pages.writes_wanted = WRITES_MIN;
        pages.granted_at = None;
        pages.earlier += 1;
        self.info(file).set_flags(SlotInfo::NO_WRITE, 0);
        drop(pages);
        let waiting = file.clone();
        let over = move || waiting.kernel_pages.0.lock().earlier -= 1;
        file.file.after_writings(over);
    }

    /// Drops the kernel's pages and grants inline writes, unless the kernel has begun to read pages since. May wait for
    /// requests of the kernel, so it must not run in a thread that serves them.
    pub(super) fn grant_writes(&self, file: &SlotFile) {
        let seen = {
            let mut pages = file.kernel_pages.0.lock();
            pages.dropping = true;
            pages.fills
        };
        self.drop_kernel_pages(&file.file);
        self.grant_unless_filled(file, seen);
    }

    /// Makes the kernel drop its pages and attributes of a file, and notes it. May wait for requests of the kernel, so it must
    /// not run in a thread that serves them.
    pub(super) fn drop_kernel_pages(&self, file: &File) {
        if let Some(kernel) = self.kernel.get() {
            let so_far = file.kernel_pages_so_far();
            kernel.drop_pages(file.ino());
            // Only after the drop: meanwhile another slot of the file may get its first writer.
            file.kernel_has_dropped(so_far);
        }
    }

    /// Grants inline writes of a file that has its first writer and of which the kernel has no pages. Never waits. Returns false
    /// and does nothing when the kernel may have pages.
    pub(super) fn try_grant_writes(&self, file: &SlotFile) -> bool {
        let seen = file.kernel_pages.0.lock().fills;
        // Pairs with the fence in `file_that_is_filled`: the file already counts as written.
        fence(Ordering::SeqCst);
        if file.file.kernel_may_have_pages() {
            return false;
        }
        if let Some(kernel) = self.kernel.get() {
            kernel.drop_attributes(file.file.ino());
        }
        self.grant_unless_filled(file, seen);
        true
    }

    /// Grants inline writes, unless the number of fills is no longer `seen`.
    fn grant_unless_filled(&self, file: &SlotFile, seen: u64) {
        let mut pages = file.kernel_pages.0.lock();
        pages.dropping = false;
        pages.writes = 0;
        if pages.fills == seen && pages.withheld && !pages.ended && pages.earlier == 0 {
            pages.withheld = false;
            pages.granted_at = Some(Instant::now());
            self.info(file).set_flags(0, SlotInfo::NO_WRITE);
            self.counts.writes_granted.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Withholds inline writes for a read that fills the page cache. A client that has not latched its page when this
    /// returns learns that it may not write.
    fn withhold_writes(&self, mounted: &Mounted, file: &SlotFile) {
        {
            let mut pages = file.kernel_pages.0.lock();
            // From here on no thread grants writes until the kernel has the pages of this read and they were dropped
            // again.
            pages.fills += 1;
            pages.writes = 0;
            if pages.withheld {
                return;
            }
        }
        self.keep_writers_out(mounted, file);
        let mut pages = file.kernel_pages.0.lock();
        if pages.withheld {
            return;
        }
        pages.withheld = true;
        let short = pages.granted_at.is_some_and(|at| at.elapsed() < SHORT);
        pages.writes_wanted = match short {
            true => (pages.writes_wanted * 4).min(WRITES_MAX),
            false => WRITES_MIN,
        };
        self.counts.writes_withheld.fetch_add(1, Ordering::Relaxed);
    }

    /// Tells clients that they may not write the file: those that read its size from now on, and those that have not latched
    /// their page yet. When this returns, no client is extending the file.
    fn keep_writers_out(&self, mounted: &Mounted, file: &SlotFile) {
        self.info(file).set_flags(SlotInfo::NO_WRITE, 0);
        // Holds the extend lock, so that no client is in the middle of a write that extends the file.
        let slot = self.slot(file);
        let seized = self.hold_extend(file);
        // After the flag: a client that reads the size from now on sees the flag too.
        slot.cut();
        if seized {
            mounted.clear_seized(file);
        }
        self.give_back_extend(file);
    }

    /// Ends inline writes while the last writable descriptor is being closed. A thread of that program, or code that a signal
    /// handler interrupted, may still be in the middle of a write. When this returns, no client changes the file inline, and the
    /// slice knows all its dirty pages.
    pub(super) fn end_writes(&self, mounted: &Mounted, file: &SlotFile) {
        {
            let mut pages = file.kernel_pages.0.lock();
            pages.fills += 1;
            pages.ended = true;
        }
        self.keep_writers_out(mounted, file);
        file.kernel_pages.0.lock().withheld = true;
        // Sets the flag before it reads the intents: a thread whose intent is not visible yet latches later and sees the flag.
        fence(Ordering::SeqCst);
        let (mut taken, object) = (0, file.file.object());
        for (slice, entries) in self.slices.iter().zip(self.intents(file)) {
            taken += slice.take_unreported(&object, &entries);
        }
        if taken > 0 {
            mounted.fs().end_write(&file.file, 0, 0);
        }
    }

    /// Allows grants again: the file still has a writer.
    pub(super) fn allow_grants(&self, file: &SlotFile) {
        file.kernel_pages.0.lock().ended = false;
    }
}

impl Mounted {
    /// Does the same as `begin_fill` when it need not wait for clients. Otherwise returns false and does nothing.
    pub(crate) fn try_begin_fill(&self, handle: &Handle) -> bool {
        self.file_that_is_filled(handle).is_none()
    }

    /// Records that the kernel gets pages of the file. Returns the file's slot while the file is written inline.
    fn file_that_is_filled(&self, handle: &Handle) -> Option<Arc<SlotFile>> {
        handle.file.kernel_gets_pages();
        // Pairs with the fence in `try_grant_writes`: a new first writer counts itself, then reads this record, so
        // one of the two threads sees the other.
        fence(Ordering::SeqCst);
        self.fast.written_file(handle.file.ino())
    }

    /// Withholds inline writes before bytes are read for the kernel's page cache. No client changes these bytes until
    /// the kernel's pages have been dropped.
    pub(crate) fn begin_fill(&self, handle: &Handle, offset: u64, len: u32) {
        let Some(slot_file) = self.file_that_is_filled(handle) else {
            return;
        };
        self.fast.withhold_writes(self, &slot_file);
        let first = offset / PAGE_BYTES;
        let end = offset.saturating_add(u64::from(len)).div_ceil(PAGE_BYTES);
        let file = &slot_file.file;
        let mut layout = file.layout();
        let is_drained = |layout: Layout| {
            let mut runs = layout.runs(first..end);
            runs.all(|(slice, pages)| self.slice(slice).drain_writers(file.ino(), pages))
        };
        // The file may move to another slice during the wait.
        while !is_drained(layout) || file.layout() != layout {
            if file.layout() == layout {
                tracing::warn!(
                    ino = file.ino(),
                    "stopped waiting for an inline write that does not end"
                );
                break;
            }
            layout = file.layout();
        }
    }

    /// Counts a write through the kernel by a program that would write inline.
    pub(crate) fn wrote_by_kernel(self: &Arc<Self>, file: &Arc<SlotFile>) {
        {
            let mut pages = file.kernel_pages.0.lock();
            if !pages.withheld || pages.dropping || pages.earlier > 0 {
                return;
            }
            pages.writes += 1;
            if pages.writes < pages.writes_wanted {
                return;
            }
            pages.dropping = true;
        }
        let (file, weak) = (file.clone(), Arc::downgrade(self));
        self.fast.later(move || {
            if let Some(mounted) = weak.upgrade() {
                mounted.fast.grant_writes(&file);
            }
        });
    }
}
