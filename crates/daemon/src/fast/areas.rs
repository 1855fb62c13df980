//! What the daemon reads in the areas of clients: intents, reference marks, loans.

use std::path::Path;
#[cfg(test)]
use std::sync::atomic::Ordering::Relaxed;

use jericho_shm::{Area, Holding, SlotLock};
use jericho_sys::files;

use super::Fast;
use super::client_table::Client;
use super::slot_file::SlotFile;

/// Adds the entries that the client's threads latched last, or are about to latch, by slice.
pub(super) fn collect_intents(area: &Area, entries: &mut [Vec<u32>]) {
    area.intents(|slice, entry| {
        if let Some(entries) = entries.get_mut(usize::from(slice)) {
            entries.push(entry);
        }
    });
}

impl Fast {
    /// Returns the entries that threads of a file's inline writers latched last, or are about to latch, by slice. Clients write
    /// these values, so they are unchecked. Looks at the clients that the file's slot names.
    pub(super) fn intents(&self, file: &SlotFile) -> Vec<Vec<u32>> {
        let mut entries = vec![vec![]; self.volume.slices.len()];
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
                if let Some(slice) = self.volume.slices.get(usize::from(slice)) {
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
        pid != 0 && thread != 0 && Path::new(&task()).exists()
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
    pub fn is_client(&self, pid: u32) -> bool {
        let clients = self.clients.lock();
        clients.by_owner.values().any(|c| c.peer.pid == pid)
    }
}
