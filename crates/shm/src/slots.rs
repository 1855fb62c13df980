//! The slots segment: for each file, the size and the locks that its writers share.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use jericho_sys::memory::Mapping;

use crate::ahead::Ahead;
use crate::lock::{Holding, Lock, Patience};
use crate::owners::Owners;
use crate::reports::{Draining, OWNER_WORDS, Reports};
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence, futex};

/// Number of words of a slot's range lock.
pub const WORDS: usize = 30;
const HEADER: usize = 4096;
const SIZE_BITS: u32 = 46;
/// Attempts to change a size. Each fails only when another thread changed the size at the same moment.
const SIZE_TRIES: u32 = 1000;
/// Bits of an offset within a segment of 64 KiB.
const SEGMENT_SHIFT: u32 = 16;
const ALL_WORDS: u32 = (1 << WORDS) - 1;

/// A file's size with its truncation count: `[truncations:18][bytes:46]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeWord(u64);

impl SizeWord {
    /// Returns the bytes.
    #[inline]
    pub fn bytes(self) -> u64 {
        self.0 & ((1 << SIZE_BITS) - 1)
    }

    /// Returns whether the truncation count is the same in both.
    #[inline]
    pub fn same_truncation_count(self, other: SizeWord) -> bool {
        // Usually both are equal.
        self == other || (self.0 ^ other.0) >> SIZE_BITS == 0
    }

    fn with_bytes(self, bytes: u64) -> SizeWord {
        SizeWord(self.0 >> SIZE_BITS << SIZE_BITS | bytes & ((1 << SIZE_BITS) - 1))
    }

    fn truncated_to(self, bytes: u64) -> SizeWord {
        SizeWord(self.0.wrapping_add(1 << SIZE_BITS)).with_bytes(bytes)
    }
}

/// The part of a slot that a file's writers change.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Slot {
    size: AtomicU64,
    modified: AtomicU64,
    removals: AtomicU64,
    _unused: u64,
    writers: Owners,
    extend: Lock,
    _unused_behind_extend: u32,
    ahead: Ahead,
    _unused_behind_ahead: [u32; 10],
    words: [Lock; WORDS],
    _unused_behind_words: [u32; 2],
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Slot>() == 256);
    assert!(std::mem::offset_of!(Slot, extend) == 64 && std::mem::offset_of!(Slot, words) == 128);
    assert!(std::mem::offset_of!(Slot, removals) == 16);
    assert!(std::mem::offset_of!(Slot, writers) == 32 && size_of::<Owners>() == 32);
    assert!(std::mem::offset_of!(Slot, ahead) == 72 && size_of::<Ahead>() == 16);
};

/// The words of the range lock that cover a byte range, one bit for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segments(u32);

impl Segments {
    /// Returns the words that cover bytes `[offset, offset + len)`. `len` > 0.
    #[inline]
    pub fn of(offset: u64, len: u64) -> Segments {
        let first = offset >> SEGMENT_SHIFT;
        let count = ((offset + len - 1) >> SEGMENT_SHIFT) - first + 1;
        if count >= WORDS as u64 {
            return Segments(ALL_WORDS);
        }
        let bits = ((1u64 << count) - 1) << (first % WORDS as u64);
        // Segments map to words modulo the number of words.
        Segments((bits as u32 | (bits >> WORDS) as u32) & ALL_WORDS)
    }

    /// Returns the word that covers a byte.
    #[inline]
    pub fn word_of(offset: u64) -> usize {
        ((offset >> SEGMENT_SHIFT) % WORDS as u64) as usize
    }

    /// Returns whether a word covers more than one segment of bytes `[offset, offset + len)`. `len` > 0.
    pub fn is_wrapped(offset: u64, len: u64) -> bool {
        ((offset + len - 1) >> SEGMENT_SHIFT) - (offset >> SEGMENT_SHIFT) >= WORDS as u64
    }

    /// Returns the words, in the order in which they are taken.
    #[inline]
    pub fn words(self) -> impl Iterator<Item = usize> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let word = left.trailing_zeros() as usize;
            left &= left.wrapping_sub(1);
            (word < WORDS).then_some(word)
        })
    }
}

/// Words of the range lock that a writer holds.
#[derive(Debug)]
#[must_use = "they are given back with it"]
pub struct RangeHeld {
    pub(crate) segments: Segments,
    /// The word's value for each held word; 0 for the others.
    pub(crate) words: [u32; WORDS],
}

