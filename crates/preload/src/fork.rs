//! New processes. A child finds the offsets of the descriptions that it inherits in the kernel.

use std::ffi::{c_char, c_int, c_ulong, c_void};

use jericho_client::fd;
use libc::pid_t;

use crate::{errno, real, threads};

exports! {
    fork as fork, __fork: () -> pid_t;
    vfork as vfork, __vfork: () -> pid_t;
    bare_fork as _Fork: () -> pid_t;
    forkpty as forkpty:
        (master: *mut c_int, name: *mut c_char, terminal: *const c_void, window: *const c_void)
        -> pid_t;
    daemon as daemon: (keep_dir: c_int, keep_streams: c_int) -> c_int;
    system as system: (command: *const c_char) -> c_int;
    wordexp as wordexp: (words: *const c_char, out: *mut c_void, flags: c_int) -> c_int;
    posix_spawn as posix_spawn:
        (pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    posix_spawnp as posix_spawnp:
        (pid: *mut pid_t, file: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    pidfd_spawn as pidfd_spawn:
        (pidfd: *mut c_int, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    pidfd_spawnp as pidfd_spawnp:
        (pidfd: *mut c_int, file: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
}

/// Moves every description's offset to the kernel for good, and restores the thread's CPU mask: a child would inherit both.
pub fn share_all() {
    errno::kept(fd::share_all);
    threads::release();
}

pub unsafe fn fork() -> pid_t {
    share_all();
    let forking = errno::kept(fd::before_fork);
    // SAFETY: fork takes no arguments.
    let pid = unsafe { real::fork() };
    if pid == 0 {
        forking.in_child();
    }
    errno::kept(|| drop(forking));
    pid
}

/// Does the same as fork. The child of a real vfork runs in its parent's memory. There, the dup2 and close that it makes before
/// it executes a program would change the state of the parent's fds. POSIX allows a fork here, because such a child may do
/// nothing that shows the difference.
pub unsafe fn vfork() -> pid_t {
    // SAFETY: fork takes no arguments.
    unsafe { fork() }
}

unsafe fn bare_fork() -> pid_t {
    share_all();
    // SAFETY: neither call takes arguments.
    unsafe {
        match real::symbol::_Fork.address().is_null() {
            true => real::fork(),
            false => {
                errno::kept(fd::before_bare_fork);
                real::_Fork()
            }
        }
    }
}

/// Prepares for clone, which is variadic: see `trampoline`. Only a clone with memory of its own counts as a new process here.
pub extern "C" fn before_clone(_: usize, _: usize, flags: c_int) -> *const c_void {
    match flags & libc::CLONE_VM {
        0 => {
            share_all();
            errno::kept(fd::before_bare_fork);
        }
        _ => {
            threads::release();
            fd::has_threads();
        }
    }
    real::symbol::clone.address()
}

/// Prepares for a clone made with syscall(2).
pub fn before_raw_clone(flags: c_ulong) {
    match flags & libc::CLONE_VM as c_ulong {
        0 => {
            share_all();
            errno::kept(fd::before_bare_fork);
        }
        _ => {
            threads::release();
            fd::has_threads();
        }
    }
}

unsafe fn forkpty(
    master: *mut c_int,
    name: *mut c_char,
    terminal: *const c_void,
    window: *const c_void,
) -> pid_t {
    share_all();
    // SAFETY: the caller's arguments.
    let pid = unsafe { real::forkpty(master, name, terminal, window) };
    if pid == 0 {
        errno::kept(|| fd::forget_range(0, 2));
    }
    pid
}

/// Forks inside the C library, and then puts /dev/null on 0, 1 and 2.
unsafe fn daemon(keep_dir: c_int, keep_streams: c_int) -> c_int {
    share_all();
    if keep_streams == 0 {
        errno::kept(|| fd::forget_range(0, 2));
    }
    // SAFETY: the caller's arguments.
    unsafe { real::daemon(keep_dir, keep_streams) }
}

unsafe fn system(command: *const c_char) -> c_int {
    share_all();
    // SAFETY: the caller's arguments.
    unsafe { real::system(command) }
}

/// Runs a shell for `$(...)`.
unsafe fn wordexp(words: *const c_char, out: *mut c_void, flags: c_int) -> c_int {
    share_all();
    // SAFETY: the caller's arguments.
    unsafe { real::wordexp(words, out, flags) }
}

unsafe fn posix_spawn(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: *const *mut c_char,
    environment: *const *mut c_char,
) -> c_int {
    share_all();
    // SAFETY: the caller's arguments.
    unsafe { real::posix_spawn(pid, path, actions, attributes, arguments, environment) }
}

unsafe fn posix_spawnp(
    pid: *mut pid_t,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: *const *mut c_char,
    environment: *const *mut c_char,
) -> c_int {
    share_all();
    // SAFETY: the caller's arguments.
    unsafe { real::posix_spawnp(pid, file, actions, attributes, arguments, environment) }
}

unsafe fn pidfd_spawn(
    pidfd: *mut c_int,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: *const *mut c_char,
    environment: *const *mut c_char,
) -> c_int {
    // These functions return the errno, and never -1.
    if real::symbol::pidfd_spawn.address().is_null() {
        return libc::ENOSYS;
    }
    share_all();
    // SAFETY: the caller's arguments.
    unsafe { real::pidfd_spawn(pidfd, path, actions, attributes, arguments, environment) }
}

unsafe fn pidfd_spawnp(
    pidfd: *mut c_int,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: *const *mut c_char,
    environment: *const *mut c_char,
) -> c_int {
    if real::symbol::pidfd_spawnp.address().is_null() {
        return libc::ENOSYS;
    }
    share_all();
    // SAFETY: the caller's arguments.
    unsafe { real::pidfd_spawnp(pidfd, file, actions, attributes, arguments, environment) }
}
