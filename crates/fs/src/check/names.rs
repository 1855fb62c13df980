//! Compares entries, orphans and attributes with the inodes of a window.

use std::collections::BTreeMap;

use jericho_format::record::{self, key_number};
use jericho_metadata::shard::ShardId;
use jericho_metadata::store::tables::Table;
use jericho_metadata::store::{Entry, codec};

use super::findings::{FIXES_MAX, Found, show};
use super::index::{Index, Lookup, Part, Place};
use super::parallel::in_parallel;
use super::stores::{Range, Subject};
use crate::error::Result;
use crate::types::{Ino, Kind, ROOT};

/// An entry that names a directory, which records another parent.
struct Astray {
    dir: Ino,
    entry: Entry,
}

/// Compares orphans and attributes with the inodes of the window. Marks orphans in the index.
pub(super) fn orphans_and_xattrs(subject: Subject, index: &Index, found: &mut Found) -> Result<()> {
    let each = in_parallel(&index.parts, |part| {
        let mut found = Found::part_of(index.parts.len());
        if !part.is_over() {
            orphans(subject, index, part, &mut found)?;
            xattrs(subject, index, part, &mut found)?;
        }
        Ok(found)
    })?;
    each.into_iter().for_each(|one| found.extend(one));
    Ok(())
}

fn orphans(subject: Subject, index: &Index, part: &Part, found: &mut Found) -> Result<()> {
    let (from, to) = part.keys();
    let range = Range {
        from: &from,
        to: to.as_deref(),
        ..Range::all(part.shard, Table::Orphans)
    };
    subject.stores.scan_all(range, found, |found, key, _| {
        match key_number(key).and_then(|ino| index.place(ino)) {
            Some(place) => place.set_orphan(),
            None => {
                let ino = key_number(key).unwrap_or_default();
                found.damage(format!("inode {ino} is to be removed but does not exist"));
                found.remove_from(part.shard, Table::Orphans, key);
            }
        }
        true
    })
}

fn xattrs(subject: Subject, index: &Index, part: &Part, found: &mut Found) -> Result<()> {
    let (from, to) = part.keys();
    let range = Range {
        from: &from,
        to: to.as_deref(),
        ..Range::all(part.shard, Table::Xattrs)
    };
    // The inode of the last row, and whether it exists.
    let mut last = (0, false);
    subject.stores.scan_all(range, found, |found, key, _| {
        let ino = key_number(key).unwrap_or_default();
        if last.0 != ino || !last.1 {
            last = (ino, index.place(ino).is_some());
        }
        if !last.1 {
            let name = show(key.get(8..).unwrap_or_default());
            found.damage(format!(
                "attribute {name} belongs to inode {ino}, which does not exist"
            ));
            found.remove_from(part.shard, Table::Xattrs, key);
        }
        true
    })
}

/// Compares all entries with the inodes of the window, and counts them in the index. Returns the directories whose name is not in
/// the directory that they record as their parent, with the directory that has the name.
pub(super) fn entries(
    subject: Subject,
    index: &Index,
    found: &mut Found,
) -> Result<BTreeMap<Ino, Ino>> {
    let shards = subject.stores.shards();
    let each = in_parallel(&shards, |shard| {
        let mut entries = Entries {
            subject,
            index,
            shard: *shard,
            found: Found::part_of(shards.len()),
            astray_max: (FIXES_MAX / shards.len().max(1)).max(1),
            astray: Vec::new(),
            dir: (0, Lookup::Elsewhere),
        };
        entries.all()?;
        Ok((entries.found, entries.astray))
    })?;
    let mut moved = BTreeMap::new();
    let mut all_astray = Vec::new();
    for (one, astray) in each {
        found.extend(one);
        all_astray.extend(astray);
    }
    for Astray { dir, entry } in all_astray {
        let Some(place) = index.place(entry.ino) else {
            continue;
        };
        if place.set_named() {
            let what = format!("is a second name of directory {}", entry.ino);
            refuse(subject, found, dir, &entry, &what);
        } else {
            moved.insert(entry.ino, dir);
            accept(subject, found, dir, index.lookup(dir), &entry, place);
        }
    }
    Ok(moved)
}

/// The entries of a shard.
struct Entries<'a> {
    subject: Subject<'a>,
    index: &'a Index,
    shard: ShardId,
    found: Found,
    astray: Vec<Astray>,
    astray_max: usize,
    /// The directory of the last entry, and what the index knows of it.
    dir: (Ino, Lookup<'a>),
}

