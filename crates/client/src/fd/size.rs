//! The size of a file.

use jericho_sys::files::{self, Result};

use super::route::{Route, facts, route};
use crate::descriptors::{self, FdState, OpenFd};
use crate::thread::{self, Doing};

pub(super) fn end_of(open: &OpenFd) -> Result<u64> {
    match inline_size(open) {
        Some(size) => Ok(size),
        None => files::fstat(open.fd).map(|stat| stat.size),
    }
}

fn inline_size(open: &OpenFd) -> Option<u64> {
    match route(open, &facts(open)?) {
        Route::Inline(_, file) => file.size().ok(),
        _ => None,
    }
}

/// Returns the size of a file that is used inline, for fstat(2). It may be newer than the kernel's.
pub fn size(fd: i32) -> Option<u64> {
    let Some(FdState::Described(open)) = descriptors::state(fd) else {
        return None;
    };
    thread::enter(Doing::Reading, |_| inline_size(&open))?
}

/// Makes the kernel refresh a file's size before it appends to the file or copies from it. Otherwise the kernel uses the
/// size from before the inline writes of this program or another: for the new offset, for RWF_APPEND, and as the end of the copy,
/// without an error.
pub fn refresh_size(fd: i32) {
    let _ = files::fstat(fd);
}
