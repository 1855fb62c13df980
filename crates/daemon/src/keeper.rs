//! The keeper: a small process that outlives a volume's daemon, and then ends inline access to its cache and restores the CPU masks that the daemon has
//! left narrow.
//!
//! ```text
//! exec'ed by the daemon ── descriptors of the segments ──▶ keeping ── the daemon has ended ──▶ clients revoked, memory freed
//! ```
//!
//! The keeper holds the descriptors of the segments and of the masks' notes, a pidfd of the daemon and the socket to it, and nothing else: no volume and
//! no lock. It must not hold /dev/fuse: the kernel would then not tell programs that the daemon is gone. It maps nothing
//! and sleeps. `fast/keeping.rs` starts the keeper and sends it the segments.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use jericho_shm::keep::{self, KEEPER_BYTES, KeeperMessage, Segment};
use jericho_sys::handshake::Connection;
use jericho_sys::limits;
use jericho_sys::memory;
use jericho_sys::poller::Poller;
use jericho_sys::process::{self, Signal, Signals};

use crate::narrow_masks;

const SOCKET: u64 = 0;
const DAEMON: u64 = 1;

/// The descriptors that the keeper holds.
#[derive(Default)]
struct Kept {
    daemon: Option<OwnedFd>,
    segments: Vec<(Segment, OwnedFd)>,
    /// By owner number.
    areas: HashMap<u16, File>,
    /// Notes of the masks that the daemon has narrowed.
    masks: Option<File>,
}

/// Runs the keeper of the daemon at the other end of standard input, until that daemon has ended. Fails when standard input is
/// not a socket, or when the kernel refuses a call of the keeper.
pub fn run() -> io::Result<()> {
    // A signal to the daemon's process group must not stop the keeper before the daemon has ended.
    let _blocked = Signals::block(&[Signal::Terminate, Signal::Interrupt, Signal::HangUp])?;
    limits::raise_open_files();
    // Otherwise the file system of the start directory could not be unmounted.
    std::env::set_current_dir("/")?;
    keep(&Connection::from(io::stdin().as_fd().try_clone_to_owned()?))
}

/// Waits until the daemon has ended, then ends inline access. Returns at once when the connection closes before the daemon's
/// pidfd has arrived.
fn keep(connection: &Connection) -> io::Result<()> {
    let mut kept = Kept::default();
    let listened = kept.listen(connection);
    // Closes the connection: a daemon that sends more gets an error and starts another keeper.
    connection.shut();
    let Some(daemon) = &kept.daemon else {
        return listened;
    };
    if let Err(error) = listened {
        tracing::error!(%error, "cannot receive from the daemon; waiting for its end");
    }
    process::wait_readable(daemon.as_fd(), None)?;
    kept.end();
    Ok(())
}

impl Kept {
    /// Receives the daemon's messages until the daemon has ended or closes the connection.
    fn listen(&mut self, connection: &Connection) -> io::Result<()> {
        let poller = Poller::new()?;
        poller.add(connection, SOCKET)?;
        let mut ready = vec![];
        loop {
            ready.clear();
            poller.wait(&mut ready, None)?;
            if ready.contains(&SOCKET) {
                let knew = self.daemon.is_some();
                if !self.receive_message(connection)? {
                    return Ok(());
                }
                if let Some(daemon) = self.daemon.as_ref().filter(|_| !knew) {
                    poller.add(daemon, DAEMON)?;
                }
            }
            if ready.contains(&DAEMON) {
                // Messages that the daemon sent before it ended are still readable. Another process may still hold the daemon's
                // end of the socket, so this does not wait for the connection to close.
                let now = Some(Duration::ZERO);
                while process::wait_readable(connection.as_fd(), now)?
                    && self.receive_message(connection)?
                {}
                return Ok(());
            }
        }
    }

    /// Handles one pending message; ignores a message of another version. Returns false when no more messages can come.
    fn receive_message(&mut self, connection: &Connection) -> io::Result<bool> {
        let mut bytes = [0; KEEPER_BYTES];
        let (len, fds) = loop {
            match connection.receive(&mut bytes) {
                Ok(received) => break received,
                // The daemon ended without reading an answer. The socket reports that once, before the daemon's own
                // messages.
                Err(error) if error.raw_os_error() == Some(libc::ECONNRESET) => {}
                Err(error) => return Err(error),
            }
        };
        if len == 0 {
            return Ok(false);
        }
        let mut fds = fds.into_iter();
        match KeeperMessage::decode(&bytes[..len]) {
            // Only the first pidfd counts: `listen` watches that one.
            Some(KeeperMessage::Daemon) => self.daemon = self.daemon.take().or(fds.next()),
            Some(KeeperMessage::Segments(segment)) => {
                self.segments.extend(fds.map(|fd| (segment, fd)));
            }
            Some(KeeperMessage::Area(owner)) => {
                self.areas
                    .extend(fds.next().map(|fd| (owner, File::from(fd))));
            }
            Some(KeeperMessage::Forget(owner)) => drop(self.areas.remove(&owner)),
            Some(KeeperMessage::Masks) => self.masks = fds.next().map(File::from),
            Some(KeeperMessage::Complete) => {
                // A daemon that has ended needs no answer.
                let _ = connection.send(&KeeperMessage::Complete.encode(), &[]);
            }
            None => tracing::warn!(len, "ignored a message from the daemon: unknown version"),
        }
        Ok(true)
    }

    /// Ends inline access and frees the memory even though programs have it mapped.
    ///
    /// Empties the segments in the order of `Segment` and finishes each before the next. A client that checked its area earlier
    /// finds no slot. A client that found its slot finds no page. A client that found a page and copied it sees the page gone
    /// when it checks again. Only then do the copied bytes turn into zeros. No client believes a size of zero either, because its
    /// slot is gone first.
    fn end(&mut self) {
        let (mut failed, clients) = (None, self.areas.len());
        for area in self.areas.values() {
            failed = keep::revoke(area).err().or(failed);
        }
        self.segments.sort_by_key(|(segment, _)| *segment);
        for (_, fd) in &self.segments {
            failed = memory::punch_all(fd.as_fd()).err().or(failed);
        }
        if let Some(masks) = &self.masks {
            match narrow_masks::restore_noted(masks) {
                Ok(0) => {}
                Ok(masks) => {
                    tracing::info!(masks, "restored CPU masks that the daemon had narrowed")
                }
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            None => tracing::info!(clients, "the daemon has ended: inline access is over"),
            Some(error) => {
                tracing::error!(%error, clients, "cannot end all inline access and restore all CPU masks")
            }
        }
    }
}

#[cfg(test)]
mod tests;
