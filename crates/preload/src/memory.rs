//! Memory that the caller names and a hook looks into before the kernel does: lists of buffers, locks, messages.
//!
//! The kernel answers EFAULT for an address that is not mapped, where a look of ours would end the program. So it is asked first,
//! by a call that reads the memory and changes nothing.

use std::ffi::{c_int, c_void};

use crate::{errno, real};

/// Every page has at least this much.
const PAGE: usize = 4096;
/// No way to change a signal mask: the kernel reads the mask first, and then says EINVAL.
const NO_WAY: c_int = -1;
/// Bytes of the kernel's signal mask.
const MASK_BYTES: usize = 8;
/// Pages that are asked about at most. What a hook looks into is shorter, if the kernel takes it.
const PAGES_MAX: usize = 256;

/// Whether `len` bytes at `at` can be read now. No system call for memory in the page of the stack that the calling thread is
/// using, as the caller's local variables often are.
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
    // No program has the first page, and null would be no mask to the kernel.
    page != 0 && !is_refused(page * PAGE)
}

/// Whether the kernel says EFAULT of the bytes at `at`. Where the call itself is forbidden, it does not.
fn is_refused(at: usize) -> bool {
    errno::kept(|| {
        let (how, none) = (NO_WAY as usize, 0);
        // SAFETY: the kernel reads the mask and refuses `how`; it writes nothing.
        let status =
            unsafe { real::syscall(libc::SYS_rt_sigprocmask, how, at, none, MASK_BYTES, 0, 0) };
        status == -1 && errno::get() == libc::EFAULT
    })
}

/// As `is_readable`, for one `T`.
pub fn is_readable_one<T>(at: *const T) -> bool {
    is_readable(at.cast(), size_of::<T>())
}
