//! Namespace, inodes, extents, placement, commits and the check of a volume.
//!
//! Knows pages only as ranges of a file. Does not know clients: the daemon checks which client may ask for an operation.
#![forbid(unsafe_code)]

mod absences;
pub mod add;
pub mod check;
mod commit;
mod core;
mod data;
mod discard;
pub mod error;
mod flushes;
mod fs;
mod gates;
mod grow;
mod hosts;
mod ino_map;
mod inode;
mod interruption;
mod names;
mod objects;
mod orphans;
mod put_back;
mod resume;
mod resume_reading;
mod scrub;
mod shards;
mod table;
mod take;
mod times;
pub mod types;

pub use jericho_metadata::format;

pub use absences::Absences;
pub use data::file::Writing;
pub use data::layout::Layout;
pub use data::write_errors::SeenErrors;
pub use error::{Error, Result};
pub use fs::Fs;
pub use inode::File;
pub use interruption::{Interruption, begin_change, with_interruption};
pub use names::privileges::CAPABILITY;
pub use put_back::{PutBackError, ReturnedDevice};
pub use resume::Resumed;
pub use scrub::ScrubStatus;
pub use take::{CacheError, TakeError};
pub use types::{Done, FsOptions};
