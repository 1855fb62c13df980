//! The table of clients: processes that have a volume's segments mapped.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use jericho_shm::{Area, PageState};
use jericho_sys::handshake::Peer;
use serde::{Deserialize, Serialize};

/// Number of rounds for which the evictor keeps visiting a client after it had new reference marks.
const ROUNDS_AFTER_MARKS: u8 = 8;
/// Number of other clients that a round visits, in turn.
pub(super) const IDLE_PER_ROUND: usize = 64;

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

/// A client.
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

/// The clients by owner number, and the counters of those that have ended.
#[derive(Default)]
pub(crate) struct ClientTable {
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

impl ClientTable {
    /// Returns an owner number that no client has.
    pub(super) fn free_owner(&mut self) -> Option<u16> {
        let first = jericho_cache::OWNER_DAEMON + 1;
        let count = PageState::OWNER_MAX - first + 1;
        (0..count)
            .map(|i| first + (self.next.wrapping_add(i)) % count)
            .find(|owner| !self.by_owner.contains_key(owner))
            .inspect(|owner| self.next = owner - first + 1)
    }

    /// Returns the clients whose reference marks the next round collects.
    pub(super) fn next_marked(&mut self) -> Vec<(u16, Arc<Area>)> {
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
    pub(super) fn visited(&mut self, owner: u16, had_marks: bool) {
        if had_marks {
            self.marked.insert(owner, ROUNDS_AFTER_MARKS);
        } else if let Entry::Occupied(mut left) = self.marked.entry(owner) {
            *left.get_mut() -= 1;
            if *left.get() == 0 {
                left.remove();
            }
        }
    }

    /// Adds the counters of a client that has ended.
    pub(super) fn add_past(&mut self, area: &Area, slices: usize) {
        for slice in 0..slices as u16 {
            let (local, remote) = pages_of(area, slice);
            let past = self.past.entry(slice).or_default();
            *past = (past.0.wrapping_add(local), past.1.wrapping_add(remote));
        }
    }

    /// Returns the counters of the clients of a volume with this many slices.
    pub(super) fn stats(&self, slices: usize) -> Vec<ClientStat> {
        let mut all: Vec<ClientStat> = self
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
                for slice in 0..slices.min(64) as u16 {
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
    pub(super) fn pages(&self, slice: u16) -> (u64, u64) {
        let past = self.past.get(&slice).copied().unwrap_or_default();
        self.by_owner.values().fold(past, |sum, client| {
            let (local, remote) = pages_of(&client.area, slice);
            (sum.0.wrapping_add(local), sum.1.wrapping_add(remote))
        })
    }
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
