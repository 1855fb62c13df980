//! Writes: inline if the pages are cached and reserved, otherwise through the slice. A write keeps a copy of its data and
//! continues later only if it has to fetch a page, or if too many pages are dirty.

use std::cell::OnceCell;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::{Arc, mpsc};

use jericho_cache::{Grant, Intent, OWNER_DAEMON, PAGES_PER_GET_MAX, Slice};
use jericho_format::{FILE_BYTES_MAX, PAGE_BYTES};
use jericho_fs::error::of_cache;
use jericho_fs::types::SliceId;
use jericho_fs::{Error, Result};
use jericho_fs::{File, Interruption, Writing, with_interruption};
use jericho_shm::{Key, SourceParts, Writer};

use crate::fast::WriteGuard;
use crate::handle::Handle;
use crate::locality::LocalityCounters;
use crate::mapped::{MappedFile, NotPut};
use crate::mounted::Mounted;
use crate::pages::{is_over_several_pages, put_new};
use crate::write_mode::{WriteMode, WriteSync};

const PAGE: usize = PAGE_BYTES as usize;

/// The state of a write.
struct Progress {
    mounted: Arc<Mounted>,
    handle: Arc<Handle>,
    offset: u64,
    done: usize,
    mode: WriteMode,
    /// Space for the whole write is reserved. This is done once, in the caller's thread: it may have to wait for locks that a
    /// slice's thread must not wait for.
    reserved: bool,
    /// The request is still in the thread that received it, which may block.
    may_block: bool,
    /// Set when the kernel may have pages of the file.
    mapped: Option<Arc<MappedFile>>,
    /// Set when a signal may end the write while it waits.
    interruption: Option<Arc<Interruption>>,
    /// The file does not move to another slice until the write is over.
    _writing: Writing,
    /// Makes inline writers of the same range wait. Released before the reply: a client that has lent its locks wants them back
    /// then.
    guard: Option<WriteGuard>,
}

/// How the next piece of a write gets its pages.
struct Piece {
    /// The slice that holds all of its pages.
    slice: SliceId,
    first: u64,
    count: u32,
    intent: Intent,
    /// The pages are beyond the end of the file: the bytes that the write does not cover are zeros.
    pad: bool,
}

enum Step {
    Done,
    /// Pages have to be fetched, or too many pages are dirty.
    Wait,
    Failed(Error),
}

/// Writes `data` at `at` of a file, up to the first page in the slice that is not cached and reserved. Returns the number of
/// bytes written. Tells the slice which pages became dirty, neighbours together.
fn hit(
    locality: &LocalityCounters,
    slice: &Slice,
    file: &Arc<File>,
    at: u64,
    data: &[u8],
) -> usize {
    let object = OnceCell::new();
    let mut dirtied = 0..0;
    let tell = |pages: &Range<u64>| {
        if !pages.is_empty() {
            let object = object.get_or_init(|| file.object());
            slice.dirtied(object, pages.start, (pages.end - pages.start) as u32);
        }
    };
    let written = slice.memory().write_bytes(
        Key::new(file.object_id(), 0),
        at,
        data.len(),
        SourceParts::new(&[IoSlice::new(data)]),
        Writer::daemon(OWNER_DAEMON),
        slice.epoch(),
        // Needs no check: only a client has to notice that the daemon changes the file meanwhile.
        |_| true,
        |key, page, _| {
            if let Some(node) = slice.memory().node_of_spilled(page.frame) {
                locality.spilled(slice.id(), node);
            }
            if !page.was_clean {
                return;
            }
            if key.page() != dirtied.end {
                tell(&dirtied);
                dirtied = key.page()..key.page();
            }
            dirtied.end += 1;
        },
    );
    tell(&dirtied);
    written.map_or_else(|(done, _)| done, |()| data.len())
}

/// Returns where a write begins. An append begins at the file's size. Its offset may be stale: the kernel fills in the size
/// that it last saw and does not ask again before a write, even if the clients that extended the file have long closed it.
fn write_offset(file: &File, offset: u64, mode: WriteMode) -> u64 {
    match mode.append {
        true => file.size(),
        false => offset,
    }
}

