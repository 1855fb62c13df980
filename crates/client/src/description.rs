//! Open file descriptions that use the fast path, and the fds under which the program knows them.
//!
//! The tables are static and consist of atomics. They begin as zeros, so they take no memory before they are used. The code
//! allocates nothing and takes no lock, because a signal handler or a child of a process with threads may call any of it.
//!
//! An fd's word: kind (2 bits), then the data of that kind.
//!
//! ```text
//!   unknown, opened by this process or by another ──worth it────▶ description (index, generation)
//!        ▲                │                                           │
//!        └──forget────────┴────────────▶ kernel ◀─────────────────────┘ (as unknown, when reused behind our back)
//! ```

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use jericho_sys::files;

use crate::ReadAhead;
use crate::fd::NEVER;
use crate::offset::Offset;

/// Fds below this number have a word; larger ones take the kernel path.
const FDS: usize = 65_536;
/// Divides 2^16, so that the remainder of a word's upper half is the index.
const DESCRIPTIONS: usize = 16_384;
/// Entries that a search for a free description tries.
const PROBES: usize = 64;
/// Reference count of a description that is being freed.
const DYING: u32 = u32::MAX;

const KIND_SHIFT: u32 = 62;
const UNKNOWN: u64 = 0;
const KERNEL: u64 = 1;
const DESCRIBED: u64 = 2;
/// In the word of an unknown fd: this process has opened it.
const OPENED: u64 = 1 << 32;
/// In the word of an unknown fd: it is a regular file of a mount.
const OURS: u64 = 1 << 33;
/// In the word of an unknown fd: the cost of its ordinary calls so far, in units (see `early`).
const UNITS_SHIFT: u32 = 34;
const UNITS_MAX: u32 = (1 << 12) - 1;
/// In the word of an unknown fd: calls in progress that move the kernel's offset.
const IN_USE_SHIFT: u32 = 46;
const IN_USE_MAX: u64 = (1 << 12) - 1;
/// In the word of an unknown fd: a wish was left for it (see `wish`).
const WISHED: u64 = 1 << 58;

/// In the word of an fd that takes the kernel path, beside its description as in `DESCRIBED`: the fd is being closed, and the
/// description has others.
const CLOSING: u64 = 1 << 61;

static FD_WORDS: [AtomicU64; FDS] = [const { AtomicU64::new(0) }; FDS];
static TABLE: [Description; DESCRIPTIONS] = [const { Description::new() }; DESCRIPTIONS];
/// Changes whenever an fd is forgotten, so that facts found out before are not stored afterwards.
static SERIAL: AtomicU32 = AtomicU32::new(1);
/// One more than the largest fd ever seen.
static FDS_END: AtomicU32 = AtomicU32::new(0);

/// The file may be read.
pub const READ: u32 = 1;
/// The file may be written.
pub const WRITE: u32 = 2;
/// Writes append.
pub const APPEND: u32 = 4;
/// Writes must be durable, so they take the kernel path.
pub const SYNC: u32 = 8;
/// The daemon gave no write access to the segments.
pub const NO_INLINE_WRITE: u32 = 32;
/// All calls take the kernel path.
pub const TO_KERNEL: u32 = 64;

/// The library's knowledge of an fd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FdState {
    /// The library knows nothing yet.
    Unknown {
        /// This process has opened it, and no other process has it.
        opened: bool,
        /// The fd's word, for calls that change it only if it is unchanged.
        word: u64,
    },
    /// The fd is not on a mount, or takes the kernel path.
    Kernel,
    /// The fd has a description.
    Described(Open),
}

/// A description, reached through an fd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// The fd.
    pub fd: i32,
    /// Index in the table.
    pub index: u32,
    /// The description's generation.
    pub generation: u32,
}

/// Facts of a description at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Session through which the library reaches the slot.
    pub session: usize,
    /// The slot.
    pub slot: u32,
    /// The slot's generation.
    pub slot_generation: u32,
    /// The object.
    pub object: u64,
    /// `READ` and the other flags.
    pub flags: u32,
}

/// The kernel's identity of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Device, as in fstat(2).
    pub device: u64,
    /// Inode, as in fstat(2).
    pub inode: u64,
}

impl From<&files::Stat> for Identity {
    fn from(stat: &files::Stat) -> Identity {
        Identity {
            device: stat.device,
            inode: stat.inode,
        }
    }
}

