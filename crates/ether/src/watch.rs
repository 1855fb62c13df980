//! What wakes a thread that receives frames: its sockets, the end of its owner, and what it adds.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use jericho_sys::poller::Poller;

use crate::links::{Links, Receiver};

/// Key of `stopped`. Sockets have the numbers of their interfaces.
const STOP: u64 = u64::MAX;

pub(crate) struct Watch {
    /// The sockets.
    pub receiver: Receiver,
    poller: Poller,
    /// Readable when the thread must end.
    _stopped: UnixStream,
    ready: Vec<u64>,
}

impl Watch {
    /// Watches the sockets of some interfaces, and the end of their owner: it closes the other end of `stopped`.
    pub fn new(links: &Links, nics: Vec<u16>, stopped: &UnixStream) -> io::Result<Watch> {
        let (receiver, poller) = (links.receiver(nics), Poller::new()?);
        for (nic, socket) in receiver.sockets() {
            poller.add(socket, nic.into())?;
        }
        let stopped = stopped.try_clone()?;
        poller.add(&stopped, STOP)?;
        Ok(Watch {
            receiver,
            poller,
            _stopped: stopped,
            ready: Vec::new(),
        })
    }

    /// Watches a descriptor with a key from 2^16 to 2^64 - 2, too.
    pub fn add(&self, fd: impl AsFd, key: u64) -> io::Result<()> {
        self.poller.add(fd, key)
    }

    /// Watches a descriptor no more.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        self.poller.remove(fd)
    }

    /// Sleeps until something is ready, or not at all if more frames may have arrived. Returns `false` when the thread must end.
    pub fn wait(&mut self, has_more: bool) -> bool {
        self.ready.clear();
        let timeout = has_more.then_some(Duration::ZERO);
        if let Err(error) = self.poller.wait(&mut self.ready, timeout) {
            tracing::error!(%error, "cannot wait for frames");
            std::thread::sleep(Duration::from_millis(10));
        }
        !self.is_ready(STOP)
    }

    /// Returns whether the last `wait` has found a descriptor ready.
    pub fn is_ready(&self, key: u64) -> bool {
        self.ready.contains(&key)
    }
}

/// Returns the name of one of several threads: the first one has no number.
pub(crate) fn thread_name(name: &str, number: usize) -> String {
    match number {
        0 => name.to_owned(),
        number => format!("{name}-{number}"),
    }
}
