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

/// Makes the kernel refresh a file's size before it appends to the file or copies from it. Without that, the kernel uses a size
/// from before the latest inline writes of any program, and returns no error. An append then sets a wrong offset, an append with
/// RWF_APPEND begins too early, and a copy ends too early.
pub fn refresh_size(fd: i32) {
    let _ = files::fstat(fd);
}
