//! Ranges of bytes and the blocks around them.

use std::ops::Range;

use jericho_storage::BLOCK_BYTES;

/// Bytes of a request inside the blocks that contain them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// The blocks, in bytes.
    pub blocks: Range<u64>,
    /// The request's bytes, counted from the beginning of the blocks.
    pub inside: Range<usize>,
}

impl Span {
    /// Returns the span of a range whose blocks fit into memory.
    pub fn of(bytes: Range<u64>) -> Span {
        let start = bytes.start - bytes.start % BLOCK_BYTES;
        Span {
            inside: (bytes.start - start) as usize..(bytes.end - start) as usize,
            blocks: start..bytes.end.next_multiple_of(BLOCK_BYTES),
        }
    }

    /// Returns the size of the blocks in bytes.
    pub fn size(&self) -> usize {
        (self.blocks.end - self.blocks.start) as usize
    }

    /// Returns whether the bytes are all bytes of the blocks.
    pub fn is_whole(&self) -> bool {
        self.inside == (0..self.size())
    }
}

/// Returns the blocks that are inside a range as a whole; an empty range if there are none.
pub(crate) fn whole_blocks(bytes: &Range<u64>) -> Range<u64> {
    let start = bytes.start.next_multiple_of(BLOCK_BYTES);
    let end = bytes.end - bytes.end % BLOCK_BYTES;
    start..end.max(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_has_the_blocks_around_its_bytes() {
        let span = Span::of(4000..8193);
        assert_eq!(
            (span.blocks.clone(), span.inside.clone()),
            (0..12_288, 4000..8193)
        );
        assert!(!span.is_whole());
        assert!(Span::of(4096..12_288).is_whole());
    }

    #[test]
    fn blocks_that_a_range_covers_in_part_are_not_its_own() {
        assert_eq!(whole_blocks(&(1..8191)), 4096..4096);
        assert_eq!(whole_blocks(&(1..8192)), 4096..8192);
        assert_eq!(whole_blocks(&(0..12_288)), 0..12_288);
    }
}
