//! Compares pages that were read with the checksums that their object has.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use jericho_format::PAGE_BYTES;
use jericho_format::sums::checksum;
use jericho_shm::SliceMemory;

use crate::counters::Counts;
use crate::object::{Error, Object};

/// What is known of the checksums of neighbouring pages of an object.
#[derive(Clone)]
pub(crate) struct Check {
    pub object: Arc<dyn Object>,
    pub first: u64,
    /// `None` for a page that is not compared.
    pub sums: Vec<Option<u32>>,
    /// The frames of the pages, for a read from a device. Kept here because clients can corrupt the table.
    pub frames: Vec<u32>,
}

impl Check {
    /// Returns the part of the pages from `skip` on that a read fills, into these frames.
    pub fn part(&self, skip: usize, frames: Vec<u32>) -> Check {
        Check {
            object: self.object.clone(),
            first: self.first + skip as u64,
            sums: self.sums[skip..skip + frames.len()].to_vec(),
            frames,
        }
    }

    /// Compares a page. Reports a difference to the object, counts it and returns the error.
    pub fn compare(&self, counts: &Counts, at: usize, bytes: &[u8]) -> Result<(), Error> {
        let Some(expected) = self.sums[at] else {
            return Ok(());
        };
        let found = checksum(bytes);
        if found == expected {
            return Ok(());
        }
        counts.checksum_errors.fetch_add(1, Relaxed);
        let page = self.first + at as u64;
        Err(self.object.checksum_failed(page, expected, found))
    }

    /// Compares the pages in the frames, which the slice fills. Returns the places of those that differ, and the first error.
    pub fn compare_frames(&self, memory: &SliceMemory, counts: &Counts) -> Compared {
        let mut compared = Compared::default();
        let mut page = vec![0; PAGE_BYTES as usize];
        for (at, frame) in self.frames.iter().enumerate() {
            copy(memory, *frame, &mut page);
            if let Err(error) = self.compare(counts, at, &page) {
                compared.wrong.push(at);
                compared.error.get_or_insert(error);
            }
        }
        compared
    }
}

/// The result of a comparison of several pages.
#[derive(Default)]
pub(crate) struct Compared {
    /// The places of the pages that differ, in order.
    pub wrong: Vec<usize>,
    pub error: Option<Error>,
}

/// Copies the page in a frame of the slice's own records.
pub(crate) fn copy(memory: &SliceMemory, frame: u32, page: &mut [u8]) {
    let copied = memory.copy_out(frame, 0, page);
    assert!(copied.is_ok(), "a frame of the slice's own records");
}
