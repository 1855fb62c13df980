//! readdir: returns entries in order of the hashes of their names.
//!
//! The cookie of an entry is the hash of its name, so it stays valid when other entries are created or removed. Names with
//! equal hashes (one pair in 2^63) have no cookie of their own. All of them but the last carry the cookie before their hash. A
//! reader that stops between them gets them again instead of missing one.

use crate::core::FIRST_HASH;
use crate::error::{Error, Result};
use crate::fs::Fs;
use crate::types::{DirEntry, Ino, Kind};

/// Cookies of "." and "..".
const DOT: u64 = 1;
const DOT_DOT: u64 = 2;
/// Number of entries to read at first, because a reader's buffer takes few. Later reads are larger.
const FIRST_ENTRIES: usize = 64;
const MOST_ENTRIES: usize = 1024;

impl Fs {
    /// Calls `each` with the entries after `cookie` until it returns false. With cookie 0 begins with "." and "..". Holds no
    /// lock while `each` runs.
    pub fn readdir(
        &self,
        dir: Ino,
        cookie: u64,
        each: &mut dyn FnMut(DirEntry) -> bool,
    ) -> Result<()> {
        let core = &self.core;
        let inode = core.directory(dir)?;
        let parent = inode.meta.read().rec.parent;
        for (at, ino, name) in [(DOT, dir, "."), (DOT_DOT, parent, "..")] {
            let entry = DirEntry {
                ino,
                kind: Kind::Directory,
                name: name.into(),
                cookie: at,
            };
            if cookie < at && !each(entry) {
                return Ok(());
            }
        }
        let mut from = (cookie + 1).max(FIRST_HASH);
        let mut limit = FIRST_ENTRIES;
        loop {
            let (entries, last) = {
                let meta = inode.meta.read();
                if meta.rec.nlink == 0 {
                    return Ok(());
                }
                let stored = if meta.stored {
                    core.store_of(dir).entries(dir, from, limit)?
                } else {
                    Vec::new()
                };
                // Damaged pages of the store may return entries in any order. The reader would never come to an end.
                if !stored.is_sorted_by_key(|entry| entry.hash)
                    || stored.first().is_some_and(|entry| entry.hash < from)
                {
                    let what = format!("the entries of directory {dir} are not in order");
                    let error = Error::Damaged(what);
                    core.store_of(dir).note_damage(&error);
                    return Err(error);
                }
                let last = match stored.last() {
                    Some(entry) if stored.len() >= limit => entry.hash,
                    _ => u64::MAX,
                };
                let last = last.min(meta.overlay.stop(from, limit));
                (meta.overlay.merge(stored, from, last), last)
            };
            for (i, entry) in entries.iter().enumerate() {
                let shares = entries
                    .get(i + 1)
                    .is_some_and(|next| next.hash == entry.hash);
                let entry = DirEntry {
                    ino: entry.ino,
                    kind: entry.kind,
                    name: entry.name.to_vec(),
                    cookie: entry.hash - u64::from(shares),
                };
                if !each(entry) {
                    return Ok(());
                }
            }
            if last == u64::MAX {
                return Ok(());
            }
            from = last + 1;
            limit = (limit * 2).min(MOST_ENTRIES);
        }
    }
}
