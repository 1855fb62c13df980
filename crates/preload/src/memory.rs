//! Memory that the caller names and that a hook reads before the kernel does: lists of buffers, locks, messages.
//!
//! The kernel fails with EFAULT for an unmapped address, where a read by the hook would end the program. So the hook first asks
//! the kernel, with a call that reads the memory and changes nothing.

use std::ffi::{c_int, c_void};

use crate::{errno, real};

/// Smallest page size of any machine.
const PAGE: usize = 4096;
/// An invalid operation on a signal mask: the kernel reads the mask first, and then fails with EINVAL.
const INVALID_OPERATION: c_int = -1;
/// Bytes of the kernel's signal mask.
const MASK_BYTES: usize = 8;
/// Most pages that one check covers. Everything that a hook reads and the kernel accepts is shorter.
const PAGES_MAX: usize = 256;

/// Returns whether `len` bytes at `at` can be read now. Makes no system call for memory in the stack page that the calling
/// thread is using, where the caller's local variables often are.
pub fn is_readable(at: *const c_void, len: usize) -> bool {
    if len == 0 {
        return true;
    }
    let Some(last) = at.addr().checked_add(len - 1) else {
        return false;
    };
    let (first, last) = (at.addr() / PAGE, last / PAGE);
    let here = (&raw const last).addr() / PAGE;
    last - first < PAGES_MAX && (first..=last).all(|page| page == here || is_page_readable(page))
}

#[cold]
fn is_page_readable(page: usize) -> bool {
    // No program maps the first page, and a null pointer would mean no mask.
    page != 0 && !is_refused(page * PAGE)
}

/// Returns whether the kernel fails with EFAULT for the bytes at `at`. Returns false where the call itself is
/// forbidden.
fn is_refused(at: usize) -> bool {
    errno::kept(|| {
        let (how, none) = (INVALID_OPERATION as usize, 0);
        // SAFETY: the kernel reads the mask and refuses `how`; it writes nothing.
        let status =
            unsafe { real::syscall(libc::SYS_rt_sigprocmask, how, at, none, MASK_BYTES, 0, 0) };
        status == -1 && errno::get() == libc::EFAULT
    })
}

/// Does the same as `is_readable` for one `T`.
pub fn is_readable_one<T>(at: *const T) -> bool {
    is_readable(at.cast(), size_of::<T>())
}
