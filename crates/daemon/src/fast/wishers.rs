//! The threads of clients that may leave wishes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use jericho_shm::{Area, ClientThread};
use parking_lot::{Mutex, MutexGuard};

/// Entries of the table. Two threads whose ids have the same remainder replace each other.
pub(super) const ENTRIES: usize = 4096;

/// Threads of clients that may leave wishes, by thread id in the daemon's pid namespace.
pub(super) struct Wishers {
    pub entries: Box<[WisherEntry]>,
}

#[derive(Default)]
pub(super) struct WisherEntry {
    /// Thread id; 0: none. Changed with `wisher` locked.
    thread: AtomicU32,
    /// Locked while a wish is answered. Lock order: this lock, a slice's lock, the lock of the clients. An answer takes locks of
    /// slices, and a slice takes the lock of the clients to revoke one. So a thread that has the clients locked never waits for
    /// this lock.
    pub wisher: Mutex<Option<Wisher>>,
}

/// A thread of a client.
pub(super) struct Wisher {
    pub owner: u16,
    pub block: u32,
    pub area: Arc<Area>,
}

impl WisherEntry {
    /// Locks the entry of a thread. Returns `None` if the entry belongs to another thread by now, or if a wish of this thread is
    /// being answered: the kernel has split the thread's call into several requests.
    pub fn lock(&self, thread: u32) -> Option<MutexGuard<'_, Option<Wisher>>> {
        let wisher = self.wisher.try_lock()?;
        let is_same = self.thread.load(Ordering::Relaxed) == thread;
        is_same.then_some(wisher)
    }
}

impl Default for Wishers {
    fn default() -> Wishers {
        let entries = (0..ENTRIES).map(|_| WisherEntry::default());
        Wishers {
            entries: entries.collect(),
        }
    }
}

impl Wishers {
    /// Returns the entry of a thread. Costs one load for a thread that is not in the table.
    #[inline]
    pub fn entry(&self, thread: u32) -> Option<&WisherEntry> {
        let entry = &self.entries[thread as usize % ENTRIES];
        (thread != 0 && entry.thread.load(Ordering::Acquire) == thread).then_some(entry)
    }

    /// Returns whether the table has the thread with this block. Also returns true while a wish of the thread is being answered.
    pub fn is_known(&self, thread: u32, block: ClientThread) -> bool {
        self.entry(thread).is_some_and(|entry| {
            let wisher = entry.wisher.try_lock();
            let same = |w: &Wisher| (w.owner, w.block) == (block.owner, block.block);
            wisher.is_none_or(|wisher| wisher.as_ref().is_some_and(same))
        })
    }

    /// Adds a thread. Leaves the thread out while a wish of the entry is being answered: it names itself again with its next
    /// request for a slot.
    pub fn add(&self, thread: u32, wisher: Wisher) {
        let entry = &self.entries[thread as usize % ENTRIES];
        if let Some(mut place) = entry.wisher.try_lock() {
            *place = Some(wisher);
            entry.thread.store(thread, Ordering::Release);
        }
    }

    /// Removes the threads of a client that is gone. Waits for answers to wishes, so the caller holds no lock.
    pub fn remove(&self, owner: u16) {
        for entry in &self.entries {
            if entry.thread.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut wisher = entry.wisher.lock();
            if wisher.as_ref().is_some_and(|w| w.owner == owner) {
                entry.thread.store(0, Ordering::Release);
                *wisher = None;
            }
        }
    }
}
