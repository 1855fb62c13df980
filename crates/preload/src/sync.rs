//! sync and syncfs: the library also asks the mounts' daemons, because the kernel does not tell them. Also hooks the calls that
//! concern all pages of a file, such as fsync and ftruncate: a signal handler that makes one must not wait for a write that it has
//! interrupted.

use std::ffi::{c_char, c_int};

use jericho_client::{fd, sync};
use libc::off_t;

use crate::death::{checked, checked_path};
use crate::{errno, real};

exports! {
    sync_all as sync: ();
    syncfs as syncfs: (fd: c_int) -> c_int;
    fsync as fsync: (fd: c_int) -> c_int;
    fdatasync as fdatasync: (fd: c_int) -> c_int;
    ftruncate as ftruncate, ftruncate64: (fd: c_int, length: off_t) -> c_int;
    truncate as truncate, truncate64: (path: *const c_char, length: off_t) -> c_int;
    fallocate as fallocate, fallocate64:
        (fd: c_int, mode: c_int, offset: off_t, length: off_t) -> c_int;
    posix_fallocate as posix_fallocate, posix_fallocate64:
        (fd: c_int, offset: off_t, length: off_t) -> c_int;
}

pub unsafe fn fsync(fd: c_int) -> c_int {
    errno::kept(|| fd::make_way_everywhere(fd));
    // SAFETY: the caller's arguments.
    checked(fd, unsafe { real::fsync(fd) })
}

pub unsafe fn fdatasync(fd: c_int) -> c_int {
    errno::kept(|| fd::make_way_everywhere(fd));
    // SAFETY: the caller's arguments.
    checked(fd, unsafe { real::fdatasync(fd) })
}

pub unsafe fn ftruncate(fd: c_int, length: off_t) -> c_int {
    errno::kept(|| fd::make_way_everywhere(fd));
    // SAFETY: the caller's arguments.
    checked(fd, unsafe { real::ftruncate(fd, length) })
}

pub unsafe fn truncate(path: *const c_char, length: off_t) -> c_int {
    errno::kept(fd::make_way_in_all_files);
    // SAFETY: the caller's arguments; after an error other than EFAULT the kernel has read the path.
    unsafe { checked_path(libc::AT_FDCWD, path, real::truncate(path, length)) }
}

pub unsafe fn fallocate(fd: c_int, mode: c_int, offset: off_t, length: off_t) -> c_int {
    errno::kept(|| fd::make_way_everywhere(fd));
    // SAFETY: the caller's arguments.
    checked(fd, unsafe { real::fallocate(fd, mode, offset, length) })
}

unsafe fn posix_fallocate(fd: c_int, offset: off_t, length: off_t) -> c_int {
    errno::kept(|| fd::make_way_everywhere(fd));
    // SAFETY: the caller's arguments.
    match unsafe { real::posix_fallocate(fd, offset, length) } {
        0 => 0,
        // The function returns the errno.
        errno => errno::kept(|| fd::errno_after(fd, errno)),
    }
}

/// Calls the kernel first: the daemons then have the bytes that were written through mappings.
pub unsafe fn sync_all() {
    errno::kept(fd::make_way_in_all_files);
    // SAFETY: sync takes no arguments.
    unsafe { real::sync() };
    errno::kept(sync::sync_all);
}

pub unsafe fn syncfs(fd: c_int) -> c_int {
    errno::kept(fd::make_way_in_all_files);
    // SAFETY: the caller's arguments.
    let status = checked(fd, unsafe { real::syncfs(fd) });
    if status != 0 {
        return status;
    }
    match errno::kept(|| sync::sync_of(fd)) {
        Some(Err(errno)) => {
            errno::set(fd::errno_after(fd, errno));
            -1
        }
        _ => status,
    }
}
