//! The library's record of a thread: its present call, its last hits, its use of data.

mod accounting;
mod locked_offset;
mod recent_hits;
mod record;
mod spilled;
mod tally;

pub use record::{Doing, Thread, current, enter, enter_briefly, is_writing};
pub use spilled::Spilled;
