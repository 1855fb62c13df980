//! Checks the numbers that save a mount from counting: the marks of the inode numbers, and the number of inodes of each store.

use jericho_format::record::{INO_COUNTER_BITS, INODES_NAME, ino_mark_name, ino_of};
use jericho_metadata::numbers::mark_after;
use jericho_metadata::store::codec;
use jericho_metadata::store::tables::{Row, Table};

use super::findings::Found;
use super::inodes::Numbers;
use super::stores::{Range, Stores, Subject};
use crate::error::Result;
use crate::types::{Ino, SliceId};

/// What the stores say about the inode numbers and the numbers of inodes.
pub(super) struct Counts {
    /// By slice: the mark, if it is possible.
    marks: Vec<Option<u64>>,
    /// By slice: whether its store has a row for the mark.
    has_mark: Vec<bool>,
    /// By shard: the number of inodes that its store records.
    inodes: Vec<Option<u64>>,
}

impl Counts {
    /// Reads the values of the stores.
    pub fn read(subject: Subject, found: &mut Found) -> Result<Counts> {
        let slices = subject.volume.slices().len();
        let mut counts = Counts {
            marks: vec![None; slices],
            has_mark: vec![false; slices],
            inodes: vec![None; subject.stores.all.len()],
        };
        let names: Vec<String> = (0..slices as SliceId).map(ino_mark_name).collect();
        for shard in subject.stores.shards() {
            let range = Range::all(shard, Table::Values);
            subject.stores.scan_all(range, found, |_, key, value| {
                let number = codec::number_of_value("", value).ok();
                if key == INODES_NAME.as_bytes() {
                    counts.inodes[shard.index()] = number;
                }
                if let Some(slice) = names.iter().position(|name| name.as_bytes() == key) {
                    counts.has_mark[slice] = true;
                    counts.marks[slice] =
                        number.filter(|mark| (2..=1 << INO_COUNTER_BITS).contains(mark));
                }
                true
            })?;
        }
        Ok(counts)
    }

    /// Returns the counter of slice 0 for an inode that the repair makes.
    pub fn unused(&self, numbers: &Numbers) -> u64 {
        let mark = self.marks.first().copied().flatten().unwrap_or(0);
        let highest = numbers.highest.first().copied().unwrap_or(0);
        mark.max(highest + 1).max(2)
    }

    /// Returns the inode number of a counter of slice 0.
    pub fn ino(counter: u64) -> Ino {
        ino_of(0, counter)
    }

    /// Compares the marks and the numbers of inodes with the inodes. `made` is the counter of the inode that the repair makes, if any.
    pub fn compare(
        &self,
        subject: Subject,
        numbers: &Numbers,
        made: Option<u64>,
        found: &mut Found,
    ) {
        self.compare_marks(subject.stores, numbers, found);
        if let Some(made) = made {
            let row = value_row(&ino_mark_name(0), mark_after(made));
            subject.stores.fix(found, row);
        }
        for shard in subject.stores.shards() {
            let (counted, rows) = (self.inodes[shard.index()], numbers.rows[shard.index()]);
            // A store without inodes need not have the row.
            if counted == Some(rows) || (counted.is_none() && rows == 0) {
                continue;
            }
            let impossible = || "an impossible number of".to_owned();
            let counted = counted.map_or_else(impossible, |counted| counted.to_string());
            found.damage(format!(
                "the store says that there are {counted} inodes, and there are {rows}"
            ));
            found.fix(shard, value_row(INODES_NAME, rows));
        }
    }

    fn compare_marks(&self, stores: &Stores, numbers: &Numbers, found: &mut Found) {
        for (slice, mark) in self.marks.iter().enumerate() {
            let highest = numbers.highest[slice];
            let is_impossible = self.has_mark[slice] && mark.is_none();
            // The root directory needs no mark.
            let is_low = highest > 1 && mark.is_none_or(|mark| mark <= highest);
            if !is_impossible && !is_low {
                continue;
            }
            let name = ino_mark_name(slice as SliceId);
            let mark = mark.map_or("no possible number".into(), |mark| mark.to_string());
            found.damage(format!(
                "the mark {name} is {mark}, and must be more than {highest}"
            ));
            stores.fix(found, value_row(&name, mark_after(highest)));
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
