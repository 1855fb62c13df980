//! Errors of finding nodes, with messages that a user can act on.

use std::io;
use std::path::PathBuf;

/// Why a topology could not be detected, created, or read from a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// The kernel did not return the CPUs on which this process may run.
    #[error("cannot ask the kernel for the CPU affinity of this process: {source}")]
    Affinity {
        /// The kernel's answer.
        source: io::Error,
    },

    /// No CPU is left after the affinity and the cpuset were applied.
    #[error(
        "none of the CPUs in the affinity of this process is online: \
         widen it with `taskset` or through the cpuset of its control group"
    )]
    NoCpus,

    /// A file of the kernel exists but could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },

    /// A file of the kernel has unexpected contents.
    #[error(
        "{}: expected {expected}, found {found:?}; \
         check that /sys and /proc are the kernel's own", path.display()
    )]
    Sysfs {
        /// The file.
        path: PathBuf,
        /// The expected contents.
        expected: String,
        /// The actual contents.
        found: String,
    },

    /// The specification of the topology (`--topology SPEC`) is invalid.
    #[error("topology {spec:?}: {reason}")]
    Spec {
        /// The specification.
        spec: String,
        /// What is wrong with it, and what is right.
        reason: String,
    },

    /// The topology file could not be read.
    #[error(
        "cannot read the topology file {path:?}: {source}; \
         a topology is `auto`, `virtual:N` with N from 1 to {max}, or the path of a topology file",
        max = crate::NODES_MAX
    )]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
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
        /// The expected and the found text.
        message: String,
    },
}
