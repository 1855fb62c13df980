//! What the cache asks of whoever owns the pages.

use std::sync::Arc;

use jericho_storage::IoError;

/// Why a page could not be had, kept or written.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A device failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The object could not say where its pages are, or had no space for them.
    #[error("{message}")]
    Object {
        /// errno that a program should see.
        errno: i32,
        /// What went wrong, in full.
        message: Arc<str>,
    },
    /// The object's home is another slice now: look it up and ask that one.
    #[error("the file was re-homed to another slice meanwhile")]
    Moved,
    /// The slice is shutting down.
    #[error("the volume is being unmounted")]
    Closed,
}

impl Error {
    /// The errno that a program should see.
    pub fn errno(&self) -> i32 {
        match self {
            Error::Io(e) => e.errno(),
            Error::Object { errno, .. } => *errno,
            Error::Moved => 11,   // EAGAIN; never reaches a program
            Error::Closed => 108, // ESHUTDOWN
        }
    }
}

/// A run of pages and where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// How many pages.
    pub pages: u32,
    /// Where.
    pub place: Place,
}

/// Where a run of pages is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nowhere: reads as zeros.
    Hole,
    /// Contiguous on a device.
    Device {
        /// Index in the volume's list of devices.
        device: u16,
        /// Byte offset there.
        offset_bytes: u64,
    },
}

/// Something with pages: a file, to the filesystem. Its calls are made by slice threads and by
/// whoever calls the slice. They may take short locks of the object's own, and must never wait
/// for the cache: a slice's lock may be held.
pub trait Object: Send + Sync + 'static {
    /// The object's part of a page key: 1..=`jericho_format::INO_MAX`. Whoever reuses a number first
    /// makes sure that `Slice::invalidate` of the old object's pages has completed.
    fn id(&self) -> u64;

    /// Index of the slice that may cache the object's pages now. Asked under that slice's lock.
    fn slice(&self) -> u16;

    /// Whether clients may write the object's pages in the cache without asking.
    fn may_write_inline(&self) -> bool {
        true
    }

    /// Appends runs that cover exactly the pages `[first, first + count)`, for reading.
    fn resolve(&self, first: u64, count: u32, out: &mut Vec<Run>) -> Result<(), Error>;

    /// As `resolve`, for write-back: places what has no place yet (delayed allocation), so that every
    /// run is `Place::Device`. The pages are written there next, then `written` is called.
    /// Never called for pages that nobody reserved (`Intent::Modify`/`Overwrite` promise that).
    fn allocate(&self, first: u64, count: u32, out: &mut Vec<Run>) -> Result<(), Error>;

    /// The pages `[first, first + count)` given by the last `allocate` are on the device (not yet flushed
    /// there).
    fn written(&self, first: u64, count: u32);

    /// The write-back of pages failed. They stay dirty and are tried again; the object remembers the
    /// error for the next fsync.
    fn write_failed(&self, first: u64, count: u32, error: &Error);
}
