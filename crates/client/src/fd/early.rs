//! The first calls on an fd, which go through the kernel. A program that makes only these calls does not pay for fast later
//! calls: for a slot, for the extra step of a file's first writer, and for attaching to the daemon, which costs 0.3 ms.
//!
//! The call that makes the fd worth a slot goes through the kernel, too, and asks for the slot at the same time (`wish`). If the
//! wish brings no answer, the next call makes a request of its own.
//!
//! The first call does so already if the fd's number has had two files in turn that were worth a slot (`descriptors::past`).
//!
//! Ordinary calls move the kernel's offset. When the fd gets a description, the library takes the offset over from the kernel. A
//! call in progress at that moment would still move the kernel's offset afterwards. So the fd's word counts the calls in
//! progress. A description replaces a word only if the word shows no call in progress and has not changed since the library read
//! the offset.

use std::sync::atomic::{AtomicU32, Ordering};

use jericho_sys::files;

use super::kernel_path::errno_after;
use super::reserve::WrittenTo;
use super::wish::FdWish;
use crate::descriptors::{self, FdState};
use crate::session::{self, devices};

/// A call costs one unit, and one more for each 64 KiB that it writes or has read.
const BYTES_OF_UNIT: usize = 64 << 10;
/// An fd gets a slot when its calls cost more units than this.
const UNITS_OF_FD: u32 = 4;
/// A process attaches to the daemon when its calls on all mounts cost more units than this.
const UNITS_OF_PROCESS: u32 = 16;
/// A seek gives an fd a slot only when the fd's calls have cost more units than this.
const SEEK_UNITS_MAX: u32 = 2 * UNITS_OF_FD;
/// Number of attempts to describe an fd before its offset stays in the kernel.
const TRIES: u32 = 3;

/// Cost of all ordinary calls of this process, in units.
static UNITS: AtomicU32 = AtomicU32::new(0);

/// The kind of a call.
#[derive(Clone, Copy)]
pub(super) enum CallKind {
    /// Reads.
    Read,
    /// Writes this number of bytes.
    Write(usize),
    /// Moves the offset only.
    Seek,
}

impl CallKind {
    fn units(self) -> u32 {
        let written = match self {
            CallKind::Write(bytes) => units_of(bytes),
            CallKind::Read | CallKind::Seek => 0,
        };
        written.saturating_add(1)
    }
}

/// The way to make a call.
pub(super) enum CallPath {
    /// Inline. The call looks the fd up first if it is unknown.
    Inline,
    /// Through the kernel.
    Ordinary,
    /// Through the kernel, by the library itself. The caller keeps the value until the call has ended.
    Counted(Counted),
}

/// A call in progress that may move the kernel's offset, or has left a wish.
pub(super) struct Counted {
    fd: i32,
    word: u64,
    more: u32,
    /// The call moves the kernel's offset.
    moves: bool,
    wish: Option<FdWish>,
    written: WrittenTo,
}

impl Counted {
    /// Adds the bytes that a read returned: the size of its buffer does not tell them in advance. Returns the read's result as
    /// the program sees it.
    pub fn has_read(mut self, result: files::Result<usize>) -> files::Result<usize> {
        self.more = units_of(result.unwrap_or(0));
        UNITS.fetch_add(self.more.min(UNITS_OF_PROCESS), Ordering::Relaxed);
        self.has_ended(result)
    }

    /// Notes the end of a write. `at`: its beginning, unless that was the fd's offset. Returns the write's result as the program
    /// sees it.
    pub fn has_written(
        mut self,
        result: files::Result<usize>,
        at: Option<u64>,
    ) -> files::Result<usize> {
        self.written = match (result, at) {
            (Err(_), _) => WrittenTo::Nothing,
            (Ok(_), None) => WrittenTo::Here,
            (Ok(n), Some(at)) => WrittenTo::Offset(at + n as u64),
        };
        self.has_ended(result)
    }

    fn has_ended(self, result: files::Result<usize>) -> files::Result<usize> {
        let fd = self.fd;
        drop(self);
        result.map_err(|errno| errno_after(fd, errno))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if self.moves {
            descriptors::call_ended(self.fd, self.word, self.more);
        }
        if let Some(wish) = &self.wish {
            wish.end(self.fd, self.word, self.written);
        }
    }
}

fn units_of(bytes: usize) -> u32 {
    u32::try_from(bytes / BYTES_OF_UNIT).unwrap_or(u32::MAX)
}

