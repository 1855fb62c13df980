//! Open files: the operations that the data path calls around each read and write.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_format::{FILE_BYTES_MAX, PAGE_BYTES};
use jericho_metadata::errno::*;

use crate::core::{PAGES, wait};
use crate::data::file::CacheResult;
use crate::error::{self, Result};
use crate::fs::Fs;
use crate::inode::File;
use crate::inode::Meta;
use crate::times::{now_ns, relatime};
use crate::types::{AccessTimes, Ino};

/// If several writes happen within this time, only the first sets the times.
const TICK_NS: i128 = 4_000_000;

impl Fs {
    /// Opens a regular file and counts the open.
    pub fn open_file(&self, ino: Ino) -> Result<Arc<File>> {
        let core = &self.core;
        let inode = core.inode(ino)?;
        let meta = inode.meta.read();
        if meta.dead {
            return Err(ESTALE);
        }
        let file = core.file_of(&inode, &meta)?;
        // Counts under the lock that `reap` takes before it decides.
        inode.opens.fetch_add(1, Ordering::AcqRel);
        Ok(file)
    }

    /// Prepares the close of a writable descriptor. If the file was truncated to nothing or renamed over another one, starts
    /// its write-back without waiting for it. Otherwise the truncation would become durable with the next batch, while the new
    /// pages are written back only when they are old enough. After a crash in between, a program that replaces contents without
    /// a sync would find an empty file.
    pub fn writer_closes(&self, file: &Arc<File>) {
        if !file.is_replacing() {
            return;
        }
        let inode = &file.inode;
        if inode.opens.load(Ordering::Acquire) == 1 {
            file.note_replaced();
        }
        if inode.unlinked.load(Ordering::Acquire) || file.first_dirty(0).is_none() {
            return;
        }
        let Some(cache) = file.cache() else { return };
        let reach = file.sync_begins();
        let synced = file.clone();
        let done = move |result: CacheResult| {
            // On an error the pages stay dirty, and the next fsync reports it.
            if result.is_ok() {
                synced.note_synced(&reach, u64::MAX);
            }
        };
        cache.sync(&file.object(), 0..PAGES, Box::new(done));
    }

