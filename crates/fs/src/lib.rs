//! Namespace, inodes, extents, allocation, placement and the metadata store.
//!
//! Knows pages only as ranges of a file. Does not know clients: the daemon checks which client may ask for an operation.
#![forbid(unsafe_code)]

pub mod alloc;
pub mod check;
pub mod error;
pub mod fs;
pub mod store;
pub mod types;
pub mod volume;

pub use error::{Error, Result};
