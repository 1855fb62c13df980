//! Errors of filesystem operations.

pub use jericho_metadata::error::{Error, Result};

/// Returns the error of a cache operation as one of the filesystem.
pub fn of_cache(error: jericho_cache::Error) -> Error {
    match error {
        jericho_cache::Error::Io(e) => Error::Io(e),
        e => Error::Errno(e.errno()),
    }
}
