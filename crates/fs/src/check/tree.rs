//! Finds directories that contain each other: no path leads to them from the root.
//!
//! Each directory here has one name, in its parent. So an unreachable directory is in a cycle, below a cycle, or below a directory without
//! a name.

use std::collections::{BTreeMap, HashSet};

use jericho_format::record::{self, key_number};
use jericho_metadata::store::codec;
use jericho_metadata::store::tables::Table;

use super::stores::{Range, Subject};
use crate::error::Result;
use crate::types::{Ino, Kind, ROOT};

/// Returns one directory of each cycle, with its parent. `tree` has directories and their parents, in order, without the root.
pub(super) fn cycles(tree: &[(Ino, Ino)]) -> Vec<(Ino, Ino)> {
    const UNSEEN: u8 = 0;
    const IN_WALK: u8 = 1;
    const SEEN: u8 = 2;
    let mut states = vec![UNSEEN; tree.len()];
    let mut found = Vec::new();
    let mut walk: Vec<u32> = Vec::new();
    for start in 0..tree.len() {
        let mut at = start;
        // Follows the parents up to the root, or to a directory that was seen before.
        while states[at] == UNSEEN {
            states[at] = IN_WALK;
            walk.push(at as u32);
            match tree.binary_search_by_key(&tree[at].1, |(ino, _)| *ino) {
                Ok(parent) => at = parent,
                Err(_) => break,
            }
            if states[at] == IN_WALK {
                found.push(tree[at]);
            }
        }
        for at in walk.drain(..) {
            states[at as usize] = SEEN;
        }
    }
    found
}

/// A bit for each directory, in the order of the stores and their keys.
struct Bits(Vec<u64>);

impl Bits {
    fn get(&self, at: usize) -> bool {
        self.0
            .get(at / 64)
            .is_some_and(|word| word >> (at % 64) & 1 == 1)
    }

    fn set(&mut self, at: usize) {
        if let Some(word) = self.0.get_mut(at / 64) {
            *word |= 1 << (at % 64);
        }
    }
}

/// The directories of a volume that are too many to be kept in memory.
pub(super) struct ManyDirectories<'a> {
    pub subject: Subject<'a>,
    /// Number of directories.
    pub count: u64,
    /// Parents of the directories that record another one.
    pub moved: &'a BTreeMap<Ino, Ino>,
    /// Inodes without a name, which do not count.
    pub lost: &'a HashSet<Ino>,
}

impl ManyDirectories<'_> {
    /// Passes the place, the number and the parent of each directory to `each`, until it returns false.
    fn each(&self, mut each: impl FnMut(usize, Ino, Ino) -> bool) -> Result<()> {
        let (mut at, mut goes_on) = (0, true);
        for shard in self.subject.stores.shards() {
            let range = Range::all(shard, Table::Inodes);
            self.subject.stores.scan(range, |key, value| {
                let ino = key_number(key).filter(|_| key.len() == 8);
                if let Some(ino) = ino
                    && let Ok(inode) = codec::inode_from_bytes(ino, value)
                    && inode.kind == Kind::Directory
                {
                    let parent = self.moved.get(&ino).copied();
                    goes_on = each(at, ino, parent.unwrap_or(inode.parent));
                    at += 1;
                }
                goes_on
            })?;
            if !goes_on {
                break;
            }
        }
        Ok(())
    }

    /// Returns directories from place `from` on, with their places, in the order of their numbers: as many as fit.
    fn window(&self, from: usize) -> Result<Vec<(Ino, usize)>> {
        let most = self.subject.limits.directories_max().max(1);
        let mut window = Vec::new();
        self.each(|at, ino, _| {
            if at >= from {
                window.push((ino, at));
            }
            window.len() < most
        })?;
        window.sort_unstable();
        Ok(window)
    }

    /// Returns directories that cannot be reached from the root, with their parents, in order: as many as fit. Reads all inodes once
    /// for each window, and again for each level at which a directory has a smaller number than its parent.
    pub fn unreachable(&self) -> Result<Vec<(Ino, Ino)>> {
        let mut reached = Bits(vec![0; (self.count as usize).div_ceil(64)]);
        let mut changed = true;
        while changed {
            changed = false;
            let mut from = 0;
            loop {
                let window = self.window(from)?;
                if window.is_empty() {
                    break;
                }
                from += window.len();
                self.each(|at, ino, parent| {
                    let above = window.binary_search_by_key(&parent, |(ino, _)| *ino);
                    let is_reached = ino == ROOT
                        || parent == ROOT
                        || above.is_ok_and(|above| reached.get(window[above].1));
                    if is_reached && !reached.get(at) {
                        reached.set(at);
                        changed = true;
                    }
                    true
                })?;
            }
        }
        let most = self.subject.limits.directories_max().max(1);
        let mut tree = Vec::new();
        self.each(|at, ino, parent| {
            if !reached.get(at) && !self.lost.contains(&ino) {
                tree.push((ino, parent));
            }
            tree.len() < most
        })?;
        let mut named = Vec::new();
        for (ino, parent) in tree {
            if !self.is_orphan(ino)? {
                named.push((ino, parent));
            }
        }
        named.sort_unstable();
        Ok(named)
    }

    fn is_orphan(&self, ino: Ino) -> Result<bool> {
        let stores = self.subject.stores;
        let key = record::ino_key(ino);
        let range = Range {
            from: &key,
            ..Range::all(stores.map().of_ino(ino), Table::Orphans)
        };
        let mut is_orphan = false;
        stores.scan(range, |found, _| {
            is_orphan = found == key;
            false
        })?;
        Ok(is_orphan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_directory_of_each_cycle_is_found() {
        assert_eq!(cycles(&[]), []);
        assert_eq!(cycles(&[(2, 1), (3, 2), (4, 2)]), []);
        // 3 and 4 contain each other, 5 is below them; 6 contains itself; the parent of 7 has no name.
        let tree = [(2, 1), (3, 4), (4, 3), (5, 4), (6, 6), (7, 90)];
        let found: Vec<Ino> = cycles(&tree).into_iter().map(|(ino, _)| ino).collect();
        assert_eq!(found, [3, 6]);
    }
}
