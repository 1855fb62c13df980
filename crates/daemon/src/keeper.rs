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

use jericho_shm::keep::{self, KEEPER_BYTES, KeeperMessage, Segment};
use jericho_sys::handover::Connection;
use jericho_sys::limits;
use jericho_sys::memory;
use jericho_sys::poller::Poller;
use jericho_sys::process::{Signal, Signals};

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
    let connection = Connection::from(io::stdin().as_fd().try_clone_to_owned()?);
    let poller = Poller::new()?;
    poller.add(&connection, SOCKET)?;
    let (mut kept, mut ready) = (Kept::default(), vec![]);
    loop {
        ready.clear();
        poller.wait(&mut ready, None)?;
        let mut open = true;
        if ready.contains(&SOCKET) {
            let knew = kept.daemon.is_some();
            open = kept.hear(&connection)?;
            if let Some(daemon) = kept.daemon.as_ref().filter(|_| !knew) {
                poller.add(daemon, DAEMON)?;
            }
        }
        if ready.contains(&DAEMON) {
            // What the daemon sent before it ended is still there.
            while kept.hear(&connection)? {}
            kept.end();
            return Ok(());
        }
        if !open {
            if kept.daemon.is_none() {
                return Ok(());
            }
            // The daemon has ended, and its pidfd will say so, or it has given this keeper up.
            poller.remove(&connection)?;
        }
    }
}

impl Kept {
    /// Takes in the message that is there. False: there is none, and will be none.
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
        let bad = || io::Error::new(io::ErrorKind::InvalidData, "no message of this version");
        let mut fds = fds.into_iter();
        match KeeperMessage::decode(&bytes[..len]).ok_or_else(bad)? {
            KeeperMessage::Daemon => self.daemon = fds.next(),
            KeeperMessage::Segments(segment) => {
                self.segments.extend(fds.map(|fd| (segment, fd)));
            }
            KeeperMessage::Area(owner) => {
                self.areas
                    .extend(fds.next().map(|fd| (owner, File::from(fd))));
            }
            KeeperMessage::Forget(owner) => drop(self.areas.remove(&owner)),
            KeeperMessage::Complete => {
                // A daemon that has ended meanwhile needs no answer.
                let _ = connection.send(&KeeperMessage::Complete.encode(), &[]);
            }
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
