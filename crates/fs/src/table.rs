//! The inodes in memory, and the number of references that the kernel has to each.
//!
//! The two are separate, so that an inode can leave memory while the kernel still knows its number. The table drops clean
//! inodes beyond the limit by CLOCK: a hand goes round each part of the table, and an inode that was used since the hand last passed stays.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::Result;
use crate::ino_map::InoMap;
use crate::inode::Inode;
use crate::shard::{ShardId, ShardMap};
use crate::types::Ino;

/// Number of parts of the table, each with a lock of its own.
const PARTS: usize = 64;
/// Largest number of inodes that the hand passes for each inode added. Bounds the work of one operation.
const HAND_STEPS: usize = 4;

#[derive(Default)]
struct Part {
    inodes: InoMap<Arc<Inode>>,
    hand: VecDeque<Ino>,
}

/// The table of inodes.
pub struct Table {
    parts: Vec<Mutex<Part>>,
    /// The kernel's references by inode.
    lookups: Vec<Mutex<InoMap<u64>>>,
    limit_per_part: usize,
    /// The last durable batch of each shard of the volume. An inode that a later batch included must stay.
    durable: Vec<AtomicU64>,
    map: ShardMap,
}

impl Table {
    /// Creates a table that keeps about `limit` clean inodes. `map` names the volume's shards.
    pub fn new(limit: usize, map: ShardMap) -> Table {
        Table {
            parts: (0..PARTS).map(|_| Mutex::default()).collect(),
            lookups: (0..PARTS).map(|_| Mutex::default()).collect(),
            limit_per_part: limit.div_ceil(PARTS).max(1),
            durable: (0..map.count()).map(|_| AtomicU64::default()).collect(),
            map,
        }
    }

    /// Returns the inode, and calls `load` if it is not in memory. `load` runs under the part's lock. Without the lock two
    /// threads could load one inode, and the older state could replace later changes.
    pub fn get_or_load(
        &self,
        ino: Ino,
        load: impl FnOnce() -> Result<Arc<Inode>>,
    ) -> Result<Arc<Inode>> {
        let mut part = self.parts[part_of(ino)].lock();
        if let Some(inode) = part.inodes.get(&ino) {
            if !inode.referenced.load(Ordering::Relaxed) {
                inode.referenced.store(true, Ordering::Relaxed);
            }
            return Ok(inode.clone());
        }
        let inode = load()?;
        self.add(&mut part, inode.clone());
        Ok(inode)
    }

    /// Returns the inode if it is in memory.
    pub fn get(&self, ino: Ino) -> Option<Arc<Inode>> {
        self.parts[part_of(ino)].lock().inodes.get(&ino).cloned()
    }

    /// Adds an inode that was just created.
    pub fn insert(&self, inode: Arc<Inode>) {
        let mut part = self.parts[part_of(inode.ino)].lock();
        self.add(&mut part, inode);
    }

    fn add(&self, part: &mut Part, inode: Arc<Inode>) {
        let ino = inode.ino;
        if let Entry::Vacant(slot) = part.inodes.entry(ino) {
            slot.insert(inode);
            part.hand.push_back(ino);
        }
        if part.hand.len() > 2 * part.inodes.len() + 64 {
            // More than half of the hand's entries are of removed inodes.
            part.hand = part.inodes.keys().copied().collect();
        }
        for _ in 0..HAND_STEPS {
            if part.inodes.len() <= self.limit_per_part {
                break;
            }
            self.step(part);
        }
    }

    /// Moves the hand past one inode.
    fn step(&self, part: &mut Part) {
        let Some(ino) = part.hand.pop_front() else {
            return;
        };
        let Some(inode) = part.inodes.get(&ino) else {
            return;
        };
        if inode.referenced.swap(false, Ordering::Relaxed) || !self.may_drop(inode) {
            part.hand.push_back(ino);
            return;
        }
        if let Some(inode) = part.inodes.remove(&ino) {
            inode.file.lock().take();
        }
    }

    /// Returns whether the inode can be dropped without losing state. New references come only from the table, whose part is
    /// locked, so a count of one stays one.
    fn may_drop(&self, inode: &Arc<Inode>) -> bool {
        let Some(file) = inode.file.try_lock() else {
            return false;
        };
        let own = 1 + usize::from(file.is_some());
        Arc::strong_count(inode) == own
            && inode.opens.load(Ordering::Acquire) == 0
            && !inode.unlinked.load(Ordering::Acquire)
            && !inode.is_uncommitted(self.durable_of(inode.ino))
            && inode
                .meta
                .try_read()
                .is_some_and(|meta| meta.overlay.is_empty())
            && file
                .as_ref()
                .is_none_or(|file| Arc::strong_count(file) == 1 && file.is_forgettable())
    }

    /// Returns the last durable batch of an inode's shard.
    fn durable_of(&self, ino: Ino) -> u64 {
        self.durable[self.map.of_ino(ino).index()].load(Ordering::Acquire)
    }

    /// Records that every batch of a shard up to `seq` is durable.
    pub fn set_durable(&self, shard: ShardId, seq: u64) {
        self.durable[shard.index()].store(seq, Ordering::Release);
    }

    /// Drops clean inodes beyond the limit. Called after a batch made many inodes clean.
    pub fn trim(&self) {
        for part in &self.parts {
            let mut part = part.lock();
            // Goes round twice, because the first round only clears the reference marks.
            let mut steps = part.hand.len() * 2;
            while part.inodes.len() > self.limit_per_part && steps > 0 {
                self.step(&mut part);
                steps -= 1;
            }
        }
    }

    /// Removes an inode that has been removed from the filesystem.
    pub fn remove(&self, ino: Ino) {
        let removed = self.parts[part_of(ino)].lock().inodes.remove(&ino);
        if let Some(inode) = removed {
            inode.file.lock().take();
        }
    }

    /// Drops all inodes, which ends the cycles between inodes and files.
    pub fn clear(&self) {
        for part in &self.parts {
            let part = std::mem::take(&mut *part.lock());
            for inode in part.inodes.values() {
                inode.file.lock().take();
            }
        }
    }

    /// Returns the results of `pick` for all inodes in memory.
    pub fn collect<T>(&self, pick: impl Fn(&Arc<Inode>) -> Option<T>) -> Vec<T> {
        let mut picked = Vec::new();
        for part in &self.parts {
            picked.extend(part.lock().inodes.values().filter_map(&pick));
        }
        picked
    }

    /// Returns the number of inodes in memory.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|s| s.lock().inodes.len()).sum()
    }

    /// Counts one more reference of the kernel to the inode.
    pub fn count_lookup(&self, ino: Ino) {
        *self.lookups[part_of(ino)].lock().entry(ino).or_insert(0) += 1;
    }

    /// Subtracts `n` references of the kernel. Returns whether the kernel has none left.
    pub fn forget(&self, ino: Ino, n: u64) -> bool {
        let mut lookups = self.lookups[part_of(ino)].lock();
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
        self.lookups[part_of(ino)].lock().contains_key(&ino)
    }
}

fn part_of(ino: Ino) -> usize {
    ino as usize % PARTS
}
