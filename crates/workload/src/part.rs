//! What one thread reads or writes.

use std::path::PathBuf;

/// Files of the same size, or a part of a device.
#[derive(Debug)]
pub struct Part {
    /// The files, or the device.
    pub paths: Vec<PathBuf>,
    /// Where it begins in each.
    pub offset: u64,
    /// Its length in each.
    pub bytes: u64,
}
