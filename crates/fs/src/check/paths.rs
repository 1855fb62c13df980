//! Finds paths of inodes, in memory that grows only with the number of these inodes and the depth of their directories.

use std::collections::{BTreeMap, BTreeSet};

use jericho_metadata::store::codec;
use jericho_metadata::store::tables::Table;

use super::stores::{Range, Stores};
use crate::error::Result;
use crate::types::{Ino, Kind, ROOT};

/// Most directories above all wanted inodes. Inodes for which there are more get no path.
const DIRECTORIES_MAX: usize = 100_000;

/// The directory and the name of an inode.
type Place = (Ino, Box<[u8]>);

/// Returns a path of each of these inodes that has one. Reads all entries twice.
pub(super) fn paths(stores: &Stores, wanted: &BTreeSet<Ino>) -> Result<BTreeMap<Ino, String>> {
    if wanted.is_empty() {
        return Ok(BTreeMap::new());
    }
    let mut places = places(stores, |_, ino, kind| {
        kind != Kind::Directory && wanted.contains(&ino)
    })?;
    let mut above: BTreeMap<Ino, Ino> = BTreeMap::new();
    for (first, _) in places.values() {
        let mut dir = *first;
        // Visits each directory once, because a damaged tree may have cycles.
        while dir != ROOT && above.len() < DIRECTORIES_MAX && !above.contains_key(&dir) {
            let store = &stores.all[stores.map().of_ino(dir).index()];
            let Ok(Some(record)) = store.inode(dir) else {
                break;
            };
            above.insert(dir, record.parent);
            dir = record.parent;
        }
    }
    places.append(&mut self::places(stores, |dir, ino, kind| {
        kind == Kind::Directory && above.get(&ino) == Some(&dir)
    })?);
    let path = |ino: &Ino| Some((*ino, path(&places, *ino)?));
    Ok(wanted.iter().filter_map(path).collect())
}

/// Returns the places of the inodes whose entries `is_wanted` chooses by directory, inode and type.
fn places(
    stores: &Stores,
    is_wanted: impl Fn(Ino, Ino, Kind) -> bool,
) -> Result<BTreeMap<Ino, Place>> {
    let mut places = BTreeMap::new();
    for shard in stores.shards() {
        stores.scan(Range::all(shard, Table::Entries), |key, value| {
            let dir = jericho_format::record::key_number(key);
            if let (Some(dir), Ok(entry)) = (dir, codec::entry_of_row(key, value))
                && is_wanted(dir, entry.ino, entry.kind)
            {
                places.insert(entry.ino, (dir, entry.name));
            }
            true
        })?;
    }
    Ok(places)
}

fn path(places: &BTreeMap<Ino, Place>, ino: Ino) -> Option<String> {
    let (mut path, mut at) = (String::new(), ino);
    for _ in 0..places.len() {
        let (dir, name) = places.get(&at)?;
        let name = super::findings::show(name);
        path = format!("/{name}{path}");
        at = *dir;
        if at == ROOT {
            return Some(path);
        }
    }
    None
}
