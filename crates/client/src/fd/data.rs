//! The bytes of a write, and its result.

use std::io::IoSlice;

use jericho_sys::files::Result;

use super::buffers::{PARTS_MAX, is_fit, total};

/// The bytes of a write.
#[derive(Clone, Copy)]
pub(super) struct Data<'a, 'b> {
    pub parts: &'a [IoSlice<'b>],
    pub len: usize,
    /// Whether the library may read the bytes. Otherwise the kernel reports the error.
    pub is_fit: bool,
}

impl<'a, 'b> Data<'a, 'b> {
    /// Returns the bytes of all `parts`.
    pub fn new(parts: &'a [IoSlice<'b>]) -> Data<'a, 'b> {
        let len = total(parts.iter().map(|part| part.len()));
        let fits = |part: &IoSlice<'_>| part.is_empty() || is_fit(part);
        Data {
            parts,
            len: len.unwrap_or(0),
            is_fit: parts.len() <= PARTS_MAX
                && len.is_some_and(|len| len > 0)
                && parts.iter().all(fits),
        }
    }
}

/// The result of a write, and the offset after it.
pub(super) struct Written {
    pub result: Result<usize>,
    pub end: u64,
}
