//! Inline writes against the pages that the kernel has of a file.
//!
//! The kernel reads pages into its page cache for mappings, programs that run, sendfile, splice. Nobody tells it of an inline write.
//! So while it may have pages of a file, that file is not written inline:
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
use jericho_shm::SlotInfo;
use parking_lot::Mutex;

use super::{Fast, SlotFile};
use crate::handle::Handle;
use crate::mounted::Mounted;

/// Writes through the kernel that make it worth to drop its pages: from the first to the second, as grants turn out to be short.
const WRITES_MIN: u32 = 8;
const WRITES_MAX: u32 = 8192;
/// A grant that is withdrawn earlier was not worth it.
const SHORT: Duration = Duration::from_millis(200);

/// Whether a file may be written inline as far as the kernel's pages are concerned. Nothing is waited for under its lock.
#[derive(Default)]
pub(crate) struct KernelPages(Mutex<Pages>);

#[derive(Default)]
struct Pages {
    /// Inline writes are withheld.
    withheld: bool,
    /// Reads that fill the page cache and have begun.
    fills: u64,
    /// Writes through the kernel, of programs that would write inline, since the last fill.
    writes: u32,
    /// So many of them make it worth to drop the kernel's pages.
    writes_wanted: u32,
    granted_at: Option<Instant>,
    /// The kernel's pages are being dropped.
    dropping: bool,
    /// The last descriptor that writes the file is being closed, or was: nobody grants writes.
    ended: bool,
    /// Times that the file got its first inline writer while writes of the mount were under way that take no locks, and are so still.
    earlier: u32,
}

impl Fast {
    /// The file has its first inline writer: the kernel may have pages from before, and the mount may be in the middle of writes that
    /// take no locks. Withholds writes until the pages are dropped and those writes are over.
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

    /// Drops the kernel's pages and lets clients write again, unless the kernel has begun to read pages meanwhile. May wait for
    /// requests that the kernel makes for it: not in a thread that serves them.
    pub(super) fn grant_writes(&self, file: &SlotFile) {
        let seen = {
            let mut pages = file.kernel_pages.0.lock();
            pages.dropping = true;
            pages.fills
        };
        if let Some(kernel) = self.kernel.get() {
            let so_far = file.file.kernel_pages_so_far();
            kernel.drop_pages(file.file.ino());
            // Not before: another slot of the file may get its first writer while the kernel drops them.
            file.file.kernel_has_dropped(so_far);
        }
        self.grant_unless_filled(file, seen);
    }

    /// Lets clients write a file that has its first writer, and of which the kernel has no pages. Does not wait. False: it may have
    /// some; nothing was done.
    pub(super) fn try_grant_writes(&self, file: &SlotFile) -> bool {
        let seen = file.kernel_pages.0.lock().fills;
        // The file counts as written already; see `file_that_is_filled`.
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

    /// Lets clients write, unless the kernel has begun to read pages since there were `seen` such reads.
    fn grant_unless_filled(&self, file: &SlotFile, seen: u64) {
        let mut pages = file.kernel_pages.0.lock();
        pages.dropping = false;
        pages.writes = 0;
        if pages.fills == seen && pages.withheld && !pages.ended && pages.earlier == 0 {
            pages.withheld = false;
            pages.granted_at = Some(Instant::now());
            self.info(file).set_flags(0, SlotInfo::NO_WRITE);
            self.writes_granted.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Withholds inline writes for a read that fills the page cache. After the return a client that has not latched its page
    /// yet finds out.
    fn withhold_writes(&self, mounted: &Mounted, file: &SlotFile) {
        {
            let mut pages = file.kernel_pages.0.lock();
            // From here on nobody grants writes before the kernel has this read's pages and they were dropped.
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
        self.writes_withheld.fetch_add(1, Ordering::Relaxed);
    }

    /// Has clients find out that they may not write the file: those that look at its size from here on, or have not latched their page yet.
    /// Nobody is making the file longer after the return.
    fn keep_writers_out(&self, mounted: &Mounted, file: &SlotFile) {
        self.info(file).set_flags(SlotInfo::NO_WRITE, 0);
        // With the lock, so that nobody is in the middle of a write that makes the file longer.
        let slot = self.slot(file);
        let seized = file.extend.hold(slot);
        // After the flag: a client that sees a size from after this sees the flag, too.
        slot.cut();
        if seized {
            mounted.clear_seized(file);
        }
        file.extend.give_back(slot);
    }

    /// The last descriptor that writes the file is being closed: a thread of its program, or the code that a signal handler interrupted, may be
    /// in the middle of a write all the same. After the return nobody changes the file inline, and its slice knows all dirty pages.
    pub(super) fn end_writes(&self, mounted: &Mounted, file: &SlotFile) {
        {
            let mut pages = file.kernel_pages.0.lock();
            pages.fills += 1;
            pages.ended = true;
        }
        self.keep_writers_out(mounted, file);
        file.kernel_pages.0.lock().withheld = true;
        // The flag before the notes: a thread whose note is not there yet latches after that, and sees the flag.
        fence(Ordering::SeqCst);
        let (mut taken, object) = (0, file.file.object());
        for (slice, entries) in self.slices.iter().zip(self.intents()) {
            taken += slice.take_unreported(&object, &entries);
        }
        if taken > 0 {
            mounted.fs().end_write(&file.file, 0, 0);
        }
    }

    /// The file has a writer all the same: writes may be granted again.
    pub(super) fn allow_grants(&self, file: &SlotFile) {
        file.kernel_pages.0.lock().ended = false;
    }
}

impl Mounted {
    /// As `begin_fill`, where it does not have to wait for clients; false: it does, and nothing was done.
    pub(crate) fn try_begin_fill(&self, handle: &Handle) -> bool {
        self.file_that_is_filled(handle).is_none()
    }

    /// Notes that the kernel gets pages of the file; gives its slot while it is written inline.
    fn file_that_is_filled(&self, handle: &Handle) -> Option<Arc<SlotFile>> {
        handle.file.kernel_gets_pages();
        // A first writer becomes one, and then looks at the note: one of us sees the other.
        fence(Ordering::SeqCst);
        self.fast.written_file(handle.file.ino())
    }

    /// Before bytes are read for the kernel's page cache: no client changes them from here on, until the kernel's pages
    /// have been dropped.
    pub(crate) fn begin_fill(&self, handle: &Handle, offset: u64, len: u32) {
        let Some(slot_file) = self.file_that_is_filled(handle) else {
            return;
        };
        self.fast.withhold_writes(self, &slot_file);
        let first = offset / PAGE_BYTES;
        let end = offset.saturating_add(u64::from(len)).div_ceil(PAGE_BYTES);
        let file = &slot_file.file;
        let mut home = file.slice();
        // The file may move to another slice meanwhile.
        while !self.slice(home).drain_writers(file.ino(), first..end) || file.slice() != home {
            if file.slice() == home {
                tracing::warn!(ino = file.ino(), "an inline writer does not finish");
                break;
            }
            home = file.slice();
        }
    }

    /// A program that would write inline has written through the kernel.
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
