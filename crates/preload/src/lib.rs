//! `libjericho_preload.so`: the C library's calls on fds, for programs that were not written for Jericho.
//!
//! Each function here stands in front of the C library's function of the same name. It asks `jericho_client::fd`, which knows the
//! state of each fd. Calls that are not served inline go to the C library unchanged. `docs/internals/preload.md` lists the hooked
//! functions, with reasons.
//!
//! Rules for all hooks: a hook may run before `main`, after the exit handlers, in a signal handler and in any thread. So it takes
//! no lock, allocates nothing, never panics, and leaves errno as the C library would. Exceptions: attaching to a daemon, sync, and
//! a hook that runs before the library's constructor may allocate memory.

#[cfg(not(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64"),
    target_pointer_width = "64"
)))]
compile_error!("the preload library is for glibc on x86-64 and aarch64 Linux");

#[macro_use]
mod export;

mod copy;
mod death;
mod errno;
mod exec;
mod fds;
mod fork;
mod limits;
mod map;
mod memory;
mod messages;
mod offset;
mod open;
mod raw;
mod real;
mod report;
mod start;
mod stat;
mod stdio;
mod streams;
mod sync;
mod threads;
mod trampoline;
mod transfer;
mod vectors;
