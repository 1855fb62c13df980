//! The offset, and the calls that use it implicitly.

use std::ffi::c_int;

use jericho_client::fd;
use libc::off_t;

use crate::death::checked;
use crate::transfer::share;
use crate::{errno, real};

exports! {
    lseek as lseek, lseek64, __lseek, llseek: (fd: c_int, offset: off_t, whence: c_int) -> off_t;
    lockf as lockf, lockf64: (fd: c_int, command: c_int, length: off_t) -> c_int;
    ioctl as ioctl: (fd: c_int, request: usize, argument: usize) -> c_int;
}

pub unsafe fn lseek(fd: c_int, offset: off_t, whence: c_int) -> off_t {
    match errno::kept(|| fd::lseek(fd, offset, whence)) {
        Some(Ok(offset)) => offset,
        Some(Err(errno)) => {
            errno::set(fd::errno_after(fd, errno));
            -1
        }
        // SAFETY: the caller's arguments.
        None => checked(fd, unsafe { real::lseek(fd, offset, whence) }),
    }
}

/// Locks a section that begins at the offset.
unsafe fn lockf(fd: c_int, command: c_int, length: off_t) -> c_int {
    share(fd);
    // SAFETY: the caller's arguments.
    checked(fd, unsafe { real::lockf(fd, command, length) })
}

/// Requests that count from the offset: bytes left to read, and XFS's old requests to reserve and release space, which the kernel
/// offers for every file.
const FROM_OFFSET: [u32; 6] = [
    libc::FIONREAD as u32,
    0x4030_5828, // FS_IOC_RESVSP
    0x4030_582a, // FS_IOC_RESVSP64
    0x4030_5829, // FS_IOC_UNRESVSP
    0x4030_582b, // FS_IOC_UNRESVSP64
    0x4030_5839, // FS_IOC_ZERO_RANGE
];

pub unsafe fn ioctl(fd: c_int, request: usize, argument: usize) -> c_int {
    // The kernel reads only 32 bits of the request.
    if FROM_OFFSET.contains(&(request as u32)) {
        share(fd);
    }
    // SAFETY: the caller's arguments; the kernel ignores an argument that the caller did not give.
    checked(fd, unsafe { real::ioctl(fd, request, argument) })
}
