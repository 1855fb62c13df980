//! Namespace, inodes, extents, allocation, placement and the metadata store.
//!
//! Knows pages only as ranges of a file. Does not know clients: the daemon checks which client may ask for an operation.
#![forbid(unsafe_code)]

pub mod add;
pub mod alloc;
pub mod check;
mod commit;
mod core;
mod data;
mod discard;
mod errno;
pub mod error;
mod flushes;
pub mod format;
mod fs;
mod gates;
mod grow;
mod ino_map;
mod inode;
mod logged;
pub mod metadata;
mod names;
mod numbers;
mod objects;
mod scrub;
mod shard;
mod shards;
pub mod store;
mod table;
mod times;
pub mod types;

pub use data::file::Writing;
pub use data::layout::Layout;
pub use data::write_errors::SeenErrors;
pub use error::{Error, Result};
pub use fs::Fs;
pub use inode::File;
pub use names::privileges::CAPABILITY;
pub use types::{Done, FsOptions};
