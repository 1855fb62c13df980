//! The limit of file sizes (RLIMIT_FSIZE).

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use jericho_sys::files;

/// The size of this process's files is limited (RLIMIT_FSIZE). Only the kernel knows the outcome of an extending write then.
static SIZE_LIMITED: AtomicBool = AtomicBool::new(false);

/// Reads the limit of file sizes again, after setrlimit(2) or prlimit(2) may have changed it.
pub fn size_limit_changed() {
    SIZE_LIMITED.store(files::size_is_limited(), Relaxed);
}

/// Returns whether the size of this process's files is limited.
pub(super) fn is_limited() -> bool {
    SIZE_LIMITED.load(Relaxed)
}
