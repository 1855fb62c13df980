//! Private copies of pages that are written back, and their checksums.
//!
//! Programs may change a page while a device reads it. The page is then dirty again and is written again. But until then the device
//! may have bytes that the page never had as a whole, so no checksum of the page fits. Pages with checksums are written from a copy.

use std::io;
use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::sums::checksum;
use jericho_shm::SliceMemory;
use jericho_storage::Segment;
use jericho_sys::memory::Mapping;

use crate::checks;
use crate::transfers::TRANSFER_PAGES_MAX;

/// Maximum number of copies, each for one transfer. Further transfers wait for a copy to become free.
const COPIES_MAX: usize = 16;

const PAGE: usize = PAGE_BYTES as usize;

/// The copies of an evictor.
#[derive(Default)]
pub(crate) struct Copies {
    free: Vec<Arc<Mapping>>,
    used: usize,
}

/// A copy of the pages of a transfer.
pub(crate) struct Copy {
    memory: Arc<Mapping>,
    /// The checksum of each page.
    pub sums: Vec<u32>,
}

impl Copies {
    /// Copies the pages in frames. Returns `None` while all copies are in use.
    pub fn take(&mut self, memory: &SliceMemory, frames: &[u32]) -> io::Result<Option<Copy>> {
        let target = match self.free.pop() {
            Some(free) => free,
            None if self.used == COPIES_MAX => return Ok(None),
            None => Arc::new(Mapping::create(
                "jericho-copy",
                TRANSFER_PAGES_MAX * PAGE,
                false,
            )?),
        };
        self.used += 1;
        let mut page = vec![0; PAGE];
        let mut sums = Vec::with_capacity(frames.len());
        for (at, frame) in frames.iter().enumerate() {
            checks::copy(memory, *frame, &mut page);
            sums.push(checksum(&page));
            target.copy_in(at * PAGE, &page);
        }
        Ok(Some(Copy {
            memory: target,
            sums,
        }))
    }

    /// Takes a copy back. Its transfer has ended.
    pub fn give_back(&mut self, copy: Copy) {
        self.used -= 1;
        self.free.push(copy.memory);
    }
}

impl Copy {
    /// Returns the memory of the copy.
    pub fn segments(&self) -> Vec<Segment> {
        vec![Segment {
            mapping: self.memory.clone(),
            offset: 0,
            len: self.sums.len() * PAGE,
        }]
    }
}
