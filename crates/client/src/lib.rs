//! The application side: inline reads and writes of cached pages, in the caller's thread.
//!
//! Three kinds of callers use it: the mount's workers, the library between a program and libc, and any other process that has
//! mapped a slice's segments. This crate knows pages of numbered objects. It knows neither the filesystem nor the cache behind
//! them: the caller asks the daemon for a page that is not cached.
#![forbid(unsafe_code)]

mod ask;
pub mod death;
mod description;
mod devices;
mod early;
mod fast;
pub mod fd;
pub mod hit;
mod inline;
pub mod migration;
mod offset;
mod read_ahead;
mod recent_hits;
mod reentrancy;
mod report;
mod session;
mod source;
pub mod sync;
mod wish;

pub use inline::{read, write};
pub use read_ahead::ReadAhead;
