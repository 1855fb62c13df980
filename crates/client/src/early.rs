//! The first calls on a number, which are made in the ordinary way. A program that makes no more than these pays nothing for
//! what would make later ones fast: a slot costs a request, a file's first writer another, and attaching to the daemon 0.3 ms.
//!
//! Ordinary calls move the kernel's offset. It is taken from the kernel when the number gets a description, and a call that is
//! under way at that moment would move it afterwards. So calls under way are counted in the number's word, and a
//! description only replaces a word that counts none and is the one that was there before the offset was asked for.

use std::sync::atomic::{AtomicU32, Ordering};

use jericho_sys::files;

use crate::description::{self, Number};
use crate::fd::Result;
use crate::{devices, session};

/// A call counts one, and one more for each of these bytes: that are to be written, or that were read.
const BYTES_OF_UNIT: usize = 64 << 10;
/// A number is worth a slot when its calls come to more than this.
const UNITS_OF_NUMBER: u32 = 4;
/// A process is worth attaching when its calls on all mounts come to more than this.
const UNITS_OF_PROCESS: u32 = 16;
/// Times that a number is found out about before its offset stays in the kernel.
const TRIES: u32 = 3;

/// What all calls of this process come to that were made in the ordinary way.
static UNITS: AtomicU32 = AtomicU32::new(0);

/// How a call is made.
pub(crate) enum First {
    /// As is known of the number, or found out now.
    Inline,
    /// By the ordinary call.
    Ordinary,
    /// By the kernel's call at its own offset, while this lives.
    Counted(Counted),
}

/// A call under way that may move the kernel's offset.
pub(crate) struct Counted {
    fd: i32,
    word: u64,
    more: u32,
}

impl Counted {
    /// A read gave so many bytes, which its caller's room does not tell before.
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

/// Decides how a call is made that is to write so many bytes (0: of another kind). `moves`: it uses and moves the offset.
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
                // The call that goes inline finds out why not.
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

/// After a number was found out about without a result: whether to begin again, since calls of other threads were in the way.
/// After some times its offset stays in the kernel.
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
        /// Else each number is worth a slot at its first call, as most tests want it.
        pub static ARE_COUNTED: Cell<bool> = const { Cell::new(false) };
    }

    /// As if this process had made many calls.
    pub fn worth_attaching() {
        super::UNITS.store(super::UNITS_OF_PROCESS, super::Ordering::Relaxed);
    }
}
