//! Waking a thread that may be asleep, without a system call when it is not, and without losing a
//! wake-up.
//!
//! One atomic word holds the whole protocol:
//!
//! ```text
//!            doze (owner)              ring (anybody)
//!   AWAKE ─────────────────▶ ASLEEP ─────────────────▶ RUNG + write the eventfd
//!     │ ▲                      │                        │
//!     │ └──── rise (owner) ────┴────────────────────────┤
//!     └─────── ring (anybody) ─────────────────────────▶┘
//! ```
//!
//! Why no wake-up is lost: all changes are read-modify-writes of one word, so they have one order.
//! A `ring` that comes before the owner's `doze` leaves RUNG, and `doze` refuses to sleep. A `ring`
//! that comes after finds ASLEEP and writes the eventfd; the eventfd stays readable until the owner
//! drains it, so it does not matter whether the owner has reached its blocking system call yet.
//! What the ringer wrote before (a message in a mailbox) is visible to the owner when it sees RUNG,
//! because the ringer's swap releases and the owner's acquires.
//!
//! A ringer that found ASLEEP but was delayed before its write may hit a later sleep: that sleep
//! ends early and finds no RUNG, so it simply continues.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;
const RUNG: u32 = 2;

/// Wakes its owner, one thread that dozes on it. Anybody may ring.
#[derive(Debug)]
pub struct Doorbell {
    state: AtomicU32,
    eventfd: OwnedFd,
}

impl Doorbell {
    /// A doorbell that nobody has rung. Errors: EMFILE, ENFILE, ENOMEM.
    pub fn new() -> io::Result<Doorbell> {
        let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Doorbell {
            state: AtomicU32::new(AWAKE),
            eventfd,
        })
    }

    /// Makes the owner's current or next sleep end. Costs one atomic exchange unless it sleeps.
    pub fn ring(&self) {
        // Release: pairs with the acquiring swaps of `doze` and `rise`. It must be an exchange even
        // when RUNG is there already: a mere load could be older than the owner's last `rise`.
        if self.state.swap(RUNG, Ordering::AcqRel) == ASLEEP {
            // EAGAIN would mean a counter near 2^64: readable all the same. Nothing else can fail.
            let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
        }
    }

    /// Owner: about to sleep. False when the bell was rung since the last `rise`: do not sleep.
    pub(crate) fn doze(&self) -> bool {
        match self
            .state
            .compare_exchange(AWAKE, ASLEEP, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => true,
            // Only a doze without a rise leaves ASLEEP; sleeping again is right then too.
            Err(state) => state == ASLEEP,
        }
    }

    /// Owner: awake again. True when the bell was rung; the ring is consumed.
    pub(crate) fn rise(&self) -> bool {
        // Not read-modify-write when there is nothing to change. A ring that this load misses ends
        // the next sleep instead.
        self.state.load(Ordering::Relaxed) != AWAKE
            && self.state.swap(AWAKE, Ordering::AcqRel) == RUNG
    }

    /// Owner: whether the bell was rung since the last `rise`.
    pub(crate) fn has_rung(&self) -> bool {
        self.state.load(Ordering::Relaxed) == RUNG
    }

    /// Owner: empties the eventfd after it was seen readable.
    pub(crate) fn drain(&self) {
        let mut counter = [0u8; 8];
        // EAGAIN: empty already.
        let _ = rustix::io::read(&self.eventfd, &mut counter);
    }

    /// Owner: sleeps until rung or for `timeout` (`None`: no limit; zero: only looks). True when
    /// rung; the ring is consumed. Errors: ENOMEM.
    pub fn sleep(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if timeout == Some(Duration::ZERO) || !self.doze() {
                return Ok(self.rise());
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut fds = [PollFd::new(&self.eventfd, PollFlags::IN)];
            let polled = rustix::event::poll(&mut fds, left.as_ref());
            let rung = self.rise();
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
    /// The eventfd: readable when the owner slept and was rung.
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
    fn a_looking_sleep_consumes_a_ring() {
        let bell = Doorbell::new().unwrap();
        bell.ring();
        assert!(bell.sleep(Some(Duration::ZERO)).unwrap());
        assert!(!bell.sleep(Some(Duration::ZERO)).unwrap());
    }

    /// Hangs (and is killed by the test runner's time limit) if one wake-up of 200,000 is lost.
    #[test]
    fn no_wake_up_is_lost_however_ringer_and_sleeper_interleave() {
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
