//! Gives inodes without a path from the root a name in /lost+found.

use jericho_format::record;
use jericho_metadata::store::codec;
use jericho_metadata::store::tables::Table;

use super::findings::Found;
use super::stores::{Range, Subject};
use crate::error::{Error, Result};
use crate::format;
use crate::types::{Ino, Kind, ROOT};

/// Directory that takes the inodes without a path from the root.
const LOST_AND_FOUND: &[u8] = b"lost+found";

/// An inode without a path from the root.
#[derive(Clone, Copy)]
pub(super) struct Lost {
    pub ino: Ino,
    /// The directory that has the inode's name, if the inode is a directory in a cycle.
    pub named_in: Option<Ino>,
}

/// Reports the inodes, and has the repair name them in /lost+found. Returns true if the repair makes that directory, with the number
/// `new_ino`.
pub(super) fn adopt(
    subject: Subject,
    lost: &[Lost],
    new_ino: Ino,
    found: &mut Found,
) -> Result<bool> {
    for Lost { ino, .. } in lost {
        found.damage(format!("no name leads to inode {ino}"));
    }
    if lost.is_empty() {
        return Ok(false);
    }
    let present = present(subject)?;
    let dir = present.unwrap_or_else(|| {
        make(subject, new_ino, found);
        new_ino
    });
    for one in lost {
        adopt_one(subject, *one, dir, found)?;
    }
    Ok(present.is_none())
}

/// Returns the number of /lost+found if it exists.
fn present(subject: Subject) -> Result<Option<Ino>> {
    let stores = subject.stores;
    let hash = subject.volume.hash_name(LOST_AND_FOUND);
    let store = |ino| &stores.all[stores.map().of_ino(ino).index()];
    let entry = readable(store(ROOT).entry(ROOT, hash, LOST_AND_FOUND))?;
    let Some((ino, Kind::Directory)) = entry else {
        return Ok(None);
    };
    let inode = readable(store(ino).inode(ino))?;
    Ok(inode
        .filter(|inode| inode.kind == Kind::Directory)
        .map(|_| ino))
}

/// Returns a row, or `None` if the row is invalid.
fn readable<T>(row: Result<Option<T>>) -> Result<Option<T>> {
    match row {
        Err(Error::Damaged(_)) => Ok(None),
        row => row,
    }
}

fn make(subject: Subject, ino: Ino, found: &mut Found) {
    let stores = subject.stores;
    let mut inode = format::root((0, 0));
    inode.perm = 0o700;
    let value = codec::inode_to_bytes(&inode);
    stores.put(found, Table::Inodes, &record::ino_key(ino), value);
    put_entry(subject, found, ROOT, LOST_AND_FOUND, (ino, Kind::Directory));
}

fn put_entry(subject: Subject, found: &mut Found, dir: Ino, name: &[u8], (ino, kind): (Ino, Kind)) {
    let key = record::entry_key(dir, subject.volume.hash_name(name), name);
    let value = codec::entry_to_bytes(ino, kind).to_vec();
    subject.stores.put(found, Table::Entries, &key, value);
}

fn adopt_one(subject: Subject, lost: Lost, dir: Ino, found: &mut Found) -> Result<()> {
    let (stores, ino) = (subject.stores, lost.ino);
    let store = &stores.all[stores.map().of_ino(ino).index()];
    let Some(mut inode) = readable(store.inode(ino))? else {
        return Ok(());
    };
    let kind = inode.kind;
    // Removing this name ends the cycle.
    if let Some(named_in) = lost.named_in {
        remove_names(subject, named_in, ino, found)?;
    }
    if kind == Kind::Directory {
        inode.parent = dir;
        let value = codec::inode_to_bytes(&inode);
        stores.put(found, Table::Inodes, &record::ino_key(ino), value);
    }
    let name = format!("#{ino}").into_bytes();
    put_entry(subject, found, dir, &name, (ino, kind));
    Ok(())
}

/// Removes the entries of a directory that name an inode.
fn remove_names(subject: Subject, dir: Ino, ino: Ino, found: &mut Found) -> Result<()> {
    let stores = subject.stores;
    let (from, to) = (record::ino_key(dir), record::ino_key(dir + 1));
    let range = Range {
        from: &from,
        to: Some(&to),
        ..Range::all(stores.map().of_ino(dir), Table::Entries)
    };
    stores.scan(range, |key, value| {
        if codec::entry_of_row(key, value).is_ok_and(|entry| entry.ino == ino) {
            stores.remove(found, Table::Entries, key);
        }
        true
    })
}
