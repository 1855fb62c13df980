//! Which numbers a `FILE` of the C library may be using.
//!
//! What stdio does to its descriptor never passes our hooks, and it uses the kernel's offset. A
//! program that redirects its output opens a log, makes it number 1 with dup2, and prints: so
//! whatever comes to sit at such a number has to have its offset in the kernel.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Numbers that are watched; the client serves none above.
const NUMBERS: usize = 65536;

/// A bit for each number; from the start stdin, stdout and stderr.
static USED: [AtomicU64; NUMBERS / 64] = {
    let mut used = [const { AtomicU64::new(0) }; NUMBERS / 64];
    used[0] = AtomicU64::new(0b111);
    used
};

fn word(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(fd).ok()?;
    Some((USED.get(number / 64)?, 1 << (number % 64)))
}

/// Whether a `FILE` may be using this number.
pub fn uses(fd: c_int) -> bool {
    word(fd).is_some_and(|(word, bit)| word.load(Relaxed) & bit != 0)
}

/// A `FILE` uses it from now on.
pub fn add(fd: c_int) {
    if let Some((word, bit)) = word(fd) {
        word.fetch_or(bit, Relaxed);
    }
}

/// Its `FILE` was closed.
pub fn remove(fd: c_int) {
    if let Some((word, bit)) = word(fd) {
        word.fetch_and(!bit, Relaxed);
    }
}
