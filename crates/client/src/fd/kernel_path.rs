//! The kernel path: gives descriptions and their offsets back to the kernel, and translates errors of kernel calls.

use jericho_shm::Call;
use jericho_sys::files::{self, Result};
use jericho_sys::{errno, signals};

use crate::descriptors::{self, FdState, OpenFd, Position, SEEK_SET, TO_KERNEL};
use crate::session::report::{self, Reason};
use crate::session::{self, ask, death};
use crate::thread;

/// Puts the description on the kernel path for good.
pub(super) fn give_up(open: &OpenFd, why: Reason) {
    if !is_given_up(open) {
        open.add_flags(TO_KERNEL);
        report::to_kernel(why);
    }
    move_offset_to_kernel(open);
}

#[inline]
pub(super) fn is_given_up(open: &OpenFd) -> bool {
    open.flags().is_some_and(|flags| flags & TO_KERNEL != 0)
}

/// Moves the description's offset to the kernel, if it is here. If this thread has it locked, `with_offset` moves it afterwards.
pub(super) fn move_offset_to_kernel(open: &OpenFd) {
    let offset = &open.description().offset;
    if offset.is_in_kernel(open.tag())
        || thread::current(|thread| thread.offset.has_offset(open.index, offset))
    {
        return;
    }
    // Blocks signals: a handler of this thread would wait for the offset.
    signals::blocked(|| {
        if let Position::At(at) = offset.lock(open.tag()) {
            // Fails only if the fd was closed meanwhile.
            let _ = files::lseek(open.fd, at as i64, SEEK_SET);
            offset.unlock(open.tag(), None);
        }
    });
}

/// Puts the fd's open file on the kernel path, and moves its offset to the kernel.
pub fn to_kernel(fd: i32, why: Reason) {
    match descriptors::state(fd) {
        Some(FdState::Described(open)) => give_up(&open, why),
        Some(FdState::Unknown { word, .. }) => descriptors::set_kernel(fd, word),
        _ => {}
    }
}

/// Returns the errno to report for a call on `fd` that the kernel failed with `errno`. The result is ENOTCONN when the mount's
/// daemon has died, also for calls that were in progress at that moment. After such a death, no inline call uses that daemon's
/// memory.
#[cold]
pub fn errno_after(fd: i32, errno: i32) -> i32 {
    if !death::may_be(errno) {
        return errno;
    }
    let open = match descriptors::state(fd) {
        Some(FdState::Described(open)) => Some(open),
        _ => None,
    };
    // An empty request, which a living daemon answers.
    let nothing = Call::ReadAhead { first: 0, pages: 0 };
    let asked = match &open {
        Some(_) => ask(fd, nothing).map(|_| ()),
        // This fd may not belong to a Jericho mount, so it gets no Jericho ioctl.
        None => files::ask_filesystem(fd),
    };
    if !death::is_sure(asked) {
        return errno;
    }
    // The keeper does the same, unless it was killed, too.
    let session = open.and_then(|open| session::get(open.facts()?.session));
    if let Some(session) = session {
        session.area.revoke();
    }
    errno::ENOTCONN
}

/// Returns the result of a kernel call as the program sees it.
pub(super) fn from_kernel<T>(open: &OpenFd, result: Result<T>) -> Result<T> {
    result.map_err(|errno| errno_after(open.fd, errno))
}
