//! The daemon's end of its keeper: starts it, sends it every segment, and starts another one when it ends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Weak};
use std::time::Duration;

use jericho_shm::keep::{KEEPER_BYTES, KeeperMessage, Segment};
use jericho_sys::handshake::{Connection, DESCRIPTORS_MAX};
use jericho_sys::poller::Poller;
use jericho_sys::process::{self, Process, Signal};
use parking_lot::Mutex;

use super::Fast;
use crate::mounted::Mounted;

/// Longest time a new keeper may take to receive everything.
const START_MAX: Duration = Duration::from_secs(30);
/// Pause before the next keeper is started. Without it, a keeper that cannot run would be restarted in a busy loop.
const RESTART_PAUSE: Duration = Duration::from_millis(200);

const ENDED: u64 = 0;
const STOP: u64 = 1;

/// Builds the command that runs `keeper::run` in a process of its own.
pub type KeeperCommand = fn() -> Command;

struct Running {
    child: Child,
    process: Process,
    connection: Arc<Connection>,
}

/// The keeper of this daemon, if it has one.
pub(crate) struct Keeping {
    command: Option<KeeperCommand>,
    running: Mutex<Option<Running>>,
}

impl Keeping {
    pub fn new(command: Option<KeeperCommand>) -> Keeping {
        Keeping {
            command,
            running: Mutex::new(None),
        }
    }

    pub fn is_configured(&self) -> bool {
        self.command.is_some()
    }

    /// Sends the area of a new client to the keeper. Called after the client enters the table, where a new keeper finds it, and
    /// before the client receives its area.
    pub fn add_area(&self, owner: u16, area: BorrowedFd<'_>) {
        self.send(KeeperMessage::Area(owner), &[area]);
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

    fn pidfd(&self) -> Option<OwnedFd> {
        let running = self.running.lock();
        let process = &running.as_ref()?.process;
        process.as_fd().try_clone_to_owned().ok()
    }

    /// Kills the keeper if it still runs, and reaps it.
    fn reap(&self) {
        if let Some(running) = self.running.lock().take() {
            end(running);
        }
    }
}

fn end(mut running: Running) {
    // The process may have ended already.
    let _ = running.process.send(Signal::Kill);
    if let Err(error) = running.child.wait() {
        tracing::warn!(%error, "cannot wait for the end of the keeper");
    }
}

impl Fast {
    /// Starts the keeper and sends it every segment. Does nothing when no keeper is configured. Called before the volume is
    /// mounted, and when a keeper has ended. Fails when the program cannot be started or does not answer in time.
    pub fn start_keeper(&self) -> io::Result<()> {
        let Some(command) = self.keeping.command else {
            return Ok(());
        };
        self.keeping.reap();
        let (connection, theirs) = Connection::pair()?;
        connection.set_timeout(START_MAX)?;
        let mut command = command();
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null());
        let child = process::spawn_with_standard_streams(&mut command)?;
        // The command holds the keeper's end of the socket pair. While the command exists, the daemon would not see that end
        // close.
        drop(command);
        let running = Running {
            process: Process::open(child.id())?,
            child,
            connection: Arc::new(connection),
        };
        let connection = running.connection.clone();
        if let Err(error) = self.hand_segments(&connection) {
            end(running);
            return Err(error);
        }
        // Publish the connection first, then send: a client admitted in between is either in the table or sent by
        // `add_area`.
        *self.keeping.running.lock() = Some(running);
        self.hand_areas(&connection)
            .inspect_err(|_| self.keeping.reap())
    }

    /// Sends the daemon's pidfd and the segments, and waits until the keeper confirms.
    fn hand_segments(&self, connection: &Connection) -> io::Result<()> {
        let own = Process::open(std::process::id())?;
        connection.send(&KeeperMessage::Daemon.encode(), &[own.as_fd()])?;
        let mut segments = vec![
            (Segment::Control, self.control.mapping()),
            (Segment::Slots, self.slots.mapping()),
        ];
        for slice in &self.slices {
            let kinds = [Segment::Table, Segment::Stamps, Segment::Frames];
            segments.extend(kinds.into_iter().zip(slice.memory().segments()));
        }
        segments.sort_by_key(|(segment, _)| *segment);
        for same in segments.chunk_by(|a, b| a.0 == b.0) {
            for part in same.chunks(DESCRIPTORS_MAX) {
                let fds: Vec<_> = part.iter().map(|(_, mapping)| mapping.fd()).collect();
                connection.send(&KeeperMessage::Segments(part[0].0).encode(), &fds)?;
            }
        }
        connection.send(&KeeperMessage::Complete.encode(), &[])?;
        let mut bytes = [0; KEEPER_BYTES];
        let (len, _) = connection.receive(&mut bytes)?;
        match KeeperMessage::decode(&bytes[..len]) {
            Some(KeeperMessage::Complete) => Ok(()),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the keeper ended, or it belongs to another version",
            )),
        }
    }

    fn hand_areas(&self, connection: &Connection) -> io::Result<()> {
        // Sends without the lock of the clients, because sending may block.
        let areas: Vec<(u16, OwnedFd)> = {
            let clients = self.clients.lock();
            let all = clients.by_owner.iter();
            all.map(|(owner, client)| {
                Ok((*owner, client.area.mapping().fd().try_clone_to_owned()?))
            })
            .collect::<io::Result<_>>()?
        };
        for (owner, area) in &areas {
            connection.send(&KeeperMessage::Area(*owner).encode(), &[area.as_fd()])?;
        }
        Ok(())
    }

    /// Waits until the keeper ends. Returns false when the volume closes, or when the kernel cannot watch the
    /// process.
    fn wait_for_keeper(&self) -> io::Result<bool> {
        let poller = Poller::new()?;
        poller.add(&self.stop.1, STOP)?;
        let pidfd = self.keeping.pidfd();
        if let Some(pidfd) = &pidfd {
            poller.add(pidfd, ENDED)?;
        }
        let mut ready = vec![];
        while ready.is_empty() {
            // There is no keeper now; the caller starts one after the pause.
            poller.wait(&mut ready, pidfd.is_none().then_some(RESTART_PAUSE))?;
            if pidfd.is_none() {
                break;
            }
        }
        Ok(!ready.contains(&STOP))
    }
}

/// Runs the thread that replaces a keeper that has ended.
pub(super) fn serve(mounted: &Weak<Mounted>) {
    loop {
        let Some(strong) = mounted.upgrade() else {
            return;
        };
        let fast = &strong.fast;
        let had_one = fast.keeping.pidfd().is_some();
        match fast.wait_for_keeper() {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => {
                tracing::error!(%error, "cannot watch the keeper: it will not be replaced when it ends");
                return;
            }
        }
        if had_one {
            tracing::warn!("the keeper has ended; starting another one");
        }
        if let Err(error) = fast.start_keeper() {
            tracing::warn!(%error, "cannot start a keeper; trying again shortly");
        }
    }
}
