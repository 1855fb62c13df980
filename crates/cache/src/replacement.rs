//! Replacement: which pages leave the cache when frames are needed.
//!
//! A kind of replacement is a pure state machine. It does no I/O and has no lock. It learns which entries of the table were filled
//! and removed, and names victims when frames are needed. What it knows of uses is what hits leave in the table: the epoch of the
//! last use of each entry's page. A hit does no work for it.
//!
//! Slices use `AgedSweep`, which is LRU with coarse ages. It takes no notes of entries, so a slice asks it for victims without its
//! lock, and does not tell it of fills and removals. All calls to a kind that takes notes belong under the slice's lock.

mod aged_sweep;
mod kind;

pub use aged_sweep::AgedSweep;
pub use kind::{Replacement, Residents, VICTIMS_AT_ONCE};
