//! How thorough a run is, and where its processes run.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The `jericho` command.
    pub jericho: PathBuf,
    /// Directory in memory for the files of targets.
    pub dir: PathBuf,
    /// Number of times that each side of a row runs.
    pub rounds: u32,
    /// How long a side is measured in a round.
    pub time: Duration,
    /// Leave rows out that are between others.
    pub is_quick: bool,
    /// CPU of each side, or `None` for all.
    pub pinning: Option<Pinning>,
    /// Only rows and tables whose name contains one of these.
    pub only: Vec<String>,
}

/// The CPUs of the two sides: each stands for a host with one CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pinning {
    /// CPU of this process.
    pub initiator: u32,
    /// CPU of the targets.
    pub target: u32,
}

impl Plan {
    /// Returns whether a row or table with this name is to be measured.
    pub fn selects(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| name.contains(part.as_str()))
    }

    /// Returns a line about the CPUs.
    pub fn cpus(&self) -> String {
        match self.pinning {
            Some(cpus) => format!(
                "initiator on CPU {}, targets on CPU {}",
                cpus.initiator, cpus.target
            ),
            None => "no process is bound to a CPU".into(),
        }
    }
}