impl RangeHeld {
    /// Returns a value that holds no words.
    #[inline]
    pub fn none() -> RangeHeld {
        RangeHeld {
            segments: Segments(0),
            words: [0; WORDS],
        }
    }

    /// Returns the words that are held.
    pub fn segments(&self) -> Segments {
        self.segments
    }

    #[inline]
    pub(crate) fn add(&mut self, word: usize, held: Holding) {
        self.segments.0 |= 1 << word;
        self.words[word] = held.0;
    }
}

/// Words of the range lock that the daemon holds.
#[derive(Debug)]
#[must_use = "they are given back with it"]
pub struct RangeTaken {
    held: RangeHeld,
    /// The borrowed words, and the values with which their lender holds them.
    lent: RangeHeld,
    all: bool,
}

impl RangeTaken {
    /// Returns a value that holds no words.
    pub fn none() -> RangeTaken {
        RangeTaken {
            held: RangeHeld::none(),
            lent: RangeHeld::none(),
            all: true,
        }
    }

    /// Returns whether the daemon holds all words that it asked for.
    pub fn is_all(&self) -> bool {
        self.all
    }

    /// Returns whether the daemon has borrowed any of them.
    pub fn has_borrowed(&self) -> bool {
        self.lent.segments.0 != 0
    }

    /// Returns the borrowed words, and the lender's holdings.
    pub fn borrowed(&self) -> impl Iterator<Item = (usize, Holding)> + '_ {
        let words = self.lent.segments.words();
        words.map(|word| (word, Holding(self.lent.words[word])))
    }

    /// Returns those of `segments` that the daemon does not hold.
    pub fn missing(&self, segments: Segments) -> Segments {
        Segments(segments.0 & !self.held.segments.0)
    }

    /// Returns the words that are held.
    pub fn held(&self) -> &RangeHeld {
        &self.held
    }
}

/// How the daemon got the extend lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seized {
    /// No client held it at the end of the wait.
    Free,
    /// The daemon borrowed it from a client that lends it; this is the client's holding.
    Lent(Holding),
    /// The daemon took it away from a client.
    TakenAway,
}

/// A waiter's action for a word that one holder keeps too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The waiter gives up.
    GiveUp,
    /// The waiter waits on: the holder is known and at work.
    WaitOn,
    /// The waiter takes the word away.
    TakeAway,
}

/// The counts of a range lock's words at a moment when no writer held the words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeCounts {
    segments: Segments,
    words: [u32; WORDS],
}

impl Slot {
    #[cfg(all(test, loom))]
    pub(crate) fn new(bytes: u64) -> Slot {
        Slot {
            size: AtomicU64::new(bytes),
            modified: AtomicU64::new(0),
            removals: AtomicU64::new(0),
            _unused: 0,
            writers: Owners::new(),
            extend: Lock::new(),
            _unused_behind_extend: 0,
            ahead: Ahead::new(),
            _unused_behind_ahead: [0; 10],
            words: std::array::from_fn(|_| Lock::new()),
            _unused_behind_words: [0; 2],
        }
    }

    /// Returns the size. Acquire: the pages that it covers are written.
    #[inline]
    pub fn size(&self) -> SizeWord {
        SizeWord(self.size.load(Ordering::Acquire))
    }

    /// Extends the file. The caller holds the extend lock and has written the pages. Returns false when the size no longer is
    /// `seen`.
    #[inline]
    pub fn extend(&self, seen: SizeWord, bytes: u64) -> bool {
        self.replace(seen, seen.with_bytes(bytes))
    }

