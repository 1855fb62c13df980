//! Namespace, inodes, extents, allocation, placement and the metadata store.
//!
//! Knows pages only as ranges of a file, and no client: who asked is not its business.
#![forbid(unsafe_code)]

pub mod alloc;
pub mod check;
pub mod error;
pub mod fs;
pub mod store;
pub mod types;
pub mod volume;

pub use error::{Error, Result};
