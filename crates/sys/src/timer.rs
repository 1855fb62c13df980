//! A timer as a descriptor: timerfd_create(2).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// A descriptor that is readable when a time has passed.
#[derive(Debug)]
pub struct Timer {
    fd: OwnedFd,
}

impl Timer {
    /// Returns a timer that does not run. Fails with EMFILE, ENFILE or ENOMEM.
    pub fn new() -> io::Result<Timer> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Timer {
            fd: timerfd_create(TimerfdClockId::Monotonic, flags)?,
        })
    }

    /// Makes the descriptor readable after a time, and not before.
    pub fn set(&self, after: Duration) -> io::Result<()> {
        let zero = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // A time of zero would stop the timer.
        let after = after.max(Duration::from_nanos(1));
        let value = Itimerspec {
            it_interval: zero,
            it_value: Timespec {
                tv_sec: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: after.subsec_nanos().into(),
            },
        };
        timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &value)?;
        Ok(())
    }

    /// Makes the descriptor unreadable after its time has passed.
    pub fn clear(&self) {
        let mut count = [0; 8];
        // EAGAIN: the time has not passed.
        let _ = rustix::io::read(&self.fd, &mut count);
    }
}

impl AsFd for Timer {
    /// Returns the descriptor.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::poller::Poller;

    #[test]
    fn a_timer_is_readable_once_after_its_time() {
        let (timer, poller) = (Timer::new().unwrap(), Poller::new().unwrap());
        poller.add(&timer, 1).unwrap();
        let mut ready = vec![];
        poller.wait(&mut ready, Some(Duration::ZERO)).unwrap();
        assert_eq!(ready, []);
        timer.set(Duration::ZERO).unwrap();
        poller.wait(&mut ready, None).unwrap();
        assert_eq!(ready, [1]);
        timer.clear();
        ready.clear();
        poller.wait(&mut ready, Some(Duration::ZERO)).unwrap();
        assert_eq!(ready, []);
    }
}