    /// Counts one open less. Removes the file if it has no name and no open left.
    pub fn close_file(&self, file: &Arc<File>) {
        let inode = &file.inode;
        if inode.opens.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.core.reap(inode);
        }
    }

    /// Returns the file in memory, without counting an open.
    pub fn file(&self, ino: Ino) -> Result<Arc<File>> {
        let inode = self.core.inode(ino)?;
        self.core.file(&inode)
    }

    /// Reserves space for those pages of the range that have none, before bytes are written. Fails with EFBIG or EROFS, and
    /// with ENOSPC at once if there is no space now; see `with_space`. Cheap if all pages of the range have or reserve space
    /// already.
    pub fn begin_write(&self, file: &Arc<File>, offset: u64, len: u64) -> Result<()> {
        self.core.may_change_inode(file.ino())?;
        let end = offset
            .checked_add(len)
            .filter(|end| *end <= FILE_BYTES_MAX)
            .ok_or(EFBIG)?;
        if len == 0 {
            return Ok(());
        }
        let _shared = file.exclusive.read();
        if offset > file.size() {
            self.clear_tail(file)?;
        }
        self.reserve(file, offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES))
    }

    /// Does the same as `begin_write` if that is possible without waiting. Otherwise changes nothing and returns false; the
    /// caller then calls `begin_write` in a thread that may wait.
    pub fn try_begin_write(&self, file: &Arc<File>, offset: u64, len: u64) -> bool {
        let core = &self.core;
        let Some(end) = offset.checked_add(len).filter(|end| *end <= FILE_BYTES_MAX) else {
            return false;
        };
        let Some(_shared) = file.exclusive.try_read() else {
            return false;
        };
        if core.may_change_inode(file.ino()).is_err()
            || (offset > file.size() && file.tail_unsure.load(Ordering::Acquire))
        {
            return false;
        }
        let pages = offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES);
        len == 0 || self.reserve(file, pages).is_ok()
    }

    /// Reserves space for those of `pages` that have none. The caller holds `exclusive`, at least shared.
    fn reserve(&self, file: &File, pages: Range<u64>) -> Result<()> {
        if file.map.read().extents.covers(pages.clone()) {
            return Ok(());
        }
        // The host may have no space although the volume has. New data must then not fill the cache.
        if let Some(error) = file.cache().and_then(|cache| cache.no_room()) {
            return Err(error::of_cache(error));
        }
        let mut map = file.map.write();
        let result = map.reserve(pages, &self.core.allocator);
        file.count_blocks(&map);
        result
    }

    /// Zeroes the bytes after the end of the file in its last page, if a write whose size was lost may have left some. Called
    /// when the file is about to grow. The caller holds `exclusive`, at least shared.
    pub(crate) fn clear_tail(&self, file: &Arc<File>) -> Result<()> {
        if !file.tail_unsure.load(Ordering::Acquire) {
            return Ok(());
        }
        let size = file.size();
        let (page, from) = (size / PAGE_BYTES, (size % PAGE_BYTES) as usize);
        let readable = file
            .map
            .read()
            .extents
            .containing(page)
            .is_some_and(|r| r.state.readable().is_some());
        if from > 0
            && readable
            && let Some(cache) = file.cache()
        {
            let object = file.object();
            wait(|done| cache.zero_part(&object, page, from..PAGE_BYTES as usize, done))?;
        }
        file.tail_unsure.store(false, Ordering::Release);
        Ok(())
    }

    /// Ends a write after its bytes are in the cache: extends the size to `offset + len` if that is larger, and sets the times.
    pub fn end_write(&self, file: &Arc<File>, offset: u64, len: u64) {
        let end = offset.saturating_add(len);
        let inode = &file.inode;
        let now = now_ns();
        let tick = (now / TICK_NS) as u64;
        let dirty = inode.dirty.load(Ordering::Acquire);
        if end <= file.size() && dirty && file.tick.load(Ordering::Relaxed) == tick {
            return;
        }
        wrote(file, &mut inode.meta.write(), end, now);
        self.core.mark_dirty(inode);
    }

    /// Does the same as `end_write` for a write that ends at `end`, if `still` returns true. The size cannot change during the
    /// call of `still`. If it returns false, changes nothing and returns false.
    pub fn end_write_if(&self, file: &Arc<File>, end: u64, still: impl FnOnce() -> bool) -> bool {
        {
            let mut meta = file.inode.meta.write();
            if !still() {
                return false;
            }
            wrote(file, &mut meta, end, now_ns());
        }
        self.core.mark_dirty(&file.inode);
        true
    }

    /// Sets which reads change access times from now on.
    pub fn set_access_times(&self, when: AccessTimes) {
        self.core.access_times.store(when as u8, Ordering::Relaxed);
    }

    /// Sets the access time after a read, if the read changes it.
    pub fn end_read(&self, file: &Arc<File>) {
        if self.core.may_change_inode(file.ino()).is_err() {
            return;
        }
        let inode = &file.inode;
        let now = now_ns();
        let when = self.core.access_times.load(Ordering::Relaxed);
        if when == AccessTimes::Never as u8 {
            return;
        }
        let always = when == AccessTimes::Always as u8;
        let is_due = |rec: &jericho_metadata::store::InodeRecord| {
            relatime(rec.atime_ns, rec.mtime_ns, rec.ctime_ns, now)
                || (always && rec.atime_ns / TICK_NS != now / TICK_NS)
        };
        // Rarely true, except under `AccessTimes::Always`: the first read after a change, or after a day.
        if is_due(&inode.meta.read().rec) {
            inode.meta.write().rec.atime_ns = now;
            self.core.mark_dirty(inode);
        }
    }
}

/// Extends the size to `end` if `end` is larger, and sets the times.
fn wrote(file: &File, meta: &mut Meta, end: u64, now: i128) {
    if end > meta.rec.size {
        meta.rec.size = end;
        file.set_size(end);
    }
    meta.rec.mtime_ns = now;
    meta.rec.ctime_ns = now;
    let tick = (now / TICK_NS) as u64;
    file.tick.store(tick, Ordering::Relaxed);
}
