//! The inodes of a window, and what the other tables say about them.
//!
//! A window has a range of the inode numbers of each shard. Successive windows together have all numbers, so that each
//! row that names an inode is compared in one window.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use jericho_format::record;
use jericho_metadata::shard::{ShardId, ShardMap};

use crate::types::{Ino, Kind};

/// Bits of `Chunk::flags` with the index of the kind in `KINDS`.
const KIND: u8 = 0x0f;
const KINDS: [Kind; 7] = [
    Kind::File,
    Kind::Directory,
    Kind::Symlink,
    Kind::Fifo,
    Kind::Socket,
    Kind::CharDevice,
    Kind::BlockDevice,
];
/// The inode was open without a name.
const ORPHAN: u8 = 0x10;
/// The directory has a name in the directory that it records as its parent.
const NAMED: u8 = 0x20;
/// Inodes of a chunk.
const CHUNK_LEN: usize = 4096;
/// Bytes that an inode takes, and more bytes that a directory takes.
const INODE_BYTES: usize = 17;
const DIRECTORY_BYTES: usize = 24;

/// Inodes of a range of numbers, in order.
struct Chunk {
    base: Ino,
    /// Numbers, less `base`.
    offsets: Vec<u32>,
    flags: Vec<AtomicU8>,
    /// Numbers of entries that name the inode.
    names: Vec<AtomicU32>,
    /// Files: number of blocks of the extents. Directories: number of entries (lower 32 bits), and of those that name directories (upper).
    tallies: Vec<AtomicU64>,
    /// Position and recorded parent of each directory, in order.
    parents: Vec<(u16, Ino)>,
}

/// The inodes of a window in one shard.
pub(super) struct Part {
    pub shard: ShardId,
    /// The numbers from this one on.
    first: Ino,
    /// The numbers before this one, or all.
    end: Option<Ino>,
    /// Whether the window has no numbers of this shard, because earlier windows have had all.
    is_over: bool,
    chunks: Vec<Chunk>,
    bytes: usize,
}

/// The place of an inode in an index.
#[derive(Clone, Copy)]
pub(super) struct Place<'i> {
    chunk: &'i Chunk,
    at: usize,
}

/// What an index knows of an inode.
#[derive(Clone, Copy)]
pub(super) enum Lookup<'i> {
    /// The inode exists.
    Here(Place<'i>),
    /// The inode does not exist.
    Missing,
    /// Another window has this number.
    Elsewhere,
}

impl Part {
    /// Returns an empty part with all numbers from `first` on, or with none if `first` is `None`.
    pub fn new(shard: ShardId, first: Option<Ino>) -> Part {
        Part {
            shard,
            first: first.unwrap_or(0),
            end: None,
            is_over: first.is_none(),
            chunks: Vec::new(),
            bytes: 0,
        }
    }

    /// Returns the bytes that the inodes take.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns whether earlier windows have had all numbers of the shard.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Returns the first number of the next window, if there is one.
    pub fn next(&self) -> Option<Ino> {
        self.end
    }

    /// Ends the part before a number.
    pub fn end_before(&mut self, ino: Ino) {
        self.end = Some(ino);
    }

    /// Returns the range of keys that begin with a number of the part. A key that is too short to have a number is in the
    /// range of exactly one part of its shard.
    pub fn keys(&self) -> (Vec<u8>, Option<Vec<u8>>) {
        let from = match self.first {
            0 => Vec::new(),
            first => record::ino_key(first).to_vec(),
        };
        (from, self.end.map(|end| record::ino_key(end).to_vec()))
    }

    /// Adds an inode. Its number is above those that were added before.
    pub fn push(&mut self, ino: Ino, kind: Kind, parent: Ino) {
        let fits = |chunk: &&mut Chunk| {
            chunk.offsets.len() < CHUNK_LEN && ino - chunk.base <= u64::from(u32::MAX)
        };
        if self.chunks.last_mut().filter(fits).is_none() {
            self.chunks.push(Chunk {
                base: ino,
                offsets: Vec::new(),
                flags: Vec::new(),
                names: Vec::new(),
                tallies: Vec::new(),
                parents: Vec::new(),
            });
        }
        let Some(chunk) = self.chunks.last_mut() else {
            return;
        };
        if kind == Kind::Directory {
            chunk.parents.push((chunk.offsets.len() as u16, parent));
            self.bytes += DIRECTORY_BYTES;
        }
        chunk.offsets.push((ino - chunk.base) as u32);
        let place = KINDS.iter().position(|one| *one == kind);
        chunk.flags.push(AtomicU8::new(place.unwrap_or(0) as u8));
        chunk.names.push(AtomicU32::new(0));
        chunk.tallies.push(AtomicU64::new(0));
        self.bytes += INODE_BYTES;
    }

    fn lookup(&self, ino: Ino) -> Lookup<'_> {
        if self.is_over || ino < self.first || self.end.is_some_and(|end| ino >= end) {
            return Lookup::Elsewhere;
        }
        let after = self.chunks.partition_point(|chunk| chunk.base <= ino);
        let Some(chunk) = after.checked_sub(1).and_then(|at| self.chunks.get(at)) else {
            return Lookup::Missing;
        };
        let offset = u32::try_from(ino - chunk.base);
        match offset.map(|offset| chunk.offsets.binary_search(&offset)) {
            Ok(Ok(at)) => Lookup::Here(Place { chunk, at }),
            _ => Lookup::Missing,
        }
    }
}

