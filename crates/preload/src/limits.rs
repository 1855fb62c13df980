//! RLIMIT_FSIZE: a new limit also applies to open files.

use std::ffi::{c_int, c_uint};

use jericho_client::fd;
use libc::{pid_t, rlimit};

use crate::{errno, real};

exports! {
    setrlimit as setrlimit, setrlimit64: (resource: c_uint, limit: *const rlimit) -> c_int;
    prlimit as prlimit, prlimit64:
        (pid: pid_t, resource: c_uint, limit: *const rlimit, old: *mut rlimit) -> c_int;
}

/// Checks the limit again after a call that may have changed it. Returns `answer`.
fn changed(resource: c_uint, answer: c_int) -> c_int {
    if resource == libc::RLIMIT_FSIZE {
        errno::kept(fd::size_limit_changed);
    }
    answer
}

pub unsafe fn setrlimit(resource: c_uint, limit: *const rlimit) -> c_int {
    // SAFETY: the caller's arguments.
    changed(resource, unsafe { real::setrlimit(resource, limit) })
}

/// Checks the limit even when `pid` is another process, because the check is cheap.
pub unsafe fn prlimit(
    pid: pid_t,
    resource: c_uint,
    limit: *const rlimit,
    old: *mut rlimit,
) -> c_int {
    // SAFETY: the caller's arguments.
    changed(resource, unsafe {
        real::prlimit(pid, resource, limit, old)
    })
}
