//! What an operation on the filesystem can meet.

use jericho_storage::IoError;

/// Result of a filesystem operation.
pub type Result<T> = std::result::Result<T, Error>;

/// An error with the errno a program gets and, where there is one, the cause.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// An outcome that POSIX names (ENOENT, EEXIST, ...): errno.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Errno(i32),
    /// A device failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The metadata store failed; what it said.
    #[error("metadata store: {0}")]
    Store(String),
    /// The volume's bytes contradict themselves; what and where.
    #[error("volume is damaged: {0}; run jericho check")]
    Damaged(String),
    /// A panic left an operation half done in memory.
    #[error("an operation panicked half way")]
    HalfDone,
}

impl Error {
    /// The errno that a program should see.
    pub fn errno(&self) -> i32 {
        match self {
            Error::Errno(e) => *e,
            Error::Io(e) => e.errno(),
            Error::Store(_) => 5,     // EIO
            Error::Damaged(_) => 117, // EUCLEAN
            Error::HalfDone => 5,     // EIO
        }
    }

    /// Returns whether the volume is full. A device whose host is full fails with the same errno, but no removal of files on
    /// the volume helps it.
    pub fn is_full_volume(&self) -> bool {
        matches!(self, Error::Errno(28)) // ENOSPC
    }
}