impl Place<'_> {
    fn flag(&self) -> &AtomicU8 {
        &self.chunk.flags[self.at]
    }

    pub fn is(&self, kind: Kind) -> bool {
        self.kind() == kind
    }

    pub fn kind(&self) -> Kind {
        KINDS[usize::from(self.flag().load(Ordering::Relaxed) & KIND)]
    }

    /// Returns the parent that a directory records, or 0.
    pub fn parent(&self) -> Ino {
        let parents = &self.chunk.parents;
        let found = parents.binary_search_by_key(&(self.at as u16), |(at, _)| *at);
        found.map_or(0, |at| parents[at].1)
    }

    pub fn set_orphan(&self) {
        self.flag().fetch_or(ORPHAN, Ordering::Relaxed);
    }

    pub fn is_orphan(&self) -> bool {
        self.flag().load(Ordering::Relaxed) & ORPHAN != 0
    }

    /// Notes that a directory has the name that counts. Returns whether it had one already.
    pub fn set_named(&self) -> bool {
        self.flag().fetch_or(NAMED, Ordering::Relaxed) & NAMED != 0
    }

    pub fn add_name(&self) {
        self.chunk.names[self.at].fetch_add(1, Ordering::Relaxed);
    }

    pub fn names(&self) -> u64 {
        self.chunk.names[self.at].load(Ordering::Relaxed).into()
    }

    pub fn add_blocks(&self, blocks: u64) {
        self.chunk.tallies[self.at].fetch_add(blocks, Ordering::Relaxed);
    }

    /// Counts an entry of a directory.
    pub fn add_entry(&self, names_directory: bool) {
        let one = 1 | u64::from(names_directory) << 32;
        self.chunk.tallies[self.at].fetch_add(one, Ordering::Relaxed);
    }

    /// Returns the blocks of a file.
    pub fn blocks(&self) -> u64 {
        match self.is(Kind::Directory) {
            true => 0,
            false => self.chunk.tallies[self.at].load(Ordering::Relaxed),
        }
    }

    /// Returns the entries of a directory, and how many of them name directories.
    pub fn entries(&self) -> (u64, u64) {
        let tally = self.chunk.tallies[self.at].load(Ordering::Relaxed);
        (tally & u64::from(u32::MAX), tally >> 32)
    }
}

/// The inodes of a window.
pub(super) struct Index {
    /// By shard.
    pub parts: Vec<Part>,
    map: ShardMap,
    /// Whether this is the first window.
    pub is_first: bool,
}

impl Index {
    pub fn new(parts: Vec<Part>, map: ShardMap, is_first: bool) -> Index {
        Index {
            parts,
            map,
            is_first,
        }
    }

    pub fn lookup(&self, ino: Ino) -> Lookup<'_> {
        self.parts[self.map.of_ino(ino).index()].lookup(ino)
    }

    /// Returns the place of an inode that exists in this window.
    pub fn place(&self, ino: Ino) -> Option<Place<'_>> {
        match self.lookup(ino) {
            Lookup::Here(place) => Some(place),
            Lookup::Missing | Lookup::Elsewhere => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_found_in_its_window_only() {
        let map = ShardMap::new(1);
        let shard = map.of_slice(0);
        let mut part = Part::new(shard, Some(100));
        let numbers = (100..9000).chain([1 << 39, (1 << 39) + 5]);
        numbers
            .clone()
            .for_each(|ino| part.push(ino, Kind::File, 1));
        part.end_before(1 << 40);
        let index = Index::new(vec![part], map, true);
        for ino in numbers {
            assert!(index.place(ino).is_some(), "{ino}");
        }
        for ino in [9000, (1 << 39) + 1, (1 << 40) - 1] {
            assert!(matches!(index.lookup(ino), Lookup::Missing), "{ino}");
        }
        for ino in [0, 99, 1 << 40] {
            assert!(matches!(index.lookup(ino), Lookup::Elsewhere), "{ino}");
        }
    }

    #[test]
    fn the_counts_of_an_inode_are_its_own() {
        let map = ShardMap::new(1);
        let mut part = Part::new(map.of_slice(0), Some(0));
        part.push(1, Kind::Directory, 1);
        part.push(2, Kind::File, 1);
        part.push(3, Kind::Directory, 1);
        let index = Index::new(vec![part], map, true);
        let place = |ino| index.place(ino).unwrap();
        place(2).add_blocks(7);
        place(1).add_entry(false);
        place(1).add_entry(true);
        place(3).add_name();
        assert_eq!((place(2).blocks(), place(1).blocks()), (7, 0));
        assert_eq!(place(1).entries(), (2, 1));
        assert_eq!((place(3).names(), place(3).parent()), (1, 1));
        assert!(!place(3).set_named() && place(3).set_named());
    }
}
