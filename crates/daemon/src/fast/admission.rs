//! The socket on which programs ask for a volume's segments, and the thread that serves it.
//!
//! ```text
//! connected ── accept ──▶ uid, gid ── trusted ──▶ handshake begun ── request ──▶ client ── its process ends ──▶ buried
//!                            │ not trusted              │ late, or one too many
//!                            ▼                          ▼
//!                         refused                    dropped
//! ```
//!
//! Every user of the machine can connect to the socket, so the thread bounds what a stranger can cost. It checks the
//! uid first, which the kernel recorded at connect. It polls all descriptors together and never blocks on one
//! connection. It receives no descriptors. The programs of a trusted user can fill the handshake table of that user
//! only.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use jericho_shm::{Area, HANDSHAKE_BYTES, Reply, Request};
use jericho_sys::handshake::{Connection, DESCRIPTORS_MAX, Listener, Peer};
use jericho_sys::memory::Mapping;
use jericho_sys::poller::Poller;

use super::Fast;
use super::client_table::Client;

/// Longest time from a program's connection to its request.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);
/// Most unfinished handshakes of one uid. A new one replaces the oldest.
const HANDSHAKES_PER_UID_MAX: usize = 256;
/// Connections accepted before the thread checks again for ended processes.
const ACCEPTS_PER_ROUND: usize = 64;
/// Pause after a failed accept. The usual cause is a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Poller keys: a serial number in the high bits, the client's owner number in the low 16. No client has owner 0 or 1.
const HANDSHAKE: u16 = 0;
const LISTENER: u64 = 1;
const STOP: u64 = 1 << 16 | 1;
const OWNER_BITS: u32 = 16;

/// A program that has connected and not yet sent its request.
struct Handshake {
    connection: Connection,
    uid: u32,
    until: Instant,
}

/// The descriptors that the thread watches.
pub(crate) struct Admission {
    poller: Poller,
    listener: Listener,
    /// Unfinished handshakes by serial number.
    handshakes: HashMap<u64, Handshake>,
    /// Serial number of the newest handshake or client.
    serial: u64,
    /// Time of the next accept, after one failed.
    paused_until: Option<Instant>,
}

impl Admission {
    pub fn new(fast: &Fast, listener: Listener) -> io::Result<Admission> {
        let poller = Poller::new()?;
        poller.add(&listener, LISTENER)?;
        poller.add(&fast.stop.1, STOP)?;
        Ok(Admission {
            poller,
            listener,
            handshakes: HashMap::new(),
            serial: 1,
            paused_until: None,
        })
    }

    /// Admits clients, and cleans up after those that ended, until the volume closes.
    pub fn serve(&mut self, fast: &Weak<Fast>) {
        let mut ready = vec![];
        loop {
            let Some(fast) = fast.upgrade() else {
                return;
            };
            ready.clear();
            if let Err(error) = self.poller.wait(&mut ready, self.timeout()) {
                tracing::error!(%error, "fast path: the admission thread has failed; new programs go through the kernel");
                return;
            }
            if ready.contains(&STOP) {
                return;
            }
            for key in &ready {
                self.serve_one(&fast, *key);
            }
            self.time_passes();
        }
    }

    /// Returns the time until the next handshake is late or the pause after a failed accept ends. Returns `None` if there is
    /// neither.
    fn timeout(&self) -> Option<Duration> {
        let handshakes = self.handshakes.values().map(|handshake| handshake.until);
        let next = handshakes.chain(self.paused_until).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Drops late handshakes, and accepts again after the pause.
    fn time_passes(&mut self) {
        let now = Instant::now();
        // Closing the connection also removes it from the poller.
        self.handshakes.retain(|_, handshake| handshake.until > now);
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = match self.poller.add(&self.listener, LISTENER) {
                Ok(()) => None,
                Err(_) => Some(now + ACCEPT_PAUSE),
            };
        }
    }

