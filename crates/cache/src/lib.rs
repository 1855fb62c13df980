//! Slices. A slice is the page cache of one home node, with its pipeline, evictor and write-back.
//!
//! A slice caches pages of numbered objects. It knows nothing of files. `docs/internals/cache.md` specifies the protocol.
//!
//! The modules below stand in layers: a module uses modules of its own layer and of the layers above it. No modules use each
//! other in a circle.
#![forbid(unsafe_code)]

// What a slice deals with: the interface to owners of pages, requests, transfers, plain records. None takes the slice's lock.
mod checks;
mod copies;
pub mod counters;
mod dirty;
mod effects;
mod faults;
mod frames;
mod object;
mod requests;
mod transfers;

// The slice as a state machine: state, and steps from a state and an event to a state and effects. No I/O, no waiting.
mod context;
mod eviction;
mod get;
mod giving_back;
mod invalidate;
mod latched;
mod latches;
mod outage;
mod repair;
pub mod replacement;
mod spill;
mod state;
mod sync;
mod waiting;
mod write_back;

// The scheduler: takes steps under the slice's lock, and performs their effects.
mod evictor;
mod pipeline;
mod scheduler;
mod shared;
mod small_sync;
mod thread_reads;

// What callers see.
mod clients;
mod grant;
mod operations;
mod ranges;
mod reader;
mod slice;

#[cfg(test)]
mod tests;

pub use counters::{Counters, Usage};
pub use faults::OWNER_DAEMON;
pub use grant::Grant;
pub use object::{Error, Object, PagePlace, PageRun};
pub use reader::Reader;
pub use requests::{Done, Intent, Latched, PAGES_PER_GET_MAX};
pub use shared::Observer;
pub use slice::{Config, FRAMES_MIN, Resident, Slice, StartError};
pub use small_sync::SmallSync;
