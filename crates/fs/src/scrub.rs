//! Reads all data in the background, at a limited rate, and compares it with its checksums.
//!
//! A *pass* reads the blocks of all durable extents, also those of pages that are cached: it looks for damage on the device. It reads rows of
//! the store and takes no lock of a file. So a file may change meanwhile. A block that differs is damaged only if its rows are the same
//! after the read, and it differs in a second read as well.
//!
//! The thread sleeps for the time that the rate asks for after each megabyte, and between two passes. The place in the volume is a value of
//! the store, so the next mount goes on there.

mod findings;
mod pages;
pub(crate) mod scrubber;

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// What the passes of this mount and of earlier ones have found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubStatus {
    /// Bytes that are read in a second; 0: none.
    pub bytes_per_s: u64,
    /// A pass is in progress, or waits for a rate.
    pub is_in_pass: bool,
    /// Damaged or unreadable pages that the pass in progress has found so far.
    pub found: u64,
    /// The end of the last whole pass, in seconds since the epoch.
    pub last_ended_s: Option<u64>,
    /// Damaged or unreadable pages that it has found.
    pub last_found: u64,
}

/// What the thread is told, and what it tells.
#[derive(Default)]
pub struct Scrub {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Bytes a second; 0: do not read.
    rate: u64,
    /// The next step does not wait.
    is_hurried: bool,
    is_stopped: bool,
    /// Without the rate, which is above.
    told: ScrubStatus,
}

impl Scrub {
    /// Sets the number of bytes to read in a second. 0 pauses the thread.
    pub fn set_rate(&self, rate: u64) {
        self.state.lock().rate = rate;
        self.changed.notify_all();
    }

    /// Begins a pass now if none is in progress.
    pub fn begin(&self) {
        self.state.lock().is_hurried = true;
        self.changed.notify_all();
    }

    /// Has the thread save its place and end.
    pub fn stop(&self) {
        self.state.lock().is_stopped = true;
        self.changed.notify_all();
    }

    /// Returns what is known of the passes.
    pub fn status(&self) -> ScrubStatus {
        let state = self.state.lock();
        ScrubStatus {
            bytes_per_s: state.rate,
            ..state.told
        }
    }

    /// Sets what is known of the passes.
    pub(super) fn tell(&self, status: ScrubStatus) {
        self.state.lock().told = status;
    }

    /// Sleeps for the time that `pause` returns for the present rate. Returns false if the thread must end.
    pub(super) fn sleep(&self, pause: impl Fn(u64) -> Duration) -> bool {
        let begun = Instant::now();
        let mut state = self.state.lock();
        while !state.is_stopped {
            if state.rate > 0 && std::mem::take(&mut state.is_hurried) {
                return true;
            }
            match (state.rate, begun.checked_add(pause(state.rate.max(1)))) {
                (0, _) | (_, None) => self.changed.wait(&mut state),
                (_, Some(until)) if Instant::now() >= until => return true,
                (_, Some(until)) => drop(self.changed.wait_until(&mut state, until)),
            }
        }
        false
    }
}
