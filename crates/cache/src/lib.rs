//! Slices: the page cache of one home node, its pipeline, evictor and write-back.
//!
//! Knows pages of numbered objects, not files. `docs/internals/cache.md` has the protocol.
#![forbid(unsafe_code)]

mod clients;
pub mod counters;
mod dirty;
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

/// Pages of one Get at most: 1 MiB.
pub const PAGES_PER_GET_MAX: u32 = 256;

/// The owner of latches that the daemon itself takes.
pub const OWNER_DAEMON: u16 = 1;

/// What a Get is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// The pages will be read.
    Read,
    /// Parts of the pages will be changed: contents are fetched first. The caller has reserved space.
    Modify,
    /// The pages will be replaced as a whole: nothing is fetched. The caller has reserved space.
    Overwrite,
}

/// Called once, when the operation is over; in the caller's thread or in a thread of the slice.
pub type Done = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// When the slice's threads begin and stop working.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    frames: u32,
    /// Eviction begins below `low` free frames and goes on to `high`.
    free_low: u32,
    free_high: u32,
    /// Write-back begins here; writers wait at `dirty_max`.
    dirty_background: u32,
    dirty_max: u32,
    /// Write-back of pages that have been dirty this long.
    dirty_age: std::time::Duration,
}
