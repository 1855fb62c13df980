//! The inodes in memory, and the number of references that the kernel has to each.
//!
//! The two are separate, so that an inode can leave memory while the kernel still knows its number. The table drops clean
//! inodes beyond the limit by CLOCK: a hand goes round each shard, and an inode that was used since the hand last passed stays.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::Result;
use crate::ino_map::InoMap;
use crate::inode::Inode;
use crate::types::Ino;

const SHARDS: usize = 64;
/// Largest number of inodes that the hand passes for each inode added. Bounds the work of one operation.
const HAND_STEPS: usize = 4;

#[derive(Default)]
struct Shard {
    inodes: InoMap<Arc<Inode>>,
    hand: VecDeque<Ino>,
}

/// The table of inodes.
pub struct Table {
    shards: Vec<Mutex<Shard>>,
    /// The kernel's references by inode.
    lookups: Vec<Mutex<InoMap<u64>>>,
    limit_per_shard: usize,
    /// The last durable batch. An inode that a later batch included must stay.
    durable: AtomicU64,
}

impl Table {
    /// Creates a table that keeps about `limit` clean inodes.
    pub fn new(limit: usize) -> Table {
        Table {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            lookups: (0..SHARDS).map(|_| Mutex::default()).collect(),
            limit_per_shard: limit.div_ceil(SHARDS).max(1),
            durable: AtomicU64::new(0),
        }
    }

    /// Returns the inode, and calls `load` if it is not in memory. `load` runs under the shard's lock. Without the lock two
    /// threads could load one inode, and the older state could replace later changes.
    pub fn get_or_load(
        &self,
        ino: Ino,
        load: impl FnOnce() -> Result<Arc<Inode>>,
    ) -> Result<Arc<Inode>> {
        let mut shard = self.shards[shard_of(ino)].lock();
        if let Some(inode) = shard.inodes.get(&ino) {
            if !inode.referenced.load(Ordering::Relaxed) {
                inode.referenced.store(true, Ordering::Relaxed);
            }
            return Ok(inode.clone());
        }
        let inode = load()?;
        self.add(&mut shard, inode.clone());
        Ok(inode)
    }

    /// Returns the inode if it is in memory.
    pub fn get(&self, ino: Ino) -> Option<Arc<Inode>> {
        self.shards[shard_of(ino)].lock().inodes.get(&ino).cloned()
    }

    /// Adds an inode that was just created.
    pub fn insert(&self, inode: Arc<Inode>) {
        let mut shard = self.shards[shard_of(inode.ino)].lock();
        self.add(&mut shard, inode);
    }

    fn add(&self, shard: &mut Shard, inode: Arc<Inode>) {
        let ino = inode.ino;
        if let Entry::Vacant(slot) = shard.inodes.entry(ino) {
            slot.insert(inode);
            shard.hand.push_back(ino);
        }
        if shard.hand.len() > 2 * shard.inodes.len() + 64 {
            // More than half of the hand's entries are of removed inodes.
            shard.hand = shard.inodes.keys().copied().collect();
        }
        for _ in 0..HAND_STEPS {
            if shard.inodes.len() <= self.limit_per_shard {
                break;
            }
            self.step(shard);
        }
    }

    /// Moves the hand past one inode.
    fn step(&self, shard: &mut Shard) {
        let Some(ino) = shard.hand.pop_front() else {
            return;
        };
        let Some(inode) = shard.inodes.get(&ino) else {
            return;
        };
        if inode.referenced.swap(false, Ordering::Relaxed) || !self.may_drop(inode) {
            shard.hand.push_back(ino);
            return;
        }
        if let Some(inode) = shard.inodes.remove(&ino) {
            inode.file.lock().take();
        }
    }

    /// Returns whether the inode can be dropped without losing state. New references come only from the table, whose shard is
    /// locked, so a count of one stays one.
    fn may_drop(&self, inode: &Arc<Inode>) -> bool {
        let Some(file) = inode.file.try_lock() else {
            return false;
        };
        let own = 1 + usize::from(file.is_some());
        Arc::strong_count(inode) == own
            && inode.opens.load(Ordering::Acquire) == 0
            && !inode.unlinked.load(Ordering::Acquire)
            && !inode.is_uncommitted(self.durable.load(Ordering::Acquire))
            && inode
                .meta
                .try_read()
                .is_some_and(|meta| meta.overlay.is_empty())
            && file
                .as_ref()
                .is_none_or(|file| Arc::strong_count(file) == 1 && file.is_forgettable())
    }

    /// Records that every batch up to `seq` is durable.
    pub fn set_durable(&self, seq: u64) {
        self.durable.store(seq, Ordering::Release);
    }

    /// Drops clean inodes beyond the limit. Called after a batch made many inodes clean.
    pub fn trim(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            // Goes round twice, because the first round only clears the reference marks.
            let mut steps = shard.hand.len() * 2;
            while shard.inodes.len() > self.limit_per_shard && steps > 0 {
                self.step(&mut shard);
                steps -= 1;
            }
        }
    }

    /// Removes an inode that has been removed from the filesystem.
    pub fn remove(&self, ino: Ino) {
        let removed = self.shards[shard_of(ino)].lock().inodes.remove(&ino);
        if let Some(inode) = removed {
            inode.file.lock().take();
        }
    }

    /// Drops all inodes, which ends the cycles between inodes and files.
    pub fn clear(&self) {
        for shard in &self.shards {
            let shard = std::mem::take(&mut *shard.lock());
            for inode in shard.inodes.values() {
                inode.file.lock().take();
            }
        }
    }

    /// Returns the results of `pick` for all inodes in memory.
    pub fn collect<T>(&self, pick: impl Fn(&Arc<Inode>) -> Option<T>) -> Vec<T> {
        let mut picked = Vec::new();
        for shard in &self.shards {
            picked.extend(shard.lock().inodes.values().filter_map(&pick));
        }
        picked
    }

    /// Returns the number of inodes in memory.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|s| s.lock().inodes.len()).sum()
    }

    /// Counts one more reference of the kernel to the inode.
    pub fn count_lookup(&self, ino: Ino) {
        *self.lookups[shard_of(ino)].lock().entry(ino).or_insert(0) += 1;
    }

    /// Subtracts `n` references of the kernel. Returns whether the kernel has none left.
    pub fn forget(&self, ino: Ino, n: u64) -> bool {
        let mut lookups = self.lookups[shard_of(ino)].lock();
        let Entry::Occupied(mut count) = lookups.entry(ino) else {
            return true;
        };
        *count.get_mut() = count.get().saturating_sub(n);
        let gone = *count.get() == 0;
        if gone {
            count.remove();
        }
        gone
    }

    /// Returns whether the kernel knows the inode.
    pub fn is_known(&self, ino: Ino) -> bool {
        self.lookups[shard_of(ino)].lock().contains_key(&ino)
    }
}

fn shard_of(ino: Ino) -> usize {
    ino as usize % SHARDS
}
