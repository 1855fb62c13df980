//! Clients: processes that have a volume's segments mapped.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use jericho_fs::fs::File;
use jericho_shm::{Area, Holding, SlotLock, State};
use jericho_sys::files;
use jericho_sys::handshake::Peer;
use serde::{Deserialize, Serialize};

use super::{Fast, SlotFile};
use crate::mounted::Mounted;

/// Number of rounds for which the evictor keeps visiting a client after it had new reference marks.
const ROUNDS_AFTER_MARKS: u8 = 8;
/// Number of other clients that a round visits, in turn.
const IDLE_PER_ROUND: usize = 64;

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

pub(super) struct Client {
    /// Never reused, unlike the owner number.
    pub serial: u64,
    pub area: Arc<Area>,
    pub peer: Peer,
    pub writes: bool,
}

#[cfg(test)]
impl Client {
    /// Returns a client that need not be a process.
    pub fn for_test(serial: u64, area: Arc<Area>, pid: u32, writes: bool) -> Client {
        let peer = Peer {
            pid,
            uid: jericho_sys::process::uid(),
            pidfd: std::fs::File::open("/dev/null").unwrap().into(),
        };
        Client {
            serial,
            area,
            peer,
            writes,
        }
    }
}

#[derive(Default)]
pub(crate) struct Clients {
    pub(super) by_owner: BTreeMap<u16, Client>,
    /// Where the search for a free owner number begins.
    next: u16,
    /// Owner number from which the next round looks for reference marks in turn.
    marks_from: u16,
    /// Clients with recent reference marks, and the rounds left until they wait for their turn again.
    marked: BTreeMap<u16, u8>,
    /// Pages accessed locally and remotely by clients that have ended, by slice.
    past: HashMap<u16, (u64, u64)>,
}

impl Clients {
    pub(super) fn free_owner(&mut self) -> Option<u16> {
        let first = jericho_cache::OWNER_DAEMON + 1;
        let count = State::OWNER_MAX - first + 1;
        (0..count)
            .map(|i| first + (self.next.wrapping_add(i)) % count)
            .find(|owner| !self.by_owner.contains_key(owner))
            .inspect(|owner| self.next = owner - first + 1)
    }

    /// Returns the clients whose reference marks the next round collects.
    fn next_marked(&mut self) -> Vec<(u16, Arc<Area>)> {
        self.marked
            .retain(|owner, _| self.by_owner.contains_key(owner));
        let mut owners: Vec<u16> = self.marked.keys().copied().collect();
        let (from, all) = (self.marks_from, &self.by_owner);
        let in_turn = all.range(from..).chain(all.range(..from));
        let idle = in_turn.map(|(owner, _)| *owner);
        let idle = idle.filter(|owner| !self.marked.contains_key(owner));
        owners.extend(
            idle.take(IDLE_PER_ROUND)
                .inspect(|owner| self.marks_from = owner + 1),
        );
        let area = |owner: u16| Some((owner, all.get(&owner)?.area.clone()));
        owners.into_iter().filter_map(area).collect()
    }

    /// Records whether a client had new reference marks.
    fn visited(&mut self, owner: u16, had_marks: bool) {
        if had_marks {
            self.marked.insert(owner, ROUNDS_AFTER_MARKS);
        } else if let Entry::Occupied(mut left) = self.marked.entry(owner) {
            *left.get_mut() -= 1;
            if *left.get() == 0 {
                left.remove();
            }
        }
    }
}

/// Adds the entries that the client's threads latched last, or are about to latch, by slice.
fn collect_intents(area: &Area, entries: &mut [Vec<u32>]) {
    area.intents(|slice, entry| {
        if let Some(entries) = entries.get_mut(usize::from(slice)) {
            entries.push(entry);
        }
    });
}

/// Returns the local and remote pages of a client's area for a slice.
fn pages_of(area: &Area, slice: u16) -> (u64, u64) {
    area.counters_of(slice).fold((0u64, 0u64), |sum, c| {
        (
            sum.0.wrapping_add(c.local_pages.load(Relaxed)),
            sum.1.wrapping_add(c.remote_pages.load(Relaxed)),
        )
    })
}

impl Fast {
    /// Returns the entries that threads of a file's inline writers latched last, or are about to latch, by slice. Clients write
    /// these values, so they are unchecked. Looks at the clients that the file's slot names.
    pub(super) fn intents(&self, file: &SlotFile) -> Vec<Vec<u32>> {
        let mut entries = vec![vec![]; self.slices.len()];
        let owners = self.slot(file).writers().owners();
        for area in owners.filter_map(|owner| self.rings.area(owner)) {
            #[cfg(test)]
            self.visited.fetch_add(1, Relaxed);
            collect_intents(&area, &mut entries);
        }
        entries
    }

    /// Collects the reference marks of clients that may not write reference ages: of clients with recent marks, and of some
    /// others in turn. The evictor calls this before it chooses victims.
    pub(super) fn take_touched(&self) {
        let clients = self.clients.lock().next_marked();
        let mut visited = Vec::with_capacity(clients.len());
        for (owner, area) in clients {
            let mut had_marks = false;
            #[cfg(test)]
            self.visited.fetch_add(1, Relaxed);
            area.take_touched(|slice, entry| {
                had_marks = true;
                if let Some(slice) = self.slices.get(usize::from(slice)) {
                    let memory = slice.memory();
                    if entry < memory.geometry().entries() {
                        memory.touch(entry, memory.epoch());
                    }
                }
            });
            visited.push((owner, had_marks));
        }
        let mut clients = self.clients.lock();
        for (owner, had_marks) in visited {
            clients.visited(owner, had_marks);
        }
    }