/// Decides how to make a call. `moves`: the call uses and moves the offset.
#[inline]
pub(super) fn begin(fd: i32, access: CallKind, moves: bool) -> CallPath {
    match descriptors::state(fd) {
        Some(FdState::Unknown { .. }) => begin_unknown(fd, access, moves),
        _ => CallPath::Inline,
    }
}

#[cold]
fn begin_unknown(fd: i32, access: CallKind, moves: bool) -> CallPath {
    let units = access.units();
    loop {
        let Some(FdState::Unknown { opened, word }) = descriptors::state(fd) else {
            return CallPath::Inline;
        };
        if !descriptors::is_ours(word) {
            match files::identify(fd) {
                Ok(file) if !devices::is_ours(file.device) => descriptors::set_kernel(fd, word),
                Ok(file) if file.is_regular => descriptors::note_ours(fd, word),
                // The inline path reports the error.
                _ => return CallPath::Inline,
            }
            continue;
        }
        let seen = descriptors::units(word);
        let counted = moves && opened;
        let mut wish = None;
        // The offset of an fd that this process has not opened stays in the kernel. Calls that move it never go inline, so
        // they leave no wish.
        let can_go_inline = counted || !moves;
        let is_promising = can_go_inline && descriptors::is_promising(word);
        if is_worth(seen.saturating_add(units), is_promising) && !descriptors::is_in_use(word) {
            // A file that is written once, in a long call, proves nothing.
            if seen > 0 && can_go_inline && !is_promising {
                descriptors::proved(fd);
            }
            // Many files are written once, so the first write reserves nothing, unless the file is promising.
            let goes_on = (seen > 0 || is_promising) && matches!(access, CallKind::Write(_));
            let may_wish = can_go_inline && !descriptors::is_wished(word);
            // A seek makes no request, so the daemon cannot answer its wish. The next read or write leaves one.
            let is_seek = matches!(access, CallKind::Seek);
            if !(is_seek && may_wish && seen <= SEEK_UNITS_MAX) {
                wish = (may_wish && !is_seek)
                    .then(|| FdWish::new(fd, goes_on))
                    .flatten();
                if wish.is_none() {
                    return CallPath::Inline;
                }
            }
        }
        if descriptors::count_call(fd, word, units, counted, wish.is_some()) {
            UNITS.fetch_add(units.min(UNITS_OF_PROCESS), Ordering::Relaxed);
            if !counted && wish.is_none() {
                return CallPath::Ordinary;
            }
            if let Some(wish) = &wish {
                wish.leave();
            }
            return CallPath::Counted(Counted {
                fd,
                word,
                more: 0,
                moves: counted,
                wish,
                written: WrittenTo::Nothing,
            });
        }
    }
}

fn is_worth(units: u32, is_promising: bool) -> bool {
    #[cfg(test)]
    if !tests::ARE_COUNTED.get() {
        return true;
    }
    (is_promising || units > UNITS_OF_FD)
        && (session::all().next().is_some()
            || UNITS.load(Ordering::Relaxed).saturating_add(units) > UNITS_OF_PROCESS)
}

/// Decides how to make a call with an offset of its own. `None`: the caller makes the ordinary call, which is counted already.
/// `Some(Some)`: the library makes the ordinary call. `Some(None)`: the call may go inline.
#[inline]
pub(super) fn ordinary(fd: i32, access: CallKind) -> Option<Option<Counted>> {
    match begin(fd, access, false) {
        CallPath::Inline => Some(None),
        CallPath::Counted(call) => Some(Some(call)),
        CallPath::Ordinary => None,
    }
}

/// Returns whether to try again to describe an fd, because calls of other threads interfered. After several attempts the
/// offset stays in the kernel.
pub(super) fn is_undecided(fd: i32, tries: &mut u32) -> bool {
    if !matches!(
        descriptors::state(fd),
        Some(FdState::Unknown { opened: true, .. })
    ) {
        return false;
    }
    *tries += 1;
    if *tries < TRIES {
        return true;
    }
    descriptors::unopened(fd);
    false
}

#[cfg(test)]
pub mod tests {
    use std::cell::Cell;

    thread_local! {
        /// Unless a test sets this, every fd gets a slot at its first call, as most tests need.
        pub static ARE_COUNTED: Cell<bool> = const { Cell::new(false) };
    }

    /// Behaves as if this process had made many calls.
    pub fn worth_attaching() {
        super::UNITS.store(super::UNITS_OF_PROCESS, super::Ordering::Relaxed);
    }
}
