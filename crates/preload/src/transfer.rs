//! read, write and similar calls with one buffer.

use std::ffi::{c_int, c_void};

use jericho_client::{fd, hit};
use libc::{off_t, size_t, ssize_t};

use crate::death::checked;
use crate::{errno, real};

exports! {
    read as read, __read: (fd: c_int, buffer: *mut c_void, count: size_t) -> ssize_t;
    read_checked as __read_chk:
        (fd: c_int, buffer: *mut c_void, count: size_t, room: size_t) -> ssize_t;
    pread as pread, pread64, __pread64:
        (fd: c_int, buffer: *mut c_void, count: size_t, offset: off_t) -> ssize_t;
    pread_checked as __pread_chk, __pread64_chk:
        (fd: c_int, buffer: *mut c_void, count: size_t, offset: off_t, room: size_t) -> ssize_t;
    write as write, __write: (fd: c_int, data: *const c_void, count: size_t) -> ssize_t;
    pwrite as pwrite, pwrite64, __pwrite64:
        (fd: c_int, data: *const c_void, count: size_t, offset: off_t) -> ssize_t;
}

/// Most bytes that the kernel transfers in one call; it cuts a longer call to this.
pub const MOST: usize = 0x7fff_f000;

unsafe extern "C-unwind" {
    /// Ends the calling thread if another one has cancelled it.
    fn pthread_testcancel();
}

/// Ends the calling thread if another one has cancelled it. A call that is served inline makes no blocking call of the C library,
/// so otherwise nothing would cancel a thread that finds all its data in the cache.
#[inline]
pub fn cancellation_point() {
    // SAFETY: the function takes no arguments; if it unwinds, the frames of the hooks own nothing.
    unsafe { pthread_testcancel() }
}

/// Returns the C function's result for the outcome of a transfer.
#[inline]
pub fn answer(outcome: Result<usize, i32>) -> ssize_t {
    match outcome {
        Ok(bytes) => bytes as ssize_t,
        Err(errno) => {
            errno::set(errno);
            -1
        }
    }
}

/// Returns whether the kernel must check a buffer and length (EFAULT, EINVAL).
#[inline]
fn is_for_kernel(buffer: *const c_void, count: size_t) -> bool {
    buffer.is_null() || count > isize::MAX as usize
}

/// Moves the offset to the kernel, because the kernel is about to use it.
#[cold]
pub fn share(fd: c_int) {
    errno::kept(|| fd::share(fd));
}

/// Returns the caller's buffer, if the short path may use it. The long path checks all others.
///
/// # Safety
/// The caller gives `count` bytes at `buffer` that no other code uses during the call, or an address that no program has.
#[inline(always)]
unsafe fn room<'a>(buffer: *mut c_void, count: size_t) -> Option<&'a mut [u8]> {
    let usual = buffer.addr() >= fd::LOWEST_ADDRESS && count <= MOST;
    // SAFETY: not null, and the caller guarantees the rest.
    usual.then(|| unsafe { std::slice::from_raw_parts_mut(buffer.cast(), count) })
}

/// Returns the caller's data, on the same condition as `room`.
///
/// # Safety
/// The caller gives `count` bytes to read at `data`, or an address that no program has.
#[inline(always)]
unsafe fn given<'a>(data: *const c_void, count: size_t) -> Option<&'a [u8]> {
    let usual = data.addr() >= fd::LOWEST_ADDRESS && count <= MOST;
    // SAFETY: not null, and the caller guarantees the rest.
    usual.then(|| unsafe { std::slice::from_raw_parts(data.cast(), count) })
}

pub unsafe fn read(fd: c_int, buffer: *mut c_void, count: size_t) -> ssize_t {
    cancellation_point();
    // SAFETY: the caller's arguments.
    match unsafe { room(buffer, count) }.and_then(|out| hit::read(fd, out)) {
        Some(bytes) => bytes as ssize_t,
        // SAFETY: the caller's arguments.
        None => unsafe { read_long(fd, buffer, count) },
    }
}

