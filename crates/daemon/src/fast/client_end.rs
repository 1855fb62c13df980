//! Ends clients: revokes those that hold a page for too long, and cleans up after those that have died.

use std::sync::Arc;

use jericho_fs::File;

use super::Fast;
use super::areas::collect_intents;
use super::slot_file::SlotFile;

impl Fast {
    /// Frees the latches, locks, pages and owner number of a dead client. The same thread admits clients, so no new client gets
    /// the number before the locks are open.
    pub(super) fn bury(&self, owner: u16) {
        // The client may have died before it set its bit in the report words, so its ring is drained in any case.
        self.drain_ring(owner);
        self.adopt_unreported();
        let Some(client) = self.clients.lock().by_owner.remove(&owner) else {
            return;
        };
        self.rings.remove(owner);
        self.wishers.remove(owner);
        self.keeper.forget(owner);
        if client.writes {
            let mut opened = 0;
            let mut entries: Vec<Vec<u32>> = vec![vec![]; self.volume.slices.len()];
            collect_intents(&client.area, &mut entries);
            for (slice, entries) in self.volume.slices.iter().zip(&entries) {
                opened += slice.owner_gone(owner, entries, &|id| self.object(id));
            }
            for file in self.extended_by(owner) {
                self.clear_behind_end(&file);
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
        let slices = self.volume.slices.len();
        self.clients.lock().add_past(&client.area, slices);
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
        if !client.area.is_revoked() {
            client.area.revoke();
            tracing::warn!(
                pid = client.peer.pid,
                "a program held a page for too long; it uses the kernel from now on"
            );
        }
        true
    }

    /// Revokes all clients.
    pub(super) fn revoke_all_clients(&self) {
        for client in self.clients.lock().by_owner.values() {
            client.area.revoke();
        }
    }
}

#[cfg(test)]
mod tests;
