//! The CPUs of threads: a mask that migration has narrowed is restored before another thread inherits it or the program reads it.

use std::ffi::{c_int, c_void};

use jericho_client::{fd, migration};
use libc::{cpu_set_t, pid_t, pthread_attr_t, pthread_t, size_t};

use crate::{errno, real};

exports! {
    pthread_create as pthread_create:
        (thread: *mut pthread_t, attributes: *const pthread_attr_t, start: *const c_void,
        argument: *mut c_void) -> c_int;
    thrd_create as thrd_create:
        (thread: *mut c_void, start: *const c_void, argument: *mut c_void) -> c_int;
    sched_getaffinity as sched_getaffinity:
        (pid: pid_t, size: size_t, cpus: *mut cpu_set_t) -> c_int;
    sched_setaffinity as sched_setaffinity:
        (pid: pid_t, size: size_t, cpus: *const cpu_set_t) -> c_int;
    pthread_getaffinity_np as pthread_getaffinity_np:
        (thread: pthread_t, size: size_t, cpus: *mut cpu_set_t) -> c_int;
    pthread_setaffinity_np as pthread_setaffinity_np:
        (thread: pthread_t, size: size_t, cpus: *const cpu_set_t) -> c_int;
}

/// Restores the calling thread's own CPU mask.
#[inline]
pub fn release() {
    errno::kept(migration::release);
}

unsafe fn pthread_create(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    start: *const c_void,
    argument: *mut c_void,
) -> c_int {
    release();
    fd::has_threads();
    // SAFETY: the caller's arguments.
    unsafe { real::pthread_create(thread, attributes, start, argument) }
}

unsafe fn thrd_create(thread: *mut c_void, start: *const c_void, argument: *mut c_void) -> c_int {
    release();
    fd::has_threads();
    // SAFETY: the caller's arguments.
    unsafe { real::thrd_create(thread, start, argument) }
}

/// Reads a thread's CPU mask. Only the calling thread's mask can be restored first; that of another thread may be narrow.
unsafe fn sched_getaffinity(pid: pid_t, size: size_t, cpus: *mut cpu_set_t) -> c_int {
    release();
    // SAFETY: the caller's arguments.
    unsafe { real::sched_getaffinity(pid, size, cpus) }
}

unsafe fn sched_setaffinity(pid: pid_t, size: size_t, cpus: *const cpu_set_t) -> c_int {
    release();
    // SAFETY: the caller's arguments.
    unsafe { real::sched_setaffinity(pid, size, cpus) }
}

unsafe fn pthread_getaffinity_np(thread: pthread_t, size: size_t, cpus: *mut cpu_set_t) -> c_int {
    release();
    // SAFETY: the caller's arguments.
    unsafe { real::pthread_getaffinity_np(thread, size, cpus) }
}

unsafe fn pthread_setaffinity_np(thread: pthread_t, size: size_t, cpus: *const cpu_set_t) -> c_int {
    release();
    // SAFETY: the caller's arguments.
    unsafe { real::pthread_setaffinity_np(thread, size, cpus) }
}
