//! Streams: stdio's I/O on its fd bypasses every hook, so the offsets of such fds stay in the kernel.

use std::ffi::{c_char, c_int, c_void};

use jericho_client::fd::{self, Reason};
use libc::FILE;

use crate::death::path_failed;
use crate::transfer::share;
use crate::{errno, fork, real, streams};

exports! {
    fopen as fopen, fopen64, _IO_fopen: (path: *const c_char, mode: *const c_char) -> *mut FILE;
    fdopen as fdopen, _IO_fdopen: (fd: c_int, mode: *const c_char) -> *mut FILE;
    freopen as freopen, freopen64:
        (path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE;
    fclose as fclose, _IO_fclose: (file: *mut FILE) -> c_int;
    tmpfile as tmpfile, tmpfile64: () -> *mut FILE;
    popen as popen, _IO_popen: (command: *const c_char, mode: *const c_char) -> *mut FILE;
    pclose as pclose: (file: *mut FILE) -> c_int;
    vdprintf as vdprintf:
        (fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int;
    vdprintf_checked as __vdprintf_chk:
        (fd: c_int, flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int;
    backtrace_symbols_fd as backtrace_symbols_fd, __backtrace_symbols_fd:
        (frames: *const *mut c_void, count: c_int, fd: c_int);
}

/// Returns the stream's fd; -1 when it has none (fmemopen) or is null.
///
/// # Safety
/// `file` is null or a stream.
unsafe fn fd_of(file: *mut FILE) -> c_int {
    if file.is_null() {
        return -1;
    }
    // SAFETY: not null, so it is a stream.
    errno::kept(|| unsafe { real::fileno(file) })
}

/// Notes the fd of a stream that was just opened (or null): stdio uses it.
///
/// # Safety
/// `file` is null or a stream.
unsafe fn opened(file: *mut FILE) -> *mut FILE {
    // SAFETY: the caller guarantees it.
    let fd = unsafe { fd_of(file) };
    if fd >= 0 {
        errno::kept(|| {
            streams::add(fd);
            // The known state is that of an earlier fd with this number, which was closed past the hooks.
            fd::forget(fd);
            fd::to_kernel(fd, Reason::Stream);
        });
    }
    file
}

/// Prepares for closing a stream, or for its reopening with another file.
///
/// # Safety
/// `file` is null or a stream.
unsafe fn closing(file: *mut FILE) {
    // SAFETY: the caller guarantees it.
    let fd = unsafe { fd_of(file) };
    if fd >= 0 {
        errno::kept(|| {
            fd::forget(fd);
            streams::remove(fd);
        });
    }
}

unsafe fn fopen(path: *const c_char, mode: *const c_char) -> *mut FILE {
    // SAFETY: the caller's arguments, here and below.
    unsafe {
        let file = real::fopen(path, mode);
        if file.is_null() {
            path_failed(libc::AT_FDCWD, path);
        }
        opened(file)
    }
}

/// Opens a stream on an fd. The kernel's offset must be right before: the stream may ask for it at once.
unsafe fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if fd >= 0 {
        errno::kept(|| fd::to_kernel(fd, Reason::Stream));
    }
    // SAFETY: the caller's arguments.
    let file = unsafe { real::fdopen(fd, mode) };
    if !file.is_null() {
        streams::add(fd);
    }
    file
}

unsafe fn freopen(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE {
    // SAFETY: the caller's arguments, here and below.
    unsafe {
        closing(file);
        opened(real::freopen(path, mode, file))
    }
}

unsafe fn fclose(file: *mut FILE) -> c_int {
    // SAFETY: the caller's arguments, here and below.
    unsafe {
        closing(file);
        real::fclose(file)
    }
}

unsafe fn tmpfile() -> *mut FILE {
    // SAFETY: tmpfile takes no arguments.
    unsafe { opened(real::tmpfile()) }
}

unsafe fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE {
    fork::share_all();
    // SAFETY: the caller's arguments.
    unsafe { opened(real::popen(command, mode)) }
}

unsafe fn pclose(file: *mut FILE) -> c_int {
    // SAFETY: the caller's arguments, here and below.
    unsafe {
        closing(file);
        real::pclose(file)
    }
}

/// Prints to an fd. The C library writes through a stream of its own. Both architectures pass a va_list as a pointer.
unsafe fn vdprintf(fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int {
    share(fd);
    // SAFETY: the caller's arguments.
    unsafe { real::vdprintf(fd, format, arguments) }
}

unsafe fn vdprintf_checked(
    fd: c_int,
    flag: c_int,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    share(fd);
    // SAFETY: the caller's arguments.
    unsafe { real::__vdprintf_chk(fd, flag, format, arguments) }
}

/// Prepares for dprintf and its checked form, which are variadic: see `trampoline`.
pub extern "C" fn before_dprintf(fd: c_int) -> *const c_void {
    share(fd);
    real::symbol::dprintf.address()
}

/// Does the same as `before_dprintf`.
pub extern "C" fn before_dprintf_checked(fd: c_int) -> *const c_void {
    share(fd);
    real::symbol::__dprintf_chk.address()
}

/// Prints a backtrace, as crash handlers do. The C library writes it past the hooks.
unsafe fn backtrace_symbols_fd(frames: *const *mut c_void, count: c_int, fd: c_int) {
    share(fd);
    // SAFETY: the caller's arguments.
    unsafe { real::backtrace_symbols_fd(frames, count, fd) }
}
