//! For how long a thread of the FUSE ring polls before it sleeps.
//!
//! A poll saves a sleep and a wake-up if the next request comes soon, as it does while a program reads and writes what is cached. Otherwise
//! it takes the CPU from the programs whose requests the thread serves: they run on the same CPU. A program that syncs waits for the
//! device again and again, and databases compute between their requests. So the thread does not poll if one of the last requests was a sync.
//! The numbers are in docs/performance/journal.md.
//!
//! Whether the last polls were in vain is no better measure. A thread that sleeps leaves its CPU idle, so the scheduler moves the program
//! between CPUs, and then all polls are in vain.

use std::time::Duration;

/// It takes about that long to wake an idle CPU.
const POLL: Duration = Duration::from_micros(40);

/// Time for which the thread polls while it reads from a device. A fast device under load takes about that long.
const POLL_FOR_DEVICE: Duration = Duration::from_micros(200);

/// Number of requests after a sync before the thread polls again. A transaction of SQLite with a rollback journal has 9 between two syncs.
const REQUESTS: u32 = 64;

/// The recent requests of a thread.
pub(crate) struct Polling {
    since_sync: u32,
}

impl Polling {
    pub(crate) fn new() -> Polling {
        Polling {
            since_sync: REQUESTS,
        }
    }

    /// Records a request.
    pub(crate) fn has_come(&mut self, is_sync: bool) {
        self.since_sync = match is_sync {
            true => 0,
            false => self.since_sync.saturating_add(1),
        };
    }

    /// Returns whether one of the last requests was a sync.
    pub(crate) fn syncs(&self) -> bool {
        self.since_sync < REQUESTS
    }

    /// Returns for how long the next wait polls. `reads`: the thread reads from a device.
    pub(crate) fn time(&self, reads: bool) -> Duration {
        match (reads, self.syncs()) {
            (true, _) => POLL_FOR_DEVICE,
            (false, true) => Duration::ZERO,
            (false, false) => POLL,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_polls_unless_a_program_has_just_synced() {
        let mut polling = Polling::new();
        assert_eq!(polling.time(false), POLL);
        polling.has_come(true);
        assert_eq!(polling.time(false), Duration::ZERO);
        assert_eq!(polling.time(true), POLL_FOR_DEVICE);
        (1..REQUESTS).for_each(|_| polling.has_come(false));
        assert_eq!(polling.time(false), Duration::ZERO);
        polling.has_come(false);
        assert_eq!(polling.time(false), POLL);
    }
}
