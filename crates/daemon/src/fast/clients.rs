//! Clients: processes that have a volume's segments mapped.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, Weak};
use std::time::Duration;

use jericho_cache::Object;
use jericho_fs::fs::File;
use jericho_shm::{Area, HANDOVER_BYTES, Key, Reply, Request, RingReader, State};
use jericho_sys::handover::{Connection, DESCRIPTORS_MAX, Listener, Peer};
use serde::{Deserialize, Serialize};

use super::Fast;
use crate::mounted::Mounted;

/// How long a client may take over the hand-over.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often rings are emptied while pages become dirty.
const ROUND: Duration = Duration::from_millis(5);

/// A client in `jericho stat`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs)] // the names are the contract; see the manual page
pub struct ClientStat {
    pub pid: u32,
    pub name: String,
    pub writes: bool,
    pub local: u64,
    pub remote: u64,
    pub local_bytes: u64,
    pub remote_bytes: u64,
    pub written_bytes: u64,
}

struct Client {
    area: Area,
    reader: RingReader,
    peer: Peer,
    writes: bool,
}

#[derive(Default)]
pub(crate) struct Clients {
    by_owner: HashMap<u16, Client>,
    /// Where the search for a free owner number begins.
    next: u16,
    /// Pages accessed locally and remotely by clients that have ended, by slice.
    past: HashMap<u16, (u64, u64)>,
}

impl Clients {
    fn free_owner(&mut self) -> Option<u16> {
        let first = jericho_cache::OWNER_DAEMON + 1;
        let count = State::OWNER_MAX - first + 1;
        (0..count)
            .map(|i| first + (self.next.wrapping_add(i)) % count)
            .find(|owner| !self.by_owner.contains_key(owner))
            .inspect(|owner| self.next = owner - first + 1)
    }
}

/// Local and remote pages of a client's area for a slice.
fn pages_of(area: &Area, slice: u16) -> (u64, u64) {
    area.counters_of(slice).fold((0u64, 0u64), |sum, c| {
        (
            sum.0.wrapping_add(c.local_pages.load(Relaxed)),
            sum.1.wrapping_add(c.remote_pages.load(Relaxed)),
        )
    })
}

impl Fast {
    /// Takes in all pages that clients have announced, and looks for those whose announcement was lost. True:
    /// there were some. Not with a lock of `fs` or of a slice held.
    pub fn hear(&self) -> bool {
        let any = self.drain_rings();
        if self.lost.swap(false, SeqCst) {
            self.adopt_dirty();
            return true;
        }
        any
    }

    /// Takes in all pages that clients have announced. Called before every question about dirty pages. True:
    /// there were some.
    pub fn drain_rings(&self) -> bool {
        let mut keys: Vec<Key> = vec![];
        let mut lost = false;
        {
            let mut clients = self.clients.lock();
            for client in clients.by_owner.values_mut().filter(|c| c.writes) {
                lost |= !client.reader.drain(&client.area, |key| keys.push(key));
            }
            // Under the lock: another thread that finds the rings empty may rely on it that what was in them
            // has been announced.
            self.announce(&mut keys);
        }
        if lost {
            // Not here: this may be called from inside `fs`, which must not be asked for files then.
            self.lost.store(true, SeqCst);
            self.slots.ring();
        }
        lost || !keys.is_empty()
    }

    fn announce(&self, keys: &mut [Key]) {
        keys.sort_unstable_by_key(|key| (key.object(), key.page()));
        let neighbours = |a: &Key, b: &Key| a.object() == b.object() && a.page() + 1 == b.page();
        for run in keys.chunk_by(neighbours) {
            let object = run[0].object();
            if let Some(slot_file) = self.slot_file(object) {
                let file = &slot_file.file;
                if let Some(slice) = self.slices.get(usize::from(file.slice())) {
                    slice.dirtied_by_client(&file.object(), run[0].page(), run.len() as u32);
                }
            }
        }
    }

    /// Looks for dirty pages that nobody has announced.
    pub fn adopt_dirty(&self) {
        let resolve = |object: u64| -> Option<Arc<dyn Object>> {
            if let Some(slot_file) = self.slot_file(object) {
                return Some(slot_file.file.object());
            }
            let mounted = self.mounted()?;
            mounted.fs().file(object).ok().map(|file| file.object())
        };
        for slice in &self.slices {
            let adopted = slice.adopt_dirty(&resolve);
            if adopted > 0 {
                tracing::debug!(
                    slice = slice.id(),
                    adopted,
                    "found dirty pages in the table"
                );
            }
        }
    }

    /// Takes a client's marks of use, for the replacement of pages.
    fn take_touched(&self) {
        let clients = self.clients.lock();
        for client in clients.by_owner.values() {
            client.area.take_touched(|slice, entry| {
                if let Some(slice) = self.slices.get(usize::from(slice)) {
                    let memory = slice.memory();
                    if entry < memory.geometry().entries() {
                        memory.touch(entry, memory.epoch());
                    }
                }
            });
        }
    }

