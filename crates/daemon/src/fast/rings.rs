//! Absorbs what clients report: the report rings, each with a lock of its own, and the thread that drains them
//! periodically.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use jericho_cache::Object;
use jericho_fs::fs::File;
use jericho_shm::{Area, Draining, Key, RingReader, State};
use parking_lot::Mutex;

use super::Fast;
use crate::mounted::Mounted;

/// Period at which rings are drained while pages become dirty.
const ROUND: Duration = Duration::from_millis(5);

/// The report ring of a client and its read position.
struct Ring {
    area: Arc<Area>,
    reader: RingReader,
}

/// The rings of all clients, by owner number.
pub(super) struct Rings {
    rings: Box<[Mutex<Option<Ring>>]>,
    draining: Draining,
    /// Reported pages of files that have no slot any more.
    closed: Mutex<Vec<Key>>,
    drained: AtomicU64,
}

impl Default for Rings {
    fn default() -> Rings {
        let rings = (0..=State::OWNER_MAX).map(|_| Mutex::default());
        Rings {
            rings: rings.collect(),
            draining: Draining::default(),
            closed: Mutex::default(),
            drained: AtomicU64::new(0),
        }
    }
}

/// Counts how often pages were queued for `adopt_unreported`, and how many of these requests it has completed.
#[derive(Default)]
pub(super) struct Unreported {
    noted: AtomicU64,
    /// Stored with `absorbing` locked.
    absorbed: AtomicU64,
    absorbing: Mutex<()>,
}

impl Unreported {
    /// Counts a request; its pages are queued already.
    pub fn note(&self) {
        self.noted.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns whether pages may still have to be absorbed.
    fn is_due(&self) -> bool {
        let absorbed = self.absorbed.load(Ordering::SeqCst);
        self.noted.load(Ordering::SeqCst) != absorbed
    }

    /// Returns whether a thread is absorbing pages.
    #[cfg(test)]
    pub fn is_absorbing(&self) -> bool {
        self.absorbing.is_locked()
    }
}

impl Rings {
    /// Adds the ring of a client that has received its area.
    pub fn add(&self, owner: u16, area: Arc<Area>) {
        let reader = RingReader::default();
        *self.rings[usize::from(owner)].lock() = Some(Ring { area, reader });
    }

    /// Removes the ring of a dead client, which was drained.
    pub fn remove(&self, owner: u16) {
        *self.rings[usize::from(owner)].lock() = None;
    }

    /// Returns the area of a client.
    pub fn area(&self, owner: u16) -> Option<Arc<Area>> {
        let ring = self.rings[usize::from(owner)].lock();
        ring.as_ref().map(|ring| ring.area.clone())
    }

    /// Drains the ring of one client. Returns whether it held a report.
    pub fn drain(&self, fast: &Fast, owner: u16) -> bool {
        let mut ring = self.rings[usize::from(owner)].lock();
        self.drained.fetch_add(1, Ordering::Relaxed);
        fast.slots.begin_drain(&self.draining, owner);
        let mut keys: Vec<Key> = vec![];
        if let Some(Ring { area, reader }) = &mut *ring {
            reader.drain(area, |key| keys.push(key));
        }
        // Reports before `end_drain`: a thread that finds no report relies on that order.
        fast.report(&mut keys);
        fast.slots.end_drain(&self.draining, owner);
        !keys.is_empty()
    }

    /// Returns how many rings were drained so far.
    #[cfg(test)]
    pub fn drained(&self) -> u64 {
        self.drained.load(Ordering::Relaxed)
    }
}

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
            any |= self.rings.drain(self, owner);
        }
        any
    }

    /// Drains the rings of all clients.
    pub fn drain_all_rings(&self) {
        let owners: Vec<u16> = self.clients.lock().by_owner.keys().copied().collect();
        for owner in owners {
            self.rings.drain(self, owner);
        }
    }

    /// Reports the pages to their slices as dirty. A file without a slot may have been closed in the middle of the write. Its
    /// pages wait for `adopt_unreported`: this function may run inside `fs`, which it must not call back to look up files.
    fn report(&self, keys: &mut [Key]) {
        keys.sort_unstable_by_key(|key| (key.object(), key.page()));
        let neighbours = |a: &Key, b: &Key| a.object() == b.object() && a.page() + 1 == b.page();
        for run in keys.chunk_by(neighbours) {
            match self.slot_file(run[0].object()) {
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
            if let Some(slice) = self.slices.get(usize::from(slice)) {
                let count = (pages.end - pages.start) as u32;
                slice.dirtied_by_client(&file.object(), pages.start, count);
            }
        }
    }

    /// Absorbs dirty pages that no client reports, and reported pages of files that were closed. Returns whether there may have
    /// been any.
    pub fn adopt_unreported(&self) -> bool {
        // Every request calls this, so it looks before it takes a lock.
        if !self.unreported.is_due() {
            return false;
        }
        // Waits for another thread that is absorbing pages: the slices know them only afterwards.
        let _absorbing = self.unreported.absorbing.lock();
        let noted = self.unreported.noted.load(Ordering::SeqCst);
        if !self.unreported.is_due() {
            return true;
        }
        let closed = std::mem::take(&mut *self.rings.closed.lock());
        for pages in closed.chunk_by(|a, b| a.object() == b.object()) {
            let file = self.mounted().map(|m| m.fs().file(pages[0].object()));
            if let Some(Ok(file)) = file {
                pages
                    .chunks(1)
                    .for_each(|page| self.report_pages(&file, page));
            }
        }
        for slice in &self.slices {
            let adopted = slice.adopt_unreported(&|id| self.object(id));
            if adopted > 0 {
                tracing::debug!(
                    slice = slice.id(),
                    adopted,
                    "absorbed dirty pages that no program reported"
                );
            }
        }
        self.unreported.absorbed.store(noted, Ordering::SeqCst);
        true
    }

    /// Returns the object with this id.
    pub(super) fn object(&self, id: u64) -> Option<Arc<dyn Object>> {
        if let Some(slot_file) = self.slot_file(id) {
            return Some(slot_file.file.object());
        }
        let mounted = self.mounted()?;
        mounted.fs().file(id).ok().map(|file| file.object())
    }
}

/// Runs the thread that drains the rings when no request does.
pub(super) fn serve(mounted: &Weak<Mounted>) {
    loop {
        let Some(strong) = mounted.upgrade() else {
            return;
        };
        let fast = &strong.fast;
        let seen = fast.slots.rung();
        let mut busy = fast.drain_reports();
        for slot_file in fast.written_files() {
            strong.absorb_file(&slot_file);
        }
        if !busy {
            // No client has reported anything for a whole period: sleep until the next report rings the doorbell. Drain once more
            // first, for a report of a client that did not yet see the doorbell armed.
            fast.slots.arm_doorbell(true);
            busy = fast.drain_reports();
        }
        if fast.closing.load(Ordering::SeqCst) {
            return;
        }
        fast.slots.sleep(seen, busy.then_some(ROUND));
    }
}
