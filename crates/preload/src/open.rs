//! Opening and closing of fds.

use std::ffi::{c_char, c_int, c_uint, c_void};

use jericho_client::fd::{self, Reason};
use libc::{mode_t, size_t};

use crate::death::{checked, checked_close, checked_path};
use crate::{errno, real, streams};

exports! {
    open as open, open64, __open, __open64:
        (path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
    open_checked as __open_2, __open64_2: (path: *const c_char, flags: c_int) -> c_int;
    openat as openat, openat64:
        (dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
    openat_checked as __openat_2, __openat64_2:
        (dir: c_int, path: *const c_char, flags: c_int) -> c_int;
    openat2 as openat2:
        (dir: c_int, path: *const c_char, how: *const c_void, size: size_t) -> c_int;
    creat as creat, creat64: (path: *const c_char, mode: mode_t) -> c_int;
    open_by_handle_at as open_by_handle_at:
        (mount: c_int, handle: *mut c_void, flags: c_int) -> c_int;
    mkstemp as mkstemp, mkstemp64: (template: *mut c_char) -> c_int;
    mkostemp as mkostemp, mkostemp64: (template: *mut c_char, flags: c_int) -> c_int;
    mkstemps as mkstemps, mkstemps64: (template: *mut c_char, suffix: c_int) -> c_int;
    mkostemps as mkostemps, mkostemps64:
        (template: *mut c_char, suffix: c_int, flags: c_int) -> c_int;
    close as close, __close: (fd: c_int) -> c_int;
    close_range as close_range: (first: c_uint, last: c_uint, flags: c_int) -> c_int;
    closefrom as closefrom: (first: c_int);
}

/// Prepares for an open that may truncate the file: a signal handler must not wait for a write that it has interrupted.
fn about_to_open(flags: c_int) {
    if flags & libc::O_TRUNC != 0 {
        errno::kept(fd::make_way_in_all_files);
    }
}

/// Tells the client of a description that this process has just opened, at offset 0. Returns `fd`, which may be the -1 of a
/// failed call.
pub fn opened(fd: c_int) -> c_int {
    if fd >= 0 {
        errno::kept(|| {
            fd::opened(fd);
            if streams::uses(fd) {
                fd::to_kernel(fd, Reason::Stream);
            }
        });
    }
    fd
}

/// Opens a path, which is relative to `dir`, with `call`.
///
/// # Safety
/// The kernel reads `path` in `call`, unless that call fails with EFAULT.
#[inline]
unsafe fn open_path(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    call: impl FnOnce() -> c_int,
) -> c_int {
    about_to_open(flags);
    // SAFETY: the caller guarantees it.
    let fd = unsafe { checked_path(dir, path, call()) };
    opened(fd)
}

/// Opens a path. `mode` is the register's content if the caller gave none; no code uses it then.
pub unsafe fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the caller's arguments, throughout.
    unsafe {
        open_path(libc::AT_FDCWD, path, flags, || {
            real::open(path, flags, mode)
        })
    }
}

unsafe fn open_checked(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments, throughout.
    unsafe { open_path(libc::AT_FDCWD, path, flags, || real::__open_2(path, flags)) }
}

/// Opens a path relative to `dir`. For `mode` see `open`.
pub unsafe fn openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the caller's arguments, throughout.
    unsafe { open_path(dir, path, flags, || real::openat(dir, path, flags, mode)) }
}

unsafe fn openat_checked(dir: c_int, path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments, throughout.
    unsafe { open_path(dir, path, flags, || real::__openat_2(dir, path, flags)) }
}

pub unsafe fn creat(path: *const c_char, mode: mode_t) -> c_int {
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC;
    // SAFETY: the caller's arguments, throughout.
    unsafe { open_path(libc::AT_FDCWD, path, flags, || real::creat(path, mode)) }
}

/// Opens a path relative to `dir`. Few C libraries have this function, but a program that looks the name up finds the hook.
pub unsafe fn openat2(dir: c_int, path: *const c_char, how: *const c_void, size: size_t) -> c_int {
    // The kernel has not validated `how` yet, so assume O_TRUNC.
    about_to_open(libc::O_TRUNC);
    let fd = if real::symbol::openat2.address().is_null() {
        let arguments = (dir as usize, path as usize, how as usize, size);
        let (a, b, c, d) = arguments;
        // SAFETY: the caller's arguments.
        unsafe { real::syscall(libc::SYS_openat2, a, b, c, d, 0, 0) as c_int }
    } else {
        // SAFETY: the caller's arguments.
        unsafe { real::openat2(dir, path, how, size) }
    };
    if fd < 0 {
        // SAFETY: the caller's arguments; after an error other than EFAULT the kernel has read the path.
        return unsafe { checked_path(dir, path, fd) };
    }
    opened(fd)
}

unsafe fn open_by_handle_at(mount: c_int, handle: *mut c_void, flags: c_int) -> c_int {
    about_to_open(flags);
    // SAFETY: the caller's arguments.
    let fd = checked(mount, unsafe {
        real::open_by_handle_at(mount, handle, flags)
    });
    opened(fd)
}

unsafe fn mkstemp(template: *mut c_char) -> c_int {
    // SAFETY: the caller's arguments.
    opened(unsafe { real::mkstemp(template) })
}

unsafe fn mkostemp(template: *mut c_char, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments.
    opened(unsafe { real::mkostemp(template, flags) })
}

unsafe fn mkstemps(template: *mut c_char, suffix: c_int) -> c_int {
    // SAFETY: the caller's arguments.
    opened(unsafe { real::mkstemps(template, suffix) })
}

unsafe fn mkostemps(template: *mut c_char, suffix: c_int, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments.
    opened(unsafe { real::mkostemps(template, suffix, flags) })
}

/// Closes an fd. The client forgets it first: afterwards the fd may already be another thread's.
pub unsafe fn close(fd: c_int) -> c_int {
    let closing = errno::kept(|| fd::closing(fd));
    // SAFETY: the caller's arguments.
    let status = checked_close(unsafe { real::close(fd) });
    closing.has_closed();
    status
}

pub unsafe fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // CLOSE_RANGE_CLOEXEC closes nothing now. CLOSE_RANGE_UNSHARE leaves the fds open for other threads and processes that share
    // the table of fds. The hook ignores that: it concerns only those that also share this memory, and with it the library's state.
    if flags as c_uint & libc::CLOSE_RANGE_CLOEXEC == 0 {
        errno::kept(|| fd::closing_range(first, last));
    }
    if real::symbol::close_range.address().is_null() {
        let (first, last, flags) = (first as usize, last as usize, flags as usize);
        // SAFETY: the caller's arguments.
        return unsafe {
            real::syscall(libc::SYS_close_range, first, last, flags, 0, 0, 0) as c_int
        };
    }
    // SAFETY: the caller's arguments.
    unsafe { real::close_range(first, last, flags) }
}

unsafe fn closefrom(first: c_int) {
    let from = first.max(0) as c_uint;
    errno::kept(|| fd::closing_range(from, c_uint::MAX));
    if real::symbol::closefrom.address().is_null() {
        // SAFETY: closes fds, as the caller asks.
        unsafe { close_range(from, c_uint::MAX, 0) };
    } else {
        // SAFETY: the caller's arguments.
        unsafe { real::closefrom(first) }
    }
}
