//! What can go wrong while finding out about nodes, in words that a user can act on.

use std::io;
use std::path::PathBuf;

/// Why a topology could not be detected, made up, or read from a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// The kernel did not say on which CPUs this process may run.
    #[error("cannot ask the kernel for the CPU affinity of this process: {source}")]
    Affinity {
        /// What the kernel answered.
        source: io::Error,
    },

    /// No CPU is left after the affinity and the cpuset were applied.
    #[error(
        "none of the CPUs in the affinity of this process is online: \
         widen it with `taskset` or through the cpuset of its control group"
    )]
    NoCpus,

    /// A file of the kernel's that exists could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },

    /// A file of the kernel's does not say what this program understands.
    #[error(
        "{}: expected {expected}, found {found:?}; \
         check that /sys and /proc are the kernel's own", path.display()
    )]
    Sysfs {
        /// The file.
        path: PathBuf,
        /// What should have been in it.
        expected: String,
        /// What was in it.
        found: String,
    },

    /// The topology asked for (`--topology SPEC`) is none that exists.
    #[error("topology {spec:?}: {reason}")]
    Spec {
        /// The specification as given.
        spec: String,
        /// What is wrong with it and what would be right.
        reason: String,
    },

    /// The topology file could not be read at all.
    #[error(
        "cannot read the topology file {path:?}: {source}; \
         a topology is `auto`, `virtual:N` with N from 1 to {max}, or the path of a topology file",
        max = crate::NODES_MAX
    )]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },

    /// A line of the topology file is wrong.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Line {
        /// The topology file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The column in characters, counted from 1.
        column: usize,
        /// What was expected there and what was found.
        message: String,
    },
}
