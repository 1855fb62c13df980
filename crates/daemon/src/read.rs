//! Reads: inline as far as pages hit, and what is missing through the slice, which calls back.

use std::sync::Arc;

use jericho_cache::{Error as CacheError, Grant, Intent, Latched, PAGES_PER_GET_MAX, Slice};
use jericho_format::PAGE_BYTES;
use jericho_fs::Result;
use jericho_shm::{Segments, Turns};

use crate::fast::SlotFile;
use crate::handle::Handle;
use crate::mapped::MappedFile;
use crate::mounted::Mounted;

/// Number of times a read that waits for pages restarts because a write over several pages interfered.
const READ_TRIES: u32 = 3;
/// Furthest that is read ahead of a reader: 4 MiB.
const WINDOW_PAGES_MAX: u32 = 1024;

/// Where the bytes of a read are put together. It goes along with a read that has to wait.
pub trait ReadBuffer: Send + 'static {
    /// The first `len` bytes of it.
    fn first(&mut self, len: usize) -> &mut [u8];
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
struct Waiting<B, R> {
    mounted: Arc<Mounted>,
    handle: Arc<Handle>,
    offset: u64,
    buffer: B,
    len: usize,
    done: usize,
    /// Set when the bytes are for the kernel's page cache.
    mapped: Option<Arc<MappedFile>>,
    /// Set for a read over several pages of a file that is written inline: the turns tell whether a write over several
    /// pages interfered.
    whole: Option<(Arc<SlotFile>, Turns)>,
    /// Remaining restarts of that kind.
    tries: u32,
    reply: R,
}

impl Mounted {
    /// Reads up to `len` bytes at `offset` into `buffer` and calls `reply` once with their number (fewer only at the end of
    /// the file) and the buffer: at once and in this thread when all hit, else later, in a thread of the slice's or one
    /// with a `Reader`. `fills_page_cache`: the kernel keeps the bytes, so it is told before they change (it may wait for
    /// clients and for other writes then).
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
            self.begin_fill(handle, offset, len);
            self.mapped.begin_fill(&handle.file)
        });
        let left = self.read_or_leave(handle, offset, len, mapped, true, buffer, reply);
        debug_assert!(left.is_none(), "a thread that may wait reads");
    }

    /// Does the same as `read`, for threads that must never block. Returns the buffer and `reply` when it would have to wait for an
    /// inline writer or for other writes; the caller then uses `read` in another thread.
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
            return self.read_or_leave(handle, offset, len, None, false, buffer, reply);
        }
        let (mapped, may_go_on) = self.mapped.try_begin_fill(&handle.file);
        if !may_go_on || !self.try_begin_fill(handle) {
            return Some((buffer, reply));
        }
        self.read_or_leave(handle, offset, len, Some(mapped), false, buffer, reply)
    }

    /// Reads as both callers above do. `mapped`: set when the bytes are for the page cache.
    #[allow(clippy::too_many_arguments)] // called by the two above
    fn read_or_leave<B, R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        len: u32,
        mapped: Option<Arc<MappedFile>>,
        may_wait: bool,
        mut buffer: B,
        reply: R,
    ) -> Option<(B, R)>
    where
        B: ReadBuffer,
        R: FnOnce(Result<usize>, B) + Send + 'static,
    {
        let file = &handle.file;
        self.settle(file.ino());
        let size = file.size();
        let len = u64::from(len).min(size.saturating_sub(offset)) as usize;
        if len == 0 {
            reply(Ok(0), buffer);
            return None;
        }
        let home = file.slice();
        let (slice, out) = (self.slice(home), buffer.first(len));
        let ino = file.ino();
        // Copies pages for the page cache one by one, under the file's lock.
        let mut read = || match mapped {
            Some(_) => 0,
            None => jericho_client::read(slice.memory(), ino, offset, out, slice.epoch()),
        };
        let several = offset / PAGE_BYTES != (offset + len as u64 - 1) / PAGE_BYTES;
        let written = several.then(|| self.fast.written_file(ino)).flatten();
        let (done, whole) = match written {
            None => (read(), None),
            Some(written) => {
                let segments = Segments::of(offset, len as u64);
                let slot = self.fast.slot(&written);
                match written.range.try_read_whole(slot, segments, &mut read) {
                    Some((done, turns)) => (done, Some((written, turns))),
                    None if may_wait => (written.range.read_alone(slot, segments, read), None),
                    None => return Some((buffer, reply)),
                }
            }
        };
        self.accessed(home, offset, len);
        if mapped.is_none() {
            count(slice, offset, done, len);
        }
        if done == len {
            self.read_ahead(handle, offset, len, size);
            reply(Ok(finish(self, handle, offset, len)), buffer);
            return None;
        }
        // The reader's own pages are asked for first; what it will want next follows in their wake.
        let waiting = Waiting {
            mounted: self.clone(),
            handle: handle.clone(),
            offset,
            buffer,
            len,
            done,
            mapped,
            whole,
            tries: READ_TRIES,
            reply,
        };
        match waiting.mapped {
            Some(_) => waiting.begin(),
            None => waiting.go(),
        }
        self.read_ahead(handle, offset, len, size);
        None
    }

    fn read_ahead(&self, handle: &Handle, offset: u64, len: usize, size: u64) {
        let first = offset / PAGE_BYTES;
        let end = (offset + len as u64).div_ceil(PAGE_BYTES);
        let window = WINDOW_PAGES_MAX.min(self.frames_per_slice() / 16);
        let pages = handle
            .read_ahead
            .advance(first, end, size.div_ceil(PAGE_BYTES), window);
        let Some(pages) = pages else { return };
        let slice = self.slice(handle.file.slice());
        let object = handle.file.object();
        let mut at = pages.start;
        while at < pages.end {
            let count = (pages.end - at).min(u64::from(PAGES_PER_GET_MAX)) as u32;
            slice.prefetch(&object, at, count);
            at += u64::from(count);
        }
    }
}

