//! Reads: cached pages inline, and missing pages through the slice, which calls back.

use std::io::IoSliceMut;
use std::ops::Range;
use std::sync::Arc;

use jericho_cache::{Error as CacheError, Grant, Intent, Latched, PAGES_PER_GET_MAX};
use jericho_format::PAGE_BYTES;
use jericho_fs::Result;
use jericho_fs::error::of_cache;
use jericho_fs::types::{Ino, SliceId};
use jericho_fs::{File, Layout};
use jericho_shm::{Key, RangeCounts, ReadHit, Segments, TargetParts};

use crate::fast::{LockedOut, ReadGuard, SlotFile, Waited};
use crate::handle::Handle;
use crate::locality::SpilledPages;
use crate::mapped::MappedFile;
use crate::mounted::Mounted;
use crate::pages::is_over_several_pages;

/// Most restarts of one read that waits for pages. A write over several pages causes a restart. After the last one, the read
/// locks writers out.
const READ_TRIES: u32 = 3;
/// Number of times a read of cached pages restarts because the file got its first inline writer and lost it again.
const FIRST_WRITER_TRIES: u32 = 100;
/// Longest distance of read-ahead: 4 MiB.
const WINDOW_PAGES_MAX: u32 = 1024;

/// What a read over several pages does when writers interfere.
enum WaitPolicy {
    /// Return the read to the caller.
    Leave,
    /// Wait for an inline writer, but not for other requests: this thread serves requests itself.
    Block,
    /// Read at once: the read has already waited, and holds the result of the wait.
    Now(Whole),
}

/// The buffer that a read fills. A read that has to wait takes it along.
pub trait ReadBuffer: Send + 'static {
    /// Returns the first `len` bytes of the buffer.
    fn first(&mut self, len: usize) -> &mut [u8];
    /// Is called when the read begins to wait for pages. Its first `done` bytes are in the buffer, and must stay there.
    fn will_wait(&mut self, _done: usize) {}
}

impl ReadBuffer for Vec<u8> {
    fn first(&mut self, len: usize) -> &mut [u8] {
        if self.len() < len {
            self.resize(len, 0);
        }
        &mut self[..len]
    }
}

/// A read that has to wait for pages.
struct WaitingRead<B, R> {
    mounted: Arc<Mounted>,
    handle: Arc<Handle>,
    offset: u64,
    buffer: B,
    len: usize,
    done: usize,
    /// Set when the bytes are for the kernel's page cache.
    mapped: Option<Arc<MappedFile>>,
    whole: Whole,
    /// Restarts that are left when `whole` finds that a write interfered.
    tries: u32,
    /// A Get of several pages has failed: asks for one page at a time, to find the one that fails.
    one_by_one: bool,
    /// Pages in spill ranges among the first `done` bytes. Their counts are corrected once, at the end.
    spilled: SpilledPages,
    reply: R,
}

/// How a read ensures that it has not seen half of an inline write over several pages.
enum Whole {
    /// Not ensured: the read covers one page, or it gave up.
    Unknown,
    /// The file had no inline writer when `File::first_writers` returned this number.
    Unwritten(u64),
    /// The file has an inline writer. The words of the range lock had these counts when the read began. `None`: a writer held a word.
    Written(Arc<SlotFile>, Option<RangeCounts>),
    /// The read keeps writers out.
    Alone { _guard: ReadGuard },
}

/// How far a read of the cached pages came.
enum CachedRead {
    /// It has read this many bytes, and saw no half of a write so far.
    Ended(usize, Whole),
    /// Writers interfered, and the read may not wait for them.
    Disturbed,
    /// A client lends a word of the range: the read has to wait for the request that ends the client's write.
    Lent,
}

impl Whole {
    /// Starts the check for a read that begins now.
    fn begin(mounted: &Mounted, file: &File, segments: Segments) -> Whole {
        // Reads the count before it looks for a writer; see `File::first_writers`.
        let count = file.first_writers();
        match mounted.fast.written_file(file.ino()) {
            None => Whole::Unwritten(count),
            Some(written) => {
                let counts = mounted.fast.slot(&written).range_counts(segments);
                Whole::Written(written, counts)
            }
        }
    }

    /// Returns whether no write interfered with the read, so that its bytes are of one instant.
    fn is_undisturbed(&self, mounted: &Mounted, file: &File) -> bool {
        match self {
            Whole::Unknown | Whole::Alone { .. } => true,
            Whole::Unwritten(count) => file.first_writers() == *count,
            Whole::Written(_, None) => false,
            Whole::Written(slot_file, Some(counts)) => {
                mounted.fast.slot(slot_file).has_range_counts(counts)
            }
        }
    }
}