    #[inline]
    fn replace(&self, seen: SizeWord, new: SizeWord) -> bool {
        self.size
            .compare_exchange(seen.0, new.0, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Sets the size for the daemon. With `truncates`, raises the truncation count, so that writers that saw the old size fail.
    pub fn set_size(&self, bytes: u64, truncates: bool) {
        let next = |seen: SizeWord| match truncates {
            true => seen.truncated_to(bytes),
            false => seen.with_bytes(bytes),
        };
        if let Err(seen) = self.change_size(|seen| Some(next(seen))) {
            // A malicious client kept changing the size. Overwriting its latest value loses nothing.
            self.size.store(next(seen).0, Ordering::Release);
        }
        if truncates {
            self.ahead.forget_where();
        }
    }

    /// Replaces the size by what `next` returns for the current one; `None` leaves it. Fails with the last size seen after
    /// `SIZE_TRIES` attempts. Only a client that violates the protocol changes the size that often.
    fn change_size(&self, next: impl Fn(SizeWord) -> Option<SizeWord>) -> Result<(), SizeWord> {
        let mut seen = self.size();
        for _ in 0..SIZE_TRIES {
            match next(seen) {
                Some(next) if !self.replace(seen, next) => seen = self.size(),
                _ => return Ok(()),
            }
        }
        Err(seen)
    }

    /// Increments the truncation count, because the daemon changes bytes of the file: writers and readers that saw the size
    /// restart.
    pub fn raise_truncation_count(&self) {
        self.size.fetch_add(1 << SIZE_BITS, Ordering::AcqRel);
    }

    /// Counts a truncation or fallocate. The daemon calls this after it has raised the truncation count and before it changes
    /// bytes.
    pub fn note_removal(&self) {
        self.removals.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the number of truncations and fallocates. A writer compares the number before its first byte with a later one. If
    /// they differ, the bytes that it has written may be gone.
    #[inline]
    pub fn removals(&self) -> u64 {
        self.removals.load(Ordering::Acquire)
    }

    /// Takes the extend lock for `owner` (the daemon): borrows it from a client that lends it, according to `lends`, and takes it
    /// away from a client that holds it too long. A client that lost the lock notices that: if it read the size before the loss,
    /// the size word has changed; if it read the size later, it finds that it does not hold the lock. After the daemon has taken
    /// the lock away, bytes of an unfinished write may lie beyond the end of the file.
    pub fn seize(&self, owner: u16, mut lends: impl FnMut(Holding) -> bool) -> (Holding, Seized) {
        if let Some(held) = self.extend.try_lock(owner) {
            return (held, Seized::Free);
        }
        let mut patience = Patience::new(&self.extend);
        let taken = self.extend.lock_or_borrow(owner, &mut patience, &mut lends);
        match taken {
            Some((held, None)) => (held, Seized::Free),
            Some((held, Some(lent))) => (held, Seized::Lent(lent)),
            None => {
                // In this order: a client that sees the new truncation count also sees that it has lost the lock.
                let held = self.extend.take_over(owner);
                self.raise_truncation_count();
                (held, Seized::TakenAway)
            }
        }
    }

    /// Gives the extend lock back to a client that lends it; `is_lent` as in `give_range_back`.
    pub fn return_extend(
        &self,
        mine: Holding,
        lent: Holding,
        is_lent: impl FnOnce(Holding) -> bool,
    ) {
        self.extend.give_back(mine, lent, || is_lent(lent));
    }

    /// Raises the size to `bytes` if it is smaller. The daemon calls this after a change that may have extended the file and has
    /// not shortened it. Calls `bytes` after it has read the size word: a truncation between that call and the change of the size
    /// changes the word, and this calls `bytes` again.
    pub fn grow(&self, bytes: impl Fn() -> u64) {
        // Ignores a client that keeps others from changing the size: it could as well store a wrong size.
        let _ = self.change_size(|seen| {
            let bytes = bytes();
            (seen.bytes() < bytes).then(|| seen.with_bytes(bytes))
        });
    }

    /// Returns the mark of inline writes: the time of the first one since the daemon last took the mark, in nanoseconds of the
    /// realtime clock; 0: none.
    #[inline]
    pub fn modified(&self) -> u64 {
        self.modified.load(Ordering::Relaxed)
    }

    /// Notes the time of an inline write.
    #[inline]
    pub fn set_modified(&self, now_ns: u64) {
        if self.modified.load(Ordering::Relaxed) != now_ns {
            self.modified.store(now_ns, Ordering::Relaxed);
        }
    }

    /// Takes the mark of inline writes. Only the daemon calls this.
    pub fn take_modified(&self) -> u64 {
        if self.modified() == 0 {
            return 0;
        }
        self.modified.swap(0, Ordering::AcqRel)
    }

    /// Returns the lock that a writer holds while it extends the file or appends.
    #[inline]
    pub fn extend_lock(&self) -> &Lock {
        &self.extend
    }

    /// Returns the state of the pages reserved beyond the end.
    #[inline]
    pub fn ahead(&self) -> &Ahead {
        &self.ahead
    }

    /// Returns the clients that may write the file inline.
    #[inline]
    pub fn writers(&self) -> &Owners {
        &self.writers
    }

    /// Returns whether `owner` is in a write that extends the file.
    pub fn is_extended_by(&self, owner: u16) -> bool {
        self.extend.is_held_by(owner)
    }

    /// Takes the words for a write over several pages. Returns `None` when one holder has kept a word for `HELD_MAX`,
    /// or after `WAIT_MAX`.
    #[inline]
    pub fn lock_range(&self, segments: Segments, owner: u16) -> Option<RangeHeld> {
        let mut held = RangeHeld::none();
        if self.lock_while_free(&mut held, segments, owner, |_| ()) {
            return Some(held);
        }
        let (none, give_up) = (|_, _| false, |_| Kept::GiveUp);
        let rest = self.lock_rest(held, segments, owner, none, give_up, |_| ());
        if !rest.all {
            self.unlock_range(&rest.held);
        }
        rest.all.then_some(rest.held)
    }

    /// Does the same as `lock_range`, but borrows words that their holders lend, according to `lends`. Asks `kept` about a word
    /// that one holder has kept for `HELD_MAX`. A waiter that gives up returns the words that it has.
    pub fn take_range(
        &self,
        segments: Segments,
        owner: u16,
        lends: impl FnMut(usize, Holding) -> bool,
        kept: impl FnMut(usize) -> Kept,
    ) -> RangeTaken {
        self.take_range_noted(segments, owner, lends, kept, |_| ())
    }

    /// Does the same as `take_range`, and calls `took` for each word as soon as it is taken, before it waits for the next.
    pub fn take_range_noted(
        &self,
        segments: Segments,
        owner: u16,
        lends: impl FnMut(usize, Holding) -> bool,
        kept: impl FnMut(usize) -> Kept,
        mut took: impl FnMut(usize),
    ) -> RangeTaken {
        let mut held = RangeHeld::none();
        if !self.lock_while_free(&mut held, segments, owner, &mut took) {
            return self.lock_rest(held, segments, owner, lends, kept, took);
        }
        RangeTaken {
            held,
            ..RangeTaken::none()
        }
    }

    /// Takes the words in their order, up to the first word that another holder has. Calls `took` for each. Returns whether it
    /// has taken all.
    #[inline]
    fn lock_while_free(
        &self,
        held: &mut RangeHeld,
        segments: Segments,
        owner: u16,
        mut took: impl FnMut(usize),
    ) -> bool {
        for word in segments.words() {
            let Some(holding) = self.words[word].try_lock(owner) else {
                return false;
            };
            held.add(word, holding);
            took(word);
        }
        true
    }

    /// Continues to take the words in their order, without waiting. Asks `kept` about the first word that another holder has, and
    /// stops there unless the answer is to take it away. Calls `took` for each word. Fails with the answer of `kept`.
    pub fn try_range(
        &self,
        taken: &mut RangeTaken,
        segments: Segments,
        owner: u16,
        mut kept: impl FnMut(usize, Holding) -> Kept,
        mut took: impl FnMut(usize),
    ) -> Result<(), Kept> {
        taken.all = false;
        for word in taken.missing(segments).words() {
            let lock = &self.words[word];
            let holding = match lock.lock_briefly(owner) {
                Some(holding) => holding,
                None => match kept(word, self.holding(word)) {
                    Kept::TakeAway => lock.take_over(owner),
                    other => return Err(other),
                },
            };
            taken.held.add(word, holding);
            took(word);
        }
        taken.all = true;
        Ok(())
    }

    /// Returns how a word is held now. The owner is 0 if the word is free.
    pub fn holding(&self, word: usize) -> Holding {
        Holding(self.words[word].seen())
    }

    #[cold]
    fn lock_rest(
        &self,
        held: RangeHeld,
        segments: Segments,
        owner: u16,
        mut lends: impl FnMut(usize, Holding) -> bool,
        mut kept: impl FnMut(usize) -> Kept,
        mut took: impl FnMut(usize),
    ) -> RangeTaken {
        let lent = RangeHeld::none();
        let all = false;
        let mut taken = RangeTaken { held, lent, all };
        // Reads all words now, so that the waiter waits only once for a stopped holder of several.
        let begun = Instant::now();
        let seen: [u32; WORDS] = std::array::from_fn(|word| self.words[word].seen());
        for word in taken.missing(segments).words() {
            let lock = &self.words[word];
            let mut patience = Patience::since(begun, seen[word]);
            let mut lends = |held| lends(word, held);
            let (holding, lent) = loop {
                let got = lock.lock_or_borrow(owner, &mut patience, &mut lends);
                match got.map_or_else(|| Err(kept(word)), Ok) {
                    Ok(got) => break got,
                    Err(Kept::WaitOn) => patience = Patience::new(lock),
                    Err(Kept::TakeAway) => break (lock.take_over(owner), None),
                    Err(Kept::GiveUp) => return taken,
                }
            };
            taken.held.add(word, holding);
            took(word);
            if let Some(lent) = lent {
                taken.lent.add(word, lent);
            }
        }
        taken.all = true;
        taken
    }

    /// Releases the words of `take_range`, and returns the borrowed ones to their lenders. `is_lent` tells whether a lender still
    /// lends a word. If not, this opens the word.
    pub fn give_range_back(
        &self,
        taken: &RangeTaken,
        mut is_lent: impl FnMut(usize, Holding) -> bool,
    ) {
        for word in taken.held.segments.words() {
            let (lock, mine) = (&self.words[word], Holding(taken.held.words[word]));
            match taken.lent.words[word] {
                0 => {
                    lock.unlock(mine);
                }
                lent => lock.give_back(mine, Holding(lent), || is_lent(word, Holding(lent))),
            }
        }
    }

    /// Releases the words.
    #[inline]
    pub fn unlock_range(&self, held: &RangeHeld) {
        for word in held.segments.words() {
            // Fails for a word that was taken away, which is harmless.
            self.words[word].unlock(Holding(held.words[word]));
        }
    }

    /// Returns whether the holder of `held` still holds the word of the byte's segment. Also returns true if `held` never had that
    /// word. A writer over several pages checks this under each page's latch. The thread that takes a word away writes the page
    /// later, so a late write never covers a newer one.
    #[inline]
    pub fn holds(&self, held: &RangeHeld, offset: u64) -> bool {
        let word = Segments::word_of(offset);
        held.segments.0 >> word & 1 == 0 || self.words[word].is_held(Holding(held.words[word]))
    }

    /// Returns whether a word is held as `held`. Acquires the notes that other threads made before they gave the word back.
    pub(crate) fn is_word_held(&self, word: usize, held: Holding) -> bool {
        let is = self.words[word].is_held(held);
        fence(Ordering::Acquire);
        is
    }

    /// Returns the words' counts of how often they were taken; `None` when one is held. Acquires the stores made under the words.
    #[inline]
    pub fn range_counts(&self, segments: Segments) -> Option<RangeCounts> {
        let mut counts = RangeCounts {
            segments,
            words: [0; WORDS],
        };
        for word in segments.words() {
            counts.words[word] = self.words[word].free_count()?;
        }
        Some(counts)
    }

    /// Returns whether no thread has taken one of the words since. Then the bytes read in between contain no half of a write.
    #[inline]
    pub fn has_range_counts(&self, counts: &RangeCounts) -> bool {
        fence(Ordering::Acquire);
        let mut words = counts.segments.words();
        words.all(|word| self.words[word].seen() == counts.words[word])
    }

    /// Returns whether `owner` holds one of the words.
    pub fn has_range_of(&self, segments: Segments, owner: u16) -> bool {
        segments
            .words()
            .any(|word| self.words[word].is_held_by(owner))
    }

    /// Takes words away from `owner`, which asks for that, and releases them.
    pub fn take_range_from(&self, segments: Segments, owner: u16, daemon: u16) {
        for word in segments.words() {
            let lock = &self.words[word];
            if let Some(held) = lock.take_from(owner, daemon) {
                lock.unlock(held);
            }
        }
    }

    /// Returns the lock of a word.
    #[inline]
    pub fn word(&self, word: usize) -> &Lock {
        &self.words[word]
    }

    /// Opens all locks, and forgets the reserved pages and the writers, before the daemon gives the slot to another file. The
    /// holders wrote the previous file, and are dead or have closed it in the middle of a write.
    pub fn open_all(&self, daemon: u16) {
        self.ahead.forget();
        self.writers.clear();
        for lock in [&self.extend, self.ahead.lock()]
            .into_iter()
            .chain(&self.words)
        {
            if !lock.is_held_by(0) {
                let held = lock.take_over(daemon);
                lock.unlock(held);
            }
        }
    }

    /// Opens all locks that the dead `owner` holds.
    pub fn open_dead(&self, owner: u16) {
        self.extend.open_dead(owner);
        self.ahead.lock().open_dead(owner);
        self.words.iter().for_each(|lock| lock.open_dead(owner));
    }
}

/// The part of the slots segment that clients and the daemon share besides the files.
#[repr(C)]
struct Header {
    doorbell: AtomicU32,
    armed: AtomicU32,
    _unused: [u32; 14],
    reports: [AtomicU64; OWNER_WORDS],
}

#[cfg(not(loom))]
const _: () = {
    assert!(std::mem::offset_of!(Header, reports) == 64);
    assert!(size_of::<Header>() == 192 && size_of::<Header>() <= HEADER);
};

/// The slots segment, mapped.
#[derive(Debug)]
pub struct Slots {
    mapping: Mapping,
    count: u32,
}

impl Slots {
    /// Creates a segment of `count` slots. Memory is taken as slots are used.
    pub fn create(name: &str, count: u32) -> io::Result<Slots> {
        let len = HEADER + count as usize * size_of::<Slot>();
        let mapping = Mapping::create(&format!("jericho-{name}-slots"), len, false)?;
        Ok(Slots { mapping, count })
    }

    /// Maps another process's segment. Fails with the errors of `Mapping::from_fd`.
    pub fn attach(fd: OwnedFd, count: u32, writable: bool) -> io::Result<Slots> {
        let len = HEADER + count as usize * size_of::<Slot>();
        let mapping = Mapping::from_fd(fd, len, writable)?;
        Ok(Slots { mapping, count })
    }

    /// Returns the segment, to be sent to clients.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Returns the number of slots.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Returns a slot; `None` beyond the last. A process that mapped the segment read-only may only call functions that read: a
    /// write would end it with SIGSEGV.
    #[inline]
    pub fn slot(&self, index: u32) -> Option<&Slot> {
        (index < self.count).then(|| {
            // SAFETY: the mapping has room for `count` slots after the header and stays mapped while `self` lives; its start is
            // page-aligned, so slots are aligned. All fields are atomics, valid for every bit pattern, except unused bytes that
            // no code reads.
            unsafe {
                &*self
                    .mapping
                    .as_ptr()
                    .add(HEADER)
                    .cast::<Slot>()
                    .add(index as usize)
            }
        })
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping begins with HEADER bytes, which the fields do not exceed; as in `slot`.
        unsafe { &*self.mapping.as_ptr().cast::<Header>() }
    }

    fn doorbell(&self) -> &AtomicU32 {
        &self.header().doorbell
    }

    #[inline]
    pub(crate) fn reports(&self) -> Reports<'_, OWNER_WORDS> {
        let header = self.header();
        Reports {
            words: &header.reports,
            armed: &header.armed,
        }
    }

    /// Arms or disarms the doorbell. The daemon arms it before it sleeps, and must check for reports once more afterwards.
    pub fn arm_doorbell(&self, armed: bool) {
        self.reports().arm_doorbell(armed);
    }

    /// Returns the clients whose reports may not be absorbed yet.
    pub fn reporters<'a>(&'a self, draining: &'a Draining) -> impl Iterator<Item = u16> + use<'a> {
        self.reports().owners(draining)
    }

    /// Begins a drain of the ring of `owner`. The caller holds the ring's lock.
    pub fn begin_drain(&self, draining: &Draining, owner: u16) {
        self.reports().begin(draining, owner);
    }

    /// Ends the drain: the pages that the ring named are absorbed. The caller still holds the ring's lock.
    pub fn end_drain(&self, draining: &Draining, owner: u16) {
        self.reports().end(draining, owner);
    }

    /// Rings the doorbell, to wake the daemon.
    pub fn ring(&self) {
        self.doorbell().fetch_add(1, Ordering::SeqCst);
        futex::wake_all(self.doorbell());
    }

    /// Returns the doorbell's value, for `sleep`.
    pub fn rung(&self) -> u32 {
        self.doorbell().load(Ordering::SeqCst)
    }

    /// Sleeps until a client rings the doorbell, or for `timeout`. Returns at once if a client has rung since `seen`. Only the
    /// daemon calls this.
    pub fn sleep(&self, seen: u32, timeout: Option<std::time::Duration>) {
        match timeout {
            Some(timeout) => futex::wait(self.doorbell(), seen, timeout),
            None => futex::wait_forever(self.doorbell(), seen),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_writer_that_saw_the_size_before_a_truncation_cannot_extend() {
        let slots = Slots::create("test", 4).unwrap();
        let slot = slots.slot(3).unwrap();
        assert!(slots.slot(4).is_none());
        slot.set_size(10_000, false);
        let seen = slot.size();
        slot.set_size(10_000, true);
        assert_eq!(slot.size().bytes(), 10_000);
        assert!(!slot.extend(seen, 20_000));
        assert!(slot.extend(slot.size(), 20_000));
        slot.grow(|| 15_000);
        assert_eq!(slot.size().bytes(), 20_000);
        slot.grow(|| 25_000);
        assert_eq!(slot.size().bytes(), 25_000);
    }

    #[test]
    fn a_client_that_keeps_changing_the_size_does_not_delay_the_daemon() {
        let slots = Slots::create("test", 1).unwrap();
        let slot = slots.slot(0).unwrap();
        // Another thread changes it between each read and each change.
        slot.grow(|| {
            slot.raise_truncation_count();
            25_000
        });
        assert_eq!(slot.size().bytes(), 0);
        let seen = slot.change_size(|seen| {
            slot.raise_truncation_count();
            Some(seen.with_bytes(1))
        });
        assert_eq!(seen, Err(slot.size()));
    }

    #[test]
    fn segments_come_in_order_and_cover_the_range() {
        let of = |offset, len| Segments::of(offset, len).words().collect::<Vec<_>>();
        assert_eq!(of(0, 1), [0]);
        assert_eq!(of((1 << 16) - 1, 2), [0, 1]);
        assert_eq!(of(29 << 16, 2 << 16), [0, 29]);
        assert_eq!(of(29 << 16, 1), [29]);
        assert_eq!(of(31 << 16, 3 << 16), [1, 2, 3]);
        for len in [29, 30, 31, 1 << 20] {
            let words = of(7 << 16, len << 16);
            assert_eq!(words.len(), WORDS.min(len as usize));
            assert!(words.is_sorted());
        }
        for at in (0..1u64 << 30).step_by(9 << 12) {
            assert!(of(at, 1 << 18).contains(&Segments::word_of(at)));
        }
    }

    #[test]
    fn a_waiter_waits_once_for_a_stopped_holder_of_many_words() {
        let slots = Slots::create("test", 1).unwrap();
        let slot = slots.slot(0).unwrap();
        let all = Segments::of(0, 1 << 30);
        let stopped = slot.lock_range(all, 7).unwrap();
        let asked = std::cell::Cell::new(0);
        let begun = Instant::now();
        let kept = |_| {
            asked.set(asked.get() + 1);
            Kept::TakeAway
        };
        let held = slot.take_range(all, 1, |_, _| false, kept);
        assert!(held.is_all());
        assert_eq!(asked.get(), WORDS);
        // Waiting one second for each word would take half a minute.
        assert!(begun.elapsed() >= crate::lock::HELD_MAX);
        assert!(begun.elapsed() < 15 * crate::lock::HELD_MAX);
        assert!((0..WORDS as u64).all(|n| !slot.holds(&stopped, n << 16)));
        slot.unlock_range(&stopped);
        assert!(slot.has_range_of(all, 1) && !slot.has_range_of(all, 7));
        slot.give_range_back(&held, |_, _| false);
        assert!(slot.range_counts(all).is_some());
    }

    #[test]
    fn a_reader_notices_a_writer_before_during_and_after_its_read() {
        let slots = Slots::create("test", 1).unwrap();
        let slot = slots.slot(0).unwrap();
        let read = Segments::of(0, 1 << 17);
        let counts = slot.range_counts(read).unwrap();
        let other = slot.lock_range(Segments::of(2 << 16, 9), 7).unwrap();
        assert!(slot.has_range_counts(&counts), "another segment");
        let held = slot.lock_range(Segments::of(1 << 16, 9), 7).unwrap();
        assert!(!slot.has_range_counts(&counts) && slot.range_counts(read).is_none());
        slot.unlock_range(&held);
        assert!(
            !slot.has_range_counts(&counts),
            "the writer was there in between"
        );
        assert!(
            slot.range_counts(read)
                .is_some_and(|counts| slot.has_range_counts(&counts))
        );
        slot.unlock_range(&other);
    }
}
