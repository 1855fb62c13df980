//! Copies of written data, for devices whose source memory must not change during a write.
//!
//! Programs may change a cached page during its write-back; the page is then dirty again and is written again. A device that
//! computes a checksum or parity of the bytes (btrfs, RAID, data integrity) reads them twice. A change between the two reads
//! makes the block on the device permanently wrong. Transfers to such a device use a copy.

use std::io;
use std::sync::Arc;

use jericho_sys::memory::{Mapping, Segment};

/// Maximum number of copies. Further transfers wait for a copy to become free.
const COPIES_MAX: usize = 16;

/// Memory of the copies, kept for reuse.
#[derive(Default)]
pub(crate) struct Bounce {
    copies: Vec<Arc<Mapping>>,
}

impl Bounce {
    /// Replaces the memory of a transfer by a copy of its bytes. Returns false when all copies are in use: the transfer must
    /// wait. Leaves a transfer that is a copy already.
    pub fn copy(&mut self, segments: &mut Vec<Segment>) -> io::Result<bool> {
        if self.is_copy(segments) {
            return Ok(true);
        }
        let len = segments.iter().map(|segment| segment.len).sum();
        let Some(copy) = self.take(len)? else {
            return Ok(false);
        };
        let mut offset = 0;
        for segment in segments.iter() {
            segment
                .mapping
                .copy_to(segment.offset, &copy, offset, segment.len);
            offset += segment.len;
        }
        *segments = vec![Segment {
            mapping: copy,
            offset: 0,
            len,
        }];
        Ok(true)
    }

    fn is_copy(&self, segments: &[Segment]) -> bool {
        let is_ours = |segment: &Segment| {
            let mut copies = self.copies.iter();
            copies.any(|copy| Arc::ptr_eq(copy, &segment.mapping))
        };
        segments.first().is_some_and(is_ours)
    }

    /// Returns memory of at least `len` bytes that no transfer uses.
    fn take(&mut self, len: usize) -> io::Result<Option<Arc<Mapping>>> {
        let is_free = |copy: &Arc<Mapping>| Arc::strong_count(copy) == 1;
        let fits = |copy: &&Arc<Mapping>| is_free(copy) && copy.len() >= len;
        if let Some(copy) = self.copies.iter().find(fits) {
            return Ok(Some(copy.clone()));
        }
        if self.copies.len() == COPIES_MAX {
            // Drops a free copy that is too small, to make room for one that is large enough.
            let Some(small) = self.copies.iter().position(is_free) else {
                return Ok(None);
            };
            self.copies.swap_remove(small);
        }
        let copy = Arc::new(Mapping::create("jericho-bounce", len, false)?);
        self.copies.push(copy.clone());
        Ok(Some(copy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(mapping: &Arc<Mapping>, page: usize, pages: usize) -> Segment {
        Segment {
            mapping: mapping.clone(),
            offset: page * 4096,
            len: pages * 4096,
        }
    }

    #[test]
    fn copies_are_reused_and_their_number_is_limited() {
        let memory = Arc::new(Mapping::create("memory", 8 * 4096, false).unwrap());
        let mut bounce = Bounce::default();
        let mut transfers = Vec::new();
        for n in 0..COPIES_MAX {
            let mut segments = vec![segment(&memory, n % 8, 1)];
            assert!(bounce.copy(&mut segments).unwrap());
            assert!(!Arc::ptr_eq(&segments[0].mapping, &memory));
            transfers.push(segments);
        }
        let mut larger = vec![segment(&memory, 0, 2), segment(&memory, 4, 1)];
        assert!(!bounce.copy(&mut larger).unwrap());
        assert_eq!(larger.len(), 2, "the transfer is unchanged");
        // The rest of a short transfer is a copy already.
        assert!(bounce.copy(&mut transfers[0]).unwrap());
        transfers.pop();
        assert!(bounce.copy(&mut larger).unwrap());
        assert_eq!(larger[0].len, 3 * 4096);
        assert_eq!(bounce.copies.len(), COPIES_MAX);
        transfers.clear();
        for _ in 0..100 {
            assert!(bounce.copy(&mut vec![segment(&memory, 0, 1)]).unwrap());
        }
        assert_eq!(bounce.copies.len(), COPIES_MAX);
    }
}