impl Mounted {
    /// Reads up to `len` bytes at `offset` into `buffer`. Calls `reply` once with the number of bytes (fewer than `len` only at
    /// the end of the file, or before a page that cannot be read) and the buffer. If all pages are cached, calls it at once in this thread; otherwise later, in a
    /// thread of the slice or one with a `Reader`. If the read has to wait for the end of a client's half-done write, calls it
    /// after that, in another thread. `fills_page_cache`: the kernel keeps the bytes, so it must be notified before they change.
    /// The call may wait for clients, and with `fills_page_cache` also for other writes.
    pub fn read<B, R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        len: u32,
        fills_page_cache: bool,
        buffer: B,
        reply: R,
    ) where
        B: ReadBuffer,
        R: FnOnce(Result<usize>, B) + Send + 'static,
    {
        let mapped = fills_page_cache.then(|| {
            self.fast.begin_fill(handle, offset, len);
            self.mapped.begin_fill(&handle.file)
        });
        let left = self.read_or_leave(
            handle,
            offset,
            len,
            mapped,
            WaitPolicy::Block,
            buffer,
            reply,
        );
        debug_assert!(left.is_none(), "a thread that may wait reads");
    }

    /// Does the same as `read` in threads that must never block. If it would have to wait for an inline writer or for other
    /// writes, returns the buffer and `reply`; the caller then uses `read` in another thread.
    #[must_use]
    pub fn try_read<B, R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        len: u32,
        fills_page_cache: bool,
        buffer: B,
        reply: R,
    ) -> Option<(B, R)>
    where
        B: ReadBuffer,
        R: FnOnce(Result<usize>, B) + Send + 'static,
    {
        if !fills_page_cache {
            return self.read_or_leave(handle, offset, len, None, WaitPolicy::Leave, buffer, reply);
        }
        let (mapped, may_go_on) = self.mapped.try_begin_fill(&handle.file);
        if !may_go_on || !self.fast.try_begin_fill(handle) {
            return Some((buffer, reply));
        }
        self.read_or_leave(
            handle,
            offset,
            len,
            Some(mapped),
            WaitPolicy::Leave,
            buffer,
            reply,
        )
    }

    /// Does the work of `read` and `try_read`. `mapped`: set when the bytes are for the page cache.
    #[allow(clippy::too_many_arguments)] // called by the two above
    fn read_or_leave<B, R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        len: u32,
        mapped: Option<Arc<MappedFile>>,
        policy: WaitPolicy,
        mut buffer: B,
        reply: R,
    ) -> Option<(B, R)>
    where
        B: ReadBuffer,
        R: FnOnce(Result<usize>, B) + Send + 'static,
    {
        let file = &handle.file;
        self.fast.absorb(file.ino());
        let size = file.size();
        let len = u64::from(len).min(size.saturating_sub(offset)) as usize;
        if len == 0 {
            // Drops the guard before the reply: a program that has its answer finds the words free.
            drop(policy);
            reply(Ok(0), buffer);
            return None;
        }
        let (layout, object) = (file.layout(), file.object_id());
        let out = buffer.first(len);
        // For the page cache, pages are copied one by one under the file's lock.
        let spilled = SpilledPages::default();
        let mut read = || match mapped {
            Some(_) => 0,
            None => self.read_cached(layout, object, offset, out, &spilled),
        };
        let bytes = offset..offset + len as u64;
        let found = match policy {
            WaitPolicy::Now(whole) => CachedRead::Ended(read(), whole),
            WaitPolicy::Leave => self.try_read_undisturbed(file, bytes, &mut read),
            WaitPolicy::Block => self.read_undisturbed(file, bytes, mapped.is_some(), &mut read),
        };
        let (done, whole) = match found {
            CachedRead::Ended(done, whole) => (done, whole),
            CachedRead::Disturbed => return Some((buffer, reply)),
            CachedRead::Lent => {
                self.read_apart(handle, offset, len, buffer, reply);
                return None;
            }
        };
        self.locality.accessed(layout, offset, len);
        if mapped.is_none() {
            self.count_pages(layout, offset, done, len);
        }
        if done == len {
            self.locality.all_spilled(&spilled);
            // Drops the guard before the reply: a program that has its answer finds the words free.
            drop(whole);
            self.read_ahead(handle, offset, len, size);
            reply(Ok(finish(self, handle, offset, len)), buffer);
            return None;
        }
        buffer.will_wait(done);
        // Requests the reader's own pages before the pages that are read ahead.
        let waiting = WaitingRead {
            mounted: self.clone(),
            handle: handle.clone(),
            offset,
            buffer,
            len,
            done,
            mapped,
            whole,
            tries: READ_TRIES,
            one_by_one: false,
            spilled,
            reply,
        };
        match waiting.mapped {
            Some(_) => waiting.begin(),
            None => waiting.get_next(),
        }
        self.read_ahead(handle, offset, len, size);
        None
    }

    /// Repeats `read` until no inline write over several pages interferes with it. Never waits.
    fn try_read_undisturbed(
        &self,
        file: &File,
        bytes: Range<u64>,
        read: &mut impl FnMut() -> usize,
    ) -> CachedRead {
        let len = bytes.end - bytes.start;
        if !is_over_several_pages(bytes.start, len) {
            return CachedRead::Ended(read(), Whole::Unknown);
        }
        let found = self.read_whole(file, Segments::of(bytes.start, len), read);
        found.map_or(CachedRead::Disturbed, |(done, whole)| {
            CachedRead::Ended(done, whole)
        })
    }

    /// Does the same as `try_read_undisturbed`, but waits for inline writers. `of_page_cache`: the bytes are for the kernel's
    /// page cache. The kernel may send the write that ends a client's half-done write only after this read. So this read waits
    /// once for inline writers but keeps none out, and may see half of a write.
    fn read_undisturbed(
        &self,
        file: &File,
        bytes: Range<u64>,
        of_page_cache: bool,
        read: &mut impl FnMut() -> usize,
    ) -> CachedRead {
        let segments = Segments::of(bytes.start, bytes.end - bytes.start);
        loop {
            let found = self.try_read_undisturbed(file, bytes.clone(), read);
            if !matches!(found, CachedRead::Disturbed) {
                return found;
            }
            match self.lock_out(file.ino(), segments) {
                Some(LockedOut::Locked(guard)) if !of_page_cache => {
                    return CachedRead::Ended(read(), Whole::Alone { _guard: guard });
                }
                Some(LockedOut::Lent) if !of_page_cache => return CachedRead::Lent,
                Some(_) => return CachedRead::Ended(read(), Whole::Unknown),
                None => {}
            }
        }
    }

    /// Copies the cached pages of a file into `out`, up to the first page that is not cached. Returns the number of bytes. Notes in `spilled`
    /// which pages were in spill ranges.
    fn read_cached(
        &self,
        layout: Layout,
        object: u64,
        offset: u64,
        out: &mut [u8],
        spilled: &SpilledPages,
    ) -> usize {
        spilled.clear();
        let mut done = 0;
        for (slice, bytes) in layout.parts(offset..offset + out.len() as u64) {
            let slice = self.slice(slice);
            let len = (bytes.end - bytes.start) as usize;
            let out = &mut out[done..done + len];
            let memory = slice.memory();
            let (mut parts, epoch) = ([IoSliceMut::new(out)], slice.epoch());
            let target = TargetParts::new(&mut parts);
            let mark = |hit: ReadHit| {
                memory.touch(hit.index, epoch);
                if let Some(node) = memory.node_of_spilled(hit.frame) {
                    spilled.add(slice.id(), node);
                }
            };
            let copied = memory.read_bytes(Key::new(object, 0), bytes.start, len, target, mark);
            let copied = copied.map_or_else(|(copied, _)| copied, |()| len);
            done += copied;
            if copied < len {
                break;
            }
        }
        done
    }

    /// Counts the pages of a range of which `done` bytes hit.
    fn count_pages(&self, layout: Layout, offset: u64, done: usize, len: usize) {
        let end = offset + len as u64;
        let hit_end = match done {
            0 => 0,
            _ => (offset + done as u64).div_ceil(PAGE_BYTES),
        };
        for (slice, pages) in layout.runs(offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES)) {
            let hits = hit_end.clamp(pages.start, pages.end) - pages.start;
            self.slice(slice)
                .count(hits, pages.end - pages.start - hits);
        }
    }

    /// Repeats `read` until no inline write over several pages interferes with it. Returns `None` when writers interfered every
    /// time or hold the words. Never waits.
    fn read_whole(
        &self,
        file: &File,
        segments: Segments,
        read: &mut impl FnMut() -> usize,
    ) -> Option<(usize, Whole)> {
        for _ in 0..FIRST_WRITER_TRIES {
            let count = file.first_writers();
            if let Some(written) = self.fast.written_file(file.ino()) {
                let slot = self.fast.slot(&written);
                let (done, counts) = written.range.try_read_whole(slot, segments, read)?;
                return Some((done, Whole::Written(written, Some(counts))));
            }
            let done = read();
            if file.first_writers() == count {
                return Some((done, Whole::Unwritten(count)));
            }
        }
        None
    }

    /// Locks out the inline writers of a file. Returns `None` when it has no inline writer any more.
    fn lock_out(&self, ino: Ino, segments: Segments) -> Option<LockedOut> {
        let written = self.fast.written_file(ino)?;
        Some(ReadGuard::take(&self.fast, &written, segments))
    }

    /// Reads after the request that ends a client's half-done write.
    fn read_apart<B, R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        len: usize,
        buffer: B,
        reply: R,
    ) where
        B: ReadBuffer,
        R: FnOnce(Result<usize>, B) + Send + 'static,
    {
        let (mounted, handle) = (self.clone(), handle.clone());
        let segments = Segments::of(offset, len as u64);
        self.wait_alone(handle.file.ino(), segments, move |waited| {
            let policy = match waited {
                Waited::Alone(guard) => WaitPolicy::Now(Whole::Alone { _guard: guard }),
                Waited::GaveUp => WaitPolicy::Now(Whole::Unknown),
                Waited::Unwritten => WaitPolicy::Leave,
            };
            let left =
                mounted.read_or_leave(&handle, offset, len as u32, None, policy, buffer, reply);
            if let Some((buffer, reply)) = left {
                // The file has an inline writer again.
                mounted.read_apart(&handle, offset, len, buffer, reply);
            }
        });
    }

    /// Calls `then` once the writers of a range are locked out; see `LoanWaits::wait_alone`.
    fn wait_alone(&self, ino: Ino, segments: Segments, then: impl FnOnce(Waited) + Send + 'static) {
        (self.loan_waits).wait_alone(&self.fast, ino, segments, then);
    }

    fn read_ahead(&self, handle: &Handle, offset: u64, len: usize, size: u64) {
        let first = offset / PAGE_BYTES;
        let end = (offset + len as u64).div_ceil(PAGE_BYTES);
        let window =
            WINDOW_PAGES_MAX.min(self.volume.home_frames_of(handle.file.layout().home()) / 16);
        let pages = handle
            .read_ahead
            .advance(first, end, size.div_ceil(PAGE_BYTES), window);
        let Some(pages) = pages else { return };
        self.volume.prefetch(&handle.file, pages);
    }
}

