//! Changes of an fd's meaning: open, close, dup, changed flags, mmap.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use jericho_shm::{Call, Refusal};
use jericho_sys::errno;
use jericho_sys::files::{self, Result};

use super::grant::flags_of;
use super::kernel_path::{give_up, move_offset_to_kernel, to_kernel};
use super::state::{described, fast_state};
use super::way::by_kernel;
use crate::descriptors::{self, APPEND, FdState, SYNC};
use crate::migration;
use crate::session::report::Reason;
use crate::session::{ask, devices};
use crate::thread::{self, Doing};

/// This process has created a thread.
static THREADS: AtomicBool = AtomicBool::new(false);

/// Notes that this process creates a thread.
pub fn has_threads() {
    THREADS.store(true, Relaxed);
}

/// Forgets an fd that is about to be closed. Until it is closed, other threads make ordinary calls on it, so this moves the
/// offset to the kernel. If the description has other fds, the offset stays here for them, and `Closing::has_closed` forgets the
/// fd.
pub fn closing(fd: i32) -> Closing {
    let word = match THREADS.load(Relaxed) {
        true => descriptors::begin_close(fd),
        false => None,
    };
    if word.is_some() {
        migration::tick();
    } else {
        move_offset_for_close(fd);
        forget(fd);
    }
    Closing { fd, word }
}

/// An fd that is being closed. A thread that is cancelled in close(2) drops it without `has_closed`; later calls on the fd then
/// ask the kernel for its meaning.
#[must_use]
#[derive(Clone, Copy, Debug)]
pub struct Closing {
    fd: i32,
    word: Option<u64>,
}

impl Closing {
    /// Notes that the fd was closed.
    #[inline]
    pub fn has_closed(self) {
        if let Some(word) = self.word {
            descriptors::has_closed(self.fd, word);
        }
    }
}

/// Forgets all fds from `first` to `last`. With threads, first moves their offsets to the kernel, also offsets that other fds
/// share.
pub fn closing_range(first: u32, last: u32) {
    if THREADS.load(Relaxed) {
        let closed = |fd: &i32| (first..=last).contains(&(*fd as u32));
        descriptors::fds()
            .filter(closed)
            .for_each(move_offset_for_close);
    }
    forget_range(first, last);
}

fn move_offset_for_close(fd: i32) {
    if THREADS.load(Relaxed)
        && let Some(FdState::Described(open)) = descriptors::state(fd)
    {
        move_offset_to_kernel(&open);
    }
}

/// Notes a successful open(2) of this process.
pub fn opened(fd: i32) {
    migration::tick();
    descriptors::opened(fd);
}

/// Forgets an fd that has changed its meaning, or is about to be closed.
pub fn forget(fd: i32) {
    migration::tick();
    descriptors::forget(fd);
}

/// Forgets all fds from `first` to `last`.
pub fn forget_range(first: u32, last: u32) {
    descriptors::forget_range(first, last);
}

/// Notes that `new` is a duplicate of `old`: after dup(2), dup2(2), dup3(2) or F_DUPFD.
pub fn duplicated(old: i32, new: i32) {
    if let Some(state @ FdState::Unknown { opened: true, .. }) = descriptors::state(old) {
        // Describes `old` now, so that both fds share one offset. If that fails, the offset stays in the kernel.
        let known = thread::enter(Doing::Reading, |_| described(old, state));
        if known.flatten().is_none() {
            descriptors::unopened(old);
        }
    }
    descriptors::duplicated(old, new);
}

/// Reads an fd's flags again after F_SETFL.
pub fn flags_changed(fd: i32) {
    let Some(FdState::Described(open)) = descriptors::state(fd) else {
        // F_SETFL may have cleared O_DIRECT, for example.
        if fast_state(fd).is_none() {
            descriptors::forget(fd);
        }
        return;
    };
    match files::mode(fd) {
        Ok(mode) if mode.direct => give_up(&open, Reason::Direct),
        Ok(mode) => {
            let set = flags_of(&mode) & (APPEND | SYNC);
            open.change_flags(set, APPEND | SYNC);
        }
        Err(_) => {}
    }
}

/// Prepares an fd for mmap. The daemon makes the kernel's pages and its own the same. Fails with an errno when the daemon cannot:
/// the mapping would show other bytes than a read.
pub fn mapped(fd: i32) -> Result<()> {
    let ours = files::fstat(fd).is_ok_and(|stat| stat.is_regular && devices::is_ours(stat.device));
    if !ours {
        return Ok(());
    }
    to_kernel(fd, Reason::Mapped);
    let _: Option<()> = by_kernel(fd, Some(0), usize::MAX, false);
    match ask(fd, Call::Mapped) {
        Ok(answer) if answer.status == 0 => Ok(()),
        // Without a fast path no program writes inline, so the kernel's pages are right.
        Ok(answer) if answer.status == Refusal::Off as u32 => Ok(()),
        Err(errno::ENOTTY) => Ok(()),
        Ok(_) => Err(errno::EBUSY),
        Err(errno) => Err(errno),
    }
}
