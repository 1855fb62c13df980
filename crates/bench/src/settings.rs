//! Settings of a run: programs, directory and duration.

use std::path::PathBuf;

/// Paths of the programs, and how thorough a run is.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The `jericho` command.
    pub jericho: PathBuf,
    /// libfuse's passthrough_hp with direct I/O.
    pub passthrough: PathBuf,
    /// Directory on the device that is measured. The run creates and removes everything in it.
    pub dir: PathBuf,
    /// Number of times that each side of a comparison runs.
    pub rounds: u32,
    /// Minutes instead of an hour: smaller data, shorter runs. Not for quoting.
    pub quick: bool,
    /// Measures the passthrough against itself: each ratio must be near 1.
    pub self_test: bool,
    /// Transports to benchmark.
    pub transports: Vec<Transport>,
}

impl Settings {
    /// Returns `full`, or `quick` in a quick run.
    pub fn pick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }
}

/// Transport of requests from the kernel to a Jericho mount (`--transport`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Requests through /dev/fuse.
    Device,
    /// Requests through the FUSE ring (FUSE over io_uring).
    Ring,
}

impl Transport {
    /// Returns the transports that this kernel supports. Prints a message if these are not both.
    pub fn offered() -> Vec<Transport> {
        const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
        if std::fs::read_to_string(SWITCH).is_ok_and(|switch| switch.trim() == "Y") {
            return vec![Transport::Device, Transport::Ring];
        }
        eprintln!("this kernel does not offer the FUSE ring ({SWITCH}); its rows are omitted");
        vec![Transport::Device]
    }

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Device => "device",
            Transport::Ring => "ring",
        }
    }

    /// Returns the prefix of the names of its measurements.
    pub fn prefix(self) -> &'static str {
        match self {
            Transport::Device => "",
            Transport::Ring => "ring ",
        }
    }

    /// Returns the name of Jericho's side in tables.
    pub fn side(self) -> &'static str {
        match self {
            Transport::Device => "mount",
            Transport::Ring => "mount, ring",
        }
    }
}

/// Bytes in a MiB.
pub const MIB: u64 = 1 << 20;
