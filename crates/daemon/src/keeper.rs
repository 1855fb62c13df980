//! The keeper: a small process that outlives the daemon of a volume, and then ends inline access to its cache.
//!
//! ```text
//! exec'ed by the daemon ── descriptors of the segments ──▶ keeping ── the daemon has ended ──▶ clients cut off, memory given back
//! ```
//!
//! It has the segments' descriptors, a pidfd of the daemon, the socket to it, and nothing else: no volume, no lock, and not
//! /dev/fuse, with which it would keep the kernel from telling programs that the daemon is gone. It maps nothing and
//! sleeps. How the daemon starts it and hands segments over: `fast/keeping.rs`.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use jericho_shm::keep::{self, KEEPER_BYTES, KeeperMessage, Segment};
use jericho_sys::handover::Connection;
use jericho_sys::limits;
use jericho_sys::memory;
use jericho_sys::poller::Poller;
use jericho_sys::process::{self, Signal, Signals};

const SOCKET: u64 = 0;
const DAEMON: u64 = 1;

/// What the keeper holds.
#[derive(Default)]
struct Kept {
    daemon: Option<OwnedFd>,
    segments: Vec<(Segment, OwnedFd)>,
    /// By owner number.
    areas: HashMap<u16, File>,
}

/// Runs the keeper of the daemon at the other end of standard input, until that has ended. Errors: standard input is no such
/// socket; the kernel refuses what a keeper needs.
pub fn run() -> io::Result<()> {
    // A signal to the daemon and all processes around it must not stop the keeper before the daemon has ended.
    let _blocked = Signals::block(&[Signal::Terminate, Signal::Interrupt, Signal::HangUp])?;
    limits::raise_open_files();
    // The directory that it was started in could not be unmounted otherwise.
    std::env::set_current_dir("/")?;
    keep(&Connection::from(io::stdin().as_fd().try_clone_to_owned()?))
}

/// Waits for the daemon's end, and ends inline access then. Returns at once when the connection ends before the daemon's pidfd
/// has come.
fn keep(connection: &Connection) -> io::Result<()> {
    let mut kept = Kept::default();
    let listened = kept.listen(connection);
    // A daemon that sends more sees that nobody listens, and starts another keeper.
    connection.shut();
    let Some(daemon) = &kept.daemon else {
        return listened;
    };
    if let Err(error) = listened {
        tracing::error!(%error, "cannot hear the daemon; its end is waited for");
    }
    process::wait_readable(daemon.as_fd(), None)?;
    kept.end();
    Ok(())
}

impl Kept {
    /// Takes in what the daemon sends, until the daemon has ended or closes the connection.
    fn listen(&mut self, connection: &Connection) -> io::Result<()> {
        let poller = Poller::new()?;
        poller.add(connection, SOCKET)?;
        let mut ready = vec![];
        loop {
            ready.clear();
            poller.wait(&mut ready, None)?;
            if ready.contains(&SOCKET) {
                let knew = self.daemon.is_some();
                if !self.hear(connection)? {
                    return Ok(());
                }
                if let Some(daemon) = self.daemon.as_ref().filter(|_| !knew) {
                    poller.add(daemon, DAEMON)?;
                }
            }
            if ready.contains(&DAEMON) {
                // What the daemon sent before it ended is still there. Another process that has the daemon's end of the socket is
                // not waited for.
                let now = Some(Duration::ZERO);
                while process::wait_readable(connection.as_fd(), now)? && self.hear(connection)? {}
                return Ok(());
            }
        }
    }

    /// Takes in the message that is there; ignores one that is none of this version. Returns false when there will be none.
    fn hear(&mut self, connection: &Connection) -> io::Result<bool> {
        let mut bytes = [0; KEEPER_BYTES];
        let (len, fds) = loop {
            match connection.receive(&mut bytes) {
                Ok(received) => break received,
                // The daemon ended before it read an answer; this is said once, before what it sent.
                Err(error) if error.raw_os_error() == Some(libc::ECONNRESET) => {}
                Err(error) => return Err(error),
            }
        };
        if len == 0 {
            return Ok(false);
        }
        let mut fds = fds.into_iter();
        match KeeperMessage::decode(&bytes[..len]) {
            // Only the first one: `listen` watches that.
            Some(KeeperMessage::Daemon) => self.daemon = self.daemon.take().or(fds.next()),
            Some(KeeperMessage::Segments(segment)) => {
                self.segments.extend(fds.map(|fd| (segment, fd)));
            }
            Some(KeeperMessage::Area(owner)) => {
                self.areas
                    .extend(fds.next().map(|fd| (owner, File::from(fd))));
            }
            Some(KeeperMessage::Forget(owner)) => drop(self.areas.remove(&owner)),
            Some(KeeperMessage::Complete) => {
                // A daemon that has ended meanwhile needs no answer.
                let _ = connection.send(&KeeperMessage::Complete.encode(), &[]);
            }
            None => tracing::warn!(len, "a message from the daemon is ignored: unknown version"),
        }
        Ok(true)
    }

    /// Ends inline access, and gives the memory back though programs have it mapped.
    ///
    /// The order is that of `Segment`, each step done before the next begins. A client that has looked at its area before
    /// finds no slot; one that has found its slot finds no page, or, when it has found one and copied it, finds the page gone when
    /// it looks again; only then the bytes that it may have copied turn into zeros. A size of zero is not believed either:
    /// its slot is gone by then.
    fn end(&mut self) {
        let (mut failed, clients) = (None, self.areas.len());
        for area in self.areas.values() {
            failed = keep::cut_off(area).err().or(failed);
        }
        self.segments.sort_by_key(|(segment, _)| *segment);
        for (_, fd) in &self.segments {
            failed = memory::punch_all(fd.as_fd()).err().or(failed);
        }
        match failed {
            None => tracing::info!(clients, "the daemon has ended: inline access is over"),
            Some(error) => tracing::error!(%error, clients, "cannot end all inline access"),
        }
    }
}

#[cfg(test)]
mod tests;