    /// Frees the latches, locks, pages and owner number of a dead client. The same thread admits clients, so no new client gets
    /// the number before the locks are open.
    pub(super) fn bury(&self, owner: u16) {
        // The client may have died before it set its bit in the report words, so its ring is drained in any case.
        self.rings.drain(self, owner);
        self.adopt_unreported();
        let Some(client) = self.clients.lock().by_owner.remove(&owner) else {
            return;
        };
        self.rings.remove(owner);
        self.wishers.remove(owner);
        self.keeping.forget(owner);
        if client.writes {
            let mut opened = 0;
            let mut entries: Vec<Vec<u32>> = vec![vec![]; self.slices.len()];
            collect_intents(&client.area, &mut entries);
            for (slice, entries) in self.slices.iter().zip(&entries) {
                opened += slice.owner_gone(owner, entries, &|id| self.object(id));
            }
            for file in self.extended_by(owner) {
                if let Some(mounted) = self.mounted() {
                    mounted.clear_behind_end(&file);
                }
            }
            for slot_file in self.files.all(|_| true) {
                self.slot(&slot_file).open_dead(owner);
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

    /// Returns the files that a client is extending.
    fn extended_by(&self, owner: u16) -> Vec<Arc<File>> {
        let is_extended = |file: &SlotFile| self.slot(file).is_extended_by(owner);
        let extended = self.files.all(is_extended).into_iter();
        extended.map(|slot_file| slot_file.file.clone()).collect()
    }

    /// Revokes a client that held a latch for too long. Returns false when there is no client with this number.
    pub fn revoke_client(&self, owner: u16) -> bool {
        let clients = self.clients.lock();
        let Some(client) = clients.by_owner.get(&owner) else {
            return false;
        };
        if !client.area.is_cut_off() {
            client.area.cut_off();
            tracing::warn!(
                pid = client.peer.pid,
                "a program held a page for too long; it uses the kernel from now on"
            );
        }
        true
    }

    /// Returns whether `owner` is a client that may write and the thread belongs to it. Returns false when the thread has no id
    /// in the daemon's pid namespace.
    pub(super) fn is_writer(&self, owner: u16, thread: u32) -> bool {
        self.has_thread(owner, thread, |client| client.writes)
    }

    /// Does the same as `is_writer` for any client.
    pub(super) fn is_client_thread(&self, owner: u16, thread: u32) -> bool {
        self.has_thread(owner, thread, |_| true)
    }

    fn has_thread(&self, owner: u16, thread: u32, is_meant: impl Fn(&Client) -> bool) -> bool {
        let pid = {
            let clients = self.clients.lock();
            let client = clients.by_owner.get(&owner);
            client.filter(|c| is_meant(c)).map_or(0, |c| c.peer.pid)
        };
        let task = || format!("/proc/{pid}/task/{thread}");
        pid != 0 && thread != 0 && std::path::Path::new(&task()).exists()
    }

    /// Returns whether a client lends the lock that it holds as `held`: the client has made half of a write and waits for the
    /// daemon to write the rest.
    pub(super) fn lends(&self, file: &SlotFile, lock: SlotLock, held: Holding) -> bool {
        let now = files::coarse_realtime_ns();
        self.with_area(held.owner(), |area| area.lends(file.slot, lock, held, now))
            .unwrap_or(false)
    }

    /// Returns whether the client has lent the lock, regardless of how long ago.
    pub(super) fn has_lent(&self, file: &SlotFile, lock: SlotLock, held: Holding) -> bool {
        self.with_area(held.owner(), |area| area.has_lent(file.slot, lock, held))
            .unwrap_or(false)
    }

    /// Records that the daemon borrowed a word that a client holds as `held`. Called before the word is given back.
    pub(super) fn note_borrowed(&self, file: &SlotFile, word: usize, held: Holding) {
        self.with_area(held.owner(), |area| {
            area.note_borrowed(file.slot, word, held)
        });
    }

    /// Returns what `ask` returns for the area of a client that writes, or `None` when there is no such client.
    fn with_area<T>(&self, owner: u16, ask: impl FnOnce(&Area) -> T) -> Option<T> {
        let clients = self.clients.lock();
        let client = clients.by_owner.get(&owner)?;
        client.writes.then(|| ask(&client.area))
    }

    /// Returns whether a process is on the fast path.
    pub(super) fn is_client(&self, pid: u32) -> bool {
        let clients = self.clients.lock();
        clients.by_owner.values().any(|c| c.peer.pid == pid)
    }

    pub(super) fn revoke_all_clients(&self) {
        for client in self.clients.lock().by_owner.values() {
            client.area.cut_off();
        }
    }
}

impl Mounted {
    /// Returns the counters of the programs on the fast path.
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

    /// Returns the local and remote pages that clients, including ended ones, have accessed inline in a slice.
    pub fn client_pages(&self, slice: u16) -> (u64, u64) {
        let clients = self.fast.clients.lock();
        let past = clients.past.get(&slice).copied().unwrap_or_default();
        clients.by_owner.values().fold(past, |sum, client| {
            let (local, remote) = pages_of(&client.area, slice);
            (sum.0.wrapping_add(local), sum.1.wrapping_add(remote))
        })
    }
}

#[cfg(test)]
mod tests;
