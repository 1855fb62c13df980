//! Reads and writes a file in shared memory, in the caller's thread. Makes no system call, allocates nothing, and never waits
//! without a bound. The caller passes all other accesses on to the kernel.
//!
//! A later page of a write over several pages may turn out not to be writable inline. The rest then goes through the kernel.
//! Until the kernel's write has ended, the library keeps the write's locks and lends them to the daemon (`Kept`), so that no
//! reader sees the first half alone. If another write over both halves came in between, or the file was truncated, the library
//! makes the whole write once more.

use std::io::IoSliceMut;
use std::ops::Range;
use std::sync::atomic::{Ordering, fence};

use jericho_format::{FILE_BYTES_MAX, PAGE_BYTES};
use jericho_shm::{
    Access, Ahead, Flags, Holding, Key, Lent, Lock, Miss, RangeHeld, Segments, SizeWord,
    SliceMemory, Slot, SlotInfo, SlotWord, Turns, Writer,
};
use jericho_sys::files;

use crate::inline::pieces;
use crate::recent_hits::Place;
use crate::reentrancy::{self, Thread};
use crate::session::Session;
use crate::source::{Source, Target};

const PAGE: usize = PAGE_BYTES as usize;
/// Most bytes of one inline write. Its caller makes several writes of a longer one, as the kernel does. Bounds the time for which
/// the locks are held.
pub const WRITE_MAX: usize = 8 << 20;
/// Attempts to read, which fail when the file is truncated or a write over several pages interferes.
const READ_TRIES: u32 = 3;

/// Why an access was not made inline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The slot belongs to another file now.
    Stale,
    /// The daemon allows no inline access to the file for now, or has revoked this process.
    Withheld,
    /// The caller must wait for the slice, or for the thread that drains reports.
    Throttled,
    /// A page is not in the cache.
    Absent,
    /// No space is reserved for a page.
    Unbacked,
    /// Another writer held the page or a lock for too long.
    Busy,
    /// The file was truncated or extended at the same time.
    Changed,
    /// The write would leave a hole, or ends beyond the largest offset of a slot.
    Far,
}

impl From<Miss> for Why {
    fn from(miss: Miss) -> Why {
        match miss {
            Miss::Absent => Why::Absent,
            Miss::Unbacked => Why::Unbacked,
            Miss::Busy => Why::Busy,
            // The daemon has revoked this process.
            Miss::Broken => Why::Withheld,
            Miss::Changed => Why::Changed,
            Miss::NoRoom => Why::Throttled,
        }
    }
}

/// Why a write was not made inline, and the locks that the library keeps until the kernel has made the rest.
#[derive(Debug)]
pub struct Failed<'a> {
    /// The reason.
    pub why: Why,
    /// The locks of a write of which some pages are written.
    pub kept: Option<Kept<'a>>,
}

impl From<Why> for Failed<'_> {
    fn from(why: Why) -> Self {
        Failed { why, kept: None }
    }
}

impl From<Miss> for Failed<'_> {
    fn from(miss: Miss) -> Self {
        Why::from(miss).into()
    }
}

/// Locks of a write whose rest is being made through the kernel. No thread reads its pages meanwhile, and the daemon borrows the
/// locks for each of its writes. Dropping the value releases them. A thread has at most one, because it makes no inline write
/// meanwhile.
#[derive(Debug)]
pub struct Kept<'a> {
    session: &'a Session,
    info: &'a SlotInfo,
    slot: &'a Slot,
    lent: Lent<'a>,
    begun: Begun,
    generation: u32,
}

/// The progress of a write that stopped half-way.
#[derive(Clone, Copy, Debug)]
struct Begun {
    at: u64,
    done: usize,
    /// The slot's removals before the first byte was written.
    removals: u64,
}