/// Counts the pages of a range of which `done` bytes hit.
fn count(slice: &Slice, offset: u64, done: usize, len: usize) {
    let pages = |len: usize| (offset + len as u64).div_ceil(PAGE_BYTES) - offset / PAGE_BYTES;
    let hits = if done == 0 { 0 } else { pages(done) };
    slice.count(hits, pages(len) - hits);
}

/// Ends a read of `len` bytes; how many of them are left of it at an end of file that has moved closer meanwhile.
fn finish(mounted: &Mounted, handle: &Handle, offset: u64, len: usize) -> usize {
    let size = handle.file.size();
    if !handle.no_access_time() {
        mounted.fs().end_read(&handle.file);
    }
    (len as u64).min(size.saturating_sub(offset)) as usize
}

impl<B, R> Waiting<B, R>
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
            self.done += len;
        }
        Ok(())
    }

    /// Gets the first pages, which may hit or miss.
    fn begin(self) {
        let (first, count) = self.wanted();
        let file = self.handle.file.clone();
        let slice = self.mounted.slice(file.slice()).clone();
        let granted = slice.try_get(&file.object(), first, count, Intent::Read);
        let hit = matches!(granted, Ok(Some(_)));
        self::count(
            &slice,
            self.offset,
            if hit { self.len } else { 0 },
            self.len,
        );
        match granted {
            Ok(Some(grant)) => self.got(Ok(grant)),
            _ => self.go(),
        }
    }

    /// Returns the next pages: first page and count.
    fn wanted(&self) -> (u64, u32) {
        let first = (self.offset + self.done as u64) / PAGE_BYTES;
        let end = (self.offset + self.len as u64).div_ceil(PAGE_BYTES);
        (
            first,
            (end - first).min(u64::from(PAGES_PER_GET_MAX)) as u32,
        )
    }

    /// Asks for the next pages.
    fn go(self) {
        let (first, count) = self.wanted();
        let file = self.handle.file.clone();
        let slice = self.mounted.slice(file.slice()).clone();
        slice.get(&file.object(), first, count, Intent::Read, move |granted| {
            self.got(granted)
        });
    }

    /// Returns whether the bytes may mix the states before and after a write over several pages. The read then
    /// restarts.
    fn begins_anew(&mut self) -> bool {
        let Some((file, turns)) = &mut self.whole else {
            return false;
        };
        let slot = self.mounted.fast.slot(file);
        if slot.is_turn(turns) || self.tries == 0 {
            return false;
        }
        self.tries -= 1;
        self.done = 0;
        // While a writer holds a word, there are no new turns; the old ones make the next check fail again.
        if let Some(now) = slot.turns(Segments::of(self.offset, self.len as u64)) {
            *turns = now;
        }
        true
    }

    fn got(mut self, granted: std::result::Result<Grant, CacheError>) {
        match granted {
            Ok(grant) => {
                let copied = self.copy(&grant);
                drop(grant);
                if let Err(latched) = copied {
                    let home = self.handle.file.slice();
                    let slice = self.mounted.slice(home).clone();
                    return slice.when_unlatched(latched, move || self.go());
                }
            }
            // The file has another home by now.
            Err(CacheError::Moved) => {}
            Err(error) => return (self.reply)(Err(error.into()), self.buffer),
        }
        if self.done < self.len || self.begins_anew() {
            return self.go();
        }
        let len = finish(&self.mounted, &self.handle, self.offset, self.len);
        (self.reply)(Ok(len), self.buffer);
    }
}

#[cfg(test)]
mod tests;
