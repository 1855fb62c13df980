//! Reads and writes of cached pages: optimistic copies out, latched copies in.
//!
//! The mount and every program read and write hits with `read_bytes` and `write_bytes`. A program's short path makes one attempt at
//! one page with `try_read` and `try_write`. All of them copy and validate in `access`.
//!
//! A program reads the file's slot and size before. After a read it compares only the count of truncations in the size word; for a
//! write it checks slot and count under the latch (`still`). The mount takes the file's size again after a read and drops the bytes
//! beyond it.
//!
//! The mount does not take this path for some cached pages, and pins them with a Get instead: pages that it reads for the kernel's
//! page cache, and pages that it writes without reserved space or in a file of which the kernel may have pages.

use jericho_format::PAGE_BYTES;

use crate::access::{Miss, try_read, try_write, try_write_own};
use crate::entry::{Entry, Key};
use crate::memory::{Found, SliceMemory};
use crate::parts::{SourceParts, TargetParts, pieces};
use crate::prefetch;
use crate::writer::Writer;

/// Polls of a reader or writer before it yields to the holder of a latch.
const SPINS: u32 = 64;

/// An entry whose page was read.
#[derive(Clone, Copy, Debug)]
pub struct Hit {
    /// Index in the table.
    pub index: u32,
    /// Whether it is marked as used at the present epoch.
    pub marked: bool,
}

/// A page that was read, and the frame that held it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadHit {
    /// Index of its entry in the table.
    pub index: u32,
    /// The frame.
    pub frame: u32,
    /// Bytes that were read.
    pub len: usize,
}

/// A written page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenPage {
    /// The page was clean before, so the writer must report it.
    pub was_clean: bool,
    /// The frame that holds the page.
    pub frame: u32,
}

impl SliceMemory {
    /// Copies bytes `[at, at + len)` of an object into `target`, page by page, until a page misses. `first` is the key of the
    /// object's first page. Each page's bytes are of one instant. Calls `mark` for each page that it has read.
    /// Fails with the number of bytes copied before the miss.
    ///
    /// Program and mount both read cached bytes with this. They differ in two ways. A program may have mapped the slice read-only,
    /// so its `mark` notes the use in its own area. And each caller checks in its own way that it has not read half of a write
    /// over several pages.
    #[inline]
    pub fn read_bytes(
        &self,
        first: Key,
        at: u64,
        len: usize,
        mut target: TargetParts<'_, '_>,
        mark: impl Fn(ReadHit),
    ) -> Result<(), (usize, Miss)> {
        let mut done = 0;
        for (page, within, len) in pieces(at, len) {
            let key = first.with_page(page);
            // Reads each page once, even if it goes into several parts, so that the page's bytes belong to one instant.
            match target.next(len, |out| self.read_unmarked(key, within, out)) {
                Ok(hit) => mark(hit),
                Err(miss) => return Err((done, miss)),
            }
            done += len;
        }
        Ok(())
    }

    /// Writes `len` bytes of `source` at offset `at` of an object, page by page, until a page cannot be written. `first` is the
    /// key of the object's first page. Writes each page as `write_if` does, and passes its offset to `still`. Calls `written` for
    /// each page, in order, also with the number of bytes. Fails with the number of bytes written before the page that cannot be written.
    ///
    /// Program and mount both write cached bytes with this, and pass different arguments. Only a program leaves notes (`Writer`),
    /// and only a program checks the slot and the range lock under the latch: the daemon holds the file's locks itself.
    #[inline]
    #[expect(clippy::too_many_arguments, reason = "each is of another kind")]
    pub fn write_bytes(
        &self,
        first: Key,
        at: u64,
        len: usize,
        mut source: SourceParts<'_, '_>,
        writer: Writer<'_>,
        epoch: u8,
        still: impl Fn(u64) -> bool,
        mut written: impl FnMut(Key, WrittenPage, usize),
    ) -> Result<(), (usize, Miss)> {
        let (mut done, end) = (0, at + len as u64);
        for (page, within, len) in pieces(at, len) {
            let (key, next) = (first.with_page(page), (page + 1) * PAGE_BYTES);
            if next < end {
                self.fetch_page(first.with_page(page + 1));
            }
            let still = || still(page * PAGE_BYTES);
            let write = |bytes: &[u8]| self.write_if(key, within, bytes, writer, epoch, still);
            match source.next(len, write) {
                Ok(page) => written(key, page, len),
                Err(miss) => return Err((done, miss)),
            }
            done += len;
        }
        Ok(())
    }

    /// Copies bytes `[offset, offset + out.len())` of a page, if it is in the cache, and marks it as used at `epoch`. On `Ok` the
    /// bytes were the page's at one instant; otherwise `out` holds nothing of use.
    #[inline]
    pub fn read(&self, key: Key, offset: usize, out: &mut [u8], epoch: u8) -> Result<(), Miss> {
        let hit = self.read_unmarked(key, offset, out)?;
        self.touch(hit.index, epoch);
        Ok(())
    }

    /// Does the same as `read`, but leaves the mark to the caller: a program that has mapped the slice read-only cannot store
    /// reference ages.
    #[inline]
    pub fn read_unmarked(&self, key: Key, offset: usize, out: &mut [u8]) -> Result<ReadHit, Miss> {
        self.until_free(key, |found, entry| {
            let len = out.len();
            let copy = |frame| self.copy_out(frame, offset, out);
            let Found { index, state } = found;
            let frame = state.frame();
            Ok(try_read(entry, state, copy)?.map(|()| ReadHit { index, frame, len }))
        })
    }