impl Kept<'_> {
    /// Returns the number of bytes of the write that are written.
    pub fn done(&self) -> usize {
        self.begun.done
    }

    /// Returns the offset of the first byte that is not written.
    fn rest(&self) -> u64 {
        self.begun.at + self.begun.done as u64
    }

    /// Returns the number of times that the daemon borrows the word of the rest's first byte for a request that writes `len`
    /// bytes from there on. Returns `None` if that is unknown: the kernel splits a long request, and more than one part may need
    /// the word.
    pub fn own_borrows(&self, len: usize) -> Option<u32> {
        let is_split = Segments::is_wrapped(self.rest(), len as u64);
        (!is_split).then(|| u32::from(!is_in_page(self.rest(), len)))
    }

    /// Returns false if other writers may have written over the first part and the rest, or removed the first part. `own`: times
    /// that the word of the rest's first byte was borrowed for own requests. A writer that writes over both parts borrows that
    /// word, too.
    pub fn is_one_write(&self, own: u32) -> bool {
        self.info.word().generation() == self.generation
            && self.slot.removals() == self.begun.removals
            && (self.lent).was_borrowed_at_most(self.slot, Segments::word_of(self.rest()), own)
    }
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        // After a fork, the child's copy belongs to its parent.
        if self.session.is_own() {
            self.lent.take_back(self.slot);
        }
    }
}

/// A file, reached through a slot.
#[derive(Clone, Copy)]
pub struct File<'a> {
    session: &'a Session,
    info: &'a SlotInfo,
    index: u32,
    slot: &'a Slot,
    memory: &'a SliceMemory,
    /// Key of the file's first page.
    key: Key,
    /// The slot's word at the lookup. A different word ends the use of this value.
    word: SlotWord,
    /// The slot names this process among the file's writers, and its word allows writes.
    may_write: bool,
}

/// The progress of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Bytes in the caller's buffer.
    pub done: usize,
    /// The file's size at the time of the read.
    pub size: u64,
    /// Why bytes are missing; `None`: the read is complete, or ends at the end of the file.
    pub rest: Option<Why>,
    /// State of a read over several pages. Tells whether the bytes still belong to one instant after the rest was read elsewhere.
    pub turns: Option<Turns>,
}

