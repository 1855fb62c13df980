//! Free blocks that are lent out to be discarded.
//!
//! Lent blocks have their bits set and do not count in `available`. So they are not allocated, and the clear blocks
//! suffice for every reservation. Lent blocks still count as free, because no file has them. A caller that would otherwise fail with
//! ENOSPC calls `recall` and tries once more.
//!
//! The allocator records for each container, in memory only, which blocks were freed since their last discard.

use std::ops::Range;
use std::sync::atomic::Ordering;

use jericho_volume::Blocks;
use parking_lot::MutexGuard;

use super::Allocator;
use super::loans::{LoanState, Recall};
use crate::error::Result;
use crate::types::SliceId;

/// Divisor of the available blocks: at most one in this many is lent, so that writers rarely wait for a loan.
const LENT_DIVISOR: u64 = 4;

/// The free blocks to lend, all in one container.
#[derive(Clone, Debug)]
pub struct LoanRequest {
    /// Slice of the container.
    pub slice: SliceId,
    /// Index of the container in the slice.
    pub container: usize,
    /// Range of the container to lend from.
    pub within: Range<usize>,
    /// Whether to lend only blocks that were freed and not lent since.
    pub freed: bool,
    /// Least length of a free run.
    pub run_least: usize,
    /// Largest number of blocks to lend.
    pub most: usize,
}

/// A range of free blocks. The allocator does not allocate them until the loan is dropped.
pub struct Loan<'a> {
    allocator: &'a Allocator,
    /// The lent range.
    pub blocks: Blocks,
    /// The block of the container after the range.
    pub end: usize,
    /// Whether blocks after `end` continue the free run.
    pub goes_on: bool,
}

impl Allocator {
    /// Records freed blocks from now on.
    pub fn remember_freed(&self) {
        self.loans.remember.store(true, Ordering::Release);
    }

    /// Returns the largest number of blocks of a container.
    pub fn container_blocks(&self) -> u64 {
        self.container_blocks
    }

    /// Returns the number of containers of a slice.
    pub fn containers_of(&self, slice: SliceId) -> usize {
        let space = self.slices.get(usize::from(slice));
        space.map_or(0, |space| space.containers.len())
    }

    /// Returns whether blocks were freed in a container that `next_freed` has not returned since.
    pub fn has_freed(&self) -> bool {
        self.loans.has_freed.load(Ordering::Acquire)
    }

    /// Returns a container in which blocks were freed since it was last returned.
    pub fn next_freed(&self) -> Option<(SliceId, usize)> {
        let (slice, index) = self.loans.pop_freed()?;
        if let Ok(container) = self.container(slice, index)
            && let Some(bits) = container.bits.lock().as_mut()
        {
            bits.is_queued = false;
        }
        Some((slice, index))
    }

    /// Makes `lend` return nothing instead of waiting for the end of a `Recall`. A move may hold one while it copies some pieces.
    pub fn lend_at_once(&self) {
        self.loans.state.lock().at_once = true;
        self.loans.changed.notify_all();
    }

    /// Lends the first range that matches `request`. Waits while a `Recall` exists. Reads the store when the container is
    /// used for the first time.
    pub fn lend(&self, request: &LoanRequest) -> Result<Option<Loan<'_>>> {
        let mut state = self.loans.state.lock();
        if state.recalls > 0 {
            state.waiting += 1;
            while state.recalls > 0 && !state.at_once {
                self.loans.changed.wait(&mut state);
            }
            state.waiting -= 1;
            state.waited += 1;
            // Wakes a thread that waits in `recall_in_turn`.
            self.loans.changed.notify_all();
        }
        if state.recalls > 0 {
            return Ok(None);
        }
        let most = (self.available() / LENT_DIVISOR).min(request.most as u64) as usize;
        if most == 0 || request.container >= self.containers_of(request.slice) {
            return Ok(None);
        }
        let mut guard = self.lock(request.slice, request.container)?;
        let Some(bits) = guard.as_mut() else {
            return Ok(None);
        };
        let Range { start, end } = request.within;
        let found = bits.free_run(start, request.freed, request.run_least);
        let Some((at, run)) = found.filter(|(at, _)| *at < end) else {
            return Ok(None);
        };
        let run = run.min(end - at);
        // Splits a run into parts of equal length, because a short last part would not be worth a discard.
        let count = run.div_ceil(run.div_ceil(most));
        if self.reserve(count as u64).is_err() {
            return Ok(None);
        }
        self.counts
            .reserved
            .fetch_sub(count as u64, Ordering::AcqRel);
        bits.lend(at, count);
        state.lent += 1;
        Ok(Some(Loan {
            allocator: self,
            blocks: Blocks {
                slice: request.slice,
                first: request.container as u64 * self.container_blocks + at as u64,
                count: count as u32,
            },
            end: at + count,
            goes_on: count < run,
        }))
    }

    /// Waits until nothing is lent, and prevents lending until the recall is dropped. The caller must hold no lock that a slice
    /// needs: the slice would stall during the wait.
    pub fn recall(&self) -> Recall<'_> {
        self.recall_locked(self.loans.state.lock(), false)
    }

    /// Does the same as `recall`, but first lets a thread that waits in `lend` have its turn. For a caller that recalls
    /// repeatedly.
    ///
    /// While a lender waits, this function makes no further recall. So its earlier recalls all end, and the lender has
    /// its turn, even if callers overlap. If `recall` made all present recalls, this function does not wait for the
    /// lender: the lender cannot lend before they end.
    pub fn recall_in_turn(&self) -> Recall<'_> {
        let mut state = self.loans.state.lock();
        let waited = state.waited;
        state.yielding += 1;
        while (state.in_turn > 0 || state.recalls == 0)
            && state.waiting > 0
            && state.waited == waited
        {
            self.loans.changed.wait(&mut state);
        }
        state.yielding -= 1;
        state.in_turn += 1;
        self.recall_locked(state, true)
    }

    /// Returns how many threads in `recall_in_turn` let a lender go first.
    #[cfg(test)]
    pub(super) fn recalls_yielding(&self) -> usize {
        self.loans.state.lock().yielding
    }

    /// Returns how many threads wait in `lend`.
    pub fn lenders_waiting(&self) -> usize {
        self.loans.state.lock().waiting
    }

    fn recall_locked(&self, mut state: MutexGuard<'_, LoanState>, in_turn: bool) -> Recall<'_> {
        state.recalls += 1;
        while state.lent > 0 {
            self.loans.changed.wait(&mut state);
        }
        Recall {
            loans: &self.loans,
            in_turn,
        }
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        let (allocator, blocks) = (self.allocator, self.blocks);
        let (index, at) = (
            (blocks.first / allocator.container_blocks) as usize,
            (blocks.first % allocator.container_blocks) as usize,
        );
        if let Ok(container) = allocator.container(blocks.slice, index)
            && let Some(bits) = container.bits.lock().as_mut()
        {
            bits.clear(at, blocks.count as usize);
        }
        let count = u64::from(blocks.count);
        allocator
            .counts
            .available
            .fetch_add(count, Ordering::AcqRel);
        allocator.loans.state.lock().lent -= 1;
        allocator.loans.changed.notify_all();
    }
}
