//! Checks the numbers that the store keeps so that a mount need not count: the marks of the inode numbers, the number of inodes and
//! the blocks of each file.

use jericho_format::record::{INO_COUNTER_BITS, INODES_NAME, ino_mark_name, ino_of, parts_of_ino};

use super::Pass;
use super::stores::Fix;
use crate::error::Result;
use crate::numbers::mark_after;
use crate::shard::ShardId;
use crate::store::codec;
use crate::store::tables::{Row, Table};
use crate::types::{Ino, SliceId};

impl Pass<'_> {
    /// Reads the marks and the number of inodes.
    pub(super) fn values(&mut self) -> Result<()> {
        let slices = self.volume.slices().len();
        let stores = self.stores;
        let counts = &mut self.counts;
        counts.inodes = vec![None; stores.all.len()];
        counts.inode_rows = vec![0; stores.all.len()];
        counts.marks = vec![None; slices];
        counts.has_mark = vec![false; slices];
        counts.highest = vec![0; slices];
        let names: Vec<String> = (0..slices as SliceId).map(ino_mark_name).collect();
        stores.scan(Table::Values, |shard, key, value| {
            let number = codec::number_of_value("", value).ok();
            if key == INODES_NAME.as_bytes() {
                counts.inodes[shard.index()] = number;
            }
            if let Some(slice) = names.iter().position(|name| name.as_bytes() == key) {
                counts.has_mark[slice] = true;
                counts.marks[slice] =
                    number.filter(|mark| (2..=1 << INO_COUNTER_BITS).contains(mark));
            }
        })
    }

    /// Returns whether a writer can have given an inode this number, and remembers the number if so.
    pub(super) fn is_possible_ino(&mut self, ino: Ino) -> bool {
        let Some((slice, counter)) = parts_of_ino(ino) else {
            return false;
        };
        let Some(highest) = self.counts.highest.get_mut(usize::from(slice)) else {
            return false;
        };
        *highest = counter.max(*highest);
        true
    }

    /// Counts a row of a shard's table of inodes.
    pub(super) fn count_inode_row(&mut self, shard: ShardId) {
        self.counts.inode_rows[shard.index()] += 1;
    }

    /// Returns a number for an inode that the repair makes. Called once in a pass.
    pub(super) fn new_ino(&mut self) -> Ino {
        let counts = &mut self.counts;
        let mark = counts.marks.first().copied().flatten().unwrap_or(0);
        let highest = counts.highest.first().copied().unwrap_or(0);
        counts.made = mark.max(highest + 1).max(2);
        ino_of(0, counts.made)
    }

    /// Compares the marks, the number of inodes and the blocks of each inode with what is in the store.
    pub(super) fn counts(&mut self) {
        self.marks();
        for shard in self.stores.map().all().iter() {
            self.inode_count(shard);
        }
        let wrong: Vec<Ino> = self
            .inodes
            .iter()
            .filter(|(_, seen)| seen.record.blocks != seen.blocks)
            .map(|(ino, _)| *ino)
            .collect();
        for ino in wrong {
            let Some(seen) = self.inodes.get_mut(&ino) else {
                continue;
            };
            let (said, blocks) = (seen.record.blocks, seen.blocks);
            seen.record.blocks = blocks;
            self.damage(format!(
                "inode {ino} says that it has {said} blocks, and it has {blocks}"
            ));
            self.put_inode(ino);
        }
    }

    fn inode_count(&mut self, shard: ShardId) {
        let counted = self.counts.inodes[shard.index()];
        let rows = self.counts.inode_rows[shard.index()];
        // A store without inodes need not have the row.
        if counted == Some(rows) || (counted.is_none() && rows == 0) {
            return;
        }
        let counted = counted.map_or("an impossible number of".into(), |counted| {
            counted.to_string()
        });
        self.damage(format!(
            "the store says that there are {counted} inodes, and there are {rows}"
        ));
        let row = value_row(INODES_NAME, rows);
        self.fixes.push(Fix { shard, row });
    }

    fn marks(&mut self) {
        for slice in 0..self.counts.marks.len() {
            let (mark, highest) = (self.counts.marks[slice], self.counts.highest[slice]);
            let is_impossible = self.counts.has_mark[slice] && mark.is_none();
            // The root directory needs no mark.
            let is_low = highest > 1 && mark.is_none_or(|mark| mark <= highest);
            if !is_impossible && !is_low {
                continue;
            }
            let name = ino_mark_name(slice as SliceId);
            let mark = mark.map_or("no possible number".into(), |mark| mark.to_string());
            self.damage(format!(
                "the mark {name} is {mark}, and must be more than {highest}"
            ));
            self.fix(value_row(&name, mark_after(highest)));
        }
        if self.counts.made > 0 {
            self.fix(value_row(&ino_mark_name(0), mark_after(self.counts.made)));
        }
    }
}

/// Returns the row of a named value.
fn value_row(name: &str, value: u64) -> Row {
    Row {
        table: Table::Values,
        key: name.as_bytes().to_vec(),
        value: Some(value.to_le_bytes().to_vec()),
    }
}
