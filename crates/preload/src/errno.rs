//! The program's errno. The library may change it only when a call fails.

use std::ffi::c_int;

/// Returns the address of the calling thread's errno.
#[inline]
fn location() -> *mut c_int {
    // SAFETY: the function takes no arguments. The address is the calling thread's alone, and valid while that thread lives.
    unsafe { libc::__errno_location() }
}

/// Sets the calling thread's errno.
#[inline]
pub fn set(errno: c_int) {
    // SAFETY: see `location`.
    unsafe { *location() = errno }
}

/// Returns the calling thread's errno.
#[inline]
pub fn get() -> c_int {
    // SAFETY: see `location`.
    unsafe { *location() }
}

/// Calls `act`, which may change errno, and restores the program's errno afterwards.
#[inline]
pub fn kept<T>(act: impl FnOnce() -> T) -> T {
    let location = location();
    // SAFETY: see `location`.
    let before = unsafe { *location };
    let answer = act();
    // SAFETY: see `location`.
    unsafe { *location = before };
    answer
}
