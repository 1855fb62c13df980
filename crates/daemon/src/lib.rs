//! A mounted volume in a process: devices, slices, filesystem, and the data path that joins them.
//!
//! `fs` knows no client and `client` knows no filesystem. Here, a read or write first accesses cached pages inline, and then uses
//! the filesystem and the slice for the rest.
//!
//! The files form layers, and each uses only those below it:
//!
//! - what there is: `volume` (slices, filesystem, homes), `spill` (slices' memory on other nodes), `move_costs` and `narrow_masks` (of threads), `handle` (an open file), `counters`, `pages`, `write_mode`
//! - mechanisms, each with a state of its own: `fast` (programs with inline access), `mapped` (pages that the kernel has), `space`
//!   (requests that wait for space), `migration` and `locality` (threads and their nodes)
//! - `mounted`, which is all of them together
//! - operations on it: `read`, `write`, `copy`, `holes`, `attributes`, `sync`, `stat`; `open` and `serving` begin and end it
#![forbid(unsafe_code)]

mod add;
mod attributes;
mod copy;
mod counters;
mod fast;
mod handle;
mod holes;
pub mod keeper;
mod kernel_cache;
mod locality;
mod mapped;
mod migration;
mod mounted;
mod move_costs;
mod narrow_masks;
mod open;
mod outage;
mod pages;
mod read;
mod resumer;
mod returner;
mod serving;
#[cfg(test)]
mod simulated;
mod space;
mod spill;
mod stat;
mod sync;
mod tasks;
mod volume;
mod write;
mod write_mode;

pub use add::Addition;
pub use counters::MountCounters;
pub use fast::{Asker, ClientStat, KeeperCommand, Moment, Served, Trusted, TrustedError};
pub use handle::Handle;
pub use jericho_cache::Reader;
pub use jericho_cache::{Counters, counters::Declared};
pub use jericho_client::migration::{VARIABLE as THREADS_VARIABLE, WITH_PARENT_VARIABLE};
pub use jericho_format::threads::{MoveCost, ThreadPolicy};
pub use jericho_fs::{Interruption, with_interruption};
pub use jericho_storage::is_remote;
pub use jericho_volume::{AddError, Added, FormatOptions, GrowError, GrowRequest, GrownDevice};
pub use kernel_cache::KernelCache;
pub use locality::Locality;
pub use mounted::Mounted;
pub use move_costs::MoveCosts;
pub use open::{OpenError, OpenOptions};
pub use read::ReadBuffer;
pub use stat::{NodeStat, ScrubStat, SliceStat, SpilledStat, Stat, Where};
pub use write_mode::{WriteMode, WriteSync};
