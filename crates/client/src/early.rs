//! The first calls on an fd, which go through the kernel. A program that makes only these does not pay for what makes later
//! calls fast: a slot costs a request, a file's first writer costs another, and attaching to the daemon costs 0.3 ms.
//!
//! Ordinary calls move the kernel's offset. When the fd gets a description, the library takes the offset over from the kernel.
//! A call in progress at that moment would still move the kernel's offset afterwards. So the fd's word counts the calls in
//! progress. A description replaces only a word with none in progress that has not changed since the offset was read.

use std::sync::atomic::{AtomicU32, Ordering};

use jericho_sys::files;

use crate::description::{self, Number};
use crate::fd::Result;
use crate::{devices, session};

/// A call costs one unit, and one more for each of these bytes that it writes or has read.
const BYTES_OF_UNIT: usize = 64 << 10;
/// An fd gets a slot when its calls cost more units than this.
const UNITS_OF_NUMBER: u32 = 4;
/// A process attaches to the daemon when its calls on all mounts cost more units than this.
const UNITS_OF_PROCESS: u32 = 16;
/// Number of attempts to describe an fd before its offset stays in the kernel.
const TRIES: u32 = 3;

/// Cost of all ordinary calls of this process, in units.
static UNITS: AtomicU32 = AtomicU32::new(0);

/// How a call is made.
pub(crate) enum First {
    /// Inline, as described; looks the fd up first if it is unknown.
    Inline,
    /// Through the kernel.
    Ordinary,
    /// Through the kernel, which moves its own offset; the value must live until the call has ended.
    Counted(Counted),
}

/// A call in progress that may move the kernel's offset.
pub(crate) struct Counted {
    fd: i32,
    word: u64,
    more: u32,
}

impl Counted {
    /// Adds the bytes that a read returned. The size of its buffer does not tell them in advance.
    pub fn has_read(mut self, result: Result<usize>) -> Result<usize> {
        self.more = units_of(result.unwrap_or(0));
        UNITS.fetch_add(self.more.min(UNITS_OF_PROCESS), Ordering::Relaxed);
        result
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        description::call_ended(self.fd, self.word, self.more);
    }
}

fn units_of(bytes: usize) -> u32 {
    u32::try_from(bytes / BYTES_OF_UNIT).unwrap_or(u32::MAX)
}

/// Decides how to make a call that writes `written` bytes (0 for other calls). `moves`: the call uses and moves the
/// offset.
#[inline]
pub(crate) fn begin(fd: i32, written: usize, moves: bool) -> First {
    match description::number(fd) {
        Some(Number::Unknown { .. }) => begin_anew(fd, written, moves),
        _ => First::Inline,
    }
}

#[cold]
fn begin_anew(fd: i32, written: usize, moves: bool) -> First {
    let units = units_of(written).saturating_add(1);
    loop {
        let Some(Number::Unknown { opened, word }) = description::number(fd) else {
            return First::Inline;
        };
        if !description::is_ours(word) {
            match files::identify(fd) {
                Ok(file) if !devices::is_ours(file.device) => description::set_kernel(fd, word),
                Ok(file) if file.is_regular => description::note_ours(fd, word),
                // The inline path reports the error.
                _ => return First::Inline,
            }
            continue;
        }
        let seen = description::units(word);
        if is_worth(seen.saturating_add(units)) && !description::is_in_use(word) {
            return First::Inline;
        }
        let counted = moves && opened;
        if description::count_call(fd, word, units, counted) {
            UNITS.fetch_add(units.min(UNITS_OF_PROCESS), Ordering::Relaxed);
            return match counted {
                true => First::Counted(Counted { fd, word, more: 0 }),
                false => First::Ordinary,
            };
        }
    }
}

fn is_worth(units: u32) -> bool {
    #[cfg(test)]
    if !tests::ARE_COUNTED.get() {
        return true;
    }
    units > UNITS_OF_NUMBER
        && (session::all().next().is_some()
            || UNITS.load(Ordering::Relaxed).saturating_add(units) > UNITS_OF_PROCESS)
}

/// Returns whether to try again to describe an fd, because calls of other threads interfered. After several attempts the
/// offset stays in the kernel.
pub(crate) fn is_undecided(fd: i32, tries: &mut u32) -> bool {
    if !matches!(
        description::number(fd),
        Some(Number::Unknown { opened: true, .. })
    ) {
        return false;
    }
    *tries += 1;
    if *tries < TRIES {
        return true;
    }
    description::unopened(fd);
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
