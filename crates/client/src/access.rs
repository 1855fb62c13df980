//! Reads and writes a file in shared memory, in the caller's thread. Makes no system call except to wait for a lock and to ring
//! the daemon's doorbell, allocates nothing, and never waits without a bound. The caller passes all other accesses on to the
//! kernel.

mod extend;
mod kept;
mod put;
mod read;
mod write;

pub use kept::{Failed, KeptLocks, WRITE_MAX};
pub use read::ReadProgress;

#[cfg(test)]
mod tests;
