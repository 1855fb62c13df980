//! The interface between the cache and the owner of the pages.

use std::sync::Arc;

use jericho_storage::IoError;

/// Why a page could not be fetched, kept or written.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A device failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The object could not tell where its pages are, or had no space for them.
    #[error("{message}")]
    Object {
        /// errno that a program should see.
        errno: i32,
        /// The full message.
        message: Arc<str>,
    },
    /// The object now belongs to another slice. The caller looks it up again and asks that slice.
    #[error("the file was moved to another slice")]
    Moved,
    /// The slice is shutting down.
    #[error("the volume is being unmounted")]
    Closed,
}

impl Error {
    /// Returns the errno that a program should see.
    pub fn errno(&self) -> i32 {
        match self {
            Error::Io(e) => e.errno(),
            Error::Object { errno, .. } => *errno,
            Error::Moved => 11,   // EAGAIN; never reaches a program
            Error::Closed => 108, // ESHUTDOWN
        }
    }
}

/// A run of pages and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// Number of pages.
    pub pages: u32,
    /// Place of the first page.
    pub place: PagePlace,
}

/// Place of a run of pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PagePlace {
    /// No place: the pages read as zeros.
    Hole,
    /// Contiguous on a device.
    Device {
        /// Index in the volume's list of devices.
        device: u16,
        /// Byte offset on the device.
        offset_bytes: u64,
    },
    /// In memory: the bytes of the run's only page, which are not on the device yet. Only `Object::resolve` returns it.
    Memory(Arc<[u8]>),
}

/// An owner of pages, for example a file of the filesystem. Slice threads and the callers of the slice call it. Its functions may
/// take short locks of the object's own. They must never wait for the cache, because the caller may hold a slice's lock.
pub trait Object: Send + Sync + 'static {
    /// Returns the object's part of a page key: 1..=`jericho_format::OBJECT_MAX`. An owner uses an id for another
    /// object only when no slice has a page of the old one (`Slice::each_object`) and no caller has it as an `Object`.
    fn id(&self) -> u64;

    /// Returns the index of the slice that may cache a page of the object now. Called under that slice's lock, for the first page
    /// of a Get: all pages of a Get are in one slice.
    fn slice_of(&self, page: u64) -> u16;

    /// Returns whether clients may write the object's cached pages without a request.
    fn may_write_inline(&self) -> bool {
        true
    }

    /// Appends the runs of exactly the pages `[first, first + count)`, for reading.
    fn resolve(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error>;

    /// Appends runs like `resolve`, for write-back. Allocates places for pages that have none (delayed allocation), so that every
    /// run has a `PagePlace::Device`. The slice then writes the pages there and calls `written`. Never called for pages without
    /// reserved space: callers of a Get with `Intent::Modify` or `Overwrite` reserve it.
    fn allocate(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error>;

    /// Offers the contents of pages from `first` on, to be stored elsewhere than in their places. Returns whether the object keeps
    /// them: then they are in its next commit, `resolve` returns them, and the slice takes the pages for clean, without calls of
    /// `allocate` and `written`. `commits` is true if the sync that writes the pages commits anyway.
    fn log(&self, _first: u64, _bytes: &[u8], _commits: bool) -> bool {
        false
    }

    /// Reports that the pages `[first, first + count)` are on the device, where the last `allocate` placed them. The device is
    /// not flushed yet.
    fn written(&self, first: u64, count: u32);

    /// Reports what `written` reports of pages that are durable.
    fn written_durably(&self, first: u64, count: u32) {
        self.written(first, count);
    }

    /// Returns whether the object keeps checksums of its pages. The slice then writes pages from private copies, calls
    /// `written_summed` in place of `written`, and `resolve_summed` in place of `resolve`. The answer never changes.
    fn has_checksums(&self) -> bool {
        false
    }

    /// Does what `resolve` does, and appends what is known of the checksum of each page, as of the same instant. The slice compares
    /// pages that it reads with it.
    fn resolve_summed(
        &self,
        first: u64,
        count: u32,
        out: &mut Vec<PageRun>,
        sums: &mut Vec<Option<u32>>,
    ) -> Result<(), Error> {
        sums.extend(std::iter::repeat_n(None, count as usize));
        self.resolve(first, count, out)
    }

    /// Reports what `written` reports, with the checksum of each page as it was written.
    fn written_summed(&self, first: u64, sums: &[u32]) {
        self.written(first, sums.len() as u32);
    }

    /// Reports that a page does not have its checksum. Returns the error for those that read the page.
    fn checksum_failed(&self, page: u64, expected: u32, found: u32) -> Error {
        Error::Object {
            errno: 5,
            message: format!(
                "page {page} has the checksum {found:#010x} instead of {expected:#010x}"
            )
            .into(),
        }
    }

    /// Reports that `Slice::first_dirty` no longer counts the pages of a finished write-back, unless they are dirty again. It
    /// counts them until after `written`, so that no owner takes pages for written whose new places it does not know yet. An owner
    /// to which `first_dirty` has named such a page asks again now. Called before a sync that waits for the pages ends.
    fn write_back_ended(&self) {}

    /// Reports that the write-back of pages failed, and that for at least one of them this is the first failure since it was last
    /// written back. They stay dirty and are retried; the object keeps the error for its next fsyncs.
    fn write_failed(&self, first: u64, count: u32, error: &Error);
}
