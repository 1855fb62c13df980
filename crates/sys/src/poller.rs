//! Waiting for many descriptors at once: epoll(7). A wait costs what is ready, not what is watched.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

/// Events that one wait returns at most; the next wait returns the others.
const EVENTS_MAX: usize = 64;

/// A set of watched descriptors, each with a number of the caller's.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    /// Watches nothing yet. Errors: EMFILE, ENOMEM.
    pub fn new() -> io::Result<Poller> {
        Ok(Poller {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
        })
    }

    /// Watches `fd` until it is removed, or until its last duplicate is closed. Errors: EEXIST when it is watched already, ENOSPC
    /// beyond /proc/sys/fs/epoll/max_user_watches.
    pub fn add(&self, fd: impl AsFd, number: u64) -> io::Result<()> {
        Ok(epoll::add(
            &self.epoll,
            fd,
            EventData::new_u64(number),
            EventFlags::IN,
        )?)
    }

    /// Stops watching `fd`. Errors: ENOENT when it is not watched.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    /// Waits until a watched descriptor is readable or closed at its other end, for at most `timeout` (`None`: no limit). Appends
    /// the numbers of those that are to `ready`.
    pub fn wait(&self, ready: &mut Vec<u64>, timeout: Option<Duration>) -> io::Result<()> {
        // A timeout that no Timespec can hold is no limit.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS_MAX);
        let spare = rustix::buffer::spare_capacity(&mut events);
        match epoll::wait(&self.epoll, spare, timeout.as_ref()) {
            Ok(_) => {}
            // A signal: as if nothing had been ready.
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        ready.extend(events.iter().map(|event| {
            let data = event.data;
            data.u64()
        }));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn what_is_ready_is_told_by_its_number_until_it_is_removed() {
        let poller = Poller::new().unwrap();
        let (mut far, near) = UnixStream::pair().unwrap();
        let (_idle, quiet) = UnixStream::pair().unwrap();
        poller.add(&near, u64::MAX).unwrap();
        poller.add(&quiet, 7).unwrap();
        let mut ready = vec![];
        poller.wait(&mut ready, Some(Duration::ZERO)).unwrap();
        assert_eq!(ready, []);
        far.write_all(b"x").unwrap();
        poller.wait(&mut ready, None).unwrap();
        assert_eq!(ready, [u64::MAX]);
        poller.remove(&near).unwrap();
        ready.clear();
        poller.wait(&mut ready, Some(Duration::ZERO)).unwrap();
        assert_eq!(ready, []);
        poller.add(&near, 8).unwrap();
        // Closing its last duplicate removes it, too.
        drop(near);
        poller.wait(&mut ready, Some(Duration::ZERO)).unwrap();
        assert_eq!(ready, []);
    }
}
