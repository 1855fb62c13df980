//! The application side: inline reads and writes of cached pages, in the caller's thread.
//!
//! The library between a program and libc makes the program's calls through this crate. The daemon uses only [`ReadAhead`] and
//! parts of [`migration`]. This crate knows pages of numbered objects. It knows neither the filesystem nor the cache behind them:
//! for a page that is not cached, it asks the daemon or leaves the access to the kernel.
//!
//! The modules from the lowest up; each uses only modules before it:
//!
//! | module | what it holds |
//! |---|---|
//! | `descriptors` | the fds and open file descriptions of the program, in static tables |
//! | `session` | the daemons: how the library asks them, their segments, a file in them |
//! | `thread` | the record of a thread: its present call, last hits and use of data |
//! | `migration` | moves threads near their data; its submodules use no other module, and `session` and `thread` use them |
//! | `access` | reads and writes of a file in the segments |
//! | `fd` | the program's calls by fd: inline, through the kernel, or a part of each way |
//! | `hit` | the short path in front of `fd`, for a call that is one hit |
#![forbid(unsafe_code)]

mod access;
mod descriptors;
pub mod fd;
pub mod hit;
pub mod migration;
mod session;
pub mod sync;
mod thread;

pub use descriptors::ReadAhead;
pub use session::death;
