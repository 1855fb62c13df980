//! Shards: the parts of a volume's metadata that are committed on their own.
//!
//! A shard has a metadata store with a journal, a batch, a committer and a checkpointer. The metadata of a slice are in one shard: the
//! inodes whose numbers the slice gave out, with their entries, extents and attributes, and the bitmaps of the slice's blocks.

use jericho_format::superblock::SLICES_MAX;

use crate::numbers::slice_of_ino;
use crate::types::{Ino, SliceId};

/// A shard of an open volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShardId(u16);

impl ShardId {
    /// Returns the place of the shard in lists of all shards.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Which shard has which metadata.
#[derive(Clone, Copy, Debug)]
pub struct ShardMap {
    /// 1: all slices are in one shard. Else each slice has its own.
    count: u16,
}

impl ShardMap {
    /// Returns the map of a volume with `count` shards: one, or as many as it has slices.
    pub fn new(count: usize) -> ShardMap {
        ShardMap {
            count: count.clamp(1, SLICES_MAX) as u16,
        }
    }

    /// Returns the number of shards.
    pub fn count(self) -> usize {
        usize::from(self.count)
    }

    /// Returns all shards.
    pub fn all(self) -> ShardSet {
        (0..self.count).map(ShardId).collect()
    }

    /// Returns the shard of a slice, or the last shard if the slice does not exist.
    pub fn of_slice(self, slice: SliceId) -> ShardId {
        ShardId(slice.min(self.count - 1))
    }

    /// Returns the shard of an inode.
    pub fn of_ino(self, ino: Ino) -> ShardId {
        self.of_slice(slice_of_ino(ino).unwrap_or(0))
    }
}

/// A set of shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardSet([u64; SLICES_MAX / 64]);

impl ShardSet {
    /// Returns the set of one shard.
    pub fn one(shard: ShardId) -> ShardSet {
        let mut set = ShardSet::default();
        set.insert(shard);
        set
    }

    /// Adds a shard.
    pub fn insert(&mut self, shard: ShardId) {
        self.0[shard.index() / 64] |= 1 << (shard.index() % 64);
    }

    /// Adds all shards of another set.
    pub fn extend(&mut self, other: ShardSet) {
        for (own, other) in self.0.iter_mut().zip(other.0) {
            *own |= other;
        }
    }

    /// Returns whether the set has a shard.
    pub fn contains(&self, shard: ShardId) -> bool {
        self.0[shard.index() / 64] >> (shard.index() % 64) & 1 == 1
    }

    /// Returns whether the set has all shards of another set.
    pub fn contains_all(&self, other: &ShardSet) -> bool {
        self.0
            .iter()
            .zip(other.0)
            .all(|(own, other)| other & !own == 0)
    }

    /// Returns the number of shards in the set.
    pub fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns the shards in order.
    pub fn iter(&self) -> impl Iterator<Item = ShardId> + use<> {
        let words = self.0;
        words.into_iter().enumerate().flat_map(|(at, mut word)| {
            std::iter::from_fn(move || {
                (word != 0).then(|| {
                    let bit = word.trailing_zeros();
                    word &= word - 1;
                    ShardId((at * 64) as u16 + bit as u16)
                })
            })
        })
    }
}

impl FromIterator<ShardId> for ShardSet {
    fn from_iter<T: IntoIterator<Item = ShardId>>(shards: T) -> ShardSet {
        let mut set = ShardSet::default();
        shards.into_iter().for_each(|shard| set.insert(shard));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_format::record::ino_of;

    #[test]
    fn a_set_returns_its_shards_in_order() {
        let mut set: ShardSet = [200, 3, 64, 63].map(ShardId).into_iter().collect();
        assert_eq!(
            set.iter().map(|s| s.0).collect::<Vec<_>>(),
            [3, 63, 64, 200]
        );
        assert_eq!(set.count(), 4);
        assert!(set.contains(ShardId(64)) && !set.contains(ShardId(65)));
        let larger = [5, 255].map(ShardId).into_iter().collect();
        assert!(!set.contains_all(&larger));
        set.extend(larger);
        assert!(set.contains_all(&larger));
        assert_eq!(set.count(), 6);
    }

    #[test]
    fn an_inode_is_in_the_shard_of_the_slice_that_gave_its_number() {
        let (one, each) = (ShardMap::new(1), ShardMap::new(4));
        assert_eq!(one.of_ino(ino_of(3, 70)).index(), 0);
        assert_eq!(each.of_ino(ino_of(3, 70)).index(), 3);
        assert_eq!(each.of_ino(1).index(), 0);
        assert_eq!(each.all().count(), 4);
    }
}