/// An open file description.
/// The first cache line identifies the file; every thread that uses it reads that line. Each sequential call changes the second
/// line.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Description {
    generation: AtomicU32,
    references: AtomicU32,
    session: AtomicU32,
    slot: AtomicU32,
    slot_generation: AtomicU32,
    flags: AtomicU32,
    object: AtomicU64,
    device: AtomicU64,
    inode: AtomicU64,
    /// Extending writes to skip before the next reservation request. A call changes it when it asks the daemon, or skips asking.
    pub reserve_pause: AtomicU32,
    _unused: [u32; 3],
    /// The offset, while this library keeps it.
    pub offset: Offset,
    /// The position of sequential reads.
    pub read_ahead: ReadAhead,
    /// End of the last write that extended the file, or `fd::NEVER`.
    pub extended_to: AtomicU64,
}

// Entries are found by a shift.
const _: () = assert!(size_of::<Description>() == 128);
// The two cache lines.
const _: () = assert!(std::mem::offset_of!(Description, offset) == 64);

impl Description {
    const fn new() -> Description {
        Description {
            generation: AtomicU32::new(0),
            references: AtomicU32::new(0),
            session: AtomicU32::new(0),
            slot: AtomicU32::new(0),
            slot_generation: AtomicU32::new(0),
            flags: AtomicU32::new(0),
            object: AtomicU64::new(0),
            device: AtomicU64::new(0),
            inode: AtomicU64::new(0),
            reserve_pause: AtomicU32::new(0),
            _unused: [0; 3],
            offset: Offset::new(),
            read_ahead: ReadAhead::new(),
            extended_to: AtomicU64::new(0),
        }
    }

    /// Returns the flags of the entry's present description.
    #[inline(always)]
    pub fn flags(&self) -> u32 {
        self.flags.load(Ordering::Relaxed)
    }

    fn set(&self, facts: &Facts, identity: Identity) {
        self.session.store(facts.session as u32, Ordering::Relaxed);
        self.slot.store(facts.slot, Ordering::Relaxed);
        self.slot_generation
            .store(facts.slot_generation, Ordering::Relaxed);
        self.object.store(facts.object, Ordering::Relaxed);
        self.device.store(identity.device, Ordering::Relaxed);
        self.inode.store(identity.inode, Ordering::Relaxed);
        self.flags.store(facts.flags, Ordering::Relaxed);
    }

    /// Drops a reference. The last one frees the description.
    fn release(&self) {
        let mut references = self.references.load(Ordering::Relaxed);
        loop {
            let next = match references {
                0 | DYING => return,
                1 => DYING,
                n => n - 1,
            };
            match self.references.compare_exchange(
                references,
                next,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) if next == DYING => break,
                Ok(_) => return,
                Err(now) => references = now,
            }
        }
        // An even generation belongs to no description.
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.references.store(0, Ordering::Release);
    }

    /// Returns whether exactly one fd refers to it.
    pub fn has_one_fd(&self) -> bool {
        self.references.load(Ordering::Relaxed) == 1
    }

    /// Adds a reference if the description still has this generation.
    fn retain(&self, generation: u32) -> bool {
        let more = |n: u32| (n != 0 && n != DYING).then_some(n + 1);
        let counted = self
            .references
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, more)
            .is_ok();
        if counted && self.generation.load(Ordering::Acquire) != generation {
            self.release();
            return false;
        }
        counted
    }
}

