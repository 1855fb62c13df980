//! The size of an open file: the kernel's may be older than the latest inline writes.

use std::ffi::{c_char, c_int, c_uint};

use jericho_client::fd;
use libc::stat;

use crate::death::{checked, checked_path};
use crate::{errno, real};

exports! {
    fstat as fstat, fstat64: (fd: c_int, out: *mut stat) -> c_int;
    fxstat as __fxstat, __fxstat64: (version: c_int, fd: c_int, out: *mut stat) -> c_int;
    fstatat as fstatat, fstatat64:
        (dir: c_int, path: *const c_char, out: *mut stat, flags: c_int) -> c_int;
    fxstatat as __fxstatat, __fxstatat64:
        (version: c_int, dir: c_int, path: *const c_char, out: *mut stat, flags: c_int) -> c_int;
    statx as statx:
        (dir: c_int, path: *const c_char, flags: c_int, mask: c_uint, out: *mut libc::statx) -> c_int;
}

/// Corrects the size after a successful call about `fd`.
///
/// # Safety
/// `out` was filled by the call.
unsafe fn correct(status: c_int, fd: c_int, out: *mut stat) -> c_int {
    if status == 0
        && let Some(bytes) = errno::kept(|| fd::size(fd))
    {
        // SAFETY: the call has filled it.
        unsafe { (*out).st_size = bytes as i64 };
    }
    status
}

/// Returns whether a call is about the fd itself: it has no path, and the flag that allows that.
///
/// # Safety
/// `path` is null or a string.
unsafe fn is_about_descriptor(path: *const c_char, flags: c_int) -> bool {
    // SAFETY: a string has at least its terminating byte.
    flags & libc::AT_EMPTY_PATH != 0 && (path.is_null() || unsafe { *path } == 0)
}

unsafe fn fstat(fd: c_int, out: *mut stat) -> c_int {
    // SAFETY: the caller's arguments.
    unsafe { correct(checked(fd, real::fstat(fd, out)), fd, out) }
}

unsafe fn fxstat(version: c_int, fd: c_int, out: *mut stat) -> c_int {
    // SAFETY: the caller's arguments.
    unsafe { correct(checked(fd, real::__fxstat(version, fd, out)), fd, out) }
}

unsafe fn fstatat(dir: c_int, path: *const c_char, out: *mut stat, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments, throughout.
    unsafe {
        let status = checked_path(dir, path, real::fstatat(dir, path, out, flags));
        // The kernel has read the path of a call that succeeded.
        match status == 0 && is_about_descriptor(path, flags) {
            true => correct(status, dir, out),
            false => status,
        }
    }
}

unsafe fn fxstatat(
    version: c_int,
    dir: c_int,
    path: *const c_char,
    out: *mut stat,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's arguments, throughout.
    unsafe {
        let status = checked_path(dir, path, real::__fxstatat(version, dir, path, out, flags));
        // The kernel has read the path of a call that succeeded.
        match status == 0 && is_about_descriptor(path, flags) {
            true => correct(status, dir, out),
            false => status,
        }
    }
}

unsafe fn statx(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    out: *mut libc::statx,
) -> c_int {
    // SAFETY: the caller's arguments, throughout.
    unsafe {
        let status = checked_path(dir, path, real::statx(dir, path, flags, mask, out));
        if status == 0
            && is_about_descriptor(path, flags)
            && let Some(bytes) = errno::kept(|| fd::size(dir))
        {
            (*out).stx_size = bytes;
        }
        status
    }
}
