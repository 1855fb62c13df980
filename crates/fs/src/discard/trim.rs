//! Discards free space on request, as fstrim(8) does.

use std::ops::Range;
use std::time::Instant;

use jericho_metadata::alloc::LoanRequest;
use jericho_metadata::errno::EOPNOTSUPP;

use super::discarder::{PIECE_BLOCKS, Walk};
use crate::error::Result;
use crate::fs::Fs;
use crate::types::Trimmed;

impl Fs {
    /// Returns the number of trims and discards that wait for the end of a `Recall`.
    pub fn discards_waiting(&self) -> usize {
        self.core.allocator.lenders_waiting()
    }

    /// Discards the free space in a range of the volume's blocks, counted through all slices, in runs of at least
    /// `run_least` blocks. Stops soon after `until`. Blocks whose removal is not durable are not free. Fails with EROFS,
    /// and with EOPNOTSUPP when no device supports discards.
    pub fn trim(
        &self,
        range: Range<u64>,
        run_least: u64,
        until: Option<Instant>,
    ) -> Result<Trimmed> {
        let core = &self.core;
        core.may_change_at_all()?;
        if !core.discards.is_on() {
            return Err(EOPNOTSUPP);
        }
        let mut blocks = 0;
        let mut slice_first = 0;
        for slice in 0..core.slice_count() {
            let slice_end = slice_first + core.allocator.capacity_of(slice);
            let mut at = range.start.max(slice_first);
            while at < range.end.min(slice_end) && core.slice_failure(slice).is_ok() {
                let container_blocks = core.allocator.container_blocks();
                let container = (at - slice_first) / container_blocks;
                let first = slice_first + container * container_blocks;
                let end = (first + container_blocks).min(slice_end);
                let mut walk = Walk::new(LoanRequest {
                    slice,
                    container: container as usize,
                    within: (at - first) as usize..(end.min(range.end) - first) as usize,
                    freed: false,
                    run_least: usize::try_from(run_least.max(1)).unwrap_or(usize::MAX),
                    most: PIECE_BLOCKS,
                });
                while let Some(count) = walk.discard(core)? {
                    blocks += count;
                    core.alive()?;
                    if until.is_some_and(|until| Instant::now() >= until) {
                        // The remaining part of a run counts as a run of its own, so it must be long enough too.
                        let next = Some(first + walk.next.within.start as u64);
                        return Ok(Trimmed { blocks, next });
                    }
                }
                at = end;
            }
            slice_first = slice_end;
        }
        Ok(Trimmed { blocks, next: None })
    }
}
