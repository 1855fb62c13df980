//! Calls that use and move the offset of a description.

use jericho_sys::files;

use super::kernel_path::{is_given_up, move_offset_to_kernel};
use crate::descriptors::{OFFSET_MAX, OpenFd, Position, SEEK_SET};
use crate::thread::Thread;

/// Calls `act` with the description's offset locked, for example to write `len` bytes there. Then calls `end` with the result, the
/// offset of the access, and the number of bytes that signal handlers have written behind the access; `end` returns the new
/// offset. Calls `end` again if a handler uses the offset meanwhile. Returns `None` when the kernel has the offset.
#[inline]
pub(crate) fn with_offset<T>(
    thread: &Thread,
    open: &OpenFd,
    len: usize,
    act: impl FnOnce(u64) -> T,
    mut end: impl FnMut(&mut T, u64, u64) -> u64,
) -> Option<T> {
    let (offset, tag) = (&open.description().offset, open.tag());
    thread.offset.locking(open.index);
    let Position::At(at) = offset.lock_as(tag, |word| thread.offset.about_to_lock(word)) else {
        thread.offset.unlocked();
        return None;
    };
    let at = thread.offset.has_locked(at, len as u64);
    let mut result = act(at);
    loop {
        let (locked, written) = thread.offset.unlocking();
        let end = end(&mut result, at, written);
        if end > OFFSET_MAX {
            let _ = files::lseek(open.fd, end as i64, SEEK_SET);
        }
        // The release fails if a signal handler has used the offset meanwhile: the thread's locked word has changed, and this
        // computes the end again. It also fails if another thread took the lock away: then nothing is left to do.
        if offset.release(tag, locked, end) || thread.offset.unlocking().0 == locked {
            break;
        }
    }
    thread.offset.unlocked();
    if is_given_up(open) {
        move_offset_to_kernel(open);
    }
    Some(result)
}