impl Mounted {
    /// Writes `data` at `offset` until it would have to wait, also for a lock that may be held for long. For threads that must
    /// never block. Returns the number of bytes written; the caller passes the rest to `write`.
    pub fn try_write(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        data: &[u8],
        mode: WriteMode,
    ) -> usize {
        let file = &handle.file;
        if data.is_empty() {
            return 0;
        }
        let offset = write_offset(file, offset, mode);
        let end = offset.checked_add(data.len() as u64);
        let several = is_over_several_pages(offset, data.len() as u64);
        // Does an append completely or not at all: a client could append inline between its two parts. An append within one page
        // has no parts.
        if self.read_only()
            || (several && mode.append)
            || (several && !self.fs().has_room_for(data.len() as u64))
            || mode.sync != WriteSync::No
            || !file.has_no_privileges()
            || end.is_none_or(|end| end > FILE_BYTES_MAX)
            || self.fast.written_file(file.ino()).is_some()
            || (self.volume)
                .throttling(file.layout(), offset..offset + data.len() as u64)
                .is_some()
        {
            return 0;
        }
        let writing = file.try_writing().filter(|writing| !writing.is_watched());
        let Some(writing) = writing else {
            return 0;
        };
        // A program that becomes an inline writer after this check waits until `writing` is dropped.
        if self.fast.written_file(file.ino()).is_some() {
            return 0;
        }
        let mut progress = Progress::new(self, handle, offset, mode, writing, None);
        if !progress.hit(data) {
            progress.try_miss(data);
        }
        if progress.done > 0 {
            self.locality.accessed(file.layout(), offset, progress.done);
        }
        progress.done
    }

    /// Writes `data` at `offset` and calls `reply` once with the number of bytes written. Calls it in this thread, unless the write
    /// has to wait for pages, a latch, fewer dirty pages, space that is being freed, or its own durability. Another thread then
    /// calls it later. An error after the first bytes is a short write, as in POSIX.
    pub fn write<R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        data: &[u8],
        mode: WriteMode,
        reply: R,
    ) where
        R: FnOnce(Result<u32>) + Send + 'static,
    {
        if let Err(reply) = self.write_if_room(handle, offset, data, mode, reply) {
            let (mounted, own, data) = (self.clone(), handle.clone(), data.to_vec());
            let range = (offset, data.len());
            let interruption = Interruption::of_thread();
            let attempt = move |reply| {
                let write = || mounted.write_if_room(&own, offset, &data, mode, reply);
                with_interruption(interruption.clone(), write)
            };
            self.space_waits.retry(handle, range, reply, attempt);
        }
    }

    /// Does the same as `write`, but does not wait for space. Returns the reply, unused, when the volume is full; nothing is
    /// written or held then.
    pub(crate) fn write_if_room<R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        data: &[u8],
        mode: WriteMode,
        reply: R,
    ) -> std::result::Result<(), R>
    where
        R: FnOnce(Result<u32>) + Send + 'static,
    {
        let mut progress = match self.begin(handle, offset, data.len(), mode) {
            Ok(progress) => progress,
            Err(error) => {
                reply(Err(error));
                return Ok(());
            }
        };
        if let Err(error) = progress.begin_step() {
            progress.fail(error, data.len(), reply);
            return Ok(());
        }
        match progress.advance(data) {
            Step::Done => progress.finish(data.len(), reply),
            Step::Wait => progress.wait(data.to_vec(), reply),
            Step::Failed(error) if progress.done == 0 && error.is_full_volume() => {
                progress.end_step();
                return Err(reply);
            }
            Step::Failed(error) => progress.fail(error, data.len(), reply),
        }
        Ok(())
    }

    /// Writes bytes and waits for devices, not for space. Returns the number of bytes written. Fails with ENOSPC when there is no
    /// space now.
    pub(crate) fn write_now(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        data: &[u8],
    ) -> Result<u32> {
        let (tx, rx) = mpsc::channel();
        let reply = move |written| drop(tx.send(written));
        let unused = self.write_if_room(handle, offset, data, WriteMode::PLAIN, reply);
        if unused.is_err() {
            return Err(Error::Errno(libc::ENOSPC));
        }
        // The channel closes without a reply when the volume is being closed.
        rx.recv().unwrap_or(Err(Error::Errno(libc::EIO)))
    }

    /// Takes the locks of a write.
    fn begin(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        len: usize,
        mode: WriteMode,
    ) -> Result<Progress> {
        if self.read_only() {
            return Err(Error::Errno(libc::EROFS));
        }
        // Checks this before the offset becomes a page key.
        let is_beyond_max = |offset: u64| {
            let end = offset.checked_add(len as u64);
            end.is_none_or(|end| end > FILE_BYTES_MAX)
        };
        if is_beyond_max(offset) {
            return Err(Error::Errno(libc::EFBIG));
        }
        if !handle.file.has_no_privileges() {
            (self.fs()).drop_privileges(handle.file.ino(), mode.strip_suid)?;
        }
        if let Some(file) = self.fast.written_file(handle.file.ino())
            && handle.grants.lock().write
        {
            self.fast.wrote_by_kernel(&file);
        }
        // The kernel's inode lock serialises appends of the mount, and the extend lock serialises them with inline writers. So
        // the size does not change here.
        let (guard, offset, writing) = loop {
            let guard = self.fast.written_file(handle.file.ino()).map(|file| {
                let at = (!mode.append).then_some(offset);
                WriteGuard::take(&self.fast, file, at, len as u64)
            });
            let offset = write_offset(&handle.file, offset, mode);
            if is_beyond_max(offset) {
                return Err(Error::Errno(libc::EFBIG));
            }
            let writing = handle.file.writing();
            // A program that becomes an inline writer after this check waits until `writing` is dropped.
            match self.fast.written_file(handle.file.ino()) {
                Some(file) if guard.as_ref().is_none_or(|guard| !guard.is_of(&file)) => {}
                _ => break (guard, offset, writing),
            }
        };
        self.locality.accessed(handle.file.layout(), offset, len);
        Ok(Progress::new(self, handle, offset, mode, writing, guard))
    }
}

