//! Fds that a `FILE` of the C library may be using.
//!
//! stdio's I/O on its fd bypasses the hooks and uses the kernel's offset. A program that redirects its output opens a log,
//! duplicates it to fd 1 with dup2, and prints. So any file that comes to such an fd must have its offset in the kernel.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Fds below this number are tracked; the client serves none above.
const FDS: usize = 65536;

/// One bit for each fd. At the start stdin, stdout and stderr are set.
static USED: [AtomicU64; FDS / 64] = {
    let mut used = [const { AtomicU64::new(0) }; FDS / 64];
    used[0] = AtomicU64::new(0b111);
    used
};

fn word(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((USED.get(fd / 64)?, 1 << (fd % 64)))
}

/// Returns whether a `FILE` may be using this fd.
pub fn uses(fd: c_int) -> bool {
    word(fd).is_some_and(|(word, bit)| word.load(Relaxed) & bit != 0)
}

/// Notes that a `FILE` uses the fd.
pub fn add(fd: c_int) {
    if let Some((word, bit)) = word(fd) {
        word.fetch_or(bit, Relaxed);
    }
}

/// Notes that the fd's `FILE` was closed.
pub fn remove(fd: c_int) {
    if let Some((word, bit)) = word(fd) {
        word.fetch_and(!bit, Relaxed);
    }
}
