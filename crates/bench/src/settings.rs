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
    /// Over which mounts are measured.
    pub transports: Vec<Transport>,
}

impl Settings {
    /// `full`, or `quick` in a quick run.
    pub fn pick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }
}

/// How requests come from the kernel to a mount of ours (`--transport`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// By /dev/fuse.
    Device,
    /// Through the kernel's ring.
    Ring,
}

impl Transport {
    /// Those that this kernel offers; a word on standard error when that is not both.
    pub fn offered() -> Vec<Transport> {
        const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
        if std::fs::read_to_string(SWITCH).is_ok_and(|switch| switch.trim() == "Y") {
            return vec![Transport::Device, Transport::Ring];
        }
        eprintln!("the kernel's ring is not offered ({SWITCH}); its rows are left out");
        vec![Transport::Device]
    }

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Device => "device",
            Transport::Ring => "ring",
        }
    }

    /// What the names of its measurements begin with.
    pub fn prefix(self) -> &'static str {
        match self {
            Transport::Device => "",
            Transport::Ring => "ring ",
        }
    }

    /// What our side is called in tables.
    pub fn side(self) -> &'static str {
        match self {
            Transport::Device => "mount",
            Transport::Ring => "mount, ring",
        }
    }
}

/// Bytes in a MiB.
pub const MIB: u64 = 1 << 20;
