//! Copies that the kernel makes between two fds. Without a given offset, the kernel uses the description's own.

use std::ffi::{c_int, c_uint};

use jericho_client::fd;
use libc::{off_t, size_t, ssize_t};

use crate::death::checked_both;
use crate::transfer::share;
use crate::{errno, real};

exports! {
    sendfile as sendfile, sendfile64:
        (out: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t;
    copy_file_range as copy_file_range:
        (from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, count: size_t,
        flags: c_uint) -> ssize_t;
    splice as splice:
        (from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, count: size_t,
        flags: c_uint) -> ssize_t;
}

fn share_unless_given(fd: c_int, offset: *mut off_t) {
    if offset.is_null() {
        share(fd);
    }
}

pub unsafe fn sendfile(out: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
    share(out);
    share_unless_given(from, offset);
    errno::kept(|| fd::refresh_size(from));
    // SAFETY: the caller's arguments.
    checked_both(from, out, unsafe {
        real::sendfile(out, from, offset, count)
    })
}

pub unsafe fn copy_file_range(
    from: c_int,
    from_offset: *mut off_t,
    to: c_int,
    to_offset: *mut off_t,
    count: size_t,
    flags: c_uint,
) -> ssize_t {
    share_unless_given(from, from_offset);
    share_unless_given(to, to_offset);
    errno::kept(|| fd::refresh_size(from));
    // SAFETY: the caller's arguments.
    checked_both(from, to, unsafe {
        real::copy_file_range(from, from_offset, to, to_offset, count, flags)
    })
}

pub unsafe fn splice(
    from: c_int,
    from_offset: *mut off_t,
    to: c_int,
    to_offset: *mut off_t,
    count: size_t,
    flags: c_uint,
) -> ssize_t {
    share_unless_given(from, from_offset);
    share_unless_given(to, to_offset);
    errno::kept(|| fd::refresh_size(from));
    // SAFETY: the caller's arguments.
    checked_both(from, to, unsafe {
        real::splice(from, from_offset, to, to_offset, count, flags)
    })
}
