//! Replacement: which pages leave the cache when frames are needed.
//!
//! A kind of replacement is a pure state machine. It does no I/O and has no lock. It learns which entries of the table were filled
//! and removed, and names victims when frames are needed. It learns of uses only from the table, in which a hit stores the epoch
//! of the last use of an entry's page. A hit does nothing else for it.
//!
//! There are two kinds. `AgedSweep` is LRU with coarse ages; slices use it. It keeps no records of entries, so a slice asks it for
//! victims without the slice's lock, and does not tell it of fills and removals. `S3Fifo` resists scans. It keeps records, so all
//! calls to it belong under the slice's lock. Only the simulator (`examples/replacement`) runs it.
//! `docs/decisions/0013-replacement.md` has the measurements.

mod aged_sweep;
mod ghost;
mod kind;
mod s3_fifo;

pub use aged_sweep::AgedSweep;
pub use kind::{Replacement, Residents, VICTIMS_AT_ONCE};
pub use s3_fifo::S3Fifo;
