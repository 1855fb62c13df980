//! The program's errno, which is ours to set only when a call fails.

use std::ffi::c_int;

/// Where the calling thread's errno is.
#[inline]
fn place() -> *mut c_int {
    // SAFETY: takes nothing. What it returns is the calling thread's alone, and valid while that lives.
    unsafe { libc::__errno_location() }
}

/// Sets the calling thread's errno.
#[inline]
pub fn set(errno: c_int) {
    // SAFETY: see `place`.
    unsafe { *place() = errno }
}

/// Returns the calling thread's errno.
#[inline]
pub fn get() -> c_int {
    // SAFETY: see `place`.
    unsafe { *place() }
}

/// Does something of ours during which errno may change, and puts the program's back.
#[inline]
pub fn kept<T>(doing: impl FnOnce() -> T) -> T {
    let place = place();
    // SAFETY: see `place`.
    let before = unsafe { *place };
    let answer = doing();
    // SAFETY: see `place`.
    unsafe { *place = before };
    answer
}
