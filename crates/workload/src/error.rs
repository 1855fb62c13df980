//! Why a workload cannot run, or has failed.

use std::fmt;
use std::io;
use std::path::Path;

use jericho_storage::IoError;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A message that names the thing, the cause and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

impl Error {
    /// Creates an error from its message.
    pub fn new(message: impl Into<String>) -> Error {
        Error(message.into())
    }
}

impl From<IoError> for Error {
    fn from(error: IoError) -> Error {
        Error(error.to_string())
    }
}

/// Adds the failed action in front of an error.
pub trait Context<T> {
    /// Turns the error into `PATH: cannot DO: CAUSE`.
    fn at(self, path: &Path, doing: &str) -> Result<T>;
    /// Turns the error into `cannot DO: CAUSE`.
    fn doing(self, doing: impl fmt::Display) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn at(self, path: &Path, doing: &str) -> Result<T> {
        self.map_err(|e| Error(format!("{}: cannot {doing}: {e}", path.display())))
    }

    fn doing(self, doing: impl fmt::Display) -> Result<T> {
        self.map_err(|e| Error(format!("cannot {doing}: {e}")))
    }
}
