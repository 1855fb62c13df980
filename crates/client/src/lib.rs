//! The application side: inline reads and writes of cached pages, in the caller's thread.
//!
//! Used by the mount's workers and by whatever else has a slice's segments mapped. Knows pages of
//! numbered objects and never the filesystem or the cache behind them: what is not there, its
//! caller asks for.
#![forbid(unsafe_code)]

mod inline;
mod read_ahead;

pub use inline::{read, write};
pub use read_ahead::ReadAhead;
