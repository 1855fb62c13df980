//! The metadata stores of a volume, and the allocator of its blocks.
//!
//! A store keeps rows: inodes, directory entries, extents, attributes, bitmaps, images of blocks, checksums. It makes the rows of a batch durable together.
//! It knows no path, open file or cached page: those belong to the filesystem above.
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
