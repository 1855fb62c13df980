//! Calls that run another program in this process, or end it without exit handlers.
//!
//! The C library's exec functions call each other internally, past the hooks. So each one has its own hook.

use std::ffi::{c_char, c_int, c_void};

use crate::{fork, real, report};

type Strings = *const *const c_char;

exports! {
    execve as execve: (path: *const c_char, arguments: Strings, environment: Strings) -> c_int;
    execv as execv: (path: *const c_char, arguments: Strings) -> c_int;
    execvp as execvp: (file: *const c_char, arguments: Strings) -> c_int;
    execvpe as execvpe: (file: *const c_char, arguments: Strings, environment: Strings) -> c_int;
    fexecve as fexecve: (fd: c_int, arguments: Strings, environment: Strings) -> c_int;
    execveat as execveat:
        (dir: c_int, path: *const c_char, arguments: Strings, environment: Strings, flags: c_int)
        -> c_int;
    exit_at_once as _exit, _Exit: (status: c_int);
}

/// Prepares for an exec: the next program finds the offsets in the kernel. If the exec fails, this program continues with the
/// offsets there, and reports once more at its end.
fn before() {
    fork::share_all();
    report::write();
}

pub unsafe fn execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    before();
    // SAFETY: the caller's arguments.
    unsafe { real::execve(path, arguments, environment) }
}

unsafe fn execv(path: *const c_char, arguments: Strings) -> c_int {
    before();
    // SAFETY: the caller's arguments.
    unsafe { real::execv(path, arguments) }
}

unsafe fn execvp(file: *const c_char, arguments: Strings) -> c_int {
    before();
    // SAFETY: the caller's arguments.
    unsafe { real::execvp(file, arguments) }
}

unsafe fn execvpe(file: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    before();
    // SAFETY: the caller's arguments.
    unsafe { real::execvpe(file, arguments, environment) }
}

unsafe fn fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int {
    before();
    // SAFETY: the caller's arguments.
    unsafe { real::fexecve(fd, arguments, environment) }
}

pub unsafe fn execveat(
    dir: c_int,
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
    flags: c_int,
) -> c_int {
    before();
    if real::symbol::execveat.address().is_null() {
        let (dir, path, flags) = (dir as usize, path as usize, flags as usize);
        let (arguments, environment) = (arguments as usize, environment as usize);
        let number = libc::SYS_execveat;
        // SAFETY: the caller's arguments.
        let status = unsafe { real::syscall(number, dir, path, arguments, environment, flags, 0) };
        return status as c_int;
    }
    // SAFETY: the caller's arguments.
    unsafe { real::execveat(dir, path, arguments, environment, flags) }
}

/// Prepares for execl, which is variadic: see `trampoline`.
pub extern "C" fn before_execl() -> *const c_void {
    before();
    real::symbol::execl.address()
}

/// Prepares for execle.
pub extern "C" fn before_execle() -> *const c_void {
    before();
    real::symbol::execle.address()
}

/// Prepares for execlp.
pub extern "C" fn before_execlp() -> *const c_void {
    before();
    real::symbol::execlp.address()
}

/// Ends the process. No exit handler runs, so this writes the report.
unsafe fn exit_at_once(status: c_int) {
    report::write();
    // SAFETY: the caller's arguments.
    unsafe { real::_exit(status) }
}
