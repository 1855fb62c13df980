//! Wakes a thread that may be asleep. Needs no system call when the thread is awake, and loses no wake-up.
//!
//! One atomic word holds the whole protocol:
//!
//! ```text
//!             arm (owner)             ring (any thread)
//!   AWAKE ─────────────────▶ ASLEEP ─────────────────▶ RUNG + write the eventfd
//!     │ ▲                      │                        │
//!     │ └── disarm (owner) ────┴────────────────────────┤
//!     └─────── ring (any thread) ──────────────────────▶┘
//! ```
//!
//! Why no wake-up is lost: all changes are read-modify-writes of one word, so they have one order. A `ring` before the owner's
//! `arm` leaves RUNG, and `arm` refuses the sleep. A `ring` after the owner's `arm` finds ASLEEP and writes the eventfd. The
//! eventfd stays readable until the owner drains it, so the owner may reach its blocking system call later. Data that a thread
//! wrote before it rang (a message in a mailbox) is visible to the owner when it sees RUNG, because the swap in `ring` releases
//! and the owner's swap acquires.
//!
//! A thread that found ASLEEP in `ring` may be delayed before its write, which then hits a later sleep. That sleep ends early,
//! finds no RUNG, and the owner sleeps again.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;
const RUNG: u32 = 2;

/// Wakes its owner, the one thread that sleeps on it. Any thread may ring.
#[derive(Debug)]
pub struct Doorbell {
    state: AtomicU32,
    eventfd: OwnedFd,
}

/// Makes the eventfd of a doorbell readable, at the cost of a system call even if the owner is awake. See `Doorbell::signal`.
#[derive(Debug)]
pub struct Signal(OwnedFd);

impl Signal {
    /// Makes the eventfd readable.
    pub fn send(&self) {
        // As in `ring`, nothing can fail.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

impl Doorbell {
    /// Creates a doorbell that was not rung. Fails with EMFILE, ENFILE or ENOMEM.
    pub fn new() -> io::Result<Doorbell> {
        let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Doorbell {
            state: AtomicU32::new(AWAKE),
            eventfd,
        })
    }

    /// Ends the owner's current or next sleep. Costs one atomic exchange if the owner is awake.
    pub fn ring(&self) {
        // Release: pairs with the acquiring swaps of `arm` and `disarm`. An exchange is needed even when RUNG is set already: a
        // plain load could be older than the owner's last `disarm`.
        if self.state.swap(RUNG, Ordering::AcqRel) == ASLEEP {
            // EAGAIN would mean a counter near 2^64, which is readable as well. Nothing else can fail.
            let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
        }
    }

    /// Returns a handle that makes the eventfd readable, as the completions of a ring do (`Ring::signal`). So it ends a wait that watches the
    /// eventfd, and no `sleep`. Fails with EMFILE.
    pub fn signal(&self) -> io::Result<Signal> {
        Ok(Signal(self.eventfd.try_clone()?))
    }

    /// Declares that the owner is about to sleep. Returns false when the doorbell was rung since the last `disarm`: the owner
    /// must not sleep. Only the owner calls it.
    pub(crate) fn arm(&self) -> bool {
        match self
            .state
            .compare_exchange(AWAKE, ASLEEP, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => true,
            // Only an `arm` without a `disarm` leaves ASLEEP. Sleeping is right then too.
            Err(state) => state == ASLEEP,
        }
    }

    /// Withdraws that declaration after the sleep. Returns whether the doorbell was rung, and resets it. Only the owner calls it.
    pub(crate) fn disarm(&self) -> bool {
        // No read-modify-write when there is nothing to change. A ring that this load misses ends the next sleep.
        self.state.load(Ordering::Relaxed) != AWAKE
            && self.state.swap(AWAKE, Ordering::AcqRel) == RUNG
    }

    /// Returns whether the doorbell was rung since the last `disarm`. Only the owner calls it.
    pub(crate) fn has_rung(&self) -> bool {
        self.state.load(Ordering::Relaxed) == RUNG
    }

    /// Empties the eventfd after it was readable, for an owner that watches it in a poller. Only the owner calls it.
    pub fn clear(&self) {
        self.drain();
    }

    /// Empties the eventfd after it was readable. Only the owner calls it.
    pub(crate) fn drain(&self) {
        let mut counter = [0u8; 8];
        // EAGAIN: the eventfd is empty already.
        let _ = rustix::io::read(&self.eventfd, &mut counter);
    }

    /// Sleeps until the doorbell is rung or for `timeout` (`None`: no limit; zero: does not sleep). Returns whether it was rung,
    /// and resets the doorbell. Fails with ENOMEM. Only the owner calls it.
    pub fn sleep(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if timeout == Some(Duration::ZERO) || !self.arm() {
                return Ok(self.disarm());
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut fds = [PollFd::new(&self.eventfd, PollFlags::IN)];
            let polled = rustix::event::poll(&mut fds, left.as_ref());
            let rung = self.disarm();
            match polled {
                Ok(0) => return Ok(rung),
                Ok(_) => self.drain(),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if rung {
                return Ok(true);
            }
        }
    }
}

impl AsFd for Doorbell {
    /// Returns the eventfd, which is readable when the doorbell was rung during a sleep.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn a_ring_before_the_sleep_ends_the_sleep_and_only_one() {
        let bell = Doorbell::new().unwrap();
        bell.ring();
        bell.ring();
        assert!(bell.sleep(None).unwrap());
        assert!(!bell.sleep(Some(Duration::from_millis(1))).unwrap());
        assert!(!bell.sleep(Some(Duration::ZERO)).unwrap());
    }

    #[test]
    fn a_sleep_without_time_consumes_a_ring() {
        let bell = Doorbell::new().unwrap();
        bell.ring();
        assert!(bell.sleep(Some(Duration::ZERO)).unwrap());
        assert!(!bell.sleep(Some(Duration::ZERO)).unwrap());
    }

    /// Hangs, until the test runner kills it, if one wake-up of 200,000 is lost.
    #[test]
    fn no_wake_up_is_lost_in_any_order_of_ring_and_sleep() {
        const ROUNDS: u64 = 100_000;
        let bells = Arc::new([Doorbell::new().unwrap(), Doorbell::new().unwrap()]);
        let mailbox = Arc::new(AtomicU64::new(0));
        let play = |own: usize| {
            let (bells, mailbox) = (Arc::clone(&bells), Arc::clone(&mailbox));
            move || {
                let mut turn = own as u64;
                while turn < ROUNDS {
                    while mailbox.load(Ordering::Relaxed) != turn {
                        bells[own].sleep(None).unwrap();
                    }
                    mailbox.store(turn + 1, Ordering::Relaxed);
                    bells[1 - own].ring();
                    turn += 2;
                }
            }
        };
        let other = std::thread::spawn(play(1));
        play(0)();
        other.join().unwrap();
        assert_eq!(mailbox.load(Ordering::Relaxed), ROUNDS);
    }
}
