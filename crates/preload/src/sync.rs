//! sync and syncfs: the library also asks the mounts' daemons, because the kernel tells them nothing. Also the calls on all pages of a
//! file: a signal handler that makes one must not wait for a write that it has interrupted.

use std::ffi::c_int;

use jericho_client::{fd, sync};
use libc::off_t;

use crate::{errno, real};

exports! {
    sync_all as sync: ();
    syncfs as syncfs: (fd: c_int) -> c_int;
    fsync as fsync: (fd: c_int) -> c_int;
    fdatasync as fdatasync: (fd: c_int) -> c_int;
    ftruncate as ftruncate, ftruncate64: (fd: c_int, length: off_t) -> c_int;
}

pub unsafe fn fsync(fd: c_int) -> c_int {
    errno::kept(|| fd::make_way_everywhere(fd));
    // SAFETY: the caller's arguments.
    unsafe { real::fsync(fd) }
}

pub unsafe fn fdatasync(fd: c_int) -> c_int {
    errno::kept(|| fd::make_way_everywhere(fd));
    // SAFETY: the caller's arguments.
    unsafe { real::fdatasync(fd) }
}

pub unsafe fn ftruncate(fd: c_int, length: off_t) -> c_int {
    errno::kept(|| fd::make_way_everywhere(fd));
    // SAFETY: the caller's arguments.
    unsafe { real::ftruncate(fd, length) }
}

/// Calls the kernel first: the daemons then have what was written through mappings.
pub unsafe fn sync_all() {
    // SAFETY: takes nothing.
    unsafe { real::sync() };
    errno::kept(sync::sync_all);
}

pub unsafe fn syncfs(fd: c_int) -> c_int {
    // SAFETY: the caller's arguments.
    let status = unsafe { real::syncfs(fd) };
    if status != 0 {
        return status;
    }
    match errno::kept(|| sync::sync_of(fd)) {
        Some(Err(errno)) => {
            errno::set(errno);
            -1
        }
        _ => status,
    }
}