impl Entries<'_> {
    fn all(&mut self) -> Result<()> {
        let stores = self.subject.stores;
        let range = Range::all(self.shard, Table::Entries);
        let mut misplaced = Found::part_of(stores.all.len());
        let is_first = self.index.is_first;
        // The first window reports rows that belong to no window.
        let mut each = |key: &[u8], value: &[u8]| {
            let dir = key_number(key).unwrap_or_default();
            match codec::entry_of_row(key, value) {
                Ok(entry) => self.one(dir, entry),
                Err(_) if is_first => {
                    let text = format!("an entry of directory {dir} is invalid");
                    self.found.damage(text);
                    self.found.remove_from(self.shard, Table::Entries, key);
                }
                Err(_) => {}
            }
            true
        };
        match is_first {
            true => {
                stores.scan_all(range, &mut misplaced, |_, key, value| each(key, value))?;
            }
            false => stores.scan(range, each)?,
        }
        self.found.extend(misplaced);
        Ok(())
    }

    fn one(&mut self, dir: Ino, entry: Entry) {
        let index = self.index;
        if self.dir.0 != dir {
            self.dir = (dir, index.lookup(dir));
        }
        let target = index.lookup(entry.ino);
        let is_named_right = is_possible_name(&entry.name);
        let wrong = match (&self.dir.1, &target) {
            (Lookup::Elsewhere, Lookup::Elsewhere) => return,
            // The window that has the named inode refuses the entry.
            (_, Lookup::Elsewhere) if !is_named_right => return,
            _ if !is_named_right => Some("has an impossible name".to_owned()),
            (Lookup::Missing, _) => Some("is in no directory".to_owned()),
            (Lookup::Here(place), _) if !place.is(Kind::Directory) => {
                Some("is in no directory".to_owned())
            }
            (_, Lookup::Missing) => {
                Some(format!("names inode {}, which does not exist", entry.ino))
            }
            (Lookup::Here(place), Lookup::Elsewhere) => {
                place.add_entry(entry.kind == Kind::Directory);
                return;
            }
            (_, Lookup::Here(place)) if place.is(Kind::Directory) => {
                self.name_of_directory(dir, &entry, *place)
            }
            (_, Lookup::Here(_)) => None,
        };
        if let Some(wrong) = wrong {
            refuse(self.subject, &mut self.found, dir, &entry, &wrong);
            return;
        }
        let Lookup::Here(place) = target else {
            return;
        };
        if place.is(Kind::Directory) && place.parent() != dir {
            // Counts only if no entry in the recorded parent names the directory.
            if self.astray.len() < self.astray_max {
                self.astray.push(Astray { dir, entry });
            } else {
                self.found.is_cut = true;
            }
            return;
        }
        accept(
            self.subject,
            &mut self.found,
            dir,
            self.dir.1,
            &entry,
            place,
        );
    }

    /// Returns why an entry cannot be the name of a directory.
    fn name_of_directory(&self, dir: Ino, entry: &Entry, place: Place) -> Option<String> {
        let is_second = entry.ino == ROOT || (place.parent() == dir && place.set_named());
        is_second.then(|| format!("is a second name of directory {}", entry.ino))
    }
}

fn is_possible_name(name: &[u8]) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && !matches!(name, b"." | b"..")
        && !name.iter().any(|byte| matches!(byte, 0 | b'/'))
}

/// Reports an entry, and has the repair remove it.
fn refuse(subject: Subject, found: &mut Found, dir: Ino, entry: &Entry, wrong: &str) {
    let name = show(&entry.name);
    found.damage(format!("entry {name} of directory {dir} {wrong}"));
    let key = record::entry_key(dir, entry.hash, &entry.name);
    subject.stores.remove(found, Table::Entries, &key);
}

/// Counts an entry for its directory, if the window has it, and for the inode that it names. Has the repair correct a wrong hash or type.
fn accept(
    subject: Subject,
    found: &mut Found,
    dir: Ino,
    directory: Lookup,
    entry: &Entry,
    place: Place,
) {
    place.add_name();
    if let Lookup::Here(directory) = directory {
        directory.add_entry(place.is(Kind::Directory));
    }
    let hash = subject.volume.hash_name(&entry.name);
    let name = show(&entry.name);
    let has_kind = place.is(entry.kind);
    if entry.hash != hash {
        found.damage(format!("entry {name} of directory {dir} has a wrong hash"));
        let key = record::entry_key(dir, entry.hash, &entry.name);
        subject.stores.remove(found, Table::Entries, &key);
    }
    if !has_kind {
        found.damage(format!(
            "entry {name} of directory {dir} has the wrong type for inode {}",
            entry.ino
        ));
    }
    if entry.hash != hash || !has_kind {
        let key = record::entry_key(dir, hash, &entry.name);
        let value = codec::entry_to_bytes(entry.ino, place.kind());
        let stores = subject.stores;
        stores.put(found, Table::Entries, &key, value.to_vec());
    }
}