impl Progress {
    fn new(
        mounted: &Arc<Mounted>,
        handle: &Arc<Handle>,
        offset: u64,
        mode: WriteMode,
        writing: Writing,
        guard: Option<WriteGuard>,
    ) -> Progress {
        let watched = writing.is_watched();
        Progress {
            mounted: mounted.clone(),
            handle: handle.clone(),
            offset,
            done: 0,
            mode,
            reserved: false,
            may_block: true,
            mapped: watched
                .then(|| mounted.mapped.file(handle.file.ino()))
                .flatten(),
            interruption: Interruption::of_thread(),
            _writing: writing,
            guard,
        }
    }

    /// Begins to change pages. Fails with EINTR if the caller was interrupted: it knows which bytes are written, and no more may be.
    fn begin_step(&self) -> Result<()> {
        match &self.interruption {
            Some(interruption) => interruption.begin(),
            None => Ok(()),
        }
    }

    /// Allows that a signal ends the write, until the next `begin_step`. A synchronous write that has written bytes is not ended: a short write
    /// would promise that they are durable, and an error that there are none.
    fn end_step(&self) {
        if let Some(interruption) = &self.interruption
            && (self.done == 0 || self.mode.sync == WriteSync::No)
        {
            interruption.wait_again(self.done);
        }
    }

    /// Writes as much as possible without waiting.
    fn advance(&mut self, data: &[u8]) -> Step {
        if self.throttling(data.len()).is_some() {
            return self
                .reserve(data.len())
                .map_or_else(Step::Failed, |()| Step::Wait);
        }
        // Writes nothing unless there is room for all data: a write that waits for space starts again from the beginning.
        if is_over_several_pages(self.offset, data.len() as u64)
            && !self.mounted.fs().has_room_for(data.len() as u64)
            && let Err(error) = self.reserve(data.len())
        {
            return Step::Failed(error);
        }
        if self.mapped.is_none() && self.hit(data) {
            return Step::Done;
        }
        if let Err(error) = self.reserve(data.len()) {
            return Step::Failed(error);
        }
        self.miss(data)
    }

    /// Writes pages that are cached and reserved, up to the first that is not. Returns true when all data is written.
    fn hit(&mut self, data: &[u8]) -> bool {
        let rest = self.offset + self.done as u64..self.offset + data.len() as u64;
        for (slice, bytes) in self.handle.file.layout().parts(rest) {
            let (file, slice) = (&self.handle.file, self.mounted.slice(slice));
            let (at, len) = (bytes.start, (bytes.end - bytes.start) as usize);
            let locality = &self.mounted.locality;
            let hit = hit(locality, slice, file, at, &data[self.done..self.done + len]);
            if hit > 0 {
                slice.count((at + hit as u64).div_ceil(PAGE_BYTES) - at / PAGE_BYTES, 0);
                self.done += hit;
                self.end(at, hit);
            }
            if hit < len {
                break;
            }
        }
        self.done == data.len()
    }