impl Open {
    /// Returns the description's entry.
    #[inline]
    pub fn description(&self) -> &'static Description {
        &TABLE[self.index as usize % DESCRIPTIONS]
    }

    /// Returns the tag that tells the description's offset from those of others in the same entry.
    #[inline]
    pub fn tag(&self) -> u16 {
        self.generation as u16
    }

    /// Returns the facts; `None` when the description is gone.
    #[inline]
    pub fn facts(&self) -> Option<Facts> {
        let d = self.description();
        let facts = Facts {
            session: d.session.load(Ordering::Relaxed) as usize,
            slot: d.slot.load(Ordering::Relaxed),
            slot_generation: d.slot_generation.load(Ordering::Relaxed),
            object: d.object.load(Ordering::Relaxed),
            flags: d.flags.load(Ordering::Relaxed),
        };
        self.is_still().then_some(facts)
    }

    /// Returns the flags; `None` when the description is gone.
    pub fn flags(&self) -> Option<u32> {
        let flags = self.description().flags();
        self.is_still().then_some(flags)
    }

    /// Returns the file's identity; `None` when the description is gone.
    pub fn identity(&self) -> Option<Identity> {
        let d = self.description();
        let identity = Identity {
            device: d.device.load(Ordering::Relaxed),
            inode: d.inode.load(Ordering::Relaxed),
        };
        self.is_still().then_some(identity)
    }

    /// Returns whether the values loaded before belong to this description.
    #[inline]
    fn is_still(&self) -> bool {
        // The generation changes before any other field of a description that is gone.
        fence(Ordering::Acquire);
        self.description().generation.load(Ordering::Relaxed) == self.generation
    }

    /// Stores another slot, or the same slot reached through another session. A thread that sees half of the change finds a slot
    /// that is not the object's, and then also calls this.
    pub fn set_slot(&self, facts: &Facts) {
        let d = self.description();
        d.session.store(facts.session as u32, Ordering::Relaxed);
        d.slot.store(facts.slot, Ordering::Relaxed);
        d.slot_generation
            .store(facts.slot_generation, Ordering::Relaxed);
    }

    /// Adds flags.
    pub fn add_flags(&self, flags: u32) {
        self.description().flags.fetch_or(flags, Ordering::AcqRel);
    }

    /// Sets and clears the flags that fcntl(2) can change.
    pub fn change_flags(&self, set: u32, clear: u32) {
        let change = |flags: u32| Some(flags & !clear | set);
        let flags = &self.description().flags;
        let _ = flags.fetch_update(Ordering::AcqRel, Ordering::Relaxed, change);
    }

    /// Decodes the word of an fd that has a description.
    #[inline(always)]
    pub fn of_word(fd: i32, word: u64) -> Open {
        Open {
            fd,
            index: (word >> 32) as u32 % DESCRIPTIONS as u32,
            generation: word as u32,
        }
    }

    fn word(&self) -> u64 {
        DESCRIBED << KIND_SHIFT | u64::from(self.index) << 32 | u64::from(self.generation)
    }
}

#[inline]
fn word_of(fd: i32) -> Option<&'static AtomicU64> {
    FD_WORDS.get(usize::try_from(fd).ok()?)
}

/// Returns the word of an fd that has a description. It is never 0, and changes whenever the fd changes its meaning.
#[inline(always)]
pub fn described(fd: i32) -> Option<u64> {
    const _: () = assert!(DESCRIBED << KIND_SHIFT == 1 << 63 && KERNEL << KIND_SHIFT < 1 << 63);
    let word = word_of(fd)?.load(Ordering::Acquire);
    (word >> 63 != 0).then_some(word)
}

/// Returns the state of an fd; `None` for one beyond the table.
#[inline]
pub fn state(fd: i32) -> Option<FdState> {
    let word = word_of(fd)?.load(Ordering::Acquire);
    Some(match word >> KIND_SHIFT {
        KERNEL if word & CLOSING != 0 => being_closed(fd, word),
        KERNEL => FdState::Kernel,
        DESCRIBED => FdState::Described(Open::of_word(fd, word)),
        _ => FdState::Unknown {
            opened: word & OPENED != 0,
            word,
        },
    })
}

/// Returns the meaning of an fd that another thread is closing. Asks the kernel, because the fd may be closed or reused already.
#[cold]
fn being_closed(fd: i32, word: u64) -> FdState {
    let open = Open::of_word(fd, word);
    let now = files::identify(fd).ok().map(|stat| Identity::from(&stat));
    match now.is_some() && now == open.identity() {
        true => FdState::Described(open),
        false => FdState::Kernel,
    }
}

/// Returns whether the word refers to a description.
fn has_description(word: u64) -> bool {
    match word >> KIND_SHIFT {
        DESCRIBED => true,
        KERNEL => word & CLOSING != 0,
        _ => false,
    }
}

/// Returns whether the word of an unknown fd marks a regular file of a mount.
pub fn is_ours(word: u64) -> bool {
    word & OURS != 0
}

/// Returns whether a wish was left for an unknown fd.
pub fn is_wished(word: u64) -> bool {
    word & WISHED != 0
}

