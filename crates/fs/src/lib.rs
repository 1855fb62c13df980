//! Namespace, inodes, extents, allocation, placement and the metadata store.
//!
//! Knows pages only as ranges of a file. Does not know clients: the daemon checks which client may ask for an operation.
#![forbid(unsafe_code)]

pub mod alloc;
pub mod check;
pub mod error;
pub mod format;
pub mod fs;
pub mod metadata;
pub mod store;
pub mod types;

pub use error::{Error, Result};
