//! The size of a file.

use jericho_sys::files::{self, Result};

use super::route::{Route, facts, route};
use crate::descriptors::{self, FdState, OpenFd};
use crate::thread::{self, Doing};

/// Attempts to make the kernel know a size. Each fails only if the daemon makes it forget the file's attributes meanwhile, or if a
/// program truncates the file.
const REFRESHES: u32 = 16;

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

/// Makes the kernel refresh a file's size before it seeks to the file's end, appends to the file or copies from it. Without that,
/// the kernel uses a size from before the latest inline writes of any program, and returns no error. A seek or an append then sets
/// a wrong offset, an append with RWF_APPEND begins too early, and a copy ends too early.
///
/// The kernel ignores the daemon's answer if the daemon makes it forget the attributes meanwhile, as it does for a file's first inline
/// writer. So this compares the answer with the size that the kernel knows.
pub fn refresh_size(fd: i32) {
    for _ in 0..REFRESHES {
        match (files::fstat(fd), files::identify(fd)) {
            (Ok(answer), Ok(known)) if known.size < answer.size => {}
            _ => return,
        }
    }
}
