//! The thread that discards freed blocks, and the walk through the free ranges of a container.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use jericho_format::PAGE_BYTES;
use jericho_metadata::alloc::{Loan, LoanRequest};
use jericho_sys::errno;

use super::Stop;
use crate::core::Core;
use crate::error::Result;

/// Longest range of one discard, in blocks (16 MiB): other transfers may have to wait for it.
pub(super) const PIECE_BLOCKS: usize = 4096;
/// Shortest run of freed blocks that is discarded without a trim request (1 MiB), unless a quarter of a container is
/// less.
const RUN_BLOCKS: u64 = 256;
/// Longest pause after a piece.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Runs the discard thread.
pub fn run(core: &Core) {
    let discards = &core.discards;
    let gather = Duration::from_millis(core.options.commit_interval_ms);
    loop {
        let stop = discards.wait_for_work().or_else(|| discards.pause(gather));
        let stop = discard_freed(core, stop);
        if stop.is_some() {
            return;
        }
    }
}

/// Discards freed blocks in runs that are long enough. Returns the way to stop if the thread must stop.
fn discard_freed(core: &Core, mut stop: Option<Stop>) -> Option<Stop> {
    let allocator = &core.allocator;
    let run_least = RUN_BLOCKS.min(allocator.container_blocks() / 4) as usize;
    while let Some((slice, container)) = allocator.next_freed() {
        let mut walk = Walk::new(LoanRequest {
            slice,
            container,
            within: 0..allocator.container_blocks() as usize,
            freed: true,
            run_least,
            most: PIECE_BLOCKS,
        });
        loop {
            match stop {
                Some(Stop::Now) => return stop,
                Some(Stop::Finish(until)) if Instant::now() >= until => return stop,
                _ if !core.discards.is_on() => return stop,
                _ if core.slice_failure(slice).is_err() => break,
                _ => {}
            }
            let begun = Instant::now();
            match walk.discard(core) {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(slice, container, %error, "cannot discard freed blocks");
                    break;
                }
            }
            let pause = begun.elapsed().min(PAUSE_MAX);
            stop = stop.or_else(|| core.discards.pause(pause));
        }
    }
    stop
}

/// A traversal of the free ranges of a container.
pub(super) struct Walk {
    pub(super) next: LoanRequest,
    run_least: usize,
}

impl Walk {
    pub(super) fn new(request: LoanRequest) -> Walk {
        Walk {
            run_least: request.run_least,
            next: request,
        }
    }

    /// Discards the next range. Returns how many blocks the devices discarded, or `None` when there is no further
    /// range.
    pub(super) fn discard(&mut self, core: &Core) -> Result<Option<u64>> {
        let _alone = core.discards.working.lock();
        let Some(loan) = core.allocator.lend(&self.next)? else {
            return Ok(None);
        };
        self.next.within.start = loan.end;
        self.next.run_least = if loan.goes_on { 1 } else { self.run_least };
        Ok(Some(discard_loan(core, &loan)))
    }
}

/// Discards a range on its devices. Returns how many of its blocks were discarded.
fn discard_loan(core: &Core, loan: &Loan<'_>) -> u64 {
    let mut blocks = 0;
    for run in core.volume.runs(loan.blocks) {
        let device = &core.volume.devices()[usize::from(run.device)];
        let on = core.discards.devices.get(usize::from(run.device));
        let Some(on) = on.filter(|on| on.load(Ordering::Acquire)) else {
            continue;
        };
        if core.volume.is_excluded(run.device) {
            continue;
        }
        match device.discard(run.offset_bytes, u64::from(run.blocks) * PAGE_BYTES) {
            Ok(()) => blocks += u64::from(run.blocks),
            // The host has no room to record the hole or does not answer, or a signal interrupted the call. A later attempt may succeed.
            Err(error)
                if error.is_unreachable()
                    || [errno::ENOSPC, errno::EINTR].contains(&error.errno()) =>
            {
                tracing::debug!(%error, "cannot discard freed blocks now");
            }
            Err(error) => {
                if on.swap(false, Ordering::AcqRel) {
                    tracing::warn!(
                        "{error}; freed blocks of this device are not discarded until the next mount"
                    );
                }
            }
        }
    }
    blocks
}
