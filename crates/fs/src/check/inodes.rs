//! Reads inodes into an index, and later compares each with what the other tables say about it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use jericho_format::FILE_BYTES_MAX;
use jericho_format::record::{self, key_number, parts_of_ino};
use jericho_metadata::store::tables::Table;
use jericho_metadata::store::{InodeRecord, codec};

use super::findings::{Found, Severity, show_key};
use super::index::{Index, Part, Place};
use super::parallel::in_parallel;
use super::stores::{Range, Subject};
use crate::error::Result;
use crate::format;
use crate::types::{Ino, Kind, ROOT, SliceId};

/// Counts and greatest numbers of the inodes of a volume.
#[derive(Clone, Default)]
pub(super) struct Numbers {
    /// By shard: number of rows with inodes.
    pub rows: Vec<u64>,
    /// By slice: the largest counter of an inode number in use, or 0.
    pub highest: Vec<u64>,
    /// Whether the repair makes the root directory, because it is missing.
    pub is_root_made: bool,
}

/// What loading a part has found.
struct Loaded {
    part: Part,
    found: Found,
    rows: u64,
    highest: Vec<u64>,
    is_root_made: bool,
}

impl Loaded {
    /// Adds an inode of the table.
    fn add(&mut self, subject: Subject, ino: Ino, value: &[u8]) {
        match codec::inode_from_bytes(ino, value) {
            Ok(inode) if ino != ROOT || inode.kind == Kind::Directory => {
                self.part.push(ino, inode.kind, inode.parent);
            }
            // The new root directory replaces the row.
            Ok(_) => {}
            Err(_) => {
                self.found.damage(format!(
                    "the record of inode {ino} is invalid; the inode is lost"
                ));
                let key = record::ino_key(ino);
                subject.stores.remove(&mut self.found, Table::Inodes, &key);
            }
        }
    }

    fn make_root(&mut self) {
        self.found.damage("there is no root directory".into());
        self.is_root_made = true;
        self.part.push(ROOT, Kind::Directory, ROOT);
    }
}

/// Reads inodes into an index until it is full. `starts` has the first number for each shard, or `None` if earlier windows have
/// had all inodes of the shard.
pub(super) fn load(
    subject: Subject,
    starts: &[Option<Ino>],
    numbers: &mut Numbers,
    found: &mut Found,
) -> Result<Index> {
    let map = subject.stores.map();
    let is_first = starts.iter().all(|start| *start == Some(0));
    // The shards share the memory, so one shard can take most of it.
    let spent = AtomicUsize::new(0);
    let parts: Vec<_> = subject.stores.shards().into_iter().zip(starts).collect();
    let loaded = in_parallel(&parts, |(shard, start)| {
        let slices = subject.volume.slices().len();
        let loaded = Loaded {
            part: Part::new(*shard, **start),
            found: Found::part_of(parts.len()),
            rows: 0,
            highest: vec![0; slices],
            is_root_made: false,
        };
        match start {
            Some(_) => load_part(
                subject,
                loaded,
                &spent,
                is_first && *shard == map.of_ino(ROOT),
            ),
            None => Ok(loaded),
        }
    })?;
    let mut parts = Vec::with_capacity(loaded.len());
    for one in loaded {
        found.extend(one.found);
        numbers.rows[one.part.shard.index()] += one.rows;
        for (highest, own) in numbers.highest.iter_mut().zip(one.highest) {
            *highest = own.max(*highest);
        }
        numbers.is_root_made |= one.is_root_made;
        parts.push(one.part);
    }
    Ok(Index::new(parts, map, is_first))
}