    /// Does the same as `read_unmarked` for a page that lies in its home line `line` (see `home_line`) and in a frame at home, and
    /// that no writer is changing. Returns `None` for any other page, and when the page changed meanwhile. Leaves the mark to the caller. `guess`
    /// is the frame that probably holds the page. If the guess is right, the CPU begins to copy before the table has answered. If
    /// not, this passes the right frame to `learn`.
    #[inline(always)]
    pub fn try_read(
        &self,
        line: u32,
        key: Key,
        guess: u32,
        learn: impl FnOnce(u32),
        offset: usize,
        out: &mut [u8],
    ) -> Option<Hit> {
        let (Found { index, state }, entry) = self.find_in(line, key)?;
        let copy = |frame| {
            // The CPU predicts this branch, and then copies from an address that does not depend on the table.
            let frame = if frame == guess {
                prefetch::unrelated(guess)
            } else {
                learn(frame);
                frame
            };
            self.copy_out_of_home(frame, offset, out)
        };
        try_read(entry, state, copy).ok()??;
        // SAFETY: `index` comes from `find_in`.
        let marked = unsafe { self.is_marked_now(index) };
        Some(Hit { index, marked })
    }

    /// Does the same as `write_if` for a page that lies in its home line `line` (see `home_line`) and in a frame at home, and whose
    /// latch is free.
    /// Returns `None` for any other page, and when the page was not written.
    #[inline(always)]
    pub fn try_write(
        &self,
        line: u32,
        key: Key,
        offset: usize,
        data: &[u8],
        writer: Writer<'_>,
        still: impl Fn() -> bool,
    ) -> Option<WrittenPage> {
        let (found, entry) = self.find_in(line, key)?;
        let Found { index, state } = found;
        let home_frames = self.geometry().home_frames;
        let written = self.write_found(entry, found, home_frames, offset, data, writer, still);
        let was_clean = written.ok()??;
        self.touch(index, self.epoch());
        let frame = state.frame();
        Some(WrittenPage { was_clean, frame })
    }

    /// Writes into a page's frame as `access::try_write` does, if the frame is below `frames` and `still` returns true under the latch. A lookup found
    /// `found` in `entry`.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "all differ")]
    fn write_found(
        &self,
        entry: &Entry,
        found: Found,
        frames: u32,
        offset: usize,
        data: &[u8],
        writer: Writer<'_>,
        still: impl Fn() -> bool,
    ) -> Result<Option<bool>, Miss> {
        let seen = found.state;
        writer.about_to_latch(found.index);
        // Prefetches before the latch is taken: no access of the copy can begin before the locked instruction of the latch has
        // ended.
        self.fetch(seen.frame(), offset, data.len());
        let has_room = || writer.can_report();
        let copy = |frame| match still() {
            true => self.overwrite_below(frames, frame, offset, data),
            false => Err(Miss::Changed),
        };
        let written = try_write(entry, seen, writer.owner(), has_room, copy);
        if written == Err(Miss::Broken) {
            // The daemon has taken the latch, after a second or for a signal handler, and has moved the page. It does not reuse the old
            // frame until this process reports that the copy into it has ended (`take_copied`).
            self.put_copied(seen.frame());
        }
        written
    }

    /// Replaces bytes of a cached page under its latch, and marks the page as used at `epoch`. If the page was clean before, the caller must
    /// report it as dirty.
    ///
    /// Before it takes the latch, checks that the page is filled, that it has space on the volume or space reserved (BACKED), and, if
    /// it is clean, that `writer` has room to report it. Under the latch, calls `still` and fails with `Changed` if that returns
    /// false. `still` sees all changes that the daemon made before its own latch on the page.
    #[inline]
    pub fn write_if(
        &self,
        key: Key,
        offset: usize,
        data: &[u8],
        writer: Writer<'_>,
        epoch: u8,
        still: impl Fn() -> bool,
    ) -> Result<WrittenPage, Miss> {
        self.until_free(key, |found, entry| {
            let frames = self.geometry().frames;
            let written = self.write_found(entry, found, frames, offset, data, writer, &still)?;
            let frame = found.state.frame();
            Ok(written.map(|was_clean| {
                self.touch(found.index, epoch);
                WrittenPage { was_clean, frame }
            }))
        })
    }

    /// Does the same as `write_if` for a caller in the daemon that has pinned the page and reserved space for it: requires no BACKED
    /// and no room to report, and checks nothing under the latch.
    pub fn write_own(
        &self,
        key: Key,
        offset: usize,
        data: &[u8],
        owner: u16,
        epoch: u8,
    ) -> Result<bool, Miss> {
        self.until_free(key, |found, entry| {
            let copy = |frame| self.overwrite_below(self.geometry().frames, frame, offset, data);
            let written = try_write_own(entry, found.state, owner, copy)?;
            Ok(written.inspect(|_| self.touch(found.index, epoch)))
        })
    }

    /// Looks a page up and calls `attempt`, and repeats both until `attempt` returns `Some`. `attempt` returns `None` if another
    /// writer holds the page's latch or has changed the page meanwhile. Fails with `Busy` when that takes too long.
    #[inline]
    fn until_free<T>(
        &self,
        key: Key,
        mut attempt: impl FnMut(Found, &Entry) -> Result<Option<T>, Miss>,
    ) -> Result<T, Miss> {
        let mut polls = 0;
        loop {
            let (found, entry) = self.find(key).ok_or(Miss::Absent)?;
            if let Some(done) = attempt(found, entry)? {
                return Ok(done);
            }
            polls = pause(polls)?;
        }
    }
}

/// Spins, then yields, then gives up: a descheduled holder needs the CPU that spinning would use.
#[cold]
fn pause(polls: u32) -> Result<u32, Miss> {
    if polls < SPINS {
        std::hint::spin_loop();
    } else if polls < SPINS * 4 {
        std::thread::yield_now();
    } else {
        return Err(Miss::Busy);
    }
    Ok(polls + 1)
}
