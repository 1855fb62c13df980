//! Takes pages out of a file (truncate, punch) and zeroes ranges.
//!
//! Meanwhile `hold` keeps batches from writing the file's size and extents, so the store changes directly from the state before
//! to the state after. The steps:
//!
//! 1. Take `exclusive`, so that no thread reserves space for the file, and no rename replaces another file with it. If it has replaced one, wait
//!    until a batch has the name (`exclusive_for_hold`).
//! 2. Set the size and remove pages from the extent map. Reads now return zeros.
//! 3. The cache drops these pages and waits for their transfers. Afterwards no transfer to their blocks is in flight. If the
//!    evictor chose a page before step 2 and placed it after step 2, the page is in the extent map again. Steps 2 and 3 are
//!    repeated until no such page exists.
//! 4. Zero the rest of partial pages in the cache.
//! 5. Free the blocks that the store does not have. The other blocks become free with the batch that removes their extents from
//!    the store.
//!
//! If blocks were freed before step 3, a write-back in flight could overwrite a block of another file.
//!
//! Zeroing a range takes the same steps, but in step 2 pages become unwritten and keep their blocks. It needs no space for
//! pages that have blocks.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_format::PAGE_BYTES;
use parking_lot::RwLockWriteGuard;

use crate::core::{Core, wait};
use crate::data::extents::{Map, PageState, Was};
use crate::data::runs::Run;
use crate::error::Result;
use crate::fs::Fs;
use crate::inode::File;
use crate::interruption::begin_change;
use crate::shards::Shard;
use crate::times::now_ns;
use crate::types::Ino;

/// Number of runs that a thread changes under one hold of the map's lock, so that readers of the file and the thread that seals a batch
/// do not wait long.
const RUNS_AT_ONCE: usize = 1024;

/// Calls `each` for parts of a range that have few runs, each time with the map's lock.
fn each_piece(
    file: &File,
    pages: &Range<u64>,
    mut each: impl FnMut(&mut Map, Range<u64>) -> Result<()>,
) -> Result<()> {
    let mut at = pages.start;
    while at < pages.end {
        let mut map = file.map.write();
        let piece = map.piece(at..pages.end, RUNS_AT_ONCE);
        at = piece.end;
        each(&mut map, piece)?;
    }
    Ok(())
}

/// Keeps batches from writing the file's size and extents.
struct Hold<'a> {
    core: &'a Core,
    file: &'a Arc<File>,
}

impl<'a> Hold<'a> {
    fn new(core: &'a Core, file: &'a Arc<File>) -> Hold<'a> {
        file.hold.fetch_add(1, Ordering::AcqRel);
        Hold { core, file }
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        // Must come before batches include the file again, because the file is only half truncated.
        let commits = self.core.commits_of(self.file.ino());
        commits.fail_if_panicking();
        self.file.hold.fetch_sub(1, Ordering::AcqRel);
        self.core.mark_dirty(&self.file.inode);
        commits.released();
    }
}

impl File {
    /// Returns whether batches have to leave out the file's size and extents.
    pub(crate) fn is_in_truncation(&self) -> bool {
        self.hold.load(Ordering::Acquire) > 0
    }

    /// Returns whether the file has replaced another one by rename, still has a name, and is in no sealed batch since.
    fn is_uncommitted_replacement(&self) -> bool {
        self.map.read().is_replacement() && !self.inode.unlinked.load(Ordering::Acquire)
    }
}

impl Fs {
    /// Commits the name of a file that has replaced another one by rename, if a truncation to `to` bytes (`None`: a punch) would have to wait for
    /// that. Call it before inline writers are locked out: otherwise they would wait for the commit, too. Ignores errors, because
    /// the truncation tries again.
    pub fn commit_replacement(&self, ino: Ino, to: Option<u64>) {
        let inode = self.core.table.get(ino);
        let file = inode.and_then(|inode| inode.file.lock().clone());
        let shortens = |file: &File| to.is_none_or(|to| to < file.size());
        if let Some(file) = file.filter(|file| shortens(file) && file.is_uncommitted_replacement())
        {
            let _ = self.core.commit_names(file.ino());
        }
    }

