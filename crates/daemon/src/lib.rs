//! A mounted volume in a process: devices, slices, filesystem, and the data path that joins them.
//!
//! `fs` knows no client and `client` knows no filesystem. Here, a read or write first accesses cached pages inline, and then uses
//! the filesystem and the slice for the rest.
#![forbid(unsafe_code)]

mod copy;
mod counters;
mod fast;
mod handle;
mod holes;
pub mod keeper;
mod locality;
mod mapped;
mod migration;
mod mounted;
mod open;
mod outage;
mod read;
#[cfg(test)]
mod simulated;
mod space;
mod stat;
mod tasks;
mod write;

pub use counters::MountCounters;
pub use fast::{Asker, ClientStat, KeeperCommand, KernelCache, Served, Trusted, TrustedError};
pub use handle::Handle;
pub use jericho_cache::Reader;
pub use jericho_cache::{Counters, counters::Declared};
pub use jericho_client::migration::VARIABLE as THREADS_VARIABLE;
pub use jericho_format::threads::ThreadPolicy;
pub use locality::Locality;
pub use mounted::Mounted;
pub use open::{OpenError, OpenOptions};
pub use read::ReadBuffer;
pub use stat::{NodeStat, SliceStat, Stat, Where};
pub use write::{WriteMode, WriteSync};
