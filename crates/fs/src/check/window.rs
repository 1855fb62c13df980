//! The blocks that the extents of some containers need, as bitmaps.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use jericho_metadata::alloc::Blocks;
use jericho_metadata::shard::ShardId;
use jericho_metadata::store::tables::container_key;

use super::stores::Subject;
use crate::types::SliceId;

/// Bytes that a container takes besides its bits.
const SLOT_BYTES: usize = 48;
/// Most containers that one thread compares in one piece: 1 TiB.
const PIECE_MAX: u64 = 16_384;

/// Some containers of a slice, and the range of keys of their rows. The pieces of a shard together have all keys, also impossible ones.
pub(super) struct Piece {
    pub shard: ShardId,
    pub slice: SliceId,
    /// First container.
    pub first: u32,
    /// Container after the last one.
    pub end: u32,
    pub from: Vec<u8>,
    pub to: Option<Vec<u8>>,
}

/// Returns all containers of the volume in pieces, in order, and the maximum number of containers of a window.
pub(super) fn pieces(subject: Subject, container_blocks: u64) -> (Vec<Piece>, usize) {
    let slot_bytes = container_blocks as usize / 8 + SLOT_BYTES;
    let window_max = (subject.limits.bitmaps_bytes / slot_bytes).max(1);
    let piece_max = PIECE_MAX.min(window_max as u64);
    let mut pieces: Vec<Piece> = Vec::new();
    for slice in subject.volume.slices() {
        let shard = subject.stores.map().of_slice(slice.id);
        let containers = slice.blocks.div_ceil(container_blocks);
        let mut first = 0;
        while first == 0 || first < containers {
            let end = (first + piece_max).min(containers);
            let mut from = container_key(slice.id, first as u32).to_vec();
            match pieces.last_mut() {
                Some(before) if before.shard == shard => before.to = Some(from.clone()),
                _ => from = Vec::new(),
            }
            pieces.push(Piece {
                shard,
                slice: slice.id,
                first: first as u32,
                end: end as u32,
                from,
                to: None,
            });
            first = end.max(1);
        }
    }
    (pieces, window_max)
}

/// The bitmaps of some pieces that follow one another.
pub(super) struct Window<'p> {
    pub pieces: &'p [Piece],
    container_blocks: u64,
    /// For each piece the index of its first container in `slots`.
    bases: Vec<usize>,
    /// The bits of each container, which its first extent makes.
    slots: Vec<OnceLock<Box<[AtomicU64]>>>,
}

impl<'p> Window<'p> {
    /// Returns a window with as many of the pieces as fit, at least one, and the pieces that are left.
    pub fn over(
        pieces: &'p [Piece],
        max: usize,
        container_blocks: u64,
    ) -> (Window<'p>, &'p [Piece]) {
        let mut bases = Vec::new();
        let mut count = 0;
        for piece in pieces {
            let containers = (piece.end - piece.first) as usize;
            if count > 0 && count + containers > max {
                break;
            }
            bases.push(count);
            count += containers;
        }
        let (own, rest) = pieces.split_at(bases.len());
        let window = Window {
            pieces: own,
            container_blocks,
            bases,
            slots: (0..count).map(|_| OnceLock::new()).collect(),
        };
        (window, rest)
    }

    fn slot(&self, slice: SliceId, container: u64) -> Option<&OnceLock<Box<[AtomicU64]>>> {
        let container = u32::try_from(container).ok()?;
        let after = self
            .pieces
            .partition_point(|piece| (piece.slice, piece.first) <= (slice, container));
        let at = after.checked_sub(1)?;
        let piece = &self.pieces[at];
        let is_in = piece.slice == slice && container < piece.end;
        let place = self.bases[at] + (container - piece.first) as usize;
        is_in.then(|| &self.slots[place])
    }

    /// Returns the bits of a container, or `None` if no extent needs it.
    pub fn bits(&self, slice: SliceId, container: u32) -> Option<&[AtomicU64]> {
        self.slot(slice, container.into())?
            .get()
            .map(|bits| &**bits)
    }

    /// Passes each word with bits of the blocks to `each`, with a mask of these bits and the range of the blocks in that
    /// container. Makes missing bitmaps if `makes` is true. Skips containers of other windows.
    fn words(
        &self,
        blocks: &Blocks,
        makes: bool,
        mut each: impl FnMut(&AtomicU64, u64, (u64, u64)),
    ) {
        let end = blocks.first + u64::from(blocks.count);
        let mut at = blocks.first;
        while at < end {
            let container = at / self.container_blocks;
            let start = container * self.container_blocks;
            let part_end = end.min(start + self.container_blocks);
            let words = self.container_blocks.div_ceil(64);
            let make = || (0..words).map(|_| AtomicU64::new(0)).collect();
            let slot = self.slot(blocks.slice, container);
            let bits = slot.and_then(|slot| match makes {
                true => Some(slot.get_or_init(make)),
                false => slot.get(),
            });
            if let Some(bits) = bits {
                let (mut bit, last) = (at - start, part_end - start);
                while bit < last {
                    let next = last.min((bit / 64 + 1) * 64);
                    let mask = u64::MAX >> (64 - (next - bit)) << (bit % 64);
                    each(&bits[(bit / 64) as usize], mask, (at, part_end));
                    bit = next;
                }
            }
            at = part_end;
        }
    }

    /// Marks blocks as needed. Passes each range in which some blocks were marked before to `overlap`.
    pub fn mark(&self, blocks: &Blocks, mut overlap: impl FnMut(u64, u64)) {
        let mut told = None;
        self.words(blocks, true, |word, mask, range| {
            if word.fetch_or(mask, Ordering::Relaxed) & mask != 0 && told != Some(range) {
                told = Some(range);
                overlap(range.0, range.1);
            }
        });
    }

    /// Marks blocks as not needed.
    pub fn unmark(&self, blocks: &Blocks) {
        self.words(blocks, false, |word, mask, _| {
            word.fetch_and(!mask, Ordering::Relaxed);
        });
    }
}