    /// Takes `exclusive` for a change that may need a `Hold`. If `needs_hold` and the file has replaced another one by rename, first waits for the
    /// batch with the name: a batch that is sealed during a `Hold` would have the name without the contents. If that commit fails, the change goes on, and
    /// a crash may show the name without the contents (docs/guarantees.md).
    pub(crate) fn exclusive_for_hold<'f>(
        &self,
        file: &'f Arc<File>,
        needs_hold: impl Fn() -> bool,
    ) -> RwLockWriteGuard<'f, ()> {
        let mut has_failed = false;
        loop {
            let alone = file.exclusive.write();
            // No rename makes the file a replacement while this thread has `exclusive`.
            if !needs_hold() || !file.is_uncommitted_replacement() {
                return alone;
            }
            if has_failed {
                // The batch may lack the space that this change frees.
                file.map.write().end_replacement();
                return alone;
            }
            drop(alone);
            // While a shard with blocks of the file is suspended, the batches lack the contents.
            let works = |shard: &Shard| shard.commits.failure().is_ok();
            let may_have = |set| self.core.shards.of_set(set).all(works);
            has_failed =
                self.core.commit_names(file.ino()).is_err() || !may_have(self.core.shards_of(file));
        }
    }

    /// Sets a file's size. The times change even when the size does not. Fails with EINTR, without a change, if the caller was interrupted before the
    /// other changes of the file have ended.
    pub(crate) fn truncate(&self, file: &Arc<File>, size: u64) -> Result<()> {
        let old = Cell::new(0);
        let _alone = self.exclusive_for_hold(file, || {
            old.set(file.size());
            size < old.get()
        });
        begin_change()?;
        let old = old.get();
        if size > old {
            self.clear_tail(file)?;
        }
        let end_page = file.end_page();
        // A longer size needs no `Hold`: a batch may have the old one or the new one.
        let _hold = (size < old).then(|| Hold::new(&self.core, file));
        {
            let mut meta = file.inode.meta.write();
            let now = now_ns();
            meta.rec.size = size;
            meta.rec.mtime_ns = now;
            meta.rec.ctime_ns = now;
            file.set_size(size);
            file.note_truncated(size);
        }
        if size >= old {
            // Space that is allocated beyond the old end stays, and reads as zeros.
            self.core.mark_dirty(&file.inode);
            return Ok(());
        }
        if size == 0 {
            file.note_replacing();
        }
        self.take_out(file, size.div_ceil(PAGE_BYTES)..end_page)?;
        let end = size.next_multiple_of(PAGE_BYTES);
        self.zero_bytes(file, size..end)?;
        file.tail_unsure.store(false, Ordering::Release);
        Ok(())
    }

    /// Releases the space that was reserved beyond the end of the file for writes that did not come, unless `is_needed` returns
    /// true. Locks writers out meanwhile. Keeps preallocated space.
    ///
    /// A client that writes inline may have bytes beyond the end that the file does not know of yet. `is_needed` must return
    /// true then. A client that asks to write inline after the call of `is_needed` loses no bytes: the daemon first waits with
    /// `after_writings`, and this wait ends only after the space is released.
    pub fn release_reserved(
        &self,
        file: &Arc<File>,
        is_needed: impl FnOnce() -> bool,
    ) -> Result<()> {
        let end = |file: &File| file.size().div_ceil(PAGE_BYTES);
        if file.reserved_end_page() <= end(file) {
            return Ok(());
        }
        let writing = file.shut_other_writers_out();
        let result = match is_needed() {
            true => Ok(()),
            false => self.release_reserved_alone(file, end(file)),
        };
        file.let_writers_in();
        drop(writing);
        result
    }

    fn release_reserved_alone(&self, file: &Arc<File>, end: u64) -> Result<()> {
        let is_clean = || file.first_dirty(end).is_none();
        let _alone = self.exclusive_for_hold(file, || !is_clean());
        let reserved: Vec<Range<u64>> = {
            let map = file.map.read();
            let runs = map.extents.from(end);
            // Includes pages that got blocks when the pages before them were placed.
            let unwritten = |state| {
                matches!(
                    state,
                    PageState::Delalloc | PageState::Pending { was: Was::Hole, .. }
                )
            };
            runs.filter(|run| unwritten(run.state) && run.end() > end)
                .map(|run| run.page.max(end)..run.end())
                .collect()
        };
        if reserved.is_empty() {
            return Ok(());
        }
        if is_clean() {
            // The pages are clean and writers are locked out, so no transfer is in flight and none begins. No batch has the pages. So there is no need
            // for a `Hold`.
            return self.release_clean(file, reserved);
        }
        let _hold = Hold::new(&self.core, file);
        for pages in reserved {
            self.take_out(file, pages)?;
        }
        Ok(())
    }

    /// Removes reserved pages that are clean and beyond the end. The caller locks writers out.
    fn release_clean(&self, file: &Arc<File>, reserved: Vec<Range<u64>>) -> Result<()> {
        let allocator = &self.core.allocator;
        let mut map = file.map.write();
        for pages in &reserved {
            let removed = map.take_out(pages.clone(), allocator);
            map.release(&removed, allocator);
        }
        file.count_blocks(&map);
        drop(map);
        self.core.mark_dirty(&file.inode);
        // A client may write a page in the cache without asking if that was said to have space (`Flags::BACKED`).
        if let Some(cache) = file.cache() {
            for pages in reserved {
                wait(|done| cache.invalidate(file.object_id(), pages, done))?;
            }
        }
        Ok(())
    }

    /// Zeroes all bytes beyond the end of the file, after a program died in a write that would have extended it. Locks the
    /// daemon's writers out meanwhile. Keeps preallocated space.
    pub fn clear_behind_end(&self, file: &Arc<File>) -> Result<()> {
        file.shut_writers_out();
        let result = self.clear_behind_end_alone(file);
        file.let_writers_in();
        result
    }

    fn clear_behind_end_alone(&self, file: &Arc<File>) -> Result<()> {
        let first = || file.size().div_ceil(PAGE_BYTES);
        let has_bytes = || self.written_behind(file, first()).is_some();
        let _alone = self.exclusive_for_hold(file, has_bytes);
        let size = file.size();
        let _hold = has_bytes().then(|| Hold::new(&self.core, file));
        let mut at = first();
        while let Some(pages) = self.written_behind(file, at) {
            at = pages.end;
            self.take_out(file, pages)?;
        }
        self.zero_bytes(file, size..size.next_multiple_of(PAGE_BYTES))?;
        file.tail_unsure.store(false, Ordering::Release);
        Ok(())
    }

    /// Returns the first range of pages at or after `from` that may hold bytes, in the cache or on the device.
    fn written_behind(&self, file: &Arc<File>, from: u64) -> Option<Range<u64>> {
        let dirty = file.first_dirty(from);
        let map = file.map.read();
        for run in map.extents.from(from) {
            let start = run.page.max(from);
            if !matches!(run.state, PageState::Unwritten(_)) {
                return Some(start..run.end());
            }
            if let Some(dirty) = dirty.filter(|page| (start..run.end()).contains(page)) {
                return Some(dirty..dirty + 1);
            }
        }
        None
    }

    /// Makes a range read as zeros, and frees the space of its whole pages. The caller holds `exclusive`.
    pub(crate) fn punch(&self, file: &Arc<File>, bytes: Range<u64>) -> Result<()> {
        self.zero_ends(file, bytes, |whole| {
            self.take_out(file, whole.start..whole.end.min(file.end_page()))
        })
    }

    /// Makes a range without holes read as zeros. Its pages keep their space. The caller holds `exclusive`.
    pub(crate) fn zero(&self, file: &Arc<File>, bytes: Range<u64>) -> Result<()> {
        self.zero_ends(file, bytes, |whole| self.unwrite(file, whole))
    }

    /// Zeroes the parts of pages at both ends of a range, and calls `rest` for the whole pages between them.
    fn zero_ends(
        &self,
        file: &Arc<File>,
        bytes: Range<u64>,
        rest: impl FnOnce(Range<u64>) -> Result<()>,
    ) -> Result<()> {
        let _hold = Hold::new(&self.core, file);
        let whole = bytes.start.div_ceil(PAGE_BYTES)..bytes.end / PAGE_BYTES;
        if whole.start > whole.end {
            return self.zero_bytes(file, bytes); // within one page
        }
        self.zero_bytes(file, bytes.start..whole.start * PAGE_BYTES)?;
        rest(whole.clone())?;
        self.zero_bytes(file, whole.end * PAGE_BYTES..bytes.end)
    }

    /// Does steps 2, 3 and 5 for whole pages. The caller has a `Hold`.
    fn take_out(&self, file: &Arc<File>, pages: Range<u64>) -> Result<()> {
        let allocator = &self.core.allocator;
        let removed = self.change_whole(file, &pages, |map, pages| {
            let removed = map.take_out(pages, allocator);
            file.count_blocks(map);
            Ok(removed)
        })?;
        for runs in removed.chunks(RUNS_AT_ONCE) {
            file.map.write().release(runs, allocator);
        }
        Ok(())
    }

    /// Does steps 2, 3 and 5 for whole pages that keep their blocks. The caller has a `Hold`.
    fn unwrite(&self, file: &Arc<File>, pages: Range<u64>) -> Result<()> {
        let allocator = &self.core.allocator;
        let before = self.change_whole(file, &pages, |map, pages| {
            map.unwrite(pages, file.home(), allocator)
        })?;
        for runs in before.chunks(RUNS_AT_ONCE) {
            file.map.write().release_earlier(runs, allocator);
        }
        each_piece(file, &pages, |map, pages| {
            // Under the map's lock: a page that is written back from here on is not unwritten any more before its block is claimed.
            map.unwritten(pages)
                .for_each(|blocks| allocator.logged(blocks).unclaim(blocks));
            Ok(())
        })
    }

    /// Does steps 2 and 3: `change` changes the map and the cache drops the pages, repeatedly until no transfer has changed the
    /// map meanwhile. Returns the runs that `change` returned.
    fn change_whole(
        &self,
        file: &Arc<File>,
        pages: &Range<u64>,
        change: impl Fn(&mut Map, Range<u64>) -> Result<Vec<Run<PageState>>>,
    ) -> Result<Vec<Run<PageState>>> {
        if pages.is_empty() {
            return Ok(vec![]);
        }
        let bytes = |page: u64| page.saturating_mul(PAGE_BYTES);
        let size = file.size();
        if bytes(pages.end) > size {
            file.map.write().cut_at(size.max(bytes(pages.start)));
        }
        let mut before = Vec::new();
        let change_all = |before: &mut Vec<_>| -> Result<bool> {
            let count = before.len();
            each_piece(file, pages, |map, pages| {
                before.append(&mut change(map, pages)?);
                Ok(())
            })?;
            Ok(before.len() > count)
        };
        change_all(&mut before)?;
        if let Some(cache) = file.cache() {
            loop {
                // An error means that the cache is shutting down. Blocks that only memory knows are lost with it.
                wait(|done| cache.invalidate(file.object_id(), pages.clone(), done))?;
                if !change_all(&mut before)? {
                    break;
                }
            }
        }
        Ok(before)
    }

    /// Zeroes bytes within one page, unless the page reads as zeros.
    fn zero_bytes(&self, file: &Arc<File>, bytes: Range<u64>) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let page = bytes.start / PAGE_BYTES;
        let Some(cache) = file.cache() else {
            return Ok(());
        };
        let holds_data = || {
            let map = file.map.read();
            let run = map.extents.containing(page);
            run.map(|run| run.state.readable().is_some())
        };
        let is_needed = match holds_data() {
            None => false,
            Some(true) => true,
            // The page is reserved or preallocated. It holds bytes only if the cache has newer ones, or has written newer ones
            // back meanwhile.
            Some(false) => {
                cache.first_dirty(file.object_id(), page) == Some(page)
                    || holds_data() == Some(true)
            }
        };
        if !is_needed {
            return Ok(());
        }
        let within = (bytes.start % PAGE_BYTES) as usize;
        let within = within..within + (bytes.end - bytes.start) as usize;
        let object = file.object();
        wait(|done| cache.zero_part(&object, page, within, done))
    }
}
