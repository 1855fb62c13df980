//! The metadata stores of a volume, and the allocator of its blocks.
//!
//! A store keeps rows: inodes, directory entries, extents, attributes, bitmaps. It knows which rows belong to one change and must be
//! durable together. It does not know what a path, an open file or a page in the cache is: those are of the filesystem above.
#![forbid(unsafe_code)]

pub mod alloc;
pub mod errno;
pub mod error;
pub mod format;
pub mod logged;
pub mod numbers;
pub mod shard;
pub mod store;
pub mod stores;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod types;

pub use error::{Error, Result};
