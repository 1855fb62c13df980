//! The geometry of the ring: where segments go, and how much fits. No I/O.

use jericho_format::journal::{
    BATCH_BYTES_MAX, HEADER_COPIES, SEGMENT_BLOCKS_MAX, SEGMENT_HEADER_BYTES,
};
use jericho_storage::BLOCK_BYTES;

/// The blocks of an area after the headers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
    /// First block of the area that is beyond the ring.
    end: u32,
}

/// One write of an append: a segment or a pad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub block: u32,
    pub blocks: u32,
    pub payload_bytes: usize,
    pub is_pad: bool,
    /// Whether another piece of the same batch follows.
    pub continues: bool,
}

/// Returns the payload bytes of a segment of this many blocks.
fn payload_bytes(blocks: u64) -> u64 {
    blocks * BLOCK_BYTES - SEGMENT_HEADER_BYTES as u64
}

impl Ring {
    /// Returns the ring of an area whose size is within `AREA_BLOCKS`.
    pub fn of(area_blocks: u64) -> Ring {
        Ring {
            end: area_blocks as u32,
        }
    }

    /// Returns the first block.
    pub fn first(self) -> u32 {
        HEADER_COPIES
    }

    /// Returns the number of blocks.
    pub fn blocks(self) -> u32 {
        self.end - HEADER_COPIES
    }

    /// Returns whether a block is in the ring.
    pub fn contains(self, block: u32) -> bool {
        (HEADER_COPIES..self.end).contains(&block)
    }

    /// Returns the number of blocks from a block to the end of its lap.
    pub fn lap_rest(self, block: u32) -> u32 {
        self.end - block
    }

    /// Returns the block after a run of blocks that does not leave the lap.
    pub fn after(self, block: u32, blocks: u32) -> u32 {
        match block + blocks {
            after if after == self.end => self.first(),
            after => after,
        }
    }

    /// Returns the number of blocks from one block forward to another; 0 when they are equal.
    pub fn distance(self, from: u32, to: u32) -> u32 {
        match to >= from {
            true => to - from,
            false => self.blocks() - (from - to),
        }
    }

    /// Returns the blocks that only checkpoints use.
    pub fn reserve_blocks(self) -> u32 {
        self.blocks() / 8
    }

    /// Returns the maximum number of blocks of a segment. In small rings, pads for larger segments would waste too much.
    pub fn segment_blocks_max(self) -> u32 {
        (self.blocks() / 4).min(SEGMENT_BLOCKS_MAX)
    }

    /// Returns the pieces of a batch that begins at a block.
    pub fn pieces(self, block: u32, payload_bytes: usize) -> Pieces {
        Pieces {
            ring: self,
            block,
            left: Some(payload_bytes),
        }
    }

    /// Returns the number of blocks of a batch that begins at a block.
    pub fn blocks_needed(self, block: u32, payload_bytes: usize) -> u64 {
        let pieces = self.pieces(block, payload_bytes);
        pieces.map(|piece| u64::from(piece.blocks)).sum()
    }

    /// Returns the longest payload of a batch that begins at a block and uses at most `available` blocks. 0 if there are none.
    pub fn longest_payload(self, block: u32, available: u32) -> u64 {
        let full = self.segment_blocks_max();
        let (mut block, mut available, mut before, mut longest) = (block, available, 0, 0);
        while available > 0 {
            let rest = self.lap_rest(block);
            let last = available.min(rest).min(full);
            longest = longest.max(before + payload_bytes(last.into()));
            // A longer payload has a full segment next, or a pad.
            let blocks = match rest >= full {
                true if available >= full => {
                    before += payload_bytes(full.into());
                    full
                }
                false if available > rest => rest,
                _ => break,
            };
            block = self.after(block, blocks);
            available -= blocks;
        }
        longest.min(BATCH_BYTES_MAX as u64)
    }
}

/// The pieces of a batch.
#[derive(Clone, Debug)]
pub(crate) struct Pieces {
    ring: Ring,
    block: u32,
    left: Option<usize>,
}

impl Iterator for Pieces {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        let left = self.left?;
        let full = payload_bytes(self.ring.segment_blocks_max().into()) as usize;
        let bytes = left.min(full);
        let blocks = (bytes + SEGMENT_HEADER_BYTES).div_ceil(BLOCK_BYTES as usize) as u32;
        let (block, rest) = (self.block, self.ring.lap_rest(self.block));
        if blocks > rest {
            self.block = self.ring.first();
            return Some(Piece {
                block,
                blocks: rest,
                payload_bytes: 0,
                is_pad: true,
                continues: true,
            });
        }
        self.block = self.ring.after(block, blocks);
        self.left = (left > bytes).then(|| left - bytes);
        Some(Piece {
            block,
            blocks,
            payload_bytes: bytes,
            is_pad: false,
            continues: self.left.is_some(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_payload_and_stay_in_their_lap() {
        for area in [18, 19, 50, 300, 2048] {
            let ring = Ring::of(area);
            for block in [2, 3, 9, area as u32 - 2, area as u32 - 1] {
                for bytes in [0, 1, 4000, 4001, 9000, 40_000] {
                    let pieces: Vec<Piece> = ring.pieces(block, bytes).collect();
                    let mut next = block;
                    for piece in &pieces {
                        assert_eq!(piece.block, next, "{pieces:?}");
                        assert!(piece.blocks >= 1 && piece.blocks <= ring.lap_rest(next));
                        next = ring.after(piece.block, piece.blocks);
                    }
                    let last = pieces.last().expect("a piece");
                    assert!(!last.is_pad && !last.continues);
                    let sum: usize = pieces.iter().map(|piece| piece.payload_bytes).sum();
                    assert_eq!(sum, bytes);
                }
            }
        }
    }

    #[test]
    fn the_longest_payload_fits_and_a_longer_one_does_not() {
        for area in [18, 19, 23, 64, 600] {
            let ring = Ring::of(area);
            for block in 2..area as u32 {
                for available in (0..=ring.blocks()).step_by(1 + area as usize / 60) {
                    let longest = ring.longest_payload(block, available);
                    let needed = |bytes: u64| ring.blocks_needed(block, bytes as usize);
                    if available > 0 {
                        assert!(needed(longest) <= u64::from(available));
                    }
                    let longer = if available > 0 { longest + 1 } else { 0 };
                    assert!(
                        needed(longer) > u64::from(available),
                        "{area} {block} {available}"
                    );
                }
            }
        }
    }

    #[test]
    fn half_of_the_reserve_is_usable_at_every_block() {
        for area in [34, 64, 600, 2048] {
            let ring = Ring::of(area);
            let half = u64::from(ring.reserve_blocks()).div_ceil(2);
            for block in 2..area as u32 {
                let longest = ring.longest_payload(block, ring.reserve_blocks());
                assert!(longest >= payload_bytes(half), "{area} {block}");
            }
        }
    }
}
