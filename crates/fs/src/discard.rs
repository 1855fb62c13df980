//! Discards freed blocks on devices that support it, so that the host gets their space back.
//!
//! The discarded blocks come from the allocator's bitmaps, so they could be allocated to any file: their removal is
//! durable, and no transfer to them is in flight. While a range is being discarded it is lent (`alloc/lend.rs`) and
//! cannot be allocated.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use jericho_format::PAGE_BYTES;
use jericho_format::superblock::FLAG_PREALLOCATED;
use jericho_storage::TakesBack;
use jericho_sys::errno;
use jericho_volume::Volume;
use parking_lot::{Condvar, Mutex};

use crate::alloc::{Loan, LoanRequest};
use crate::core::Core;
use crate::errno::EOPNOTSUPP;
use crate::error::Result;
use crate::fs::Fs;
use crate::types::Trimmed;

/// Longest range of one discard, in blocks (16 MiB): other transfers may have to wait for it.
const PIECE_BLOCKS: usize = 4096;
/// Shortest run of freed blocks that is discarded without a trim request (1 MiB), unless a quarter of a container is
/// less.
const RUN_BLOCKS: u64 = 256;
/// Longest pause after a piece.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Longest time that the remaining discards may delay an unmount.
const FINISH: Duration = Duration::from_secs(5);

/// State of discarding.
pub struct Discards {
    /// By device: whether it supports discards.
    devices: Box<[AtomicBool]>,
    /// Held during a discard: one range is discarded at a time.
    working: Mutex<()>,
    control: Mutex<Control>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
struct Control {
    /// Blocks were freed since the last search.
    work: bool,
    stop: Option<Stop>,
}

#[derive(Clone, Copy)]
enum Stop {
    Now,
    /// Discard the freed blocks before stopping.
    Finish(Instant),
}

impl Discards {
    pub fn new(volume: &Volume, read_only: bool) -> Discards {
        let keeps_space = volume
            .superblocks()
            .with(|s| s.head.flags.get() & FLAG_PREALLOCATED != 0);
        let takes_back = |takes: TakesBack| match takes {
            TakesBack::Nothing => false,
            TakesBack::Space => !keeps_space,
            TakesBack::Blocks => true,
        };
        let devices = volume.devices().iter();
        Discards {
            devices: devices
                .map(|device| AtomicBool::new(!read_only && takes_back(device.takes_back())))
                .collect(),
            working: Mutex::new(()),
            control: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Returns whether any device supports discards.
    pub fn is_on(&self) -> bool {
        self.devices.iter().any(|on| on.load(Ordering::Acquire))
    }

    /// Wakes the thread to search for freed blocks.
    pub fn wake(&self) {
        self.control.lock().work = true;
        self.changed.notify_all();
    }

    /// Tells the thread to discard the freed blocks, for a few seconds at most, and then to stop.
    pub fn finish(&self) {
        self.stop(Stop::Finish(Instant::now() + FINISH));
    }

    /// Tells the thread to stop.
    pub fn stop_now(&self) {
        self.stop(Stop::Now);
    }

    fn stop(&self, how: Stop) {
        self.control.lock().stop = Some(how);
        self.changed.notify_all();
    }

    /// Sleeps until there is work or the thread must stop. Returns the way to stop, or `None` if there is work.
    fn wait_for_work(&self) -> Option<Stop> {
        let mut control = self.control.lock();
        while !control.work && control.stop.is_none() {
            self.changed.wait(&mut control);
        }
        control.work = false;
        control.stop
    }

    /// Sleeps for a time, or until the thread must stop. Returns the way to stop, or `None` after the time.
    fn pause(&self, time: Duration) -> Option<Stop> {
        let until = Instant::now() + time;
        let mut control = self.control.lock();
        while control.stop.is_none() {
            if self.changed.wait_until(&mut control, until).timed_out() {
                break;
            }
        }
        control.stop
    }
}

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
                _ if core.commits.failure().is_err() || !core.discards.is_on() => return stop,
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
struct Walk {
    next: LoanRequest,
    run_least: usize,
}

impl Walk {
    fn new(request: LoanRequest) -> Walk {
        Walk {
            run_least: request.run_least,
            next: request,
        }
    }

    /// Discards the next range. Returns how many blocks the devices discarded, or `None` when there is no further
    /// range.
    fn discard(&mut self, core: &Core) -> Result<Option<u64>> {
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
        let (device, on) = (
            &core.volume.devices()[usize::from(run.device)],
            &core.discards.devices[usize::from(run.device)],
        );
        if !on.load(Ordering::Acquire) {
            continue;
        }
        match device.discard(run.offset_bytes, u64::from(run.blocks) * PAGE_BYTES) {
            Ok(()) => blocks += u64::from(run.blocks),
            // The host has no room to record the hole, or a signal interrupted the call. A later attempt may succeed.
            Err(error) if [errno::ENOSPC, errno::EINTR].contains(&error.errno()) => {
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
        core.may_change()?;
        if !core.discards.is_on() {
            return Err(EOPNOTSUPP);
        }
        let mut blocks = 0;
        let mut slice_first = 0;
        for slice in 0..core.slice_count() {
            let slice_end = slice_first + core.allocator.capacity_of(slice);
            let mut at = range.start.max(slice_first);
            while at < range.end.min(slice_end) {
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
                    core.may_change()?;
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
