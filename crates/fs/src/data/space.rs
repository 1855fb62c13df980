//! fallocate and lseek: space and holes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use jericho_format::{FILE_BYTES_MAX, PAGE_BYTES};
use jericho_metadata::errno::*;

use crate::core::Core;
use crate::error::Result;
use crate::fs::Fs;
use crate::inode::File;
use crate::times::now_ns;
use crate::types::Ino;

const KEEP_SIZE: i32 = 0x01;
const PUNCH_HOLE: i32 = 0x02;
const ZERO_RANGE: i32 = 0x10;

/// Effect of fallocate(2) on the bytes of a range.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ByteChange {
    /// The bytes get space and keep their values.
    Nothing,
    /// The bytes get space and become zeros.
    Zero,
    /// The bytes become a hole.
    Punch,
}

/// Checks the arguments of fallocate(2). Returns the end of the range.
fn check(mode: i32, offset: u64, len: u64) -> Result<(u64, ByteChange)> {
    if len == 0 {
        return Err(EINVAL);
    }
    let end = offset
        .checked_add(len)
        .filter(|end| *end <= FILE_BYTES_MAX)
        .ok_or(EFBIG)?;
    let change = match mode & !KEEP_SIZE {
        0 => ByteChange::Nothing,
        PUNCH_HOLE if mode & KEEP_SIZE != 0 => ByteChange::Punch,
        ZERO_RANGE => ByteChange::Zero,
        _ => return Err(EOPNOTSUPP),
    };
    Ok((end, change))
}

impl Core {
    /// Runs `attempt`, which takes space. If it fails because the volume is full, waits for space and runs it again. `attempt` must
    /// change nothing when it fails for that reason. `own` is the file that needs the space. The call may block for seconds: the
    /// caller holds no lock, and its thread does not serve requests. If `may_wait` returns false, waits for devices only.
    pub fn with_space<T>(
        &self,
        own: Ino,
        may_wait: impl Fn() -> bool,
        attempt: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        self.leaving.retry(
            own,
            // A slice that takes no changes has no space to wait for.
            || self.commit_working(),
            // Waits until no free block is being discarded.
            || self.allocator.recall(),
            || self.allocator.available(),
            may_wait,
            attempt,
        )
    }

    /// Returns whether `pages` pages could get space if all files that a write to `own` may wait for were removed.
    pub fn may_have_room(&self, own: Ino, pages: u64) -> bool {
        let mut room = 0u64;
        // Counts the files first. Their blocks become available before they leave the list, so no block is missed.
        for ino in self.leaving.awaited(own) {
            let blocks = self
                .table
                .get(ino)
                .map(|inode| inode.blocks.load(Ordering::Relaxed));
            match blocks {
                Some(blocks) => room = room.saturating_add(blocks),
                None => return true,
            }
        }
        pages <= room.saturating_add(self.allocator.available())
    }
}

impl Fs {
    /// Runs `attempt`, which takes space for a file. If the volume is full, waits for space that is being freed, and runs it
    /// again. May take seconds. The caller holds no lock, and `attempt` holds none when it returns. A thread that serves
    /// requests must not call this, because the wait may be for a request that the thread would serve.
    pub fn with_space<T>(&self, file: &File, attempt: impl FnMut() -> Result<T>) -> Result<T> {
        self.core.with_space(file.ino(), || true, attempt)
    }

    /// Does the same as `with_space`, but waits for requests only while `may_wait` returns true. Calls `may_wait` when an
    /// attempt has failed although removals have been made durable. If it returns false, the call still waits for devices.
    pub fn with_space_if<T>(
        &self,
        file: &File,
        may_wait: impl Fn() -> bool,
        attempt: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        self.core.with_space(file.ino(), may_wait, attempt)
    }

    /// Returns whether a range of a file may soon have space. Returns false if its holes need more than the free space and the
    /// space of the files that a caller of `with_space` waits for.
    pub fn may_have_room(&self, file: &File, offset: u64, len: u64) -> bool {
        let pages = offset / PAGE_BYTES..offset.saturating_add(len).div_ceil(PAGE_BYTES);
        let holes = file.map.read().extents.holes(pages);
        let missing = holes.iter().map(|(_, count)| count).sum();
        self.core.may_have_room(file.ino(), missing)
    }

    /// Returns the number of callers of `with_space` that wait for space.
    pub fn space_waits(&self) -> usize {
        self.core.leaving.waiters()
    }