fn load_part(
    subject: Subject,
    mut loaded: Loaded,
    spent: &AtomicUsize,
    mut needs_root: bool,
) -> Result<Loaded> {
    let (from, _) = loaded.part.keys();
    let range = Range {
        from: &from,
        ..Range::all(loaded.part.shard, Table::Inodes)
    };
    let mut misplaced = Found::part_of(subject.stores.all.len());
    subject
        .stores
        .scan_all(range, &mut misplaced, |_, key, value| {
            let ino = key_number(key).filter(|_| key.len() == 8);
            // At least one inode of each shard, so that each window makes progress.
            if let Some(ino) = ino
                && loaded.part.bytes() > 0
                && spent.load(Ordering::Relaxed) >= subject.limits.index_bytes
            {
                loaded.part.end_before(ino);
                return false;
            }
            loaded.rows += 1;
            let possible = ino.and_then(|ino| {
                let (slice, counter) = parts_of_ino(ino)?;
                let highest = loaded.highest.get_mut(usize::from(slice))?;
                *highest = counter.max(*highest);
                Some(ino)
            });
            let Some(ino) = possible else {
                loaded.found.damage(format!(
                    "a record has the impossible inode number {}",
                    show_key(key)
                ));
                let shard = loaded.part.shard;
                loaded.found.remove_from(shard, Table::Inodes, key);
                return true;
            };
            let before = loaded.part.bytes();
            let is_due = std::mem::take(&mut needs_root);
            if is_due && ino != ROOT {
                loaded.make_root();
            }
            loaded.add(subject, ino, value);
            if is_due && loaded.part.bytes() == 0 {
                loaded.make_root();
            }
            spent.fetch_add(loaded.part.bytes() - before, Ordering::Relaxed);
            true
        })?;
    if needs_root {
        loaded.make_root();
    }
    loaded.found.extend(misplaced);
    Ok(loaded)
}

/// What the comparison of inodes has found.
#[derive(Default)]
pub(super) struct Compared {
    pub found: Found,
    pub directories: u64,
    pub files: u64,
    /// Inodes without a name, in order.
    pub lost: Vec<Ino>,
    /// Directories with a name, and their parents, in order.
    pub tree: Vec<(Ino, Ino)>,
    /// Whether there are more directories than `tree` has room for.
    pub is_tree_cut: bool,
}

/// Compares the inodes of a window with the counts of the check. `moved` maps directories to their parent, where they record another one.
pub(super) fn compare(
    subject: Subject,
    index: &Index,
    numbers: &Numbers,
    moved: &BTreeMap<Ino, Ino>,
    (lost_max, tree_max): (usize, usize),
) -> Result<Vec<Compared>> {
    let shards = index.parts.len();
    // The shards share the memory for directories.
    let in_tree = AtomicUsize::new(0);
    in_parallel(&index.parts, |part| {
        let mut compared = Compared {
            found: Found::part_of(shards),
            ..Compared::default()
        };
        if part.is_over() {
            return Ok(compared);
        }
        let mut one = |ino: Ino, record: InodeRecord, is_made: bool| {
            let Some(place) = index.place(ino) else {
                return;
            };
            match record.kind {
                Kind::Directory => compared.directories += 1,
                _ => compared.files += 1,
            }
            let parent = moved.get(&ino).copied();
            let comparison = Comparison {
                subject,
                ino,
                place,
                found: &mut compared.found,
            };
            let (is_lost, parent) = comparison.run(record, parent, is_made);
            if is_lost {
                if compared.lost.len() <= lost_max / shards {
                    compared.lost.push(ino);
                } else {
                    compared.found.is_cut = true;
                }
            } else if let Some(parent) = parent.filter(|_| ino != ROOT) {
                if in_tree.fetch_add(1, Ordering::Relaxed) < tree_max {
                    compared.tree.push((ino, parent));
                } else {
                    compared.is_tree_cut = true;
                }
            }
        };
        let is_root_made = index.is_first && numbers.is_root_made;
        if is_root_made && part.shard == subject.stores.map().of_ino(ROOT) {
            one(ROOT, format::root((0, 0)), true);
        }
        let (from, to) = part.keys();
        let range = Range {
            from: &from,
            to: to.as_deref(),
            ..Range::all(part.shard, Table::Inodes)
        };
        subject.stores.scan(range, |key, value| {
            let ino = key_number(key).filter(|_| key.len() == 8);
            let ino = ino.filter(|ino| !(is_root_made && *ino == ROOT));
            if let Some(ino) = ino
                && let Ok(record) = codec::inode_from_bytes(ino, value)
            {
                one(ino, record, false);
            }
            true
        })?;
        Ok(compared)
    })
}

/// The comparison of an inode.
struct Comparison<'a> {
    subject: Subject<'a>,
    ino: Ino,
    place: Place<'a>,
    found: &'a mut Found,
}

