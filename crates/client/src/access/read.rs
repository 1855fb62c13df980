//! Reads of a file in shared memory.

use std::io::IoSliceMut;
use std::sync::atomic::{Ordering, fence};

use jericho_format::PAGE_BYTES;
use jericho_shm::{Miss, RangeCounts, ReadHit, Segments, SizeWord, TargetParts, is_in_page};

use crate::session::{InlineFile, Why};
use crate::thread::{self, Spilled, Thread};

const PAGE: usize = PAGE_BYTES as usize;

/// Attempts to read, which fail when the file is truncated or a write over several pages interferes.
const READ_TRIES: u32 = 3;

/// The progress of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadProgress {
    /// Bytes in the caller's buffer.
    pub done: usize,
    /// The file's size at the time of the read.
    pub size: u64,
    /// Why bytes are missing; `None`: the read is complete, or ends at the end of the file.
    pub rest: Option<Why>,
    /// State of a read over several pages. Tells whether the bytes still belong to one instant after the rest was read elsewhere.
    pub range_counts: Option<RangeCounts>,
}

impl InlineFile<'_> {
    /// Reads bytes of one page that is cached and that no writer is changing. Most reads are of this kind. Returns the number of
    /// bytes. Returns `None` otherwise; `out` then holds nothing of use.
    #[inline(always)]
    pub fn read_page(&self, thread: &Thread, at: u64, out: &mut [u8]) -> Option<usize> {
        let (page, within) = (at / PAGE_BYTES, (at % PAGE_BYTES) as usize);
        let guess = thread.recent_hits.frame(page);
        self.memory.fetch(guess, within, 1);
        let seen = self.size_word().ok()?;
        let left = seen.bytes().checked_sub(at)?;
        let len = left.min(out.len() as u64) as usize;
        if len == 0 || len > PAGE - within {
            return None;
        }
        let key = self.key.with_page(page);
        let line = thread.recent_hits.line(key, || self.memory.home_line(key));
        let out = &mut out[..len];
        let learn = |frame| thread.recent_hits.was_in(page, frame);
        let hit = self.memory.try_read(line, key, guess, learn, within, out)?;
        if !hit.marked {
            mark_last(thread, hit.index);
        }
        // As in `read_as_of`.
        fence(Ordering::Acquire);
        self.slot.size().same_truncation_count(seen).then_some(len)
    }

    /// Reads at `at`, as far as pages hit. Each page's bytes are of one instant, and the size was the file's at an instant of the
    /// call.
    pub fn read(&self, at: u64, out: &mut [u8]) -> ReadProgress {
        let none = |why| ReadProgress {
            done: 0,
            size: 0,
            rest: Some(why),
            range_counts: None,
        };
        for _ in 0..READ_TRIES {
            let seen = match self.size_word() {
                Ok(seen) => seen,
                Err(why) => return none(why),
            };
            if let Some(read) = self.read_as_of(seen, at, out) {
                return read;
            }
        }
        none(Why::Changed)
    }

    /// Reads a file of the size `seen`. Returns `None` when the file was truncated meanwhile.
    pub(super) fn read_as_of(
        &self,
        seen: SizeWord,
        at: u64,
        out: &mut [u8],
    ) -> Option<ReadProgress> {
        let size = seen.bytes();
        let len = size.saturating_sub(at).min(out.len() as u64) as usize;
        let (done, rest, range_counts) = self.read_whole(at, &mut out[..len]);
        // Zeros beyond a new end must not pass for bytes before the old end.
        fence(Ordering::Acquire);
        let same = self.slot.size().same_truncation_count(seen);
        same.then_some(ReadProgress {
            done,
            size,
            rest,
            range_counts,
        })
    }

    /// Restarts the read until it contains no half of a write over several pages.
    fn read_whole(&self, at: u64, out: &mut [u8]) -> (usize, Option<Why>, Option<RangeCounts>) {
        if out.is_empty() || is_in_page(at, out.len()) {
            let (done, rest) = self.read_pages(at, out);
            return (done, rest, None);
        }
        let segments = Segments::of(at, out.len() as u64);
        for _ in 0..READ_TRIES {
            let Some(counts) = self.slot.range_counts(segments) else {
                std::thread::yield_now();
                continue;
            };
            let (done, rest) = self.read_pages(at, out);
            if self.slot.has_range_counts(&counts) {
                return (done, rest, Some(counts));
            }
        }
        (0, Some(Why::Busy), None)
    }

    /// Reads into several parts at `at`, as `read` does into one buffer. Reads all the bytes that the file has there, which then
    /// belong to one instant, or reads none and sets `rest`.
    pub fn read_parts(&self, at: u64, len: usize, parts: &mut [IoSliceMut<'_>]) -> ReadProgress {
        let mut why = Why::Changed;
        for _ in 0..READ_TRIES {
            match self.try_read_parts(at, len, parts) {
                Ok(Some((done, size))) => {
                    return ReadProgress {
                        done,
                        size,
                        rest: None,
                        range_counts: None,
                    };
                }
                Ok(None) => {}
                Err(miss) => {
                    why = miss;
                    break;
                }
            }
        }
        ReadProgress {
            done: 0,
            size: self.size().unwrap_or(0),
            rest: Some(why),
            range_counts: None,
        }
    }

    /// Returns the bytes read and the file's size; `None` when a write over several pages or a truncation interfered.
    fn try_read_parts(
        &self,
        at: u64,
        len: usize,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<Option<(usize, u64)>, Why> {
        let seen = self.size_word()?;
        let size = seen.bytes();
        let len = size.saturating_sub(at).min(len as u64) as usize;
        let mut counts = None;
        if len > 0 && !is_in_page(at, len) {
            counts = self.slot.range_counts(Segments::of(at, len as u64));
            if counts.is_none() {
                std::thread::yield_now();
                return Ok(None);
            }
        }
        self.read_hits(at, len, parts).map_err(|(_, miss)| miss)?;
        if counts.is_some_and(|counts| !self.slot.has_range_counts(&counts)) {
            return Ok(None);
        }
        // As in `read_as_of`.
        fence(Ordering::Acquire);
        Ok(self
            .slot
            .size()
            .same_truncation_count(seen)
            .then_some((len, size)))
    }

    /// Returns whether the bytes of `read` and bytes read elsewhere since belong to one instant.
    pub fn is_of_one_instant(&self, read: &ReadProgress) -> bool {
        read.range_counts
            .is_none_or(|counts| self.slot.has_range_counts(&counts))
    }

    fn read_pages(&self, at: u64, out: &mut [u8]) -> (usize, Option<Why>) {
        let len = out.len();
        let mut parts = [IoSliceMut::new(out)];
        match self.read_hits(at, len, &mut parts) {
            Ok(()) => (len, None),
            Err((done, miss)) => (done, Some(miss.into())),
        }
    }

    /// Copies bytes `[at, at + len)` as far as their pages hit. Fails with the number of bytes before the miss.
    fn read_hits(
        &self,
        at: u64,
        len: usize,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<(), (usize, Miss)> {
        let (target, epoch) = (TargetParts::new(parts), self.memory.epoch());
        let spilled = Spilled::new();
        let mark = |hit: ReadHit| {
            self.mark(hit.index, epoch);
            if self.memory.is_spilled(hit.frame) {
                spilled.note(self, hit.frame, hit.len);
            }
        };
        let read = self.memory.read_bytes(self.key, at, len, target, mark);
        // Of several attempts, the last one counts.
        thread::current(|thread| thread.spilled.set(&spilled));
        read
    }

    #[inline(always)]
    fn mark(&self, index: u32, epoch: u8) {
        if !self.memory.is_marked(index, epoch) {
            self.add_mark(index);
        }
    }

    /// Marks an entry whose mark is missing.
    #[cold]
    pub fn add_mark(&self, index: u32) {
        if self.memory.is_writable() {
            self.memory.touch(index, self.memory.epoch());
        } else {
            thread::current(|thread| thread.touch(self.session, self.home(), index));
        }
    }
}

/// Marks an entry of the thread's last file as used.
#[cold]
fn mark_last(thread: &Thread, index: u32) {
    if let Some(file) = thread.recent_hits.last_file() {
        file.add_mark(index);
    }
}
