//! Sends the keeper every segment, and starts another keeper when it ends.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Weak;
use std::time::Duration;

use jericho_shm::keep::{KEEPER_BYTES, KeeperMessage, Segment};
use jericho_sys::handshake::{Connection, DESCRIPTORS_MAX};
use jericho_sys::poller::Poller;
use jericho_sys::process::Process;

use super::Fast;
use super::keeper_process::{self, KINDS};

/// Pause before the next keeper is started. Without it, a keeper that cannot run would be restarted in a busy loop.
const RESTART_PAUSE: Duration = Duration::from_millis(200);

const ENDED: u64 = 0;
const STOP: u64 = 1;

impl Fast {
    /// Starts the keeper and sends it every segment. Does nothing when no keeper is configured. Called before the volume is
    /// mounted, and when a keeper has ended. Fails when the program cannot be started or does not answer in time.
    pub fn start_keeper(&self) -> io::Result<()> {
        let Some(running) = self.keeper.spawn()? else {
            return Ok(());
        };
        let connection = running.connection.clone();
        let handed = self.volume.slices.len();
        if let Err(error) = self.hand_segments(&connection, handed) {
            keeper_process::end(running);
            return Err(error);
        }
        // Publish the connection first, then send: a client admitted in between is either in the table or sent by
        // `add_area`.
        self.keeper.publish(running);
        // Slices that the volume has got since. `add_slice` may have sent them, too, which is harmless.
        let since = self.volume.slices.iter().skip(handed);
        since.for_each(|slice| self.keeper.add_slice(slice));
        self.hand_areas(&connection)
            .inspect_err(|_| self.keeper.reap())
    }

    /// Sends the daemon's pidfd and the segments of the first `slices` slices, and waits until the keeper confirms.
    fn hand_segments(&self, connection: &Connection, slices: usize) -> io::Result<()> {
        let own = Process::open(std::process::id())?;
        connection.send(&KeeperMessage::Daemon.encode(), &[own.as_fd()])?;
        connection.send(&KeeperMessage::Masks.encode(), &[self.masks.fd()])?;
        let mut segments = vec![
            (Segment::Control, self.control.mapping()),
            (Segment::Slots, self.slots.mapping()),
        ];
        for slice in self.volume.slices.iter().take(slices) {
            segments.extend(KINDS.into_iter().zip(slice.memory().segments()));
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

    /// Waits until the keeper ends. Without a keeper, waits for the pause before the next start. Returns false when the volume
    /// closes. Fails when the kernel cannot watch the process.
    fn wait_for_keeper(&self) -> io::Result<bool> {
        let poller = Poller::new()?;
        poller.add(&self.stop.1, STOP)?;
        let pidfd = self.keeper.pidfd();
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
pub(super) fn serve(fast: &Weak<Fast>) {
    loop {
        let Some(fast) = fast.upgrade() else {
            return;
        };
        let had_one = fast.keeper.pidfd().is_some();
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