    /// A client is gone: its latches and locks are opened, its pages and its number taken back.
    fn bury(&self, owner: u16) {
        self.hear();
        let Some(client) = self.clients.lock().by_owner.remove(&owner) else {
            return;
        };
        if client.writes {
            let mut opened = 0;
            for slice in &self.slices {
                opened += slice.owner_gone(owner);
            }
            // It may have died after a page was dirty and before it said so.
            self.adopt_dirty();
            for file in self.extended_by(owner) {
                if let Some(mounted) = self.mounted() {
                    mounted.clear_behind_end(&file);
                }
            }
            for slot_file in self.files.read().values() {
                self.slot(slot_file).open_dead(owner);
            }
            if opened > 0 {
                tracing::info!(
                    pid = client.peer.pid,
                    opened,
                    "a program died while it wrote pages"
                );
            }
        }
        let mut clients = self.clients.lock();
        for slice in &self.slices {
            let (local, remote) = pages_of(&client.area, slice.id());
            let past = clients.past.entry(slice.id()).or_default();
            *past = (past.0.wrapping_add(local), past.1.wrapping_add(remote));
        }
        tracing::debug!(pid = client.peer.pid, owner, "a client has ended");
    }

    /// Files that a client is making longer.
    fn extended_by(&self, owner: u16) -> Vec<Arc<File>> {
        let files = self.files.read();
        let extended = files.values();
        extended
            .filter(|slot_file| self.slot(slot_file).is_extended_by(owner))
            .map(|slot_file| slot_file.file.clone())
            .collect()
    }

    /// A client that held a latch for too long. False: no such client.
    pub fn cut_off(&self, owner: u16) -> bool {
        let clients = self.clients.lock();
        let Some(client) = clients.by_owner.get(&owner) else {
            return false;
        };
        if !client.area.is_cut_off() {
            client.area.cut_off();
            tracing::warn!(
                pid = client.peer.pid,
                "a program held a page for too long; it goes through the kernel from now on"
            );
        }
        true
    }

    /// Whether a process is on the fast path.
    pub(super) fn is_client(&self, pid: u32) -> bool {
        let clients = self.clients.lock();
        clients.by_owner.values().any(|c| c.peer.pid == pid)
    }

    pub(super) fn cut_all_off(&self) {
        for client in self.clients.lock().by_owner.values() {
            client.area.cut_off();
        }
    }

    fn admit(&self, connection: &Connection) -> std::io::Result<()> {
        connection.set_timeout(PATIENCE)?;
        let peer = connection.peer()?;
        let mut bytes = [0; HANDOVER_BYTES];
        let (len, _) = connection.receive(&mut bytes)?;
        let refuse = |errno: i32| {
            let reply = Reply {
                error: errno as u32,
                owner: 0,
                slices: 0,
            };
            connection.send(&reply.encode(), &[])
        };
        let Some(request) = Request::decode(&bytes[..len]) else {
            return refuse(libc::EPROTO);
        };
        if !self.uids.contains(&peer.uid) {
            return refuse(libc::EPERM);
        }
        let owner = match self.enter(request, peer) {
            Ok(owner) => owner,
            Err(errno) => return refuse(errno),
        };
        let sent = self.hand_over(connection, owner, request.write);
        if sent.is_err() {
            self.bury(owner);
        }
        sent
    }

    /// Makes a client, or gives one write access. Error: errno.
    fn enter(&self, request: Request, peer: Peer) -> Result<u16, i32> {
        if request.owner != 0 {
            let mut clients = self.clients.lock();
            let known = clients.by_owner.get_mut(&request.owner);
            let known = known.filter(|c| c.peer.pid == peer.pid && !c.area.is_cut_off());
            let client = known.ok_or(libc::ESRCH)?;
            client.writes |= request.write;
            return Ok(request.owner);
        }
        // The same process anew: it has executed another program, and nobody runs the old one.
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
        area.want_bell(true);
        let client = Client {
            area,
            reader: RingReader::default(),
            peer,
            writes: request.write,
        };
        clients.by_owner.insert(owner, client);
        Ok(owner)
    }

