//! What is measured with, and how long.

use std::path::PathBuf;

/// Where the programs are and how thorough a run is.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The `jericho` command.
    pub jericho: PathBuf,
    /// libfuse's passthrough_hp with direct I/O.
    pub passthrough: PathBuf,
    /// Directory on the device that is measured; everything in it is made and removed by the run.
    pub dir: PathBuf,
    /// How often each side of a comparison runs.
    pub rounds: u32,
    /// Minutes instead of an hour: smaller data, shorter runs. Not for quoting.
    pub quick: bool,
    /// Measures the passthrough against itself: every ratio must come out near 1.
    pub self_test: bool,
}

impl Settings {
    /// `full`, or `quick` in a quick run.
    pub fn pick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }
}

/// Bytes in a MiB.
pub const MIB: u64 = 1 << 20;