    /// Returns a slice that has too many dirty pages and holds a page of the remaining data. If no data remains, checks the page
    /// at the current offset.
    fn throttling(&self, len: usize) -> Option<&Arc<Slice>> {
        let at = self.offset + self.done as u64;
        let layout = self.handle.file.layout();
        let rest = (len - self.done).max(1);
        self.mounted
            .volume
            .throttling(layout, at..at.saturating_add(rest as u64))
    }

    /// Writes the rest after `hit`, until it would have to wait.
    fn try_miss(&mut self, data: &[u8]) {
        let file = self.handle.file.clone();
        let at = self.offset + self.done as u64;
        let rest = (data.len() - self.done) as u64;
        if self.mounted.fs().try_begin_write(&file, at, rest) {
            self.reserved = true;
            // `write` handles the rest, and errors: its caller may wait.
            let _ = self.miss(data);
        }
    }

    /// Gets the remaining pages and writes them, until it would have to wait. Space is reserved.
    fn miss(&mut self, data: &[u8]) -> Step {
        let (mounted, object) = (self.mounted.clone(), self.handle.file.object());
        while self.done < data.len() {
            let piece = self.piece(data.len());
            let slice = mounted.slice(piece.slice);
            match slice.try_get(&object, piece.first, piece.count, piece.intent) {
                Ok(Some(grant)) => {
                    slice.count(0, u64::from(piece.count));
                    if self.put(grant, &piece, data).is_err() {
                        return Step::Wait;
                    }
                }
                Ok(None) => return Step::Wait,
                Err(error) => return Step::Failed(of_cache(error)),
            }
        }
        Step::Done
    }

    /// Reserves space for the remaining data.
    fn reserve(&mut self, len: usize) -> Result<()> {
        if !self.reserved {
            let at = self.offset + self.done as u64;
            let rest = (len - self.done) as u64;
            self.mounted.fs().begin_write(&self.handle.file, at, rest)?;
            self.reserved = true;
        }
        Ok(())
    }

    /// Returns the next piece: as many whole pages as possible, or a part of one page.
    fn piece(&self, len: usize) -> Piece {
        let at = self.offset + self.done as u64;
        let rest = len - self.done;
        let first = at / PAGE_BYTES;
        // A page beyond the end of the file has no bytes to fetch.
        let is_beyond = first * PAGE_BYTES >= self.handle.file.size();
        let is_whole = at.is_multiple_of(PAGE_BYTES) && rest >= PAGE;
        let pages_max = match is_whole {
            true => (rest / PAGE).min(PAGES_PER_GET_MAX as usize) as u64,
            false => 1,
        };
        let layout = self.handle.file.layout();
        let (slice, run) = layout.first_run(first..first + pages_max);
        let count = (run.end - first) as u32;
        // Whole pages are fetched only to compare their old bytes.
        let compares = |file: &Arc<MappedFile>| file.compares(first, count, self.mode.of_mapping);
        let is_kept = !is_whole || self.mapped.as_ref().is_some_and(compares);
        Piece {
            slice,
            first,
            count,
            intent: match is_kept && !is_beyond {
                true => Intent::Modify,
                false => Intent::Overwrite,
            },
            pad: is_beyond,
        }
    }

    /// Copies a piece into its pages and releases them. Fails at a page that another writer has latched or that has to be
    /// fetched. All pages before that one are written.
    fn put(
        &mut self,
        mut grant: Grant,
        piece: &Piece,
        data: &[u8],
    ) -> std::result::Result<(), NotPut> {
        let mut result = Ok(());
        let start = self.done;
        let at = self.offset + start as u64;
        for page in piece.first..piece.first + u64::from(piece.count) {
            let within = ((self.offset + self.done as u64) % PAGE_BYTES) as usize;
            let len = (PAGE - within).min(data.len() - self.done);
            let bytes = &data[self.done..self.done + len];
            result = match &self.mapped {
                Some(file) => {
                    let of_mapping = self.mode.of_mapping;
                    file.put(&mut grant, (page, within), bytes, piece.pad, of_mapping)
                }
                None if piece.pad => put_new(&mut grant, page, within, bytes).map_err(NotPut::from),
                None => grant.write(page, within, bytes).map_err(NotPut::from),
            };
            if result.is_err() {
                break;
            }
            if let Some(node) = grant.node_of_spilled(page) {
                self.mounted.locality.spilled(grant.slice(), node);
            }
            self.done += len;
        }
        // The slice learns of the dirty pages before the size covers them. Otherwise a commit in between would store a size whose
        // data is not on the device.
        drop(grant);
        if self.done > start {
            self.end(at, self.done - start);
        }
        result
    }

