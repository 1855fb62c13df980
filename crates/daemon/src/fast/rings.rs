//! Taking in what clients report: the rings, each with a lock of its own, and the thread that empties them now and then.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use jericho_cache::Object;
use jericho_fs::fs::File;
use jericho_shm::{Area, Draining, Key, RingReader, State};
use parking_lot::Mutex;

use super::Fast;
use crate::mounted::Mounted;

/// How often rings are emptied while pages become dirty.
const ROUND: Duration = Duration::from_millis(5);

/// The ring of a client, and how far it was read.
struct Ring {
    area: Arc<Area>,
    reader: RingReader,
}

/// The rings of all clients, by owner number.
pub(super) struct Rings {
    rings: Box<[Mutex<Option<Ring>>]>,
    draining: Draining,
    /// Pages of files that have no slot any more.
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

impl Rings {
    /// A client gets its area.
    pub fn add(&self, owner: u16, area: Arc<Area>) {
        let reader = RingReader::default();
        *self.rings[usize::from(owner)].lock() = Some(Ring { area, reader });
    }

    /// A client is gone, and its ring was drained.
    pub fn remove(&self, owner: u16) {
        *self.rings[usize::from(owner)].lock() = None;
    }

    /// Takes in what a client has reported. Returns whether there was something.
    pub fn drain(&self, fast: &Fast, owner: u16) -> bool {
        let mut ring = self.rings[usize::from(owner)].lock();
        self.drained.fetch_add(1, Ordering::Relaxed);
        fast.slots.begin_drain(&self.draining, owner);
        let mut keys: Vec<Key> = vec![];
        if let Some(Ring { area, reader }) = &mut *ring {
            reader.drain(area, |key| keys.push(key));
        }
        // Before the end, which another thread that finds no report relies on.
        fast.announce(&mut keys);
        fast.slots.end_drain(&self.draining, owner);
        !keys.is_empty()
    }

    /// How many rings were drained so far.
    #[cfg(test)]
    pub fn drained(&self) -> u64 {
        self.drained.load(Ordering::Relaxed)
    }
}

impl Fast {
    /// Takes in all pages that clients have reported, and those that none reports. Returns whether there were some. The caller
    /// holds no lock of `fs` or of a slice.
    pub fn hear(&self) -> bool {
        let any = self.drain_rings();
        self.adopt_unreported() || any
    }

    /// Takes in all pages that clients have reported. Called before every question about dirty pages. Returns whether there were
    /// some. Looks at no client that has reported nothing.
    pub fn drain_rings(&self) -> bool {
        let mut any = false;
        for owner in self.slots.reporters(&self.rings.draining) {
            any |= self.rings.drain(self, owner);
        }
        any
    }

    /// Takes in what each client has reported.
    pub fn drain_all_rings(&self) {
        let owners: Vec<u16> = self.clients.lock().by_owner.keys().copied().collect();
        for owner in owners {
            self.rings.drain(self, owner);
        }
    }

    /// Tells the slices of dirty pages. A file that has no slot any more may have been closed in the middle of the write; its pages are
    /// left to `adopt_unreported`, as this may be called from inside `fs`, which must not be asked for files then.
    fn announce(&self, keys: &mut [Key]) {
        keys.sort_unstable_by_key(|key| (key.object(), key.page()));
        let neighbours = |a: &Key, b: &Key| a.object() == b.object() && a.page() + 1 == b.page();
        for run in keys.chunk_by(neighbours) {
            match self.slot_file(run[0].object()) {
                Some(slot_file) => self.announce_pages(&slot_file.file, run),
                None => {
                    self.rings.closed.lock().extend(run);
                    self.unreported.store(true, Ordering::SeqCst);
                    self.slots.ring();
                }
            }
        }
    }

    /// Tells the slice of a file of dirty pages that are neighbours.
    fn announce_pages(&self, file: &Arc<File>, run: &[Key]) {
        if let Some(slice) = self.slices.get(usize::from(file.slice())) {
            slice.dirtied_by_client(&file.object(), run[0].page(), run.len() as u32);
        }
    }

    /// Takes in dirty pages that no client reports, and those of files that were closed. Returns whether there may have been some.
    pub fn adopt_unreported(&self) -> bool {
        // Asked from each request: a load first.
        if !self.unreported.load(Ordering::SeqCst) || !self.unreported.swap(false, Ordering::SeqCst)
        {
            return false;
        }
        let closed = std::mem::take(&mut *self.rings.closed.lock());
        for pages in closed.chunk_by(|a, b| a.object() == b.object()) {
            let file = self.mounted().map(|m| m.fs().file(pages[0].object()));
            if let Some(Ok(file)) = file {
                pages
                    .chunks(1)
                    .for_each(|page| self.announce_pages(&file, page));
            }
        }
        for slice in &self.slices {
            let adopted = slice.adopt_unreported(&|number| self.object(number));
            if adopted > 0 {
                tracing::debug!(
                    slice = slice.id(),
                    adopted,
                    "took in pages that no program reported"
                );
            }
        }
        true
    }

    /// The object with a number.
    pub(super) fn object(&self, number: u64) -> Option<Arc<dyn Object>> {
        if let Some(slot_file) = self.slot_file(number) {
            return Some(slot_file.file.object());
        }
        let mounted = self.mounted()?;
        mounted.fs().file(number).ok().map(|file| file.object())
    }
}

/// The thread that takes in what clients report, also when nobody asks.
pub(super) fn serve(mounted: &Weak<Mounted>) {
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
        if !busy {
            // Nothing for a whole round: the next report rings. Looked at once more, for one that came
            // before its writer knew.
            fast.slots.want_bell(true);
            busy = fast.hear();
        }
        if fast.closing.load(Ordering::SeqCst) {
            return;
        }
        fast.slots.sleep(seen, busy.then_some(ROUND));
    }
}
