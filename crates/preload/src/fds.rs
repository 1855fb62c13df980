//! Fds that become duplicates of others, and changes by fcntl.

use std::ffi::{c_int, c_uint};

use jericho_client::fd::{self, Reason};
use libc::flock;

use crate::transfer::share;
use crate::{errno, memory, real, streams};

exports! {
    dup as dup: (old: c_int) -> c_int;
    dup2 as dup2, __dup2: (old: c_int, new: c_int) -> c_int;
    dup3 as dup3: (old: c_int, new: c_int, flags: c_int) -> c_int;
    fcntl as fcntl, fcntl64, __fcntl: (fd: c_int, command: c_int, argument: usize) -> c_int;
    pidfd_getfd as pidfd_getfd: (process: c_int, target: c_int, flags: c_uint) -> c_int;
    login_tty as login_tty: (fd: c_int) -> c_int;
}

/// Tells the client that `new` is a duplicate of `old`. Returns `new`, which may be the -1 of a failed call.
fn duplicated(old: c_int, new: c_int) -> c_int {
    if new >= 0 && new != old {
        errno::kept(|| {
            let to_stream = streams::uses(new);
            if to_stream {
                // The library needs no record of a redirected file: both fds keep their offset in the kernel.
                fd::share(old);
            }
            fd::duplicated(old, new);
            if to_stream {
                fd::to_kernel(new, Reason::Stream);
            }
        });
    }
    new
}

pub unsafe fn dup(old: c_int) -> c_int {
    // SAFETY: the caller's arguments.
    duplicated(old, unsafe { real::dup(old) })
}

pub unsafe fn dup2(old: c_int, new: c_int) -> c_int {
    // SAFETY: the caller's arguments.
    duplicated(old, unsafe { real::dup2(old, new) })
}

pub unsafe fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments.
    duplicated(old, unsafe { real::dup3(old, new, flags) })
}

// The kernel has these commands; the `libc` crate does not.
const F_DUPFD_QUERY: c_int = 1027;
const F_CREATED_QUERY: c_int = 1028;
const F_GET_RW_HINT: c_int = 1035;
const F_SET_FILE_RW_HINT: c_int = 1038;
const F_SETSIG: c_int = 10;
const F_GETSIG: c_int = 11;
const F_SETOWN_EX: c_int = 15;
const F_GETOWN_EX: c_int = 16;

pub unsafe fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
            // SAFETY: the caller's arguments.
            return duplicated(fd, unsafe { real::fcntl(fd, command, argument) });
        }
        libc::F_SETFL => {
            // SAFETY: the caller's arguments.
            let status = unsafe { real::fcntl(fd, command, argument) };
            if status == 0 {
                errno::kept(|| fd::flags_changed(fd));
            }
            return status;
        }
        libc::F_GETLK
        | libc::F_SETLK
        | libc::F_SETLKW
        | libc::F_OFD_GETLK
        | libc::F_OFD_SETLK
        | libc::F_OFD_SETLKW => {
            let lock = argument as *const flock;
            if memory::is_readable_one(lock) {
                // SAFETY: these commands take a struct flock. It is mapped, as checked above.
                let whence = unsafe { (*lock).l_whence };
                if c_int::from(whence) == libc::SEEK_CUR {
                    share(fd);
                }
            }
        }
        // These commands change neither the effect nor the offset of a read or write.
        libc::F_GETFD
        | libc::F_SETFD
        | libc::F_GETFL
        | libc::F_GETOWN
        | libc::F_SETOWN
        | libc::F_GETLEASE
        | libc::F_SETLEASE
        | libc::F_NOTIFY
        | libc::F_GETPIPE_SZ
        | libc::F_SETPIPE_SZ
        | libc::F_ADD_SEALS
        | libc::F_GET_SEALS
        | F_DUPFD_QUERY
        | F_CREATED_QUERY
        | F_GET_RW_HINT..=F_SET_FILE_RW_HINT
        | F_SETSIG
        | F_GETSIG
        | F_SETOWN_EX
        | F_GETOWN_EX => {}
        _ => errno::kept(|| fd::to_kernel(fd, Reason::Unknown)),
    }
    // SAFETY: the caller's arguments; the kernel ignores an argument that the caller did not give.
    unsafe { real::fcntl(fd, command, argument) }
}

/// Gets an fd of another process. That process shares the description, so the offset stays in the kernel, as for an inherited fd.
unsafe fn pidfd_getfd(process: c_int, target: c_int, flags: c_uint) -> c_int {
    // SAFETY: the caller's arguments.
    let fd = unsafe { real::pidfd_getfd(process, target, flags) };
    if fd >= 0 {
        errno::kept(|| fd::forget(fd));
    }
    fd
}

/// Makes fds 0, 1 and 2 refer to the terminal of `fd`, and closes `fd`.
unsafe fn login_tty(fd: c_int) -> c_int {
    errno::kept(|| {
        fd::forget(fd);
        fd::forget_range(0, 2);
    });
    // SAFETY: the caller's arguments.
    unsafe { real::login_tty(fd) }
}
