//! The data side of files: extents, space, syncs and placement.

pub(crate) mod extents;
pub(crate) mod file;
pub(crate) mod layout;
pub(crate) mod leaving;
pub(crate) mod open_file;
pub(crate) mod operations;
pub(crate) mod placement;
pub(crate) mod ranges;
pub(crate) mod runs;
pub(crate) mod settle;
pub(crate) mod share;
pub(crate) mod space;
pub(crate) mod steps;
pub(crate) mod summed;
pub(crate) mod sums;
pub(crate) mod sync;
pub(crate) mod truncate;
pub(crate) mod unflushed;
pub(crate) mod usage;
pub(crate) mod write_errors;
pub(crate) mod writers;
