//! Withholds inline writes of a file while the kernel may have pages of it, and grants them again. `kernel_pages` decides when.
//!
//! Why each step is right: docs/internals/fast-path.md, *The kernel's pages*.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use jericho_format::PAGE_BYTES;
use jericho_fs::{File, Layout};
use jericho_shm::SlotInfo;

use super::Fast;
use super::slot_file::SlotFile;
use crate::handle::Handle;

impl Fast {
    /// Prepares a file for its first inline writer. The kernel may have older pages, and the mount may be in the middle of writes
    /// that take no locks: withholds inline writes until the pages are dropped and those writes have ended.
    pub(super) fn begin_writes(&self, file: &Arc<SlotFile>) {
        let mut writes = file.kernel_pages.lock();
        writes.begin();
        self.info(file).set_flags(SlotInfo::NO_WRITE, 0);
        drop(writes);
        let waiting = file.clone();
        let over = move || waiting.kernel_pages.lock().earlier_ended();
        file.file.after_writings(over);
    }

    /// Drops the kernel's pages and grants inline writes, unless the kernel has begun to read pages since. May wait for
    /// requests of the kernel, so it must not run in a thread that serves them.
    pub(super) fn grant_writes(&self, file: &SlotFile) {
        let seen = file.kernel_pages.lock().begin_drop();
        self.drop_kernel_pages(&file.file);
        self.grant_unless_filled(file, seen);
    }

    /// Makes the kernel drop its pages and attributes of a file, and notes it. May wait for requests of the kernel, so it must
    /// not run in a thread that serves them.
    pub(super) fn drop_kernel_pages(&self, file: &File) {
        if let Some(kernel) = self.kernel.get() {
            let so_far = file.kernel_pages_so_far();
            kernel.drop_pages(file.ino());
            // Notes the drop only now. An earlier note would let another writer, with another slot of the file, write inline
            // while the kernel still has pages.
            file.kernel_has_dropped(so_far);
        }
    }

    /// Grants inline writes of a file that has its first writer and of which the kernel has no pages. Never waits. Returns false
    /// and does nothing when the kernel may have pages.
    pub(super) fn try_grant_writes(&self, file: &SlotFile) -> bool {
        let seen = file.kernel_pages.lock().fills();
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

    /// Grants inline writes, unless a fill has begun since the number of fills was `seen`.
    fn grant_unless_filled(&self, file: &SlotFile, seen: u64) {
        let mut writes = file.kernel_pages.lock();
        if writes.may_grant(seen) {
            self.info(file).set_flags(0, SlotInfo::NO_WRITE);
            self.counts.writes_granted.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Withholds inline writes for a read that fills the page cache. A client that has not latched its page when this
    /// returns learns that it may not write.
    fn withhold_writes(&self, file: &SlotFile) {
        if file.kernel_pages.lock().begin_fill() {
            return;
        }
        self.keep_writers_out(file);
        if file.kernel_pages.lock().withhold() {
            self.counts.writes_withheld.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Tells clients that they may not write the file: those that read its size from now on, and those that have not latched
    /// their page yet. When this returns, no client is extending the file.
    fn keep_writers_out(&self, file: &SlotFile) {
        self.info(file).set_flags(SlotInfo::NO_WRITE, 0);
        // Holds the extend lock, so that no client is in the middle of a write that extends the file.
        let slot = self.slot(file);
        let seized = self.hold_extend(file);
        // After the flag: a client that reads the size from now on sees the flag too.
        slot.raise_truncation_count();
        if seized {
            self.clear_seized(file);
        }
        self.give_back_extend(file);
    }

    /// Ends inline writes while the last writable descriptor is being closed. A thread of that program, or code that a signal
    /// handler interrupted, may still be in the middle of a write. When this returns, no client changes the file inline, and the
    /// slice knows all its dirty pages.
    pub(super) fn end_writes(&self, file: &SlotFile) {
        file.kernel_pages.lock().forbid_grants();
        self.keep_writers_out(file);
        file.kernel_pages.lock().withhold_for_close();
        // Sets the flag before it reads the intents: a thread whose intent is not visible yet latches later and sees the flag.
        fence(Ordering::SeqCst);
        let (mut taken, object) = (0, file.file.object());
        for (slice, entries) in self.volume.slices.iter().zip(self.intents(file)) {
            taken += slice.take_unreported(&object, &entries);
        }
        if taken > 0 {
            self.volume.fs.end_write(&file.file, 0, 0);
        }
    }

    /// Allows grants again: the file still has a writer.
    pub(super) fn allow_grants(&self, file: &SlotFile) {
        file.kernel_pages.lock().allow_grants();
    }

    /// Records that the kernel gets pages of the file. Returns false if the file is written inline: the caller then has to
    /// call `begin_fill`, which waits for clients, before it reads.
    pub(crate) fn try_begin_fill(&self, handle: &Handle) -> bool {
        self.file_that_is_filled(handle).is_none()
    }

    /// Records that the kernel gets pages of the file. Returns the file's slot while the file is written inline.
    fn file_that_is_filled(&self, handle: &Handle) -> Option<Arc<SlotFile>> {
        handle.file.kernel_gets_pages();
        // Pairs with the fence in `try_grant_writes`: a new first writer counts itself, then reads this record, so
        // one of the two threads sees the other.
        fence(Ordering::SeqCst);
        self.written_file(handle.file.ino())
    }

    /// Withholds inline writes before bytes are read for the kernel's page cache. No client changes these bytes until
    /// the kernel's pages have been dropped.
    pub(crate) fn begin_fill(&self, handle: &Handle, offset: u64, len: u32) {
        let Some(slot_file) = self.file_that_is_filled(handle) else {
            return;
        };
        self.withhold_writes(&slot_file);
        let first = offset / PAGE_BYTES;
        let end = offset.saturating_add(u64::from(len)).div_ceil(PAGE_BYTES);
        let file = &slot_file.file;
        let mut layout = file.layout();
        let is_drained = |layout: Layout| {
            let mut runs = layout.runs(first..end);
            runs.all(|(slice, pages)| {
                let slice = self.volume.slice(slice);
                slice.drain_writers(file.object_id(), pages)
            })
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
        if !file.kernel_pages.lock().count_write() {
            return;
        }
        let (file, weak) = (file.clone(), Arc::downgrade(self));
        self.later(move || {
            if let Some(fast) = weak.upgrade() {
                fast.grant_writes(&file);
            }
        });
    }
}
