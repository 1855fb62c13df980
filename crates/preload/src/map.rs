//! mmap: a mapping shows the kernel's pages, so the descriptions of mapped files take the kernel path.

use std::ffi::{c_int, c_void};

use jericho_client::fd;
use libc::{off_t, size_t};
use rustix::mm::{MapFlags, ProtFlags};

use crate::{errno, real};

exports! {
    mmap as mmap, mmap64:
        (at: *mut c_void, length: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off_t)
        -> *mut c_void;
}

pub unsafe fn mmap(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    if flags & libc::MAP_ANONYMOUS == 0 {
        if fd >= 0
            && let Err(error) = errno::kept(|| fd::mapped(fd))
        {
            errno::set(error);
            return libc::MAP_FAILED;
        }
    } else if real::symbol::mmap.known().is_null() {
        // The program's malloc is starting and needs memory. Looking up mmap may need malloc. SAFETY: the caller's arguments.
        return unsafe { anonymous(at, length, protection, flags) };
    }
    // SAFETY: the caller's arguments.
    unsafe { real::mmap(at, length, protection, flags, fd, offset) }
}

/// Maps anonymous memory without the C library.
unsafe fn anonymous(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
) -> *mut c_void {
    let protection = ProtFlags::from_bits_retain(protection as u32);
    let flags = MapFlags::from_bits_retain(flags as u32);
    // SAFETY: the caller's arguments.
    match unsafe { rustix::mm::mmap_anonymous(at, length, protection, flags) } {
        Ok(mapped) => mapped,
        Err(error) => {
            errno::set(error.raw_os_error());
            libc::MAP_FAILED
        }
    }
}
