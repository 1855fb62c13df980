//! readv, writev and similar calls, also with an offset and flags.

use std::ffi::{c_int, c_void};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

use jericho_client::fd;
use jericho_client::fd::LOWEST_ADDRESS;
use libc::{iovec, off_t, size_t, ssize_t};

use crate::death::checked;
use crate::transfer::{self, MOST, answer, share};
use crate::{errno, memory, real};

exports! {
    readv as readv: (fd: c_int, parts: *const iovec, count: c_int) -> ssize_t;
    preadv as preadv, preadv64:
        (fd: c_int, parts: *const iovec, count: c_int, offset: off_t) -> ssize_t;
    preadv2 as preadv2, preadv64v2:
        (fd: c_int, parts: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    writev as writev: (fd: c_int, parts: *const iovec, count: c_int) -> ssize_t;
    pwritev as pwritev, pwritev64:
        (fd: c_int, parts: *const iovec, count: c_int, offset: off_t) -> ssize_t;
    pwritev2 as pwritev2, pwritev64v2:
        (fd: c_int, parts: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
}

/// Most parts of a call that is tried inline. More parts (the kernel takes 1024) would need a long copy of the list on the stack,
/// which may be a signal handler's small one.
const PARTS: usize = 64;

/// Returns the caller's list as slices, in memory of the library: null pointers of empty parts must not become slices, and the
/// caller's list may be read-only. Returns `None` when the kernel has to check the list.
///
/// # Safety
/// `parts` points to `count` iovecs, or to memory that may be partly unmapped, or `count` is not in 0..=1024.
unsafe fn list<T>(
    parts: *const iovec,
    count: c_int,
    room: &mut [MaybeUninit<T>; PARTS],
    part: impl Fn(*mut c_void, size_t) -> T,
) -> Option<&mut [T]> {
    let count = usize::try_from(count).ok().filter(|n| *n <= PARTS)?;
    if !memory::is_readable(parts.cast(), count * size_of::<iovec>()) {
        return None;
    }
    let mut total = 0usize;
    for (i, place) in room.iter_mut().take(count).enumerate() {
        // SAFETY: the caller's list has `count` parts, and its memory is mapped, as checked above.
        let iovec { iov_base, iov_len } = unsafe { *parts.add(i) };
        total = total.checked_add(iov_len).filter(|t| *t <= MOST)?;
        if iov_base.addr() < LOWEST_ADDRESS && iov_len > 0 {
            return None;
        }
        let base = match iov_len {
            0 => std::ptr::dangling_mut::<u8>().cast(),
            _ => iov_base,
        };
        place.write(part(base, iov_len));
    }
    // SAFETY: the loop has written the first `count` parts.
    Some(unsafe { std::slice::from_raw_parts_mut(room.as_mut_ptr().cast(), count) })
}

/// Reads inline, at the description's offset or at `at`. Returns `None` when the kernel has to make the call.
unsafe fn read(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    at: Option<i64>,
) -> Option<Result<usize, i32>> {
    let mut room = [const { MaybeUninit::uninit() }; PARTS];
    let part = |base: *mut c_void, length| {
        // SAFETY: the caller gives that many bytes in each part, and no other code uses them during the call.
        IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(base.cast(), length) })
    };
    // SAFETY: the caller's list.
    match unsafe { list(parts, count, &mut room, part) } {
        Some(parts) => errno::kept(|| fd::readv(fd, parts, at)),
        None => {
            if at.is_none() {
                share(fd);
            }
            None
        }
    }
}

/// Writes inline, at the description's offset or at `at`. Returns `None` when the kernel has to make the call.
unsafe fn write(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    at: Option<i64>,
) -> Option<Result<usize, i32>> {
    let mut room = [const { MaybeUninit::uninit() }; PARTS];
    let part = |base: *mut c_void, length| {
        // SAFETY: the caller gives that many bytes to read in each part.
        IoSlice::new(unsafe { std::slice::from_raw_parts(base.cast(), length) })
    };
    // SAFETY: the caller's list.
    match unsafe { list(parts, count, &mut room, part) } {
        Some(parts) => errno::kept(|| fd::writev(fd, parts, at)),
        None => {
            if at.is_none() {
                share(fd);
            }
            None
        }
    }
}

pub unsafe fn readv(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    transfer::cancellation_point();
    // SAFETY: the caller's arguments, throughout.
    unsafe {
        match read(fd, parts, count, None) {
            Some(outcome) => answer(outcome),
            None => checked(fd, real::readv(fd, parts, count)),
        }
    }
}

pub unsafe fn preadv(fd: c_int, parts: *const iovec, count: c_int, offset: off_t) -> ssize_t {
    transfer::cancellation_point();
    // SAFETY: the caller's arguments, throughout.
    unsafe {
        if offset >= 0
            && let Some(outcome) = read(fd, parts, count, Some(offset))
        {
            return answer(outcome);
        }
        checked(fd, real::preadv(fd, parts, count, offset))
    }
}

/// Reads with flags. With an offset of -1, reads at the description's offset, as readv does.
pub unsafe fn preadv2(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments, throughout.
    unsafe {
        match (flags, offset) {
            (0, -1) => readv(fd, parts, count),
            (0, _) => preadv(fd, parts, count, offset),
            _ => {
                if offset == -1 {
                    share(fd);
                }
                checked(fd, real::preadv2(fd, parts, count, offset, flags))
            }
        }
    }
}

pub unsafe fn writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    transfer::cancellation_point();
    // SAFETY: the caller's arguments, throughout.
    unsafe {
        match write(fd, parts, count, None) {
            Some(outcome) => answer(outcome),
            None => checked(fd, real::writev(fd, parts, count)),
        }
    }
}

pub unsafe fn pwritev(fd: c_int, parts: *const iovec, count: c_int, offset: off_t) -> ssize_t {
    transfer::cancellation_point();
    // SAFETY: the caller's arguments, throughout.
    unsafe {
        if offset >= 0
            && let Some(outcome) = write(fd, parts, count, Some(offset))
        {
            return answer(outcome);
        }
        checked(fd, real::pwritev(fd, parts, count, offset))
    }
}

/// Writes with flags. With an offset of -1, writes at the description's offset, as writev does.
pub unsafe fn pwritev2(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments, throughout.
    unsafe {
        match (flags, offset) {
            (0, -1) => writev(fd, parts, count),
            (0, _) => pwritev(fd, parts, count, offset),
            _ => {
                if offset == -1 {
                    share(fd);
                }
                if flags & libc::RWF_APPEND != 0 {
                    errno::kept(|| fd::refresh_size(fd));
                }
                checked(fd, real::pwritev2(fd, parts, count, offset, flags))
            }
        }
    }
}
