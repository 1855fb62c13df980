//! Why an access was not made inline.

use jericho_shm::Miss;

/// Why an access was not made inline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The slot belongs to another file now.
    Stale,
    /// The daemon allows no inline access to the file for now, or has revoked this process.
    Withheld,
    /// The caller must wait for the slice, or for the thread that drains reports.
    Throttled,
    /// A page is not in the cache.
    Absent,
    /// No space is reserved for a page.
    Unbacked,
    /// Another writer held the page or a lock for too long.
    Busy,
    /// The file was truncated or extended at the same time.
    Changed,
    /// The write would leave a hole, does not end below `FILE_BYTES_MAX`, or is longer than `WRITE_MAX` and cannot be split.
    Far,
}

impl From<Miss> for Why {
    fn from(miss: Miss) -> Why {
        match miss {
            Miss::Absent => Why::Absent,
            Miss::Unbacked => Why::Unbacked,
            Miss::Busy => Why::Busy,
            // The daemon has revoked this process.
            Miss::Broken => Why::Withheld,
            Miss::Changed => Why::Changed,
            Miss::NoRoom => Why::Throttled,
        }
    }
}
