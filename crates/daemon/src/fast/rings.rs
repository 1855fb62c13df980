//! The report rings of the clients, each with a lock of its own, and the dirty pages that no client reports.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use jericho_shm::{Area, Draining, Key, PageState, RingReader, Slots};
use parking_lot::Mutex;

/// The report ring of a client and its read position.
struct ReportRing {
    area: Arc<Area>,
    reader: RingReader,
}

/// The rings of all clients, by owner number.
pub(super) struct Rings {
    rings: Box<[Mutex<Option<ReportRing>>]>,
    pub draining: Draining,
    /// Reported pages of files that have no slot any more.
    pub closed: Mutex<Vec<Key>>,
    drained: AtomicU64,
}

impl Default for Rings {
    fn default() -> Rings {
        let rings = (0..=PageState::OWNER_MAX).map(|_| Mutex::default());
        Rings {
            rings: rings.collect(),
            draining: Draining::default(),
            closed: Mutex::default(),
            drained: AtomicU64::new(0),
        }
    }
}

/// Counts the requests to run `Fast::adopt_unreported`, and records how many of them it has completed.
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

    /// Calls `absorb` if pages may still have to be absorbed. Waits for another thread that is absorbing pages: the slices know
    /// them only afterwards. Returns whether there may have been any.
    pub fn absorb(&self, absorb: impl FnOnce()) -> bool {
        // Every request calls this, so it looks before it takes a lock.
        if !self.is_due() {
            return false;
        }
        let _absorbing = self.absorbing.lock();
        let noted = self.noted.load(Ordering::SeqCst);
        if self.is_due() {
            absorb();
            self.absorbed.store(noted, Ordering::SeqCst);
        }
        true
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
    /// Adds the ring of a new client. Called before the client receives its area.
    pub fn add(&self, owner: u16, area: Arc<Area>) {
        let reader = RingReader::default();
        *self.rings[usize::from(owner)].lock() = Some(ReportRing { area, reader });
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

    /// Drains the ring of one client, and calls `report` with the reported pages. Returns whether there were any.
    pub fn drain(&self, slots: &Slots, owner: u16, report: impl FnOnce(&mut [Key])) -> bool {
        let mut ring = self.rings[usize::from(owner)].lock();
        self.drained.fetch_add(1, Ordering::Relaxed);
        slots.begin_drain(&self.draining, owner);
        let mut keys: Vec<Key> = vec![];
        if let Some(ReportRing { area, reader }) = &mut *ring {
            area.drain(reader, |key| keys.push(key));
        }
        // Reports before `end_drain`: a thread that finds no report relies on that order.
        report(&mut keys);
        slots.end_drain(&self.draining, owner);
        !keys.is_empty()
    }

    /// Returns how many rings were drained so far.
    #[cfg(test)]
    pub fn drained(&self) -> u64 {
        self.drained.load(Ordering::Relaxed)
    }
}
