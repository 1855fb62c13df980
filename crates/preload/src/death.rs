//! Results of kernel calls on files of a mount whose daemon may have died. The program then gets ENOTCONN instead of the kernel's
//! errno.

use std::ffi::{CStr, c_char, c_int};

use jericho_client::{death, fd};

use crate::errno;

/// Returns the result of a call on `fd`; -1 means that it failed.
#[inline]
pub fn checked<T: From<i8> + PartialEq>(fd: c_int, result: T) -> T {
    if result == T::from(-1) {
        errno::set(fd::errno_after(fd, errno::get()));
    }
    result
}

/// Returns the result of a call on two fds.
#[inline]
pub fn checked_both<T: From<i8> + PartialEq>(one: c_int, other: c_int, result: T) -> T {
    checked(other, checked(one, result))
}

/// Returns the result of a call on a path, which is relative to `dir`.
///
/// # Safety
/// The kernel has read `path`, unless the call failed with EFAULT.
#[inline]
pub unsafe fn checked_path<T: From<i8> + PartialEq>(
    dir: c_int,
    path: *const c_char,
    result: T,
) -> T {
    if result == T::from(-1) {
        // SAFETY: the caller guarantees it.
        unsafe { path_failed(dir, path) };
    }
    result
}

/// Sets the errno of a call on a path that failed.
///
/// # Safety
/// The kernel has read `path`, unless the call failed with EFAULT.
#[cold]
pub unsafe fn path_failed(dir: c_int, path: *const c_char) {
    let errno = errno::get();
    if !death::may_be(errno) {
        return;
    }
    if path.is_null() {
        // Some calls treat a null path as an empty one.
        return errno::set(fd::errno_after(dir, errno));
    }
    // SAFETY: the kernel fails with these errors only after it has read the path as a string.
    let path = unsafe { CStr::from_ptr(path) };
    errno::set(match path.is_empty() {
        true => fd::errno_after(dir, errno),
        false => death::errno_after_path(dir, path, errno),
    });
}

/// Returns the result of close(2). The fd is closed already, so the library cannot ask the daemon. A living daemon never gives
/// these errors.
#[inline]
pub fn checked_close(result: c_int) -> c_int {
    if result != 0 && matches!(errno::get(), libc::ECANCELED | libc::ECONNABORTED) {
        errno::set(libc::ENOTCONN);
    }
    result
}
