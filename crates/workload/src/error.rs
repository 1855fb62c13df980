//! Why a workload cannot run, or has failed.

use std::fmt;
use std::io::{self, Write};
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

    /// Creates the error of a thread that the end of the run has stopped in its work.
    pub(crate) fn interrupted() -> Error {
        Error("interrupted".into())
    }

    pub(crate) fn is_interruption(&self) -> bool {
        *self == Error::interrupted()
    }

    /// Returns the error with another name of a path.
    pub(crate) fn renamed(self, from: &str, to: &str) -> Error {
        Error(self.0.replace(from, to))
    }
}

/// Prints a message on standard error. Ignores a failure: the terminal may be gone.
pub(crate) fn warn(message: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "jericho bench: {message}");
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
