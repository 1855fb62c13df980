//! Fds that travel over sockets: two processes then share an offset.

use std::ffi::{c_int, c_uint};

use jericho_client::fd;
use libc::{mmsghdr, msghdr, ssize_t, timespec};

use crate::transfer::share;
use crate::{errno, memory, real};

exports! {
    sendmsg as sendmsg: (socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    sendmmsg as sendmmsg, __sendmmsg:
        (socket: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    recvmsg as recvmsg: (socket: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    recvmmsg as recvmmsg:
        (socket: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec)
        -> c_int;
}

/// Calls `act` with each fd that a message carries.
///
/// # Safety
/// `message` is null or a message whose control bytes are `msg_controllen` long.
unsafe fn each_right(message: *const msghdr, act: impl Fn(c_int)) {
    // SAFETY: the macros of the C library keep to `msg_controllen`. The code below checks each header's own length against it.
    unsafe {
        if message.is_null() || (*message).msg_control.is_null() {
            return;
        }
        let end = (*message).msg_control as usize + (*message).msg_controllen;
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(header) as usize;
                let data_end = (header as usize)
                    .saturating_add((*header).cmsg_len)
                    .min(end);
                let numbers = data_end.saturating_sub(data) / size_of::<c_int>();
                for i in 0..numbers {
                    act((data as *const c_int).add(i).read_unaligned());
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// The kernel accepts no more messages in one call.
const MESSAGES_MAX: c_uint = 1024;

/// Shares the fds of a message that is about to be sent and that the kernel has not checked yet. Leaves unreadable memory to the
/// kernel, which refuses it.
///
/// # Safety
/// `message` is a message, or memory that may be partly unmapped.
unsafe fn each_right_given(message: *const msghdr) {
    if !memory::is_readable_one(message) {
        return;
    }
    // SAFETY: the message is mapped, as checked above.
    let (control, len) = unsafe { ((*message).msg_control, (*message).msg_controllen) };
    if memory::is_readable(control, len) {
        // SAFETY: the control bytes are mapped, as checked above.
        unsafe { each_right(message, share) };
    }
}

/// Forgets the fds of a received message: other processes know them, as they know inherited fds.
///
/// # Safety
/// As for `each_right`, after a call that filled the message.
unsafe fn received(message: *const msghdr) {
    // SAFETY: the caller guarantees it.
    errno::kept(|| unsafe { each_right(message, fd::forget) });
}

pub unsafe fn sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's arguments, here and below.
    unsafe {
        each_right_given(message);
        real::sendmsg(socket, message, flags)
    }
}

pub unsafe fn sendmmsg(
    socket: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's arguments, here and below.
    unsafe {
        for i in 0..count.min(MESSAGES_MAX) as usize {
            each_right_given(&raw const (*messages.wrapping_add(i)).msg_hdr);
        }
        real::sendmmsg(socket, messages, count, flags)
    }
}

pub unsafe fn recvmsg(socket: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's arguments, here and below.
    unsafe {
        let bytes = real::recvmsg(socket, message, flags);
        if bytes >= 0 {
            received(message);
        }
        bytes
    }
}

pub unsafe fn recvmmsg(
    socket: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    // SAFETY: the caller's arguments, here and below.
    unsafe {
        let filled = real::recvmmsg(socket, messages, count, flags, timeout);
        for i in 0..usize::try_from(filled).unwrap_or(0) {
            received(&raw const (*messages.add(i)).msg_hdr);
        }
        filled
    }
}