/// Returns whether two words of an unknown fd belong to the same open file.
pub fn is_same_unknown(one: u64, other: u64) -> bool {
    one >> KIND_SHIFT == UNKNOWN && other >> KIND_SHIFT == UNKNOWN && one as u32 == other as u32
}

/// Returns the cost of an unknown fd's ordinary calls so far, in units.
pub fn units(word: u64) -> u32 {
    (word >> UNITS_SHIFT) as u32 & UNITS_MAX
}

/// Returns whether calls are in progress that move the kernel's offset.
pub fn is_in_use(word: u64) -> bool {
    word >> IN_USE_SHIFT & IN_USE_MAX != 0
}

/// Marks an unknown fd as a regular file of a mount, if its word is still `seen`.
pub fn note_ours(fd: i32, seen: u64) {
    if let Some(word) = word_of(fd) {
        FDS_END.fetch_max(fd as u32 + 1, Ordering::Relaxed);
        let _ = word.compare_exchange(seen, seen | OURS, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Counts an ordinary call that begins on an unknown fd. `moves`: the call moves the kernel's offset. Returns false
/// when the word has changed since `seen`. `wishes`: a wish will be left for the call.
pub fn count_call(fd: i32, seen: u64, more: u32, moves: bool, wishes: bool) -> bool {
    let Some(word) = word_of(fd) else {
        return false;
    };
    if moves && seen >> IN_USE_SHIFT & IN_USE_MAX == IN_USE_MAX {
        // The counter is full.
        unopened(fd);
        return false;
    }
    // Always changes the word, so that a thread that has asked the kernel for the offset notices the call.
    let wished = if wishes { WISHED } else { 0 };
    let new = (with_units(seen, more) | wished) + (u64::from(moves) << IN_USE_SHIFT);
    let counted = word.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Relaxed);
    counted.is_ok()
}

/// Returns the word of an unknown fd with `more` units added. Units only grow, so a later call never restores an earlier word.
/// When the units reach their maximum, the fd counts as known to other processes: its offset stays in the kernel.
fn with_units(word: u64, more: u32) -> u64 {
    let word = match units(word) {
        UNITS_MAX if more > 0 => word & !OPENED,
        _ => word,
    };
    let units = u64::from(units(word).saturating_add(more).min(UNITS_MAX));
    word & !(u64::from(UNITS_MAX) << UNITS_SHIFT) | units << UNITS_SHIFT
}

/// Counts the end of a call that moved the offset. `then` is the fd's word that `count_call` got. `more`: units that the call
/// cost beyond those that `count_call` added.
pub fn call_ended(fd: i32, then: u64, more: u32) {
    let Some(word) = word_of(fd) else { return };
    let less = |now: u64| {
        (is_same_unknown(now, then) && is_in_use(now))
            .then(|| with_units(now, more) - (1 << IN_USE_SHIFT))
    };
    let _ = word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, less);
}

fn replace(fd: i32, new: u64) {
    let Some(word) = word_of(fd) else { return };
    FDS_END.fetch_max(fd as u32 + 1, Ordering::Relaxed);
    let old = word.swap(new, Ordering::AcqRel);
    if has_description(old) {
        TABLE[(old >> 32) as usize % DESCRIPTIONS].release();
    }
}

/// Forgets all facts about an fd.
pub fn forget(fd: i32) {
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    replace(fd, UNKNOWN << KIND_SHIFT | u64::from(serial));
}

/// Marks an fd whose description has other fds as about to be closed. Until `has_closed`, a call uses the description if the
/// kernel says that the fd still refers to the file. An ordinary call would use a wrong offset, because the library keeps it.
/// Returns the word for `has_closed`. Returns `None` when the fd has no description, or is its only fd.
pub fn begin_close(fd: i32) -> Option<u64> {
    let word = word_of(fd)?;
    let seen = word.load(Ordering::Acquire);
    let is_shared = || !Open::of_word(fd, seen).description().has_one_fd();
    if seen >> KIND_SHIFT != DESCRIBED || !is_shared() {
        return None;
    }
    let closing = KERNEL << KIND_SHIFT | CLOSING | seen & !(3 << KIND_SHIFT);
    word.compare_exchange(seen, closing, Ordering::AcqRel, Ordering::Relaxed)
        .ok()
        .map(|_| closing)
}

/// Forgets an fd that was closed, after `begin_close` returned `closing`. Does nothing if the fd has a new meaning since.
pub fn has_closed(fd: i32, closing: u64) {
    let Some(word) = word_of(fd) else { return };
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let new = UNKNOWN << KIND_SHIFT | u64::from(serial);
    if word
        .compare_exchange(closing, new, Ordering::AcqRel, Ordering::Relaxed)
        .is_ok()
    {
        Open::of_word(fd, closing).description().release();
    }
}

/// Notes that this process has just opened the fd.
pub fn opened(fd: i32) {
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    replace(fd, UNKNOWN << KIND_SHIFT | OPENED | u64::from(serial));
}

/// Forgets all fds from `first` to `last`.
pub fn forget_range(first: u32, last: u32) {
    for fd in first..FDS_END.load(Ordering::Relaxed).min(last.saturating_add(1)) {
        forget(fd as i32);
    }
}

/// Puts the fd on the kernel path, if its word is still `seen`.
pub fn set_kernel(fd: i32, seen: u64) {
    if let Some(word) = word_of(fd) {
        FDS_END.fetch_max(fd as u32 + 1, Ordering::Relaxed);
        let new = KERNEL << KIND_SHIFT | seen & u64::from(u32::MAX);
        let _ = word.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Gives the fd a description, if its word is still `seen`. `offset`: the file offset, unless it is in the kernel. Returns `None`
/// when the word has changed, or no description is free.
pub fn describe(
    fd: i32,
    seen: u64,
    facts: &Facts,
    identity: Identity,
    offset: Option<u64>,
) -> Option<Open> {
    let word = word_of(fd)?;
    if offset.is_some() && is_in_use(seen) {
        return None;
    }
    for probe in 0..PROBES {
        let index = (fd as usize + probe) % DESCRIPTIONS;
        let d = &TABLE[index];
        let free = d
            .references
            .compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed);
        if free.is_err() {
            continue;
        }
        // The entry's generation is even, and no other thread uses the entry.
        fence(Ordering::Release);
        d.set(facts, identity);
        d.read_ahead.reset();
        d.extended_to.store(NEVER, Ordering::Relaxed);
        d.reserve_pause.store(0, Ordering::Relaxed);
        let generation = d.generation.load(Ordering::Relaxed).wrapping_add(1);
        d.offset.begin(generation as u16, offset);
        d.generation.store(generation, Ordering::Release);
        let open = Open {
            fd,
            index: index as u32,
            generation,
        };
        FDS_END.fetch_max(fd as u32 + 1, Ordering::Relaxed);
        if word
            .compare_exchange(seen, open.word(), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
        {
            return Some(open);
        }
        d.release();
        return None;
    }
    None
}

/// Notes that `new` is a duplicate of `old`, made by dup(2) or a similar call. The caller describes an unknown `old` first:
/// otherwise the two fds would have two offsets.
pub fn duplicated(old: i32, new: i32) {
    if old == new {
        return;
    }
    match state(old) {
        Some(FdState::Described(open)) if open.description().retain(open.generation) => {
            replace(new, open.word());
        }
        Some(FdState::Kernel) => replace(new, KERNEL << KIND_SHIFT),
        _ => forget(new),
    }
}

/// Forgets an fd that was closed and reused by calls that the library did not see, if the fd still is `open`.
pub fn disown(open: &Open) {
    let Some(word) = word_of(open.fd) else { return };
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let new = UNKNOWN << KIND_SHIFT | u64::from(serial);
    if word
        .compare_exchange(open.word(), new, Ordering::AcqRel, Ordering::Relaxed)
        .is_ok()
    {
        open.description().release();
    }
}

/// Notes that an fd that this process opened is known to other processes now, so its offset stays in the kernel.
pub fn unopened(fd: i32) {
    if let Some(word) = word_of(fd) {
        let clear = |word: u64| {
            (word >> KIND_SHIFT == UNKNOWN && word & OPENED != 0).then_some(word & !OPENED)
        };
        let _ = word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, clear);
    }
}

/// Returns all fds that were ever used.
pub fn fds() -> impl Iterator<Item = i32> {
    0..FDS_END.load(Ordering::Relaxed) as i32
}