impl Comparison<'_> {
    /// Compares the inode. Returns whether it lacks a name that it must have, and the parent of a directory that has a name. `moved`
    /// is the directory that has the name, if the inode records another one.
    fn run(
        mut self,
        mut record: InodeRecord,
        moved: Option<Ino>,
        is_made: bool,
    ) -> (bool, Option<Ino>) {
        let ino = self.ino;
        let mut is_wrong = is_made;
        if let Some(parent) = moved {
            let before = std::mem::replace(&mut record.parent, parent);
            self.found.damage(format!(
                "directory {ino} is in {parent} but says that it is in {before}"
            ));
            is_wrong = true;
        }
        is_wrong |= self.slices(&mut record);
        is_wrong |= self.blocks(&mut record);
        let is_open_orphan = self.is_open_orphan();
        if !is_open_orphan {
            is_wrong |= self.links(&mut record);
            is_wrong |= self.size(&mut record);
        }
        if is_wrong {
            let value = codec::inode_to_bytes(&record);
            let key = record::ino_key(ino);
            let stores = self.subject.stores;
            stores.put(self.found, Table::Inodes, &key, value);
        }
        let is_lost = !is_open_orphan && ino != ROOT && self.place.names() == 0;
        let is_in_tree = !is_open_orphan && !is_lost && record.kind == Kind::Directory;
        (is_lost, is_in_tree.then_some(record.parent))
    }

    /// Checks that the slices of the inode exist.
    fn slices(&mut self, record: &mut InodeRecord) -> bool {
        let slices = self.subject.volume.slices().len();
        let beyond = |slice: Option<SliceId>| slice.is_some_and(|s| usize::from(s) >= slices);
        if !beyond(record.slice) && !beyond(record.placement) {
            return false;
        }
        record.slice = record.slice.map(|s| if beyond(Some(s)) { 0 } else { s });
        record.placement = record.placement.filter(|s| !beyond(Some(*s)));
        let text = format!("inode {} is of a slice that does not exist", self.ino);
        self.found.damage(text);
        true
    }

    /// Returns whether the inode was open without a name. Reports orphans.
    fn is_open_orphan(&mut self) -> bool {
        let (ino, names) = (self.ino, self.place.names());
        if !self.place.is_orphan() {
            return false;
        }
        if names == 0 {
            let text = format!("inode {ino} was open without a name; the next mount removes it");
            self.found.find(Severity::Info, text);
            return true;
        }
        self.found.damage(format!(
            "inode {ino} is to be removed but has {names} names"
        ));
        let stores = self.subject.stores;
        stores.remove(self.found, Table::Orphans, &record::ino_key(ino));
        false
    }

    /// Compares the link count with the number of names, or, of a directory, of subdirectories.
    fn links(&mut self, record: &mut InodeRecord) -> bool {
        let names = self.place.names();
        let links = match record.kind {
            Kind::Directory => 2 + self.place.entries().1,
            _ => names,
        };
        let counted = u64::from(record.nlink);
        if counted == links || (names == 0 && self.ino != ROOT) {
            return false;
        }
        record.nlink = links as u32;
        self.found.damage(format!(
            "inode {} has link count {counted} instead of {links}",
            self.ino
        ));
        true
    }

    /// Compares the size of a directory with its entries, of a symbolic link with its target, and of a file with the largest
    /// size that a file can have.
    fn size(&mut self, record: &mut InodeRecord) -> bool {
        let size = record.size;
        let right = match record.kind {
            Kind::Directory => self.place.entries().0,
            Kind::Symlink => record.target.as_ref().map_or(0, |t| t.len() as u64),
            Kind::File => size.min(FILE_BYTES_MAX),
            _ => size,
        };
        if size == right {
            return false;
        }
        record.size = right;
        self.found.damage(format!(
            "inode {} has size {size} instead of {right}",
            self.ino
        ));
        true
    }

    /// Compares the number of blocks with the extents.
    fn blocks(&mut self, record: &mut InodeRecord) -> bool {
        let (said, blocks) = (record.blocks, self.place.blocks());
        if said == blocks {
            return false;
        }
        record.blocks = blocks;
        self.found.damage(format!(
            "inode {} says that it has {said} blocks, and it has {blocks}",
            self.ino
        ));
        true
    }
}
