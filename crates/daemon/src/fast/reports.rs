//! Absorbs the dirty pages that clients report, and those that no client reports.

use std::sync::Arc;

use jericho_cache::Object;
use jericho_fs::File;
use jericho_shm::Key;

use super::Fast;
use super::slot_file::SlotFile;

impl Fast {
    /// Absorbs all reported dirty pages and those that no client reports. Returns whether there were any. The caller holds no
    /// lock of `fs` or of a slice.
    pub fn drain_reports(&self) -> bool {
        let any = self.drain_rings();
        self.adopt_unreported() || any
    }

    /// Absorbs all reported dirty pages. Called before every query of dirty pages. Returns whether there were any. Visits no
    /// client that has reported nothing.
    pub fn drain_rings(&self) -> bool {
        let mut any = false;
        for owner in self.slots.reporters(&self.rings.draining) {
            any |= self.drain_ring(owner);
        }
        any
    }

    /// Drains the ring of one client. Returns whether it held a report.
    pub(super) fn drain_ring(&self, owner: u16) -> bool {
        self.rings
            .drain(&self.slots, owner, |keys| self.report(keys))
    }

    /// Drains the rings of all clients.
    pub fn drain_all_rings(&self) {
        let owners: Vec<u16> = self.clients.lock().by_owner.keys().copied().collect();
        for owner in owners {
            self.drain_ring(owner);
        }
    }

    /// Reports the pages to their slices as dirty. A file without a slot may have been closed in the middle of the write. Its
    /// pages wait for `adopt_unreported`: this function may run inside `fs`, which it must not call back to look up files.
    fn report(&self, keys: &mut [Key]) {
        keys.sort_unstable_by_key(|key| (key.object(), key.page()));
        let neighbours = |a: &Key, b: &Key| a.object() == b.object() && a.page() + 1 == b.page();
        for run in keys.chunk_by(neighbours) {
            match self.slot_file_of(run[0].object()) {
                Some(slot_file) => self.report_pages(&slot_file.file, run),
                None => {
                    self.rings.closed.lock().extend(run);
                    self.unreported.note();
                    self.slots.ring();
                }
            }
        }
    }

    /// Reports adjacent dirty pages to the slices of the file that hold them.
    fn report_pages(&self, file: &Arc<File>, adjacent: &[Key]) {
        let first = adjacent[0].page();
        for (slice, pages) in file.layout().runs(first..first + adjacent.len() as u64) {
            if let Some(slice) = self.volume.slices.get(usize::from(slice)) {
                let count = (pages.end - pages.start) as u32;
                slice.dirtied_by_client(&file.object(), pages.start, count);
            }
        }
    }

    /// Absorbs dirty pages that no client reports, and reported pages of files that were closed. Returns whether there may have
    /// been any.
    pub fn adopt_unreported(&self) -> bool {
        self.unreported.absorb(|| {
            let closed = std::mem::take(&mut *self.rings.closed.lock());
            for pages in closed.chunk_by(|a, b| a.object() == b.object()) {
                if let Some(file) = self.file_of(pages[0].object()) {
                    pages
                        .chunks(1)
                        .for_each(|page| self.report_pages(&file, page));
                }
            }
            for slice in self.volume.slices.iter() {
                let adopted = slice.adopt_unreported(&|id| self.object(id));
                if adopted > 0 {
                    tracing::debug!(
                        slice = slice.id(),
                        adopted,
                        "absorbed dirty pages that no program reported"
                    );
                }
            }
        })
    }

    /// Returns the object with this id.
    pub(super) fn object(&self, id: u64) -> Option<Arc<dyn Object>> {
        if let Some(slot_file) = self.slot_file_of(id) {
            return Some(slot_file.file.object());
        }
        self.file_of(id).map(|file| file.object())
    }

    /// Returns the slot of the file with an object number, if it has one.
    pub(super) fn slot_file_of(&self, object: u64) -> Option<Arc<SlotFile>> {
        let ino = self.volume.fs.ino_of_object(object)?;
        // Another file may have the number since a page of the file was reported.
        let slot_file = self.slot_file(ino)?;
        (slot_file.file.object_id() == object).then_some(slot_file)
    }

    /// Returns the file with an object number.
    fn file_of(&self, object: u64) -> Option<Arc<File>> {
        let file = self.volume.fs.file(self.volume.fs.ino_of_object(object)?);
        file.ok().filter(|file| file.object_id() == object)
    }
}