    fn serve_one(&mut self, fast: &Fast, key: u64) {
        let (serial, owner) = (key >> OWNER_BITS, key as u16);
        if key == LISTENER {
            self.accept(fast);
        } else if owner == HANDSHAKE {
            self.end_handshake(fast, serial);
        } else if fast.is_serial_of(owner, serial) {
            fast.bury(owner);
        }
    }

    fn accept(&mut self, fast: &Fast) {
        for _ in 0..ACCEPTS_PER_ROUND {
            match self.listener.accept() {
                Ok(Some(connection)) => {
                    if let Err(error) = self.begin(fast, connection) {
                        tracing::debug!(%error, "a program did not get the fast path");
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "fast path: cannot accept connections; trying again shortly");
                    if self.poller.remove(&self.listener).is_ok() {
                        self.paused_until = Some(Instant::now() + ACCEPT_PAUSE);
                    }
                    return;
                }
            }
        }
    }

    /// Accepts a program's connection.
    fn begin(&mut self, fast: &Fast, connection: Connection) -> io::Result<()> {
        let peer = connection.credentials()?;
        if !fast.trusted.includes(peer.uid, peer.gid) {
            return refuse(&connection, libc::EPERM);
        }
        let same = self.handshakes.iter().filter(|(_, h)| h.uid == peer.uid);
        let (count, oldest) = same.fold((0, u64::MAX), |(count, oldest), (serial, _)| {
            (count + 1, oldest.min(*serial))
        });
        if count >= HANDSHAKES_PER_UID_MAX {
            self.handshakes.remove(&oldest);
        }
        self.serial += 1;
        let key = self.serial << OWNER_BITS | u64::from(HANDSHAKE);
        self.poller.add(&connection, key)?;
        let handshake = Handshake {
            connection,
            uid: peer.uid,
            until: Instant::now() + HANDSHAKE_MAX,
        };
        self.handshakes.insert(self.serial, handshake);
        Ok(())
    }

    /// Handles a connection that has sent a request or was closed. Ends the handshake unless there is nothing to receive yet.
    fn end_handshake(&mut self, fast: &Fast, serial: u64) {
        let Some(handshake) = self.handshakes.get(&serial) else {
            return;
        };
        let mut bytes = [0; HANDSHAKE_BYTES];
        let asked = match handshake.connection.receive_bytes(&mut bytes) {
            Ok(None) => return,
            Ok(Some(len)) => self.admit(fast, serial, &bytes[..len]),
            Err(error) => Err(error),
        };
        if let Err(error) = asked {
            tracing::warn!(%error, "a program did not get the fast path");
        }
        self.handshakes.remove(&serial);
    }

    /// Answers the request of a handshake.
    fn admit(&self, fast: &Fast, serial: u64, request: &[u8]) -> io::Result<()> {
        let Some(Handshake { connection, .. }) = self.handshakes.get(&serial) else {
            return Ok(());
        };
        let Some(request) = Request::decode(request) else {
            return refuse(connection, libc::EPROTO);
        };
        let entered = match connection.peer() {
            Ok(peer) => fast.enter(request, peer, serial),
            Err(error) => Err(error.raw_os_error().unwrap_or(libc::EIO)),
        };
        let owner = match entered {
            Ok(owner) => owner,
            Err(errno) => return refuse(connection, errno),
        };
        let watched = match request.owner {
            0 => fast.watch(&self.poller, owner),
            _ => Ok(()),
        };
        let sent = watched.and_then(|()| fast.send_segments(connection, owner, request.token != 0));
        if sent.is_err() {
            fast.bury(owner);
        }
        sent
    }
}

fn refuse(connection: &Connection, errno: i32) -> io::Result<()> {
    let reply = Reply {
        error: errno as u32,
        owner: 0,
        slices: 0,
    };
    connection.send(&reply.encode(), &[])
}