    /// Sets the longest wait of `with_space`. The default is some seconds.
    pub fn set_space_patience(&self, patience: Duration) {
        self.core.leaving.set_patience(patience);
    }

    /// Ends all current and future waits for space.
    pub fn end_space_waits(&self) {
        self.core.leaving.close();
    }

    /// Returns whether the volume has space for the given number of additional bytes.
    pub fn has_room_for(&self, bytes: u64) -> bool {
        bytes.div_ceil(PAGE_BYTES) < self.core.allocator.available()
    }

    /// Does what fallocate(2) does, for the modes 0, KEEP_SIZE 1, PUNCH_HOLE|KEEP_SIZE 3 and ZERO_RANGE 0x10 (| KEEP_SIZE).
    /// Fails with EOPNOTSUPP for other modes. Waits for the cache when it drops pages, and before that for a commit
    /// if the file has just replaced another one by rename. Fails with ENOSPC at once if the volume
    /// has no space now; see `with_space`.
    pub fn fallocate(&self, file: &Arc<File>, mode: i32, offset: u64, len: u64) -> Result<()> {
        let core = &self.core;
        core.may_change_inode(file.ino())?;
        let (end, change) = check(mode, offset, len)?;
        let keep_size = mode & KEEP_SIZE != 0;
        let _alone = self.exclusive_for_hold(file, || change != ByteChange::Nothing);
        let size = file.size();
        if change != ByteChange::Punch {
            let pages = offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES);
            if end > size && !keep_size {
                self.clear_tail(file)?;
            }
            // Comes before anything is zeroed: if the holes cannot get space, nothing changes.
            let mut map = file.map.write();
            map.preallocate(pages, file.home(), &core.allocator)?;
            file.count_blocks(&map);
        }
        match change {
            ByteChange::Nothing => {}
            ByteChange::Zero => self.zero(file, offset..end)?,
            // Bytes beyond the end are zeros already. The whole pages there may have space to free.
            ByteChange::Punch => self.punch(file, offset..end)?,
        }
        let mut meta = file.inode.meta.write();
        if !keep_size && end > meta.rec.size {
            meta.rec.size = end;
            file.set_size(end);
        }
        let now = now_ns();
        meta.rec.mtime_ns = now;
        meta.rec.ctime_ns = now;
        drop(meta);
        core.mark_dirty(&file.inode);
        Ok(())
    }

    /// Fails as `fallocate` would because of its arguments or because nothing may be changed.
    pub fn check_fallocate(&self, mode: i32, offset: u64, len: u64) -> Result<()> {
        self.core.may_change_at_all()?;
        check(mode, offset, len).map(drop)
    }

    /// Returns the offset for SEEK_DATA (`data` is true) or SEEK_HOLE. Fails with ENXIO past the end. Pages that are dirty in
    /// the cache are data.
    pub fn seek(&self, file: &Arc<File>, offset: u64, data: bool) -> Result<u64> {
        self.core.alive()?;
        let size = file.size();
        if offset >= size {
            return Err(ENXIO);
        }
        let end = size.div_ceil(PAGE_BYTES);
        let mut page = offset / PAGE_BYTES;
        while page < end {
            let (is_data, next) = self.segment(file, page, end);
            if is_data == data {
                return Ok(offset.max(page * PAGE_BYTES));
            }
            page = next;
        }
        // The end of the file counts as a hole.
        if data { Err(ENXIO) } else { Ok(size) }
    }

    /// Returns whether a page is data, and the first page after it that has to be checked again. A page without data on the
    /// device (hole, reserved, preallocated) is data if the cache has newer bytes.
    fn segment(&self, file: &File, page: u64, end: u64) -> (bool, u64) {
        if let Some(until) = file.data_from(page) {
            return (true, until.min(end));
        }
        let dirty = file.first_dirty(page);
        if dirty == Some(page) {
            return (true, page + 1);
        }
        // Checks the map again: the page may have been dirty at the first check and written back since.
        if let Some(until) = file.data_from(page) {
            return (true, until.min(end));
        }
        let data = file.map.read().extents.from(page).find_map(|run| {
            let is_data = run.state.readable().is_some();
            is_data.then_some(run.page)
        });
        let next = [dirty, data].into_iter().flatten().min();
        (false, next.unwrap_or(end).min(end))
    }
}

impl File {
    /// Returns the end of the run of on-device data that contains `page`.
    fn data_from(&self, page: u64) -> Option<u64> {
        let run = self.map.read().extents.containing(page)?;
        run.state.readable().map(|_| run.end())
    }
}
