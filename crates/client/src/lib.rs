//! The application side: inline reads and writes of cached pages, in the caller's thread.
//!
//! Used by the mount's workers, by the library that stands between a program and libc, and by whatever else has a
//! slice's segments mapped. Knows pages of numbered objects and never the filesystem or the cache behind
//! them: what is not there, its caller asks for.
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