impl Fast {
    fn is_serial_of(&self, owner: u16, serial: u64) -> bool {
        let clients = self.clients.lock();
        let client = clients.by_owner.get(&owner);
        client.is_some_and(|client| client.serial == serial)
    }

    /// Watches for the end of a client's process.
    fn watch(&self, poller: &Poller, owner: u16) -> io::Result<()> {
        let clients = self.clients.lock();
        let client = clients.by_owner.get(&owner);
        let client = client.ok_or(io::Error::from(io::ErrorKind::NotFound))?;
        let key = client.serial << OWNER_BITS | u64::from(owner);
        // Stays registered until the client is buried, which closes the pidfd.
        poller.add(&client.peer.pidfd, key)
    }

    /// Admits a new client, or gives an existing one write access. Fails with an errno.
    pub(super) fn enter(&self, request: Request, peer: Peer, serial: u64) -> Result<u16, i32> {
        let write = request.token != 0;
        if write && self.volume.read_only {
            return Err(libc::EROFS);
        }
        if write && !self.tokens.take(request.token, peer.uid) {
            return Err(libc::EACCES);
        }
        if request.owner != 0 {
            let mut clients = self.clients.lock();
            let known = clients.by_owner.get_mut(&request.owner);
            // The daemon sees all processes of other pid namespaces with id 0.
            let same = |c: &&mut Client| peer.pid != 0 && c.peer.pid == peer.pid;
            let known = known.filter(|c| same(c) && !c.area.is_revoked());
            let client = known.ok_or(libc::ESRCH)?;
            client.writes |= write;
            return Ok(request.owner);
        }
        // The same process asks again: it has called exec, so its old program no longer runs.
        let old: Vec<u16> = {
            let clients = self.clients.lock();
            let same = clients.by_owner.iter();
            same.filter(|(_, c)| peer.pid != 0 && c.peer.pid == peer.pid)
                .map(|(owner, _)| *owner)
                .collect()
        };
        old.into_iter().for_each(|owner| self.bury(owner));
        let mut clients = self.clients.lock();
        let owner = clients.free_owner().ok_or(libc::EUSERS)?;
        let area =
            Area::create("client", owner).map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))?;
        let client = Client {
            serial,
            area: Arc::new(area),
            peer,
            writes: write,
        };
        let fd = client.area.mapping().fd().try_clone_to_owned();
        let fd = fd.map_err(|e| e.raw_os_error().unwrap_or(libc::EMFILE))?;
        let area = client.area.clone();
        clients.by_owner.insert(owner, client);
        drop(clients);
        self.rings.add(owner, area);
        self.keeper.add_area(owner, fd.as_fd());
        Ok(owner)
    }

    fn send_segments(&self, connection: &Connection, owner: u16, write: bool) -> io::Result<()> {
        let mut fds: Vec<OwnedFd> = vec![
            self.control.mapping().read_only_fd()?,
            segment(self.slots.mapping(), write)?,
        ];
        {
            let clients = self.clients.lock();
            let client = clients.by_owner.get(&owner);
            let client = client.ok_or(io::Error::from(io::ErrorKind::NotFound))?;
            fds.push(segment(client.area.mapping(), true)?);
        }
        // Before the first one is sent: the volume may get more meanwhile. The control segment has at least as many.
        let count = self.volume.slices.len();
        for slice in self.volume.slices.iter().take(count) {
            for mapping in slice.memory().segments() {
                fds.push(segment(mapping, write)?);
            }
        }
        let reply = Reply {
            error: 0,
            owner,
            slices: count as u16,
        };
        for part in fds.chunks(DESCRIPTORS_MAX) {
            let part: Vec<_> = part.iter().map(|fd| fd.as_fd()).collect();
            connection.send(&reply.encode(), &part)?;
        }
        Ok(())
    }
}

fn segment(mapping: &Mapping, write: bool) -> io::Result<OwnedFd> {
    if write {
        mapping.fd().try_clone_to_owned()
    } else {
        mapping.read_only_fd()
    }
}
