//! The fds under which the program knows its open files: one word each, in a static table as in `description`.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use jericho_sys::files;

use super::description::{Facts, FileIdentity, OpenFd};
use super::past;
use super::word::{
    CLOSING, DESCRIBED, FDS, IN_USE_MAX, IN_USE_SHIFT, KERNEL, KIND_SHIFT, OPENED, OURS, PROMISING,
    UNKNOWN, WISHED, has_description, is_in_use, is_same_unknown, with_units,
};

static FD_WORDS: [AtomicU64; FDS] = [const { AtomicU64::new(0) }; FDS];
/// Changes whenever an fd is forgotten, so that facts found out before are not stored afterwards.
static SERIAL: AtomicU32 = AtomicU32::new(1);
/// One more than the largest fd ever seen.
static FDS_END: AtomicU32 = AtomicU32::new(0);

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
    Described(OpenFd),
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
        DESCRIBED => FdState::Described(OpenFd::of_word(fd, word)),
        _ => FdState::Unknown {
            opened: word & OPENED != 0,
            word,
        },
    })
}

/// Returns the meaning of an fd that another thread is closing. Asks the kernel, because the fd may be closed or reused already.
#[cold]
fn being_closed(fd: i32, word: u64) -> FdState {
    let open = OpenFd::of_word(fd, word);
    let now = files::identify(fd)
        .ok()
        .map(|stat| FileIdentity::from(&stat));
    match now.is_some() && now == open.identity() {
        true => FdState::Described(open),
        false => FdState::Kernel,
    }
}

/// Marks an unknown fd as a regular file of a mount, if its word is still `seen`.
pub fn note_ours(fd: i32, seen: u64) {
    if let Some(word) = word_of(fd) {
        FDS_END.fetch_max(fd as u32 + 1, Ordering::Relaxed);
        let noted = word.compare_exchange(seen, seen | OURS, Ordering::AcqRel, Ordering::Relaxed);
        if noted.is_ok() && past::begins(fd) {
            let promise = |word: u64| is_same_unknown(word, seen).then_some(word | PROMISING);
            let _ = word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, promise);
        }
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
    // Changes the word of every fd with `OPENED`, so that a thread that has asked the kernel for the offset notices the call.
    let wished = if wishes { WISHED } else { 0 };
    let new = (with_units(seen, more) | wished) + (u64::from(moves) << IN_USE_SHIFT);
    let counted = word.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Relaxed);
    counted.is_ok()
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
        OpenFd::of_word(fd, old).description().release();
    }
}

/// Forgets all facts about an fd.
pub fn forget(fd: i32) {
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    replace(fd, UNKNOWN << KIND_SHIFT | u64::from(serial));
}

/// Marks an fd as about to be closed, if its description has other fds. Until `has_closed`, a call uses the description if the
/// kernel says that the fd still refers to the file. An ordinary call would use a wrong offset, because the library keeps it.
/// Returns the word for `has_closed`. Returns `None` when the fd has no description, or is the description's only fd.
pub fn begin_close(fd: i32) -> Option<u64> {
    let word = word_of(fd)?;
    let seen = word.load(Ordering::Acquire);
    let is_shared = || !OpenFd::of_word(fd, seen).description().has_one_fd();
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
        OpenFd::of_word(fd, closing).description().release();
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
    identity: FileIdentity,
    offset: Option<u64>,
) -> Option<OpenFd> {
    let word = word_of(fd)?;
    if offset.is_some() && is_in_use(seen) {
        return None;
    }
    let open = OpenFd::new(fd, facts, identity, offset)?;
    FDS_END.fetch_max(fd as u32 + 1, Ordering::Relaxed);
    match word.compare_exchange(seen, open.word(), Ordering::AcqRel, Ordering::Relaxed) {
        Ok(_) => Some(open),
        Err(_) => {
            open.description().release();
            None
        }
    }
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
pub fn disown(open: &OpenFd) {
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