    fn hand_over(&self, connection: &Connection, owner: u16, write: bool) -> std::io::Result<()> {
        let mut fds: Vec<OwnedFd> = vec![
            self.control.mapping().read_only_fd()?,
            segment(self.slots.mapping(), write)?,
        ];
        {
            let clients = self.clients.lock();
            let client = clients.by_owner.get(&owner);
            let client = client.ok_or(std::io::Error::from(std::io::ErrorKind::NotFound))?;
            fds.push(segment(client.area.mapping(), true)?);
        }
        for slice in &self.slices {
            for mapping in slice.memory().segments() {
                fds.push(segment(mapping, write)?);
            }
        }
        let reply = Reply {
            error: 0,
            owner,
            slices: self.slices.len() as u16,
        };
        for part in fds.chunks(DESCRIPTORS_MAX) {
            let part: Vec<_> = part.iter().map(|fd| fd.as_fd()).collect();
            connection.send(&reply.encode(), &part)?;
        }
        Ok(())
    }
}

fn segment(mapping: &jericho_sys::memory::Mapping, write: bool) -> std::io::Result<OwnedFd> {
    if write {
        mapping.fd().try_clone_to_owned()
    } else {
        mapping.read_only_fd()
    }
}

/// The thread that admits clients and notices their ends.
pub(crate) fn serve(mounted: &Weak<Mounted>, listener: &Listener) {
    loop {
        let Some(strong) = mounted.upgrade() else {
            return;
        };
        let fast = &strong.fast;
        let pidfds: Vec<(u16, OwnedFd)> = {
            let clients = fast.clients.lock();
            let all = clients.by_owner.iter();
            all.filter_map(|(owner, c)| Some((*owner, c.peer.pidfd.try_clone().ok()?)))
                .collect()
        };
        let mut wanted = vec![listener.as_fd(), fast.stop.1.as_fd()];
        wanted.extend(pidfds.iter().map(|(_, fd)| fd.as_fd()));
        let ready = match jericho_sys::process::wait_any(&wanted) {
            Ok(ready) => ready,
            Err(error) => {
                tracing::error!(%error, "no further programs get the fast path");
                return;
            }
        };
        if ready[1] {
            return;
        }
        for ((owner, _), ended) in pidfds.iter().zip(&ready[2..]) {
            if *ended {
                fast.bury(*owner);
            }
        }
        if ready[0] {
            match listener.accept() {
                Ok(connection) => {
                    if let Err(error) = fast.admit(&connection) {
                        tracing::warn!(%error, "a program did not get the fast path");
                    }
                }
                Err(error) => tracing::warn!(%error, "cannot accept a program for the fast path"),
            }
        }
    }
}

/// The thread that takes in what clients announce.
pub(crate) fn rings(mounted: &Weak<Mounted>) {
    loop {
        let Some(strong) = mounted.upgrade() else {
            return;
        };
        let fast = &strong.fast;
        let seen = fast.slots.rung();
        let mut busy = fast.hear();
        for slot_file in fast.written_files() {
            strong.settle_file(&slot_file);
        }
        fast.take_touched();
        if !busy {
            // Nothing for a whole round: the next key rings. Looked at once more, for one that came
            // before it knew.
            let want = |wanted| {
                let clients = fast.clients.lock();
                clients
                    .by_owner
                    .values()
                    .for_each(|c| c.area.want_bell(wanted));
            };
            want(true);
            busy = fast.hear();
        }
        if fast.closing.load(SeqCst) {
            return;
        }
        fast.slots.sleep(seen, busy.then_some(ROUND));
    }
}

impl Mounted {
    /// The programs on the fast path.
    pub fn client_counters(&self) -> Vec<ClientStat> {
        let clients = self.fast.clients.lock();
        let mut all: Vec<ClientStat> = clients
            .by_owner
            .values()
            .map(|client| {
                let pid = client.peer.pid;
                let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                let mut stat = ClientStat {
                    pid,
                    name: name.trim_end().to_owned(),
                    writes: client.writes,
                    ..ClientStat::default()
                };
                for slice in 0..self.fast.slices.len().min(64) as u16 {
                    for c in client.area.counters_of(slice) {
                        stat.local = stat.local.wrapping_add(c.local_pages.load(Relaxed));
                        stat.remote = stat.remote.wrapping_add(c.remote_pages.load(Relaxed));
                        let bytes = [
                            (&mut stat.local_bytes, &c.local_bytes),
                            (&mut stat.remote_bytes, &c.remote_bytes),
                            (&mut stat.written_bytes, &c.written_bytes),
                        ];
                        for (sum, word) in bytes {
                            *sum = sum.wrapping_add(word.load(Relaxed));
                        }
                    }
                }
                stat
            })
            .collect();
        all.sort_by_key(|c| c.pid);
        all
    }

    /// Pages that clients, living and ended, have accessed inline in a slice: local and remote.
    pub fn client_pages(&self, slice: u16) -> (u64, u64) {
        let clients = self.fast.clients.lock();
        let past = clients.past.get(&slice).copied().unwrap_or_default();
        clients.by_owner.values().fold(past, |sum, client| {
            let (local, remote) = pages_of(&client.area, slice);
            (sum.0.wrapping_add(local), sum.1.wrapping_add(remote))
        })
    }
}
