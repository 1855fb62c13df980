//! Slices. A slice is the page cache of one home node, with its pipeline, evictor and write-back.
//!
//! A slice caches pages of numbered objects. It knows nothing of files. `docs/internals/cache.md` specifies the protocol.
#![forbid(unsafe_code)]

mod clients;
pub mod counters;
mod dirty;
mod eviction;
mod evictor;
mod frames;
mod get;
mod invalidate;
mod latched;
mod object;
mod outage;
mod reader;
mod repair;
mod slice;
mod state;

pub use counters::{Counters, Usage};
pub use get::Grant;
pub use latched::Latched;
pub use object::{Error, Object, Place, Run};
pub use outage::Observer;
pub use reader::Reader;
pub use slice::{Config, FRAMES_MIN, Resident, Slice, StartError};

/// Maximum number of pages of one Get: 1 MiB.
pub const PAGES_PER_GET_MAX: u32 = 256;

/// Owner of the latches that the daemon itself takes.
pub const OWNER_DAEMON: u16 = 1;

/// Purpose of a Get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// The caller reads the pages.
    Read,
    /// The caller changes parts of the pages, so their contents are fetched first. It has reserved space.
    Modify,
    /// The caller replaces whole pages, so nothing is fetched. It has reserved space.
    Overwrite,
}

/// Callback that runs once, at the end of the operation, in the caller's thread or in a thread of the slice.
pub type Done = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// Thresholds at which the slice's threads start and stop working.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    frames: u32,
    /// Eviction starts below `free_low` free frames and stops at `free_high`.
    free_low: u32,
    free_high: u32,
    /// Write-back starts at this number of dirty pages; writers wait at `dirty_max`.
    dirty_background: u32,
    dirty_max: u32,
    /// Age at which a dirty page is written back.
    dirty_age: std::time::Duration,
}
