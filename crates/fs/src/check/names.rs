//! Checks inodes, entries, links, orphans and attributes.

use std::collections::HashMap;

use jericho_format::FILE_BYTES_MAX;
use jericho_format::record::{self, key_number};

use super::stores::Fix;
use super::{Pass, Seen, Severity};
use crate::error::Result;
use crate::format;
use crate::shard::ShardId;
use crate::store::tables::Row;
use crate::store::tables::Table;
use crate::store::{Entry, codec};
use crate::types::{Ino, Kind, ROOT, SliceId};

/// Directory that takes the inodes without a path from the root.
const LOST_AND_FOUND: &[u8] = b"lost+found";

fn show(name: &[u8]) -> String {
    String::from_utf8_lossy(name).escape_debug().collect()
}

impl Pass<'_> {
    /// Has the repair put or remove a row in the store where it belongs.
    pub(super) fn fix(&mut self, row: Row) {
        let home = self.stores.home_of(row.table, &row.key);
        let shard = home.unwrap_or_else(|| self.stores.map().of_ino(ROOT));
        self.fixes.push(Fix { shard, row });
    }

    /// Has the repair remove a row from the store where it belongs.
    pub(super) fn remove(&mut self, table: Table, key: &[u8]) {
        self.fix(Row {
            table,
            key: key.to_vec(),
            value: None,
        });
    }

    /// Has the repair remove a row from the store that has it, because its key may make no sense.
    pub(super) fn remove_from(&mut self, shard: ShardId, table: Table, key: &[u8]) {
        let row = Row {
            table,
            key: key.to_vec(),
            value: None,
        };
        self.fixes.push(Fix { shard, row });
    }

    pub(super) fn put_inode(&mut self, ino: Ino) {
        if let Some(seen) = self.inodes.get(&ino) {
            let value = Some(codec::inode_to_bytes(&seen.record));
            let key = record::ino_key(ino).to_vec();
            self.fix(Row {
                table: Table::Inodes,
                key,
                value,
            });
        }
    }

    /// Adds an entry with the right hash.
    fn put_entry(&mut self, dir: Ino, name: &[u8], ino: Ino, kind: Kind) {
        let key = record::entry_key(dir, self.volume.hash_name(name), name);
        let value = Some(codec::entry_to_bytes(ino, kind).to_vec());
        self.fix(Row {
            table: Table::Entries,
            key,
            value,
        });
    }

    pub(super) fn inodes(&mut self) -> Result<()> {
        let stores = self.stores;
        stores.scan(Table::Inodes, |shard, key, value| {
            self.count_inode_row(shard);
            let ino = key_number(key).filter(|_| key.len() == 8);
            let Some(ino) = ino.filter(|ino| self.is_possible_ino(*ino)) else {
                self.damage(format!(
                    "a record has the impossible inode number {key:02x?}"
                ));
                self.remove_from(shard, Table::Inodes, key);
                return;
            };
            match codec::inode_from_bytes(ino, value) {
                Ok(record) => {
                    let seen = Seen {
                        record,
                        names: 0,
                        entries: 0,
                        subdirectories: 0,
                        reachable: false,
                        orphan: false,
                        blocks: 0,
                        name_key: None,
                    };
                    self.inodes.insert(ino, seen);
                }
                Err(_) => {
                    self.damage(format!(
                        "the record of inode {ino} is invalid; the inode is lost"
                    ));
                    self.remove_from(shard, Table::Inodes, key);
                }
            }
        })?;
        let root = self.inodes.get(&ROOT).map(|seen| seen.record.kind);
        if root != Some(Kind::Directory) {
            self.damage("there is no root directory".into());
            let record = format::root((0, 0));
            let seen = Seen {
                record,
                names: 0,
                entries: 0,
                subdirectories: 0,
                reachable: false,
                orphan: false,
                blocks: 0,
                name_key: None,
            };
            self.inodes.insert(ROOT, seen);
            self.put_inode(ROOT);
        }
        Ok(())
    }

    pub(super) fn orphans(&mut self) -> Result<()> {
        let stores = self.stores;
        stores.scan(Table::Orphans, |shard, key, _| {
            match key_number(key).and_then(|ino| self.inodes.get_mut(&ino)) {
                Some(seen) => seen.orphan = true,
                None => {
                    let ino = key_number(key).unwrap_or_default();
                    self.damage(format!("inode {ino} is to be removed but does not exist"));
                    self.remove_from(shard, Table::Orphans, key);
                }
            }
        })
    }

    pub(super) fn entries(&mut self) -> Result<()> {
        // The directories in each directory, to find the reachable inodes.
        let mut children: HashMap<Ino, Vec<Ino>> = HashMap::new();
        let stores = self.stores;
        stores.scan(Table::Entries, |shard, key, value| {
            let dir = key_number(key).unwrap_or_default();
            match codec::entry_of_row(key, value) {
                Ok(entry) => self.entry(dir, key, &entry, &mut children),
                Err(_) => {
                    self.damage(format!("an entry of directory {dir} is invalid"));
                    self.remove_from(shard, Table::Entries, key);
                }
            }
        })?;
        let mut next = vec![ROOT];
        while let Some(dir) = next.pop() {
            if let Some(seen) = self.inodes.get_mut(&dir)
                && !seen.reachable
            {
                seen.reachable = true;
                next.extend(children.remove(&dir).into_iter().flatten());
            }
        }
        Ok(())
    }

    fn entry(
        &mut self,
        dir: Ino,
        key: &[u8],
        entry: &Entry,
        children: &mut HashMap<Ino, Vec<Ino>>,
    ) {
        let name = show(&entry.name);
        let ino = entry.ino;
        let wrong = if entry.name.is_empty()
            || entry.name.len() > 255
            || matches!(&entry.name[..], b"." | b"..")
            || entry.name.iter().any(|b| matches!(b, 0 | b'/'))
        {
            Some("has an impossible name".to_owned())
        } else if self
            .inodes
            .get(&dir)
            .is_none_or(|d| d.record.kind != Kind::Directory)
        {
            Some("is in no directory".to_owned())
        } else {
            match self.inodes.get(&ino) {
                None => Some(format!("names inode {ino}, which does not exist")),
                Some(seen)
                    if seen.record.kind == Kind::Directory && (ino == ROOT || seen.names > 0) =>
                {
                    Some(format!("is a second name of directory {ino}"))
                }
                Some(_) => None,
            }
        };
        if let Some(wrong) = wrong {
            self.damage(format!("entry {name} of directory {dir} {wrong}"));
            self.remove(Table::Entries, key);
            return;
        }
        if entry.hash != self.volume.hash_name(&entry.name) {
            self.damage(format!("entry {name} of directory {dir} has a wrong hash"));
            self.remove(Table::Entries, key);
            self.put_entry(dir, &entry.name, ino, entry.kind);
        }
        let Some(seen) = self.inodes.get_mut(&ino) else {
            return;
        };
        seen.names += 1;
        let kind = seen.record.kind;
        let parent = seen.record.parent;
        if kind == Kind::Directory {
            seen.record.parent = dir;
            seen.name_key = Some(key.into());
            if dir == ROOT && &entry.name[..] == LOST_AND_FOUND {
                self.lost_and_found = Some(ino);
            }
            children.entry(dir).or_default().push(ino);
        }
        if kind != entry.kind {
            self.damage(format!(
                "entry {name} of directory {dir} has the wrong type for inode {ino}"
            ));
            self.put_entry(dir, &entry.name, ino, kind);
        }
        if kind == Kind::Directory && parent != dir {
            self.damage(format!(
                "directory {ino} is in {dir} but says that it is in {parent}"
            ));
            self.put_inode(ino);
        }
        if let Some(directory) = self.inodes.get_mut(&dir) {
            directory.entries += 1;
            directory.subdirectories += u64::from(kind == Kind::Directory);
        }
    }

    /// Checks link counts, sizes of directories, and inodes without a name.
    pub(super) fn links(&mut self) {
        let mut lost = Vec::new();
        let all: Vec<Ino> = self.inodes.keys().copied().collect();
        for ino in all {
            self.slices_of_inode(ino);
            if self.is_open_orphan(ino) {
                continue;
            }
            // A directory that has a name and cannot be reached is below one without a name, or in a cycle.
            if ino != ROOT && self.inodes.get(&ino).is_some_and(|seen| seen.names == 0) {
                lost.push(ino);
            }
            self.link_count(ino);
            self.size_of_inode(ino);
        }
        self.cycles(&mut lost);
        for ino in &lost {
            self.damage(format!("no name leads to inode {ino}"));
        }
        if !lost.is_empty() {
            self.adopt(&lost);
        }
    }

    /// Checks that the slices of an inode exist.
    fn slices_of_inode(&mut self, ino: Ino) {
        let Some(seen) = self.inodes.get(&ino) else {
            return;
        };
        let slices = self.volume.slices().len();
        let beyond = |slice: Option<SliceId>| slice.is_some_and(|s| usize::from(s) >= slices);
        if beyond(seen.record.slice) || beyond(seen.record.placement) {
            if let Some(seen) = self.inodes.get_mut(&ino) {
                let record = &mut seen.record;
                record.slice = record.slice.map(|s| if beyond(Some(s)) { 0 } else { s });
                record.placement = record.placement.filter(|s| !beyond(Some(*s)));
            }
            self.damage(format!("inode {ino} is of a slice that does not exist"));
            self.put_inode(ino);
        }
    }

    /// Returns whether an inode was open without a name. Reports orphans.
    fn is_open_orphan(&mut self, ino: Ino) -> bool {
        let Some(seen) = self.inodes.get(&ino) else {
            return false;
        };
        let (names, orphan) = (seen.names, seen.orphan);
        if orphan && names > 0 {
            self.damage(format!(
                "inode {ino} is to be removed but has {names} names"
            ));
            self.remove(Table::Orphans, &record::ino_key(ino));
        } else if orphan {
            self.find(
                Severity::Info,
                format!("inode {ino} was open without a name; the next mount removes it"),
            );
            return true;
        }
        false
    }

    /// Compares the link count of an inode with its names, or of a directory with its subdirectories.
    fn link_count(&mut self, ino: Ino) {
        let Some(seen) = self.inodes.get_mut(&ino) else {
            return;
        };
        let names = seen.names;
        let links = if seen.record.kind == Kind::Directory {
            2 + seen.subdirectories
        } else {
            names
        };
        let found = u64::from(seen.record.nlink);
        if found != links && names + u64::from(ino == ROOT) > 0 {
            seen.record.nlink = links as u32;
            self.damage(format!(
                "inode {ino} has link count {found} instead of {links}"
            ));
            self.put_inode(ino);
        }
    }

    /// Compares the size of a directory with its entries, of a symbolic link with its target, and of a file with the largest
    /// size that a file can have.
    fn size_of_inode(&mut self, ino: Ino) {
        let Some(seen) = self.inodes.get_mut(&ino) else {
            return;
        };
        let (entries, size) = (seen.entries, seen.record.size);
        let wrong_size = match seen.record.kind {
            Kind::Directory => (size != entries).then_some(entries),
            Kind::Symlink => {
                let length = seen.record.target.as_ref().map_or(0, |t| t.len() as u64);
                (size != length).then_some(length)
            }
            Kind::File => (size > FILE_BYTES_MAX).then_some(FILE_BYTES_MAX),
            _ => None,
        };
        if let Some(right) = wrong_size {
            seen.record.size = right;
            self.damage(format!("inode {ino} has size {size} instead of {right}"));
            self.put_inode(ino);
        }
    }

    /// Finds directories that contain each other. Treats one directory of each cycle as lost.
    fn cycles(&mut self, lost: &mut Vec<Ino>) {
        let is_unreachable =
            |seen: &Seen| seen.record.kind == Kind::Directory && !seen.reachable && !seen.orphan;
        let start: Vec<Ino> = self
            .inodes
            .iter()
            .filter(|(_, s)| is_unreachable(s))
            .map(|(ino, _)| *ino)
            .collect();
        let mut done: HashMap<Ino, Ino> = HashMap::new();
        for first in start {
            let mut at = first;
            // Follows the parents up to an inode already visited, or around the cycle.
            while let Some(seen) = self.inodes.get(&at)
                && is_unreachable(seen)
                && !lost.contains(&at)
                && !done.contains_key(&at)
            {
                done.insert(at, first);
                at = seen.record.parent;
            }
            if done.get(&at) == Some(&first) && !lost.contains(&at) {
                lost.push(at);
            }
        }
    }

    /// Gives lost inodes a name in /lost+found.
    fn adopt(&mut self, lost: &[Ino]) {
        let hash = self.volume.hash_name(LOST_AND_FOUND);
        let key = record::entry_key(ROOT, hash, LOST_AND_FOUND);
        let dir = match self.lost_and_found {
            Some(ino) => ino,
            None => {
                let ino = self.new_ino();
                let mut record = format::root((0, 0));
                record.perm = 0o700;
                let value = Some(codec::inode_to_bytes(&record));
                let row_key = record::ino_key(ino).to_vec();
                self.fix(Row {
                    table: Table::Inodes,
                    key: row_key,
                    value,
                });
                let value = Some(codec::entry_to_bytes(ino, Kind::Directory).to_vec());
                self.fix(Row {
                    table: Table::Entries,
                    key,
                    value,
                });
                ino
            }
        };
        for ino in lost {
            let Some(seen) = self.inodes.get_mut(ino) else {
                continue;
            };
            let kind = seen.record.kind;
            if kind == Kind::Directory {
                seen.record.parent = dir;
                // Breaks a cycle where the search entered it, by removing the name inside the cycle.
                if let Some(key) = seen.name_key.take() {
                    self.remove(Table::Entries, &key);
                }
                self.put_inode(*ino);
            }
            let name = format!("#{ino}").into_bytes();
            self.put_entry(dir, &name, *ino, kind);
        }
    }

    pub(super) fn xattrs(&mut self) -> Result<()> {
        let stores = self.stores;
        stores.scan(Table::Xattrs, |shard, key, _| {
            let ino = key_number(key).unwrap_or_default();
            if !self.inodes.contains_key(&ino) {
                let name = show(key.get(8..).unwrap_or_default());
                self.damage(format!(
                    "attribute {name} belongs to inode {ino}, which does not exist"
                ));
                self.remove_from(shard, Table::Xattrs, key);
            }
        })
    }
}
