//! Replacement: which pages leave the cache when frames are needed.
//!
//! A kind of replacement is a pure state machine. It does no I/O and has no lock. It learns which entries of the table were filled
//! and removed, and names victims when frames are needed. What it knows of uses is what hits leave in the table: the epoch of the
//! last use of each entry's page. A hit does no work for it.
//!
//! There are two kinds. `AgedSweep` is LRU with coarse ages; slices use it. It takes no notes of entries, so a slice asks it for
//! victims without its lock, and does not tell it of fills and removals. `S3Fifo` resists scans. It takes notes, so all calls to
//! it belong under the slice's lock. Only the simulator (`examples/replacement`) runs it.
//! `docs/decisions/0013-replacement.md` has the measurements.

mod aged_sweep;
mod ghost;
mod kind;
mod s3_fifo;

pub use aged_sweep::AgedSweep;
pub use kind::{Replacement, Residents, VICTIMS_AT_ONCE};
pub use s3_fifo::S3Fifo;
