//! Open files that other processes get: by fork(2), exec, or in a message.

use super::kernel_path::move_offset_to_kernel;
use super::way::by_kernel;
use crate::descriptors::{self, FdState};
use crate::migration;
use crate::session::{self, devices};

/// Reads the environment, before main, while the process has one thread.
pub fn prepare() {
    devices::prepare();
    migration::policy_of_run();
    migration::is_with_parent();
}

/// Keeps other threads from attaching while this one forks. The child would have no thread to finish an attachment in progress.
pub fn before_fork() -> Forking {
    Forking {
        may_attach: session::may_attach(),
        _attach_lock: session::lock_attaching(),
    }
}

/// A fork in progress.
pub struct Forking {
    may_attach: bool,
    _attach_lock: session::AttachLock,
}

impl Forking {
    /// Allows the child to attach, if the parent may.
    pub fn in_child(&self) {
        if self.may_attach {
            session::allow_attaching();
        }
    }
}

/// Prepares for a child that is made other than by the C library's fork. All the child's I/O goes through the kernel.
pub fn before_bare_fork() {
    session::before_bare_fork();
}

/// Moves all offsets to the kernel, before fork(2), exec or posix_spawn.
pub fn share_all() {
    descriptors::fds().for_each(share_offset);
}

/// Moves the fd's offset to the kernel for good, before another process gets the open file (SCM_RIGHTS), or the kernel uses its
/// offset (sendfile(2) ...).
pub fn share(fd: i32) {
    share_offset(fd);
    // The library does not know which bytes will be accessed.
    let _: Option<()> = by_kernel(fd, Some(0), usize::MAX, false);
}

fn share_offset(fd: i32) {
    match descriptors::state(fd) {
        Some(FdState::Described(open)) => move_offset_to_kernel(&open),
        Some(FdState::Unknown { opened: true, .. }) => descriptors::unopened(fd),
        _ => {}
    }
}