#[inline(never)]
unsafe fn read_long(fd: c_int, buffer: *mut c_void, count: size_t) -> ssize_t {
    if is_for_kernel(buffer, count) {
        share(fd);
    } else {
        // SAFETY: the caller gives `count` bytes that no other code uses during the call.
        let out = unsafe { std::slice::from_raw_parts_mut(buffer.cast(), count.min(MOST)) };
        if let Some(outcome) = errno::kept(|| fd::read(fd, out)) {
            return answer(outcome);
        }
    }
    // SAFETY: the caller's arguments.
    unsafe { checked(fd, real::read(fd, buffer, count)) }
}

unsafe fn read_checked(fd: c_int, buffer: *mut c_void, count: size_t, room: size_t) -> ssize_t {
    if count > room {
        // SAFETY: the caller's arguments; the call ends the program, with the C library's message.
        return unsafe { real::__read_chk(fd, buffer, count, room) };
    }
    // SAFETY: the caller's arguments.
    unsafe { read(fd, buffer, count) }
}

pub unsafe fn pread(fd: c_int, buffer: *mut c_void, count: size_t, offset: off_t) -> ssize_t {
    cancellation_point();
    // SAFETY: the caller's arguments.
    match unsafe { room(buffer, count) }.and_then(|out| hit::pread(fd, out, offset)) {
        Some(bytes) => bytes as ssize_t,
        // SAFETY: the caller's arguments.
        None => unsafe { pread_long(fd, buffer, count, offset) },
    }
}

#[inline(never)]
unsafe fn pread_long(fd: c_int, buffer: *mut c_void, count: size_t, offset: off_t) -> ssize_t {
    if !is_for_kernel(buffer, count) && offset >= 0 {
        // SAFETY: the caller gives `count` bytes that no other code uses during the call.
        let out = unsafe { std::slice::from_raw_parts_mut(buffer.cast(), count.min(MOST)) };
        if let Some(outcome) = errno::kept(|| fd::pread(fd, out, offset)) {
            return answer(outcome);
        }
    }
    // SAFETY: the caller's arguments.
    unsafe { checked(fd, real::pread(fd, buffer, count, offset)) }
}

unsafe fn pread_checked(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    offset: off_t,
    room: size_t,
) -> ssize_t {
    if count > room {
        // SAFETY: the caller's arguments; the call ends the program, with the C library's message.
        return unsafe { real::__pread_chk(fd, buffer, count, offset, room) };
    }
    // SAFETY: the caller's arguments.
    unsafe { pread(fd, buffer, count, offset) }
}

pub unsafe fn write(fd: c_int, data: *const c_void, count: size_t) -> ssize_t {
    cancellation_point();
    // SAFETY: the caller's arguments.
    match unsafe { given(data, count) }.and_then(|bytes| hit::write(fd, bytes)) {
        Some(outcome) => answer(outcome),
        // SAFETY: the caller's arguments.
        None => unsafe { write_long(fd, data, count) },
    }
}

#[inline(never)]
unsafe fn write_long(fd: c_int, data: *const c_void, count: size_t) -> ssize_t {
    if is_for_kernel(data, count) {
        share(fd);
    } else {
        // SAFETY: the caller gives `count` bytes to read.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast(), count.min(MOST)) };
        if let Some(outcome) = errno::kept(|| fd::write(fd, bytes)) {
            return answer(outcome);
        }
    }
    // SAFETY: the caller's arguments.
    unsafe { checked(fd, real::write(fd, data, count)) }
}

pub unsafe fn pwrite(fd: c_int, data: *const c_void, count: size_t, offset: off_t) -> ssize_t {
    cancellation_point();
    // SAFETY: the caller's arguments.
    match unsafe { given(data, count) }.and_then(|bytes| hit::pwrite(fd, bytes, offset)) {
        Some(bytes) => bytes as ssize_t,
        // SAFETY: the caller's arguments.
        None => unsafe { pwrite_long(fd, data, count, offset) },
    }
}

#[inline(never)]
unsafe fn pwrite_long(fd: c_int, data: *const c_void, count: size_t, offset: off_t) -> ssize_t {
    if !is_for_kernel(data, count) && offset >= 0 {
        // SAFETY: the caller gives `count` bytes to read.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast(), count.min(MOST)) };
        if let Some(outcome) = errno::kept(|| fd::pwrite(fd, bytes, offset)) {
            return answer(outcome);
        }
    }
    // SAFETY: the caller's arguments.
    unsafe { checked(fd, real::pwrite(fd, data, count, offset)) }
}
