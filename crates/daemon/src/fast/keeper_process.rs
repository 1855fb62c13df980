//! The process of the keeper, and the daemon's connection to it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use jericho_cache::Slice;
use jericho_shm::keep::{KeeperMessage, Segment};
use jericho_sys::handshake::Connection;
use jericho_sys::process::{self, Process, Signal};
use parking_lot::Mutex;

/// Longest time a new keeper may take to receive everything.
const START_MAX: Duration = Duration::from_secs(30);

/// The segments of a slice, in the order of `SliceMemory::segments`.
pub(super) const KINDS: [Segment; 3] = [Segment::Table, Segment::Ages, Segment::Frames];

/// Builds the command that runs `keeper::run` in a process of its own.
pub type KeeperCommand = fn() -> Command;

/// A keeper that runs.
pub(super) struct Running {
    child: Child,
    process: Process,
    pub connection: Arc<Connection>,
}

/// The keeper of this daemon, if it has one.
pub(crate) struct KeeperProcess {
    command: Option<KeeperCommand>,
    running: Mutex<Option<Running>>,
}

impl KeeperProcess {
    pub fn new(command: Option<KeeperCommand>) -> KeeperProcess {
        KeeperProcess {
            command,
            running: Mutex::new(None),
        }
    }

    pub fn is_configured(&self) -> bool {
        self.command.is_some()
    }

    /// Starts a process. Returns `None` when no keeper is configured. The caller sends it the segments and then calls `publish`.
    pub fn spawn(&self) -> io::Result<Option<Running>> {
        let Some(command) = self.command else {
            return Ok(None);
        };
        self.reap();
        let (connection, theirs) = Connection::pair()?;
        connection.set_timeout(START_MAX)?;
        let mut command = command();
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null());
        let child = process::spawn_with_standard_streams(&mut command)?;
        // The command holds the keeper's end of the socket pair. While the command exists, the daemon would not see that end
        // close.
        drop(command);
        Ok(Some(Running {
            process: Process::open(child.id())?,
            child,
            connection: Arc::new(connection),
        }))
    }

    /// Makes `running` the daemon's keeper. It has received all segments.
    pub fn publish(&self, running: Running) {
        *self.running.lock() = Some(running);
    }

    /// Sends the area of a new client to the keeper. Called after the client has entered the table, from which `start_keeper`
    /// sends the areas to a new keeper, and before the client receives its area.
    pub fn add_area(&self, owner: u16, area: BorrowedFd<'_>) {
        self.send(KeeperMessage::Area(owner), &[area]);
    }

    /// Sends the segments of a further slice to the keeper. Called before a client can receive them.
    pub fn add_slice(&self, slice: &Slice) {
        for (kind, mapping) in KINDS.into_iter().zip(slice.memory().segments()) {
            self.send(KeeperMessage::Segments(kind), &[mapping.fd()]);
        }
    }

    /// Tells the keeper that the client with this owner number is gone.
    pub fn forget(&self, owner: u16) {
        self.send(KeeperMessage::Forget(owner), &[]);
    }

    /// Sends a message without waiting. Kills a keeper that does not read its socket: the next keeper receives everything.
    fn send(&self, message: KeeperMessage, fds: &[BorrowedFd<'_>]) {
        let running = self.running.lock();
        let Some(running) = running.as_ref() else {
            return;
        };
        if let Err(error) = running.connection.send_now(&message.encode(), fds) {
            tracing::debug!(%error, "the keeper does not read its socket; it is replaced");
            // The process may have ended already.
            let _ = running.process.send(Signal::Kill);
        }
    }

    /// Returns the pidfd of the keeper that runs.
    pub fn pidfd(&self) -> Option<OwnedFd> {
        let running = self.running.lock();
        let process = &running.as_ref()?.process;
        process.as_fd().try_clone_to_owned().ok()
    }

    /// Kills the keeper if it still runs, and reaps it.
    pub fn reap(&self) {
        if let Some(running) = self.running.lock().take() {
            end(running);
        }
    }
}

/// Kills a keeper if it still runs, and reaps it.
pub(super) fn end(mut running: Running) {
    // The process may have ended already.
    let _ = running.process.send(Signal::Kill);
    if let Err(error) = running.child.wait() {
        tracing::warn!(%error, "cannot wait for the end of the keeper");
    }
}