impl<'a> File<'a> {
    /// Returns the file of a slot, if the slot still is the one that the daemon gave out for the object.
    #[inline(always)]
    pub fn of(
        session: &'a Session,
        index: u32,
        generation: u32,
        object: u64,
    ) -> Result<File<'a>, Why> {
        if session.area.is_cut_off() {
            return Err(Why::Withheld);
        }
        let info = session.control.slot(index).ok_or(Why::Stale)?;
        let slot = session.slots.slot(index).ok_or(Why::Stale)?;
        let word = info.word();
        if word.generation() != generation || info.object() != object {
            return Err(Why::Stale);
        }
        if word.flags() & SlotInfo::KERNEL != 0 {
            return Err(Why::Withheld);
        }
        let memory = session.slices.get(usize::from(word.home()));
        let memory = memory.ok_or(Why::Withheld)?;
        Ok(File {
            session,
            info,
            index,
            slot,
            memory,
            key: Key::new(object, 0),
            word,
            may_write: false,
        })
    }

    /// Names this process among the file's writers, if its session may write. Otherwise the result cannot be used to write the
    /// file.
    #[inline]
    pub fn for_writing(self) -> File<'a> {
        let (named, owner) = (self.memory.is_writable(), self.session.owner);
        if named && !self.slot.writers().contains(owner) {
            self.slot.writers().add(owner);
        }
        self.if_named(named)
    }

    /// Returns the file, writable if this process already is among its writers. Stores nothing, because the caller only reads.
    #[inline]
    pub fn for_reading(self) -> File<'a> {
        self.if_named(self.memory.is_writable() && self.slot.writers().contains(self.session.owner))
    }

    /// Returns whether the file may be written inline, except while too many pages are dirty.
    pub fn is_for_writing(&self) -> bool {
        self.may_write
    }

    /// Decides once whether the file may be written. The slot's word cannot change without a new lookup of the file.
    #[inline]
    fn if_named(self, named: bool) -> File<'a> {
        let may_write = named && self.word.flags() & SlotInfo::NO_WRITE == 0;
        File { may_write, ..self }
    }

    /// Returns whether this process may still use its session. The caller that reads the size checks that the slot is unchanged.
    #[inline(always)]
    pub fn is_reachable(&self) -> bool {
        self.session.is_own() && !self.session.area.is_cut_off()
    }

    /// Returns the size, after checking that the slot is still this file's.
    #[inline(always)]
    fn size_word(&self) -> Result<SizeWord, Why> {
        let size = self.slot.size();
        // Loads the word after the size: the daemon changes the generation before it stores another file's size.
        let word = self.info.word();
        if word != self.word {
            return Err(self.why_not(word));
        }
        Ok(size)
    }

    /// Returns why a slot with this word is not usable as this file.
    #[cold]
    fn why_not(&self, word: SlotWord) -> Why {
        if word.generation() != self.word.generation() {
            return Why::Stale;
        }
        match word.flags() & SlotInfo::KERNEL {
            0 => Why::Changed,
            _ => Why::Withheld,
        }
    }

    /// Returns the file's size in bytes.
    #[inline]
    pub fn size(&self) -> Result<u64, Why> {
        Ok(self.size_word()?.bytes())
    }

    /// Returns whether bytes `[at, at + len)` are within the file and one page.
    #[inline]
    pub fn has_in_page(&self, at: u64, len: usize) -> bool {
        let left = self.slot.size().bytes().checked_sub(at);
        left.is_some_and(|left| len as u64 <= left) && len <= PAGE - (at % PAGE_BYTES) as usize
    }

    /// Returns the slice that caches the file.
    pub fn home(&self) -> u16 {
        self.word.home()
    }

    /// Returns whether a page is in the cache.
    pub fn has_page(&self, page: u64) -> bool {
        self.memory.lookup(self.key.with_page(page)).is_some()
    }

    /// Returns whether the bytes' pages are all cached and have space reserved.
    pub fn is_writable(&self, at: u64, len: usize) -> bool {
        pieces(at, len).all(|(page, _, _)| {
            let key = self.key.with_page(page);
            self.memory.is_writable_page(key).is_ok()
        })
    }

    /// Returns the state of pages that the daemon has reserved beyond the end of the file.
    #[inline]
    pub fn ahead(&self) -> &'a Ahead {
        self.slot.ahead()
    }

    /// Keeps other writers from asking for pages beyond the end until the result is dropped.
    pub fn begin_asking(&self) -> Asking<'a> {
        let ahead = self.ahead();
        let held = ahead.begin_asking(self.session.owner);
        Asking { ahead, held }
    }

    /// Returns whether a writer of this process holds a lock that an access to these bytes waits for.
    pub fn is_locked_here(&self, at: u64, len: usize, extends: bool) -> bool {
        let owner = self.session.owner;
        let len = len.min(isize::MAX as usize) as u64;
        let several = len > 0 && !is_in_page(at, len as usize);
        extends && self.slot.is_extended_by(owner)
            || several && self.slot.has_range_of(Segments::of(at, len), owner)
    }

    /// Returns whether a writer of this process holds a page's latch.
    pub fn is_latched_here(&self, page: u64) -> bool {
        let found = self.memory.lookup(self.key.with_page(page));
        found.is_some_and(|found| {
            found.state.has(Flags::LATCH) && found.state.owner() == self.session.owner
        })
    }

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
            thread.recent_hits.mark(hit.index);
        }
        // As in `read_as_of`.
        fence(Ordering::Acquire);
        self.slot.size().same_cuts(seen).then_some(len)
    }

    /// Reads at `at`, as far as pages hit. Each page's bytes are of one instant, and the size was the file's at an instant of the
    /// call.
    pub fn read(&self, at: u64, out: &mut [u8]) -> Read {
        let none = |why| Read {
            done: 0,
            size: 0,
            rest: Some(why),
            turns: None,
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
    fn read_as_of(&self, seen: SizeWord, at: u64, out: &mut [u8]) -> Option<Read> {
        let size = seen.bytes();
        let len = size.saturating_sub(at).min(out.len() as u64) as usize;
        let (done, rest, turns) = self.read_whole(at, &mut out[..len]);
        // Zeros beyond a new end must not pass for bytes before the old end.
        fence(Ordering::Acquire);
        let same = self.slot.size().same_cuts(seen);
        same.then_some(Read {
            done,
            size,
            rest,
            turns,
        })
    }

    /// Restarts the read until it contains no half of a write over several pages.
    fn read_whole(&self, at: u64, out: &mut [u8]) -> (usize, Option<Why>, Option<Turns>) {
        if out.is_empty() || is_in_page(at, out.len()) {
            let (done, rest) = self.read_pages(at, out);
            return (done, rest, None);
        }
        let segments = Segments::of(at, out.len() as u64);
        for _ in 0..READ_TRIES {
            let Some(turns) = self.slot.turns(segments) else {
                std::thread::yield_now();
                continue;
            };
            let (done, rest) = self.read_pages(at, out);
            if self.slot.is_turn(&turns) {
                return (done, rest, Some(turns));
            }
        }
        (0, Some(Why::Busy), None)
    }

    /// Reads into several parts at `at`, as `read` does into one; the bytes that it returns belong to one instant. Reads all
    /// bytes that the file has, or none (`rest`).
    pub fn read_parts(&self, at: u64, len: usize, parts: &mut [IoSliceMut<'_>]) -> Read {
        let mut why = Why::Changed;
        for _ in 0..READ_TRIES {
            match self.try_read_parts(at, len, parts) {
                Ok(Some((done, size))) => {
                    return Read {
                        done,
                        size,
                        rest: None,
                        turns: None,
                    };
                }
                Ok(None) => {}
                Err(miss) => {
                    why = miss;
                    break;
                }
            }
        }
        Read {
            done: 0,
            size: self.size().unwrap_or(0),
            rest: Some(why),
            turns: None,
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
        let mut turns = None;
        if len > 0 && !is_in_page(at, len) {
            turns = self.slot.turns(Segments::of(at, len as u64));
            if turns.is_none() {
                std::thread::yield_now();
                return Ok(None);
            }
        }
        let (mut target, epoch) = (Target::new(parts), self.memory.epoch());
        for (page, within, len) in pieces(at, len) {
            let key = self.key.with_page(page);
            // Reads each page once, also into several parts: its bytes belong to one instant.
            let read = target.next(len, |out| self.memory.read_unmarked(key, within, out));
            self.mark(read?, epoch);
        }
        if turns.is_some_and(|turns| !self.slot.is_turn(&turns)) {
            return Ok(None);
        }
        // As in `read_as_of`.
        fence(Ordering::Acquire);
        Ok(self.slot.size().same_cuts(seen).then_some((len, size)))
    }

    /// Returns whether the bytes of `read` and bytes read elsewhere since belong to one instant.
    pub fn is_of_one_instant(&self, read: &Read) -> bool {
        read.turns.is_none_or(|turns| self.slot.is_turn(&turns))
    }

    fn read_pages(&self, at: u64, out: &mut [u8]) -> (usize, Option<Why>) {
        let epoch = self.memory.epoch();
        let mut done = 0;
        for (page, within, len) in pieces(at, out.len()) {
            let key = self.key.with_page(page);
            let out = &mut out[done..done + len];
            match self.memory.read_unmarked(key, within, out) {
                Ok(index) => self.mark(index, epoch),
                Err(miss) => return (done, Some(miss.into())),
            }
            done += len;
        }
        (done, None)
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
            reentrancy::thread(|thread| self.session.touch(thread, self.home(), index));
        }
    }

    /// Accounts an inline access to the bytes `bytes`. `calls`: 0 when a part of the call was made elsewhere, else 1.
    pub fn account(&self, thread: &Thread, write: bool, bytes: Range<u64>, calls: u64) {
        if !bytes.is_empty() {
            let access = Access {
                local: false,
                write,
                pages: bytes.end.div_ceil(PAGE_BYTES) - bytes.start / PAGE_BYTES,
                bytes: bytes.end - bytes.start,
                calls,
            };
            let policy = self.info.policy();
            self.session.account(thread, self.home(), policy, access);
        }
    }

    /// Returns where the thread's accesses to this file count now.
    pub fn place(&self, thread: &Thread) -> Place<'a> {
        self.session.place(thread, self.home(), self.info.policy())
    }

    /// Returns whether the slot is unchanged since the beginning of the call. A writer asks while it holds the page's latch:
    /// the daemon revokes the right to write by changing this word first and then waiting for latches.
    #[inline(always)]
    fn is_still(&self) -> bool {
        self.info.word() == self.word
    }

    #[inline]
    fn may_write(&self) -> Result<(), Why> {
        if !self.may_write {
            return Err(Why::Withheld);
        }
        if self.memory.is_throttled() {
            return Err(Why::Throttled);
        }
        Ok(())
    }

    /// Checks that an inline write may make the file longer.
    fn may_grow(&self) -> Result<(), Why> {
        match self.word.flags() & SlotInfo::NO_GROW {
            0 => Ok(()),
            _ => Err(Why::Withheld),
        }
    }

    /// Returns the identity under which the calling thread writes. Returns `None` when it cannot write inline.
    fn writer(&self) -> Option<Writer<'a>> {
        reentrancy::thread(|thread| self.session.writer(thread, self.home()))
    }

    /// Writes to one cached page, within the file, if the file `is_for_writing`. Most writes are of this kind. Returns `None`
    /// otherwise; the caller then makes the write with `write`, and some bytes may be written already.
    #[inline(always)]
    pub fn write_page(&self, thread: &Thread, at: u64, data: &[u8]) -> Option<()> {
        let (page, within) = (at / PAGE_BYTES, (at % PAGE_BYTES) as usize);
        self.memory.fetch(thread.recent_hits.frame(page), within, 1);
        debug_assert!(self.may_write);
        if self.memory.is_throttled() {
            return None;
        }
        let seen = self.size_word().ok()?;
        let left = seen.bytes().checked_sub(at)?;
        if data.len() as u64 > left || data.len() > PAGE - within {
            return None;
        }
        let key = self.key.with_page(page);
        let still = || self.is_still() && self.slot.size().same_cuts(seen);
        let writer = self.session.writer(thread, self.home())?;
        let line = thread.recent_hits.line(key, || self.memory.home_line(key));
        let written = self
            .memory
            .try_write(line, key, within, data, writer, still)?;
        thread.recent_hits.was_in(page, written.frame);
        if written.was_clean {
            report(self.session, key);
        }
        self.wrote();
        Some(())
    }

    /// Writes `len` bytes (1..=`WRITE_MAX`) of `source` at `at`. When it fails, some bytes may be written, but the file is as
    /// long as before.
    #[inline]
    pub fn write(&self, at: u64, len: usize, source: Source<'_, '_>) -> Result<(), Failed<'a>> {
        self.may_write()?;
        let end = at
            .checked_add(len as u64)
            .filter(|end| *end < FILE_BYTES_MAX);
        let end = end.ok_or(Why::Far)?;
        let seen = self.size_word()?;
        if end <= seen.bytes() {
            return self.write_within(seen, at, len, source);
        }
        self.write_beyond(at, len, source)
    }

    #[inline(never)]
    fn write_beyond(&self, at: u64, len: usize, source: Source<'_, '_>) -> Result<(), Failed<'a>> {
        self.may_grow()?;
        let end = at + len as u64;
        let (extend, seen) = self.lock_size()?;
        if end <= seen.bytes() {
            return self.write_within(seen, at, len, source);
        }
        self.extend(extend, seen, at, len, source, false)
    }

    /// Writes `len` bytes (1..=`WRITE_MAX`) of `source` at the end of the file, all or none. Returns the new end.
    pub fn append(&self, len: usize, source: Source<'_, '_>) -> Result<u64, Why> {
        self.may_write()?;
        self.may_grow()?;
        let (extend, seen) = self.lock_size()?;
        let end = seen.bytes() + len as u64;
        if end >= FILE_BYTES_MAX {
            return Err(Why::Far);
        }
        // A failed append keeps nothing: all its bytes are beyond the end.
        let done = self.extend(extend, seen, seen.bytes(), len, source, true);
        done.map_err(|failed| failed.why)?;
        Ok(end)
    }

    /// Takes the extend lock. Returns the size, which no other client changes while the lock is held.
    fn lock_size(&self) -> Result<(Held<'a>, SizeWord), Why> {
        let lock = self.slot.extend_lock();
        let held = lock.lock(self.session.owner).ok_or(Why::Busy)?;
        let held = Held { lock, held };
        let seen = self.size_word()?;
        // The daemon takes the lock away from a holder that keeps it for long, and then adds one to the truncation count. The
        // page write notices a size from before that. A size from after it is the daemon's to change, so this checks the lock
        // again.
        if !lock.is_held(held.held) {
            return Err(Why::Busy);
        }
        Ok((held, seen))
    }

    #[inline]
    fn write_within(
        &self,
        seen: SizeWord,
        at: u64,
        len: usize,
        source: Source<'_, '_>,
    ) -> Result<(), Failed<'a>> {
        // Only a truncation matters: other writers may extend the file.
        let removals = self.slot.removals();
        let range = self.lock_range(at, len)?;
        let still = |at| self.is_still() && self.slot.size().same_cuts(seen) && range.is_held(at);
        self.check_pages(at, len)?;
        match self.put(at, len, source, still) {
            Ok(()) => {
                self.wrote();
                Ok(())
            }
            Err((0, why)) => Err(why.into()),
            Err((done, why)) => {
                let begun = Begun { at, done, removals };
                Err(self.keep(why, range, None, begun))
            }
        }
    }

    /// Keeps and lends the locks of a half-done write, so that no reader sees the first part alone.
    #[cold]
    fn keep(
        &self,
        why: Why,
        range: Locked<'a>,
        extend: Option<Held<'a>>,
        begun: Begun,
    ) -> Failed<'a> {
        self.wrote();
        let lent = reentrancy::thread(|thread| self.session.lent(thread));
        let Some(lent) = lent else {
            return why.into();
        };
        let now = files::coarse_realtime_ns();
        let extend_held = extend.as_ref().map(|extend| extend.held);
        lent.lend(self.index, &range.held, extend_held, now);
        // `Kept` releases them.
        std::mem::forget((range, extend));
        let kept = Kept {
            session: self.session,
            info: self.info,
            slot: self.slot,
            lent,
            begun,
            generation: self.word.generation(),
        };
        Failed {
            why,
            kept: Some(kept),
        }
    }

    /// Writes beyond the end of the file. The caller holds the extend lock.
    fn extend(
        &self,
        held: Held<'a>,
        seen: SizeWord,
        at: u64,
        len: usize,
        source: Source<'_, '_>,
        append: bool,
    ) -> Result<(), Failed<'a>> {
        let (old, end) = (seen.bytes(), at + len as u64);
        // Only the daemon makes holes: the pages in between may not be cached.
        if at / PAGE_BYTES > old / PAGE_BYTES {
            return Err(Why::Far.into());
        }
        let removals = self.slot.removals();
        let range = self.lock_range(at, len)?;
        self.check_pages(at, len)?;
        // No other client changes the size while the lock is held. If the size changes, the daemon has taken the lock away and
        // goes on without this process.
        let still = |at| self.is_still() && self.slot.size() == seen && range.is_held(at);
        if let Err((done, why)) = self.put(at, len, source, still) {
            self.wipe(seen, old.max(at), at + done as u64);
            if done == 0 || at >= old {
                // Readers see no bytes beyond the end.
                return Err(why.into());
            }
            let begun = Begun {
                at,
                done: done.min((old - at) as usize),
                removals,
            };
            return Err(self.keep(why, range, Some(held), begun));
        }
        let mut now = seen;
        while !self.slot.extend(now, end) {
            now = self.slot.size();
            if append || !now.same_cuts(seen) {
                return Err(Why::Changed.into());
            }
            if now.bytes() >= end {
                break;
            }
        }
        self.wrote();
        Ok(())
    }

    /// Writes zeros again after a write that stopped half-way: all bytes beyond the end of a file are zeros.
    #[cold]
    fn wipe(&self, seen: SizeWord, from: u64, to: u64) {
        if from < to {
            const ZEROS: [u8; PAGE] = [0; PAGE];
            let epoch = self.memory.epoch();
            let Some(writer) = self.writer() else { return };
            for (page, within, len) in pieces(from, (to - from) as usize) {
                let key = self.key.with_page(page);
                let still = || self.slot.size() == seen;
                // A page that this process cannot write any more is the daemon's, which knows the file's end.
                let zeros = &ZEROS[..len];
                let wiped = self
                    .memory
                    .write_if(key, within, zeros, writer, epoch, still);
                // The slice wrote the page back after the write had ended, so the page is newly dirty.
                if wiped == Ok(true) {
                    report(self.session, key);
                }
            }
        }
    }

    /// Locks the pages of a write over several pages against overlapping writes. A write within one page needs only the page's
    /// latch.
    #[inline]
    fn lock_range(&self, at: u64, len: usize) -> Result<Locked<'a>, Why> {
        let held = if is_in_page(at, len) {
            Some(RangeHeld::none())
        } else {
            self.slot
                .lock_range(Segments::of(at, len as u64), self.session.owner)
        };
        let held = held.ok_or(Why::Busy)?;
        Ok(Locked {
            slot: self.slot,
            held,
        })
    }

    /// Checks all pages first: a write that stops half-way costs more than lookups.
    #[inline]
    fn check_pages(&self, at: u64, len: usize) -> Result<(), Why> {
        if !is_in_page(at, len) {
            for (page, _, _) in pieces(at, len) {
                self.memory.is_writable_page(self.key.with_page(page))?;
            }
        }
        Ok(())
    }

    /// Writes page by page while `still` holds. Fails with the number of bytes written so far.
    #[inline]
    fn put(
        &self,
        at: u64,
        len: usize,
        mut source: Source<'_, '_>,
        still: impl Fn(u64) -> bool,
    ) -> Result<(), (usize, Why)> {
        let epoch = self.memory.epoch();
        let writer = self.writer().ok_or((0, Why::Withheld))?;
        let (mut done, mut ring) = (0, false);
        let mut result = Ok(());
        let end = at + len as u64;
        for (page, within, len) in pieces(at, len) {
            let key = self.key.with_page(page);
            if (page + 1) * PAGE_BYTES < end {
                self.memory.fetch_page(self.key.with_page(page + 1));
            }
            let written = source.next(len, |bytes| {
                self.memory.write_if(key, within, bytes, writer, epoch, || {
                    still(page * PAGE_BYTES)
                })
            });
            match written {
                // Reports the page before the write is acknowledged and before the size covers it.
                Ok(true) => ring |= self.session.report(key),
                Ok(false) => {}
                Err(miss) => {
                    result = Err((done, miss.into()));
                    break;
                }
            }
            done += len;
        }
        if ring {
            self.session.slots.ring();
        }
        result
    }

    /// Sets the mark of inline writes, unless it is set. The daemon gives the file the time at which it takes the mark, which is
    /// after this write.
    #[inline]
    fn wrote(&self) {
        if self.slot.modified() == 0 {
            set_modified(self.slot);
        }
    }
}

