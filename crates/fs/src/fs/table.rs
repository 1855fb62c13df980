//! The inodes in memory, and how often the kernel was told of each.
//!
//! The two are apart so that an inode can leave memory while the kernel still knows its number.
//! Clean inodes beyond the limit are dropped by CLOCK: a hand goes round each shard, an inode that was
//! used since the hand last passed stays.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::inode::Inode;
use crate::error::Result;
use crate::types::Ino;

const SHARDS: usize = 64;
/// Inodes that the hand looks at for each one that comes in, at most: bounds the work of an operation.
const HAND_STEPS: usize = 4;

/// Inode numbers are dense and ours, so one multiplication spreads them well enough.
#[derive(Default)]
pub struct InoHasher(u64);

impl Hasher for InoHasher {
    fn finish(&self) -> u64 {
        // All numbers of a shard end in the same bits: bring the mixed ones down.
        self.0 ^ (self.0 >> 32)
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// A map by inode number.
pub type InoMap<V> = HashMap<Ino, V, BuildHasherDefault<InoHasher>>;

#[derive(Default)]
struct Shard {
    inodes: InoMap<Arc<Inode>>,
    hand: VecDeque<Ino>,
}

/// The table.
pub struct Table {
    shards: Vec<Mutex<Shard>>,
    /// References of the kernel.
    lookups: Vec<Mutex<InoMap<u64>>>,
    limit_per_shard: usize,
    /// The last durable batch: an inode of a later one must stay.
    durable: AtomicU64,
}

impl Table {
    /// A table that keeps about `limit` clean inodes.
    pub fn new(limit: usize) -> Table {
        Table {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            lookups: (0..SHARDS).map(|_| Mutex::default()).collect(),
            limit_per_shard: limit.div_ceil(SHARDS).max(1),
            durable: AtomicU64::new(0),
        }
    }

    /// The inode, through `load` when it is not in memory. `load` runs under the shard's lock: two
    /// loads of one inode, the older of which wins, would bring back what was changed in between.
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

    /// The inode if it is in memory.
    pub fn get(&self, ino: Ino) -> Option<Arc<Inode>> {
        self.shards[shard_of(ino)].lock().inodes.get(&ino).cloned()
    }

    /// Adds one that was just made.
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
            // Most of what the hand would pass was removed.
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
        if inode.referenced.swap(false, Ordering::Relaxed) || !self.may_go(inode) {
            shard.hand.push_back(ino);
            return;
        }
        if let Some(inode) = shard.inodes.remove(&ino) {
            inode.file.lock().take();
        }
    }

    /// Whether nothing would be lost. Only the table can hand out more references, and its shard is
    /// locked, so a count of one stays one.
    fn may_go(&self, inode: &Arc<Inode>) -> bool {
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

    /// Every batch up to this one is durable.
    pub fn set_durable(&self, seq: u64) {
        self.durable.store(seq, Ordering::Release);
    }

    /// Drops inodes beyond the limit that may go: after a batch made many clean.
    pub fn trim(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            // Twice round: the first round only takes the mark off.
            let mut steps = shard.hand.len() * 2;
            while shard.inodes.len() > self.limit_per_shard && steps > 0 {
                self.step(&mut shard);
                steps -= 1;
            }
        }
    }

    /// Removes an inode that is no more.
    pub fn remove(&self, ino: Ino) {
        let removed = self.shards[shard_of(ino)].lock().inodes.remove(&ino);
        if let Some(inode) = removed {
            inode.file.lock().take();
        }
    }

    /// Drops everything, so that the cycles between inodes and files are gone.
    pub fn clear(&self) {
        for shard in &self.shards {
            let shard = std::mem::take(&mut *shard.lock());
            for inode in shard.inodes.values() {
                inode.file.lock().take();
            }
        }
    }

    /// What `pick` gives for each inode in memory.
    pub fn collect<T>(&self, pick: impl Fn(&Arc<Inode>) -> Option<T>) -> Vec<T> {
        let mut picked = Vec::new();
        for shard in &self.shards {
            picked.extend(shard.lock().inodes.values().filter_map(&pick));
        }
        picked
    }

    /// Inodes in memory.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|s| s.lock().inodes.len()).sum()
    }

    /// The kernel was told of the inode once more.
    pub fn count_lookup(&self, ino: Ino) {
        *self.lookups[shard_of(ino)].lock().entry(ino).or_insert(0) += 1;
    }

    /// The kernel forgot `n` of them; gives whether it knows the inode no more.
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

    /// Whether the kernel knows the inode.
    pub fn is_known(&self, ino: Ino) -> bool {
        self.lookups[shard_of(ino)].lock().contains_key(&ino)
    }
}

fn shard_of(ino: Ino) -> usize {
    ino as usize % SHARDS
}
