//! Errors, with messages that a user can act on.

use std::io;
use std::path::PathBuf;

use crate::plan::NODES_MAX;

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// The topology has too many nodes.
    #[error(
        "the topology has {count} nodes, and at most {NODES_MAX} can be measured: all pairs would take too long; \
         choose fewer with --topology"
    )]
    Nodes {
        /// Nodes of the topology.
        count: usize,
    },
    /// A device could not be opened.
    #[error("cannot measure the device: {0}")]
    Device(#[from] jericho_storage::OpenError),
    /// The amount of free memory is unknown.
    #[error("cannot read how much memory this machine has: {0}; is /proc mounted?")]
    Memory(io::Error),
}

/// Why a report was not kept.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}; make the directory writable, or name another file in JERICHO_PROBE", .path.display())]
pub struct SaveError {
    /// For example "write".
    pub action: &'static str,
    /// The file or directory.
    pub path: PathBuf,
    /// The cause.
    pub source: io::Error,
}

/// Why a kept report is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file exists but could not be read.
    #[error("cannot read {}: {source}; make it readable, or run jericho probe again", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a report.
    #[error("{}: is not a report of jericho probe: {reason}; run jericho probe again", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A newer build has made the file.
    #[error(
        "{}: has format {found}, and this build knows formats up to {known}; run jericho probe again with this build", .path.display()
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u64,
        /// The newest format that this build knows.
        known: u32,
    },
    /// The report is about another topology.
    #[error(
        "{}: was made on {time} for other nodes ({source_then}) than those in use ({source_now}): their CPUs, distances or memory differ; run jericho probe with this topology", .path.display()
    )]
    OtherTopology {
        /// The file.
        path: PathBuf,
        /// When the report was made.
        time: String,
        /// Where the nodes of the report came from.
        source_then: String,
        /// Where the nodes in use come from.
        source_now: String,
    },
    /// The report is about another machine.
    #[error(
        "{}: was made on {time} on another machine ({model_then}) than this one ({model_now}); run jericho probe here", .path.display()
    )]
    OtherMachine {
        /// The file.
        path: PathBuf,
        /// When the report was made.
        time: String,
        /// The CPU of the machine that was measured.
        model_then: String,
        /// The CPU of this machine.
        model_now: String,
    },
}
