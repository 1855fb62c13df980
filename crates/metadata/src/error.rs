//! Errors of filesystem operations.

use std::sync::Arc;

use jericho_journal::AppendError;
use jericho_storage::{Cause, IoError};
use jericho_volume::VolumeError;

/// Result of a filesystem operation.
pub type Result<T> = std::result::Result<T, Error>;

/// An error, with the errno for the program and the cause if there is one.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// An outcome for which POSIX has an errno (ENOENT, EEXIST, ...).
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Errno(i32),
    /// A device failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The metadata store failed. Holds its message.
    #[error("metadata store: {0}")]
    Store(String),
    /// The bytes of the volume contradict each other. Holds the place and the contradiction.
    #[error("volume is damaged: {0}; run jericho check")]
    Damaged(String),
    /// The journal cannot be used. Holds the place and the cause.
    #[error("journal: {0}")]
    Journal(Arc<str>),
    /// Another host serves a different device under the name of the volume's device. The text names the device, what the volume found there, and what to do.
    #[error("{0}")]
    WrongDevice(Arc<str>),
    /// A panic interrupted an operation, so the state in memory may be inconsistent.
    #[error("a panic interrupted an operation")]
    HalfDone,
}

impl Error {
    /// Returns the errno for the program.
    pub fn errno(&self) -> i32 {
        match self {
            Error::Errno(e) => *e,
            Error::Io(e) => e.errno(),
            Error::Store(_) => 5, // EIO
            // EUCLEAN
            Error::Damaged(_) | Error::Journal(_) => 117,
            Error::WrongDevice(_) | Error::HalfDone => 5, // EIO
        }
    }

    /// Returns whether a device failed only because its host does not answer. Nothing is lost then.
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Error::Io(error) if error.is_unreachable())
    }

    /// Returns whether a device failed only because it is missing since the mount.
    pub fn is_missing(&self) -> bool {
        matches!(self, Error::Io(error) if error.cause == Cause::Errno(19)) // ENODEV
    }

    /// Notes in `first` an error that ends something for ever, or until a host answers again or a device comes back. Keeps an earlier error, unless only that
    /// one ends with the absence of the host or device. Returns whether it has noted the error.
    pub fn note_in(&self, first: &mut Option<Error>) -> bool {
        let is_absence = |error: &Error| error.is_unreachable() || error.is_missing();
        let is_worse = |first: &Error| is_absence(first) && !is_absence(self);
        let notes = first.as_ref().is_none_or(is_worse);
        if notes {
            *first = Some(self.clone());
        }
        notes
    }

    /// Returns whether the volume is full. A full host of a device has the same errno and returns false, because removing files on the
    /// volume does not help.
    pub fn is_full_volume(&self) -> bool {
        matches!(self, Error::Errno(28)) // ENOSPC
    }
}

impl From<AppendError> for Error {
    fn from(error: AppendError) -> Error {
        match error {
            AppendError::Io(error) => Error::Io(error),
            error => Error::Journal(error.to_string().into()),
        }
    }
}

impl From<Error> for VolumeError {
    fn from(error: Error) -> VolumeError {
        VolumeError::Store(error.into())
    }
}