/// Ends a read of `len` bytes. Returns how many of them lie within the file, which may have been truncated during the read.
fn finish(mounted: &Mounted, handle: &Handle, offset: u64, len: usize) -> usize {
    let size = handle.file.size();
    if !handle.no_access_time() {
        mounted.fs().end_read(&handle.file);
    }
    (len as u64).min(size.saturating_sub(offset)) as usize
}

impl<B, R> WaitingRead<B, R>
where
    B: ReadBuffer,
    R: FnOnce(Result<usize>, B) + Send + 'static,
{
    /// Copies the pages of the grant. Fails at a page that a writer has latched.
    fn copy(&mut self, grant: &Grant) -> std::result::Result<(), Latched> {
        let out = self.buffer.first(self.len);
        for page in grant.first()..grant.first() + u64::from(grant.count()) {
            let at = self.offset + self.done as u64;
            let within = (at - page * PAGE_BYTES) as usize;
            let len = (PAGE_BYTES as usize - within).min(self.len - self.done);
            let out = &mut out[self.done..self.done + len];
            match &self.mapped {
                Some(file) => file.give(grant, page, within, out)?,
                None => grant.read(page, within, out)?,
            }
            if let Some(node) = grant.node_of_spilled(page) {
                self.spilled.add(grant.slice(), node);
            }
            self.done += len;
        }
        Ok(())
    }

    /// Gets the first pages, which may hit or miss.
    fn begin(self) {
        let file = self.handle.file.clone();
        let layout = file.layout();
        let (slice, first, count) = self.wanted(layout);
        let slice = self.mounted.slice(slice).clone();
        let granted = slice.try_get(&file.object(), first, count, Intent::Read);
        let hit = matches!(granted, Ok(Some(_)));
        let done = if hit { self.len } else { 0 };
        self.mounted
            .count_pages(layout, self.offset, done, self.len);
        match granted {
            Ok(Some(grant)) => self.receive(Ok(grant)),
            _ => self.get_next(),
        }
    }

    /// Returns the next pages: their slice, the first page and the count.
    fn wanted(&self, layout: Layout) -> (SliceId, u64, u32) {
        let first = (self.offset + self.done as u64) / PAGE_BYTES;
        let end = (self.offset + self.len as u64).div_ceil(PAGE_BYTES);
        let (slice, run) = layout.first_run(first..end);
        let most = match self.one_by_one {
            true => 1,
            false => u64::from(PAGES_PER_GET_MAX),
        };
        let count = (run.end - first).min(most);
        (slice, first, count as u32)
    }

    /// Asks for the next pages.
    fn get_next(mut self) {
        let file = self.handle.file.clone();
        if self.one_by_one {
            // The pages that came with the failed Get.
            let at = self.offset + self.done as u64;
            let out = &mut self.buffer.first(self.len)[self.done..];
            let mounted = &self.mounted;
            let spilled = SpilledPages::default();
            self.done += mounted.read_cached(file.layout(), file.object_id(), at, out, &spilled);
            self.spilled.append(&spilled);
            if self.done == self.len {
                return self.end();
            }
        }
        let (slice, first, count) = self.wanted(file.layout());
        let slice = self.mounted.slice(slice).clone();
        slice.get(&file.object(), first, count, Intent::Read, move |granted| {
            self.receive(granted)
        });
    }

    /// Restarts the read, because its bytes mix states before and after a write.
    fn restart(mut self) {
        self.done = 0;
        self.spilled.clear();
        let (ino, segments) = (
            self.handle.file.ino(),
            Segments::of(self.offset, self.len as u64),
        );
        if self.tries > 0 {
            self.tries -= 1;
            // Words that are held now make the next check fail.
            self.whole = Whole::begin(&self.mounted, &self.handle.file, segments);
            return self.get_next();
        }
        let mounted = self.mounted.clone();
        mounted.wait_alone(ino, segments, move |waited| {
            self.whole = match waited {
                Waited::Alone(guard) => Whole::Alone { _guard: guard },
                Waited::GaveUp => Whole::Unknown,
                Waited::Unwritten => Whole::begin(&self.mounted, &self.handle.file, segments),
            };
            self.get_next();
        });
    }

    fn receive(mut self, granted: std::result::Result<Grant, CacheError>) {
        match granted {
            Ok(grant) => {
                let copied = self.copy(&grant);
                drop(grant);
                if let Err(latched) = copied {
                    let (slice, ..) = self.wanted(self.handle.file.layout());
                    let slice = self.mounted.slice(slice).clone();
                    return slice.when_unlatched(latched, move || self.get_next());
                }
            }
            // The file has moved to another slice.
            Err(CacheError::Moved) => {}
            Err(error) => return self.fail(error),
        }
        if self.done < self.len {
            return self.get_next();
        }
        self.end();
    }

    /// Ends a read before the page that fails, as read(2) does for a file on a disk. A read that begins with this page fails.
    fn fail(mut self, error: CacheError) {
        // A short read into the page cache would be the end of the file to the kernel.
        let may_be_short = self.mapped.is_none();
        let (.., count) = self.wanted(self.handle.file.layout());
        if may_be_short && count > 1 {
            self.one_by_one = true;
            return self.get_next();
        }
        if may_be_short && self.done > 0 {
            self.len = self.done;
            return self.end();
        }
        self.mounted.locality.all_spilled(&self.spilled);
        // Drops the guard before the reply, as after a successful read.
        drop(self.whole);
        (self.reply)(Err(of_cache(error)), self.buffer);
    }

    /// Replies with the bytes, or restarts the read if a write interfered.
    fn end(self) {
        // The kernel may wait for a read into its page cache before it sends the writes that this read would wait for.
        let may_restart = self.mapped.is_none() || self.tries > 0;
        if may_restart && !self.whole.is_undisturbed(&self.mounted, &self.handle.file) {
            return self.restart();
        }
        self.mounted.locality.all_spilled(&self.spilled);
        drop(self.whole);
        let len = finish(&self.mounted, &self.handle, self.offset, self.len);
        (self.reply)(Ok(len), self.buffer);
    }
}

#[cfg(test)]
mod tests;
