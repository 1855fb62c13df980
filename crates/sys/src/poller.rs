//! Waits for many descriptors at once: epoll(7). A wait costs time for the ready descriptors only, not for all
//! watched ones.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

/// Maximum number of events that one wait returns; the next wait returns the rest.
const EVENTS_MAX: usize = 64;

/// A set of watched descriptors, each with a key that the caller chooses.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    /// Creates an empty set. Fails with EMFILE or ENOMEM.
    pub fn new() -> io::Result<Poller> {
        Ok(Poller {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
        })
    }

    /// Watches `fd` until it is removed or until its last duplicate is closed. Fails with EEXIST when it is watched already, and
    /// with ENOSPC beyond /proc/sys/fs/epoll/max_user_watches.
    pub fn add(&self, fd: impl AsFd, key: u64) -> io::Result<()> {
        Ok(epoll::add(
            &self.epoll,
            fd,
            EventData::new_u64(key),
            EventFlags::IN,
        )?)
    }

    /// Stops watching `fd`. Fails with ENOENT when it is not watched.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    /// Waits until a watched descriptor is readable or its other end is closed, for at most `timeout` (`None`: no limit). Appends
    /// the keys of these descriptors to `ready`.
    pub fn wait(&self, ready: &mut Vec<u64>, timeout: Option<Duration>) -> io::Result<()> {
        // A timeout beyond the range of Timespec counts as no limit.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS_MAX);
        let spare = rustix::buffer::spare_capacity(&mut events);
        match epoll::wait(&self.epoll, spare, timeout.as_ref()) {
            Ok(_) => {}
            // A signal arrived: returns as if nothing was ready.
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
    fn a_ready_descriptor_is_reported_by_its_key_until_it_is_removed() {
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
        // Closing the last duplicate also removes it.
        drop(near);
        poller.wait(&mut ready, Some(Duration::ZERO)).unwrap();
        assert_eq!(ready, []);
    }
}