    fn end(&self, at: u64, len: usize) {
        let fs = self.mounted.fs();
        fs.end_write(&self.handle.file, at, len as u64);
        self.mounted.fast.size_grew(&self.handle.file);
    }

    /// Continues the write when the reason has ended for which `advance` stopped: missing pages, a latch, or too many dirty
    /// pages.
    fn wait<R>(mut self, data: Vec<u8>, reply: R)
    where
        R: FnOnce(Result<u32>) + Send + 'static,
    {
        self.may_block = false;
        self.end_step();
        let handle = self.handle.clone();
        let file = &handle.file;
        if let Some(slice) = self.throttling(data.len()).cloned() {
            return slice.when_not_throttling(move |result| match result {
                Ok(()) => self.resume(data, reply),
                Err(error) => self.fail(of_cache(error), data.len(), reply),
            });
        }
        let piece = self.piece(data.len());
        let (first, count, intent) = (piece.first, piece.count, piece.intent);
        let slice = self.mounted.slice(piece.slice).clone();
        slice.count(0, u64::from(count));
        slice.get(&file.object(), first, count, intent, move |granted| {
            match granted {
                Ok(grant) => {
                    if let Err(error) = self.begin_step() {
                        drop(grant);
                        return self.fail(error, data.len(), reply);
                    }
                    if let Err(NotPut::Latched(latched)) = self.put(grant, &piece, &data) {
                        self.end_step();
                        let slice = self.mounted.slice(piece.slice).clone();
                        return slice.when_unlatched(latched, move || self.resume(data, reply));
                    }
                }
                Err(error) => return self.fail(of_cache(error), data.len(), reply),
            }
            self.resume(data, reply);
        });
    }

    fn resume<R>(mut self, data: Vec<u8>, reply: R)
    where
        R: FnOnce(Result<u32>) + Send + 'static,
    {
        if let Err(error) = self.begin_step() {
            return self.fail(error, data.len(), reply);
        }
        match self.advance(&data) {
            Step::Done => self.finish(data.len(), reply),
            Step::Wait => self.wait(data, reply),
            Step::Failed(error) => self.fail(error, data.len(), reply),
        }
    }

    fn fail<R>(self, error: Error, len: usize, reply: R)
    where
        R: FnOnce(Result<u32>) + Send + 'static,
    {
        if self.done == 0 {
            // Drops the guard before the reply, as in `finish`.
            drop(self);
            return reply(Err(error));
        }
        debug_assert!(self.done < len);
        let done = self.done;
        self.finish(done, reply);
    }

    /// Ends a write whose data is all cached: makes it durable if requested, then replies.
    fn finish<R>(mut self, len: usize, reply: R)
    where
        R: FnOnce(Result<u32>) + Send + 'static,
    {
        self.guard = None;
        let mut done: jericho_fs::Done =
            Box::new(move |result: Result<()>| reply(result.map(|()| len as u32)));
        let (sync, may_block, offset) = (self.mode.sync, self.may_block, self.offset);
        let (mounted, handle) = (self.mounted.clone(), self.handle.clone());
        // Drops the write before the reply: the reply may grant inline writes, which would wait for this write. And before the
        // sync: a move of the file need not wait for it.
        drop(self);
        let (fs, file) = (mounted.fs(), &handle.file);
        if sync != WriteSync::No {
            done = handle.reporting(done);
        }
        match (sync, may_block) {
            (WriteSync::No, _) => done(Ok(())),
            (WriteSync::Data, true) => fs.sync_range_blocking(file, offset, len as u64, done),
            (WriteSync::Data, false) => fs.sync_range(file, offset, len as u64, done),
            (WriteSync::Full, true) => fs.fsync_blocking(file, false, done),
            (WriteSync::Full, false) => fs.fsync(file, false, done),
        }
    }
}

#[cfg(test)]
mod tests;