/// Reports a page that became dirty, and rings the doorbell if the daemon asked for that.
#[inline(never)]
fn report(session: &Session, key: Key) {
    if session.report(key) {
        session.slots.ring();
    }
}

#[cold]
fn set_modified(slot: &Slot) {
    slot.set_modified(files::coarse_realtime_ns());
}

/// A lock, released on drop.
struct Held<'a> {
    lock: &'a Lock,
    held: Holding,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.lock.unlock(self.held);
    }
}

/// The right to ask for pages beyond the end, released on drop.
pub struct Asking<'a> {
    ahead: &'a Ahead,
    held: Holding,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.ahead.end_asking(self.held);
    }
}

/// Words of the range lock, released on drop.
struct Locked<'a> {
    slot: &'a Slot,
    held: RangeHeld,
}

impl Locked<'_> {
    /// Returns whether the bytes of the page at `at` may still be written.
    #[inline]
    fn is_held(&self, at: u64) -> bool {
        self.slot.holds(&self.held, at)
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.slot.unlock_range(&self.held);
    }
}

/// Returns whether the bytes are within one page.
#[inline]
fn is_in_page(at: u64, len: usize) -> bool {
    (at % PAGE_BYTES) as usize + len <= PAGE
}

#[cfg(test)]
mod tests;
