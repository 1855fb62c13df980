//! Reads: inline as far as pages hit, and what is missing through the slice, which calls back.

use std::sync::Arc;

use jericho_cache::{Error as CacheError, Grant, Intent, PAGES_PER_GET_MAX, Slice};
use jericho_format::PAGE_BYTES;
use jericho_fs::Result;

use crate::handle::Handle;
use crate::mounted::Mounted;

/// Furthest that is read ahead of a reader: 4 MiB.
const WINDOW_PAGES_MAX: u32 = 1024;

/// A read that has to wait for pages.
struct Waiting<R> {
    mounted: Arc<Mounted>,
    handle: Arc<Handle>,
    offset: u64,
    buf: Vec<u8>,
    len: usize,
    done: usize,
    reply: R,
}

impl Mounted {
    /// Reads up to `len` bytes at `offset` and calls `reply` once with the bytes (fewer only at the end of the file):
    /// at once, in this thread and through `scratch` when all hit, else later in a slice's thread.
    pub fn read<R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        offset: u64,
        len: u32,
        scratch: &mut Vec<u8>,
        reply: R,
    ) where
        R: FnOnce(Result<&[u8]>) + Send + 'static,
    {
        let file = &handle.file;
        self.settle(file.ino());
        let size = file.size();
        let len = u64::from(len).min(size.saturating_sub(offset)) as usize;
        if len == 0 {
            return reply(Ok(&[]));
        }
        if scratch.len() < len {
            scratch.resize(len, 0);
        }
        let home = file.slice();
        self.accessed(home, offset, len);
        let (slice, out) = (self.slice(home), &mut scratch[..len]);
        let done = jericho_client::read(slice.memory(), file.ino(), offset, out, slice.epoch());
        count(slice, offset, done, len);
        if done == len {
            self.read_ahead(handle, offset, len, size);
            return finish(self, handle, offset, &scratch[..len], reply);
        }
        // What has hit is in the caller's buffer: it goes along, and the caller gets another for the next read.
        let (mounted, handle) = (self.clone(), handle.clone());
        let buf = std::mem::replace(scratch, self.buffers.pop().unwrap_or_default());
        // The reader's own pages are asked for first; what it will want next follows in their wake.
        let ahead = (mounted.clone(), handle.clone());
        Waiting {
            mounted,
            handle,
            offset,
            buf,
            len,
            done,
            reply,
        }
        .go();
        ahead.0.read_ahead(&ahead.1, offset, len, size);
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

/// Replies with what was read, cut at an end of file that has moved closer meanwhile.
fn finish<R>(mounted: &Mounted, handle: &Handle, offset: u64, bytes: &[u8], reply: R)
where
    R: FnOnce(Result<&[u8]>),
{
    let size = handle.file.size();
    let len = (bytes.len() as u64).min(size.saturating_sub(offset)) as usize;
    mounted.fs().end_read(&handle.file);
    reply(Ok(&bytes[..len]));
}

impl<R> Waiting<R>
where
    R: FnOnce(Result<&[u8]>) + Send + 'static,
{
    /// Asks for the next pages.
    fn go(self) {
        let at = self.offset + self.done as u64;
        let first = at / PAGE_BYTES;
        let end = (self.offset + self.len as u64).div_ceil(PAGE_BYTES);
        let count = (end - first).min(u64::from(PAGES_PER_GET_MAX)) as u32;
        let file = self.handle.file.clone();
        let slice = self.mounted.slice(file.slice()).clone();
        slice.get(&file.object(), first, count, Intent::Read, move |granted| {
            self.got(granted)
        });
    }

    fn got(mut self, granted: std::result::Result<Grant, CacheError>) {
        match granted {
            Ok(grant) => {
                for page in grant.first()..grant.first() + u64::from(grant.count()) {
                    let at = self.offset + self.done as u64;
                    let within = (at - page * PAGE_BYTES) as usize;
                    let len = (PAGE_BYTES as usize - within).min(self.len - self.done);
                    grant.read(page, within, &mut self.buf[self.done..self.done + len]);
                    self.done += len;
                }
            }
            // The file has another home by now.
            Err(CacheError::Moved) => {}
            Err(error) => return (self.reply)(Err(error.into())),
        }
        if self.done < self.len {
            return self.go();
        }
        finish(
            &self.mounted,
            &self.handle,
            self.offset,
            &self.buf[..self.len],
            self.reply,
        );
        // Full already: then it is freed.
        let _ = self.mounted.buffers.push(self.buf);
    }
}
