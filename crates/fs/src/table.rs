//! The inodes in memory, and the number of references that the kernel has to each.
//!
//! The two are separate, so that an inode can leave memory while the kernel still knows its number. The table drops clean
//! inodes beyond the limit by CLOCK: a hand goes round each part of the table, and an inode that was used since the hand last passed stays.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use jericho_metadata::shard::{ShardId, ShardMap};
use jericho_storage::Appended;
use parking_lot::Mutex;

use crate::error::Result;
use crate::ino_map::InoMap;
use crate::inode::Inode;
use crate::types::Ino;

/// Number of parts of the table, each with a lock of its own, for a volume with one shard. With more shards each has at least
/// `SHARD_PARTS`, as have those that are appended, so that threads that use different shards do not wait for each other.
const PARTS: usize = 64;
const SHARD_PARTS: usize = 8;
/// Largest number of inodes that the hand passes for each inode added. Bounds the work of one operation.
const HAND_STEPS: usize = 4;

/// Has cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Padded<T>(T);

#[derive(Default)]
struct Part {
    inodes: InoMap<Arc<Inode>>,
    hand: VecDeque<Ino>,
}

/// The inodes of a shard.
struct ShardTable {
    parts: Box<[Padded<Mutex<Part>>]>,
    /// The kernel's references by inode, in the same parts.
    lookups: Box<[Padded<Mutex<InoMap<u64>>>]>,
    /// The last durable batch of the shard. An inode that a later batch included must stay.
    durable: Padded<AtomicU64>,
}

impl ShardTable {
    fn new(parts: usize) -> ShardTable {
        ShardTable {
            parts: (0..parts).map(|_| Padded::default()).collect(),
            lookups: (0..parts).map(|_| Padded::default()).collect(),
            durable: Padded::default(),
        }
    }
}

/// The table of inodes.
pub struct Table {
    /// By shard.
    shards: Appended<ShardTable>,
    /// Most clean inodes in memory, about.
    limit: usize,
    limit_per_part: AtomicUsize,
}

impl Table {
    /// Creates a table that keeps about `limit` clean inodes. `map` names the volume's shards.
    pub fn new(limit: usize, map: ShardMap) -> Table {
        let parts = (PARTS / map.count()).max(SHARD_PARTS);
        let shards = (0..map.count()).map(|_| ShardTable::new(parts));
        let table = Table {
            shards: shards.collect(),
            limit,
            limit_per_part: AtomicUsize::new(0),
        };
        table.divide_limit();
        table
    }

    /// Appends a further shard.
    pub fn append(&self) {
        self.shards.append([ShardTable::new(SHARD_PARTS)]);
        self.divide_limit();
    }

    fn divide_limit(&self) {
        let parts: usize = self.shards.iter().map(|shard| shard.parts.len()).sum();
        let each = self.limit.div_ceil(parts).max(1);
        self.limit_per_part.store(each, Ordering::Relaxed);
    }

    /// Returns the part of a shard that exists.
    fn shard(&self, shard: ShardId) -> &ShardTable {
        let found = self.shards.get(shard.index());
        found.expect("a shard of the volume")
    }

    fn shard_of(&self, ino: Ino) -> &ShardTable {
        self.shard(ShardMap::new(self.shards.len()).of_ino(ino))
    }

    fn part_of(&self, ino: Ino) -> &Mutex<Part> {
        let parts = &self.shard_of(ino).parts;
        &parts[ino as usize % parts.len()].0
    }

    fn lookups_of(&self, ino: Ino) -> &Mutex<InoMap<u64>> {
        let lookups = &self.shard_of(ino).lookups;
        &lookups[ino as usize % lookups.len()].0
    }

    fn parts(&self) -> impl Iterator<Item = &Mutex<Part>> {
        let shards = self.shards.iter();
        shards.flat_map(|shard| shard.parts.iter().map(|part| &part.0))
    }

    fn limit_per_part(&self) -> usize {
        self.limit_per_part.load(Ordering::Relaxed)
    }

    /// Holds all locks of a shard until the returned value is dropped.
    #[cfg(test)]
    pub fn hold_all(&self, shard: ShardId) -> impl Sized {
        let own = self.shard(shard);
        let parts: Vec<_> = own.parts.iter().map(|p| p.0.lock()).collect();
        let lookups: Vec<_> = own.lookups.iter().map(|p| p.0.lock()).collect();
        (parts, lookups)
    }

    /// Returns the inode, and calls `load` if it is not in memory. `load` runs under the part's lock. Without the lock two
    /// threads could load one inode, and the older state could replace later changes.
    pub fn get_or_load(
        &self,
        ino: Ino,
        load: impl FnOnce() -> Result<Arc<Inode>>,
    ) -> Result<Arc<Inode>> {
        let mut part = self.part_of(ino).lock();
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
        self.part_of(ino).lock().inodes.get(&ino).cloned()
    }

    /// Adds an inode that was just created.
    pub fn insert(&self, inode: Arc<Inode>) {
        let mut part = self.part_of(inode.ino).lock();
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
            if part.inodes.len() <= self.limit_per_part() {
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
        self.shard_of(ino).durable.0.load(Ordering::Acquire)
    }

    /// Records that every batch of a shard up to `seq` is durable.
    pub fn set_durable(&self, shard: ShardId, seq: u64) {
        self.shard(shard).durable.0.store(seq, Ordering::Release);
    }

    /// Drops clean inodes of a shard beyond the limit. Called after a batch made many inodes clean.
    pub fn trim(&self, shard: ShardId) {
        for part in &self.shard(shard).parts {
            let mut part = part.0.lock();
            // Goes round twice, because the first round only clears the reference marks.
            let mut steps = part.hand.len() * 2;
            while part.inodes.len() > self.limit_per_part() && steps > 0 {
                self.step(&mut part);
                steps -= 1;
            }
        }
    }

    /// Removes an inode that has been removed from the filesystem.
    pub fn remove(&self, ino: Ino) {
        let removed = self.part_of(ino).lock().inodes.remove(&ino);
        if let Some(inode) = removed {
            inode.file.lock().take();
        }
    }

    /// Drops all inodes, which ends the cycles between inodes and files.
    pub fn clear(&self) {
        for part in self.parts() {
            let part = std::mem::take(&mut *part.lock());
            for inode in part.inodes.values() {
                inode.file.lock().take();
            }
        }
    }

    /// Returns the results of `pick` for all inodes in memory.
    pub fn collect<T>(&self, pick: impl Fn(&Arc<Inode>) -> Option<T>) -> Vec<T> {
        let mut picked = Vec::new();
        for part in self.parts() {
            picked.extend(part.lock().inodes.values().filter_map(&pick));
        }
        picked
    }

    /// Returns the number of inodes in memory.
    pub fn len(&self) -> usize {
        self.parts().map(|part| part.lock().inodes.len()).sum()
    }

    /// Counts one more reference of the kernel to the inode.
    pub fn count_lookup(&self, ino: Ino) {
        *self.lookups_of(ino).lock().entry(ino).or_insert(0) += 1;
    }

    /// Subtracts `n` references of the kernel. Returns whether the kernel has none left.
    pub fn forget(&self, ino: Ino, n: u64) -> bool {
        let mut lookups = self.lookups_of(ino).lock();
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
        self.lookups_of(ino).lock().contains_key(&ino)
    }
}
