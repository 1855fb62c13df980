//! Renames: move, replace and exchange names.
//!
//! A directory's parent changes only under the rename mutex, so the thread that holds it can walk up the tree without locks. If
//! a rename locks two directories, it locks the ancestor first, or the smaller number if neither is an ancestor of the other.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_metadata::errno::*;
use jericho_metadata::shard::ShardSet;
use parking_lot::RwLockWriteGuard;

use crate::core::{Core, PAGES, check_name, wait};
use crate::error::{Error, Result};
use crate::fs::Fs;
use crate::gates::Gates;
use crate::inode::{File, Inode, Meta};
use crate::interruption::begin_change;
use crate::times::now_ns;
use crate::types::{Ino, Kind, ROOT};

const NOREPLACE: u32 = 1;
const EXCHANGE: u32 = 2;

type Locked<'a> = RwLockWriteGuard<'a, Meta>;

/// The locked directories of a rename.
struct Pair<'a> {
    from: Locked<'a>,
    /// The second directory, or `None` if both are the same.
    to: Option<Locked<'a>>,
}

/// What became of a rename.
enum Renamed {
    /// It is done. Has the inode that was replaced, if there was one.
    Done(Option<Arc<Inode>>),
    /// Nothing is changed: a file that would replace another one is in memory and was not prepared, because a name has changed or another thread
    /// has opened the file. The caller prepares the files and tries again.
    Retry,
}

impl<'a> Pair<'a> {
    fn to(&mut self) -> &mut Locked<'a> {
        self.to.as_mut().unwrap_or(&mut self.from)
    }
}

/// One side of a rename.
struct Side<'a> {
    dir: &'a Arc<Inode>,
    hash: u64,
    name: &'a [u8],
}

impl Fs {
    /// Renames as renameat2(2) does with these flags. Accepts RENAME_NOREPLACE (1) and RENAME_EXCHANGE (2), and fails with
    /// EINVAL for others.
    pub fn rename(
        &self,
        dir: Ino,
        name: &[u8],
        new_dir: Ino,
        new_name: &[u8],
        flags: u32,
    ) -> Result<()> {
        self.rename_absorbing((dir, name), (new_dir, new_name), flags, |_| ())
    }

    /// Does the same as `rename` for files that clients change inline. If the renamed file replaces another one, calls `absorb`
    /// with the renamed file, and then writes the data of that file back. `absorb` gives the filesystem the size and the dirty
    /// pages that clients have made.
    pub fn rename_absorbing(
        &self,
        (dir, name): (Ino, &[u8]),
        (new_dir, new_name): (Ino, &[u8]),
        flags: u32,
        absorb: impl Fn(Ino),
    ) -> Result<()> {
        if flags & !(NOREPLACE | EXCHANGE) != 0 || flags == NOREPLACE | EXCHANGE {
            return Err(EINVAL);
        }
        for name in [name, new_name] {
            if name == b"." || name == b".." {
                return Err(crate::error::Error::Errno(16)); // EBUSY
            }
            check_name(name)?;
        }
        let core = &self.core;
        core.may_change_inode(dir)?;
        core.may_change_inode(new_dir)?;
        let (from, to) = ((dir, name), (new_dir, new_name));
        loop {
            let mut files = Vec::from_iter(self.write_replacement(from, to, &absorb)?);
            if flags & EXCHANGE != 0 {
                files.extend(self.write_replacement(to, from, &absorb)?);
            }
            // In one order, so that two renames do not wait for each other. A thread that took one lock twice could wait for itself.
            files.sort_by_key(|file| file.ino());
            files.dedup_by_key(|file| file.ino());
            let renamed = self.rename_files(from, to, flags, &files)?;
            if let Renamed::Done(replaced) = renamed {
                if let Some(replaced) = replaced {
                    core.reap(&replaced);
                }
                return Ok(());
            }
        }
    }

    /// Renames, while no truncation of `files` is in progress: the batch with the name of a replacing file must have its contents.
    fn rename_files(
        &self,
        (dir, name): (Ino, &[u8]),
        (new_dir, new_name): (Ino, &[u8]),
        flags: u32,
        files: &[Arc<File>],
    ) -> Result<Renamed> {
        let core = &self.core;
        let _untruncated: Vec<_> = files.iter().map(|file| file.exclusive.read()).collect();
        let from = core.directory(dir)?;
        let to = core.directory(new_dir)?;
        let from = Side {
            dir: &from,
            hash: core.hash(name),
            name,
        };
        let to = Side {
            dir: &to,
            hash: core.hash(new_name),
            name: new_name,
        };
        core.in_gates(&[dir, new_dir], true, |gates| {
            core.rename(gates, &from, &to, flags, files)
        })
    }

    /// Returns whether a directory has this name. In doubt, after an error, returns true.
    pub fn has_entry(&self, dir: Ino, name: &[u8]) -> bool {
        let core = &self.core;
        let found = core.directory(dir).and_then(|dir| {
            let meta = dir.meta.read();
            core.find(&dir, &meta, core.hash(name), name)
        });
        !matches!(found, Ok(None))
    }

    /// Writes back a file that is about to replace another one, and returns it if it is in memory. A program that replaces contents by rename
    /// without a sync therefore finds the old or the new contents after a crash, never an empty file.
    fn write_replacement(
        &self,
        (dir, name): (Ino, &[u8]),
        (new_dir, new_name): (Ino, &[u8]),
        absorb: &impl Fn(Ino),
    ) -> Result<Option<Arc<File>>> {
        let core = &self.core;
        let entry = |dir, name: &[u8]| {
            let dir = core.directory(dir)?;
            let meta = dir.meta.read();
            core.find(&dir, &meta, core.hash(name), name)
        };
        if entry(new_dir, new_name)?.is_none() {
            return Ok(None);
        }
        let Some((ino, Kind::File)) = entry(dir, name)? else {
            return Ok(None);
        };
        let Some(inode) = core.table.get(ino) else {
            return Ok(None);
        };
        let Some(file) = inode.file.lock().clone() else {
            return Ok(None);
        };
        absorb(ino);
        // Closing the file writes back the pages that programs dirty after this.
        file.note_replacing();
        let Some(cache) = file.cache() else {
            return Ok(Some(file));
        };
        let reach = file.sync_begins();
        if file.first_dirty(0).is_some() {
            wait(|done| cache.sync(&file.object(), 0..PAGES, done))?;
        }
        // Also if no page is dirty: a write after the rename must not hold back the size that the file has now.
        file.note_synced(&reach, u64::MAX);
        // A batch takes a bounded number of changes, and the one with the name must have all that are left.
        let mut share = core.share_of_replacement(ino);
        let is_one_batch = file.map.read().next_steps(&mut share).is_all;
        if !is_one_batch {
            core.commit_file(&inode)?;
        }
        Ok(Some(file))
    }
}

impl Core {
    /// Returns a directory and all directories above it. The caller holds the rename mutex and no lock of a directory.
    fn ancestors(&self, ino: Ino) -> Result<Vec<Ino>> {
        let mut ancestors = vec![ino];
        let mut seen = HashSet::from([ino]);
        let mut at = ino;
        while at != ROOT {
            at = self.directory(at)?.meta.read().rec.parent;
            if !seen.insert(at) {
                return Err(Error::Damaged(format!("directory {at} is within itself")));
            }
            ancestors.push(at);
        }
        Ok(ancestors)
    }

    /// Renames in these gates. Returns `None` if the rename needs more gates. The caller holds `exclusive` of `files` shared, so none of them is being
    /// truncated.
    fn rename(
        &self,
        gates: &Gates<'_>,
        from: &Side<'_>,
        to: &Side<'_>,
        flags: u32,
        files: &[Arc<File>],
    ) -> Result<Option<Renamed>> {
        let crosses = from.dir.ino != to.dir.ino;
        let _tree = crosses.then(|| self.rename.lock());
        let (mut from_ancestors, mut to_ancestors) = (Vec::new(), Vec::new());
        if crosses {
            from_ancestors = self.ancestors(from.dir.ino)?;
            to_ancestors = self.ancestors(to.dir.ino)?;
        }
        let from_within_to = from_ancestors.contains(&to.dir.ino);
        let to_within_from = to_ancestors.contains(&from.dir.ino);
        let mut pair = if !crosses {
            Pair {
                from: from.dir.meta.write(),
                to: None,
            }
        } else if to_within_from || (!from_within_to && from.dir.ino < to.dir.ino) {
            let first = from.dir.meta.write();
            Pair {
                from: first,
                to: Some(to.dir.meta.write()),
            }
        } else {
            let first = to.dir.meta.write();
            Pair {
                from: from.dir.meta.write(),
                to: Some(first),
            }
        };
        let (moved, kind) = self
            .find(from.dir, &pair.from, from.hash, from.name)?
            .ok_or(ENOENT)?;
        if pair.to().rec.nlink == 0 {
            return Err(ENOENT);
        }
        let other = self.find(to.dir, pair.to(), to.hash, to.name)?;
        if flags & NOREPLACE != 0 && other.is_some() {
            return Err(EEXIST);
        }
        if flags & EXCHANGE != 0 && other.is_none() {
            return Err(ENOENT);
        }
        if other.is_some_and(|(ino, _)| ino == moved) {
            return Ok(Some(Renamed::Done(None))); // POSIX: a rename between two names of one file does nothing
        }
        if kind == Kind::Directory && to_ancestors.contains(&moved) {
            return Err(EINVAL);
        }
        if !self.covers(gates, crosses, (moved, kind), other) {
            return Ok(None);
        }
        let is_exchange = flags & EXCHANGE != 0;
        let mut replacing = [
            Some(moved),
            other.map(|(ino, _)| ino).filter(|_| is_exchange),
        ]
        .into_iter()
        .flatten();
        if other.is_some() && !replacing.all(|ino| self.is_prepared(ino, files)) {
            return Ok(Some(Renamed::Retry));
        }
        let above = other.is_some_and(|(ino, _)| from_ancestors.contains(&ino));
        if is_exchange {
            if above {
                return Err(EINVAL);
            }
            if let Some(other) = other {
                self.exchange(from, to, &mut pair, (moved, kind), other)?;
            }
            return Ok(Some(Renamed::Done(None)));
        }
        match other {
            Some((_, Kind::Directory)) if kind != Kind::Directory => return Err(EISDIR),
            Some((_, old)) if kind == Kind::Directory && old != Kind::Directory => {
                return Err(ENOTDIR);
            }
            _ if above => return Err(ENOTEMPTY),
            _ => {}
        }
        let replaced = self.replace(from, to, &mut pair, (moved, kind), other)?;
        Ok(Some(Renamed::Done(replaced)))
    }

    /// Returns whether an inode is one of these files, or has no data side in memory.
    fn is_prepared(&self, ino: Ino, files: &[Arc<File>]) -> bool {
        let inode = self.table.get(ino);
        let is_in_memory = inode.is_some_and(|inode| inode.file.lock().is_some());
        !is_in_memory || files.iter().any(|file| file.ino() == ino)
    }

    /// Returns whether a rename may change the inodes whose names it changes.
    fn covers(
        &self,
        gates: &Gates<'_>,
        crosses: bool,
        moved: (Ino, Kind),
        other: Option<(Ino, Kind)>,
    ) -> bool {
        let inodes = || [Some(moved), other].into_iter().flatten();
        // Directories that change their parents do it in one order, which a crash keeps. Without it, two renames in different shards
        // could leave two directories within one another.
        let moves_directory = crosses && inodes().any(|(_, kind)| kind == Kind::Directory);
        let tree_is_covered = !moves_directory || gates.cover(ROOT);
        // The extents of a file that replaces another one become durable with the name. If a shard with its blocks takes no changes, they
        // would never do so, and the name would denote an empty file.
        let files = inodes().filter(|_| other.is_some());
        let contents_are_covered = files.fold(true, |all, (ino, _)| {
            gates.cover_shards(self.shards_in_memory(ino)) && all
        });
        let is_covered = tree_is_covered && contents_are_covered;
        inodes().fold(is_covered, |all, (ino, _)| gates.cover(ino) && all)
    }

    /// Returns the shards with blocks of a file that is in memory.
    fn shards_in_memory(&self, ino: Ino) -> ShardSet {
        let inode = self.table.get(ino);
        let file = inode.and_then(|inode| inode.file.lock().clone());
        file.map_or(ShardSet::default(), |file| self.shards_of(&file))
    }

    fn replace(
        &self,
        from: &Side<'_>,
        to: &Side<'_>,
        pair: &mut Pair<'_>,
        (moved, kind): (Ino, Kind),
        other: Option<(Ino, Kind)>,
    ) -> Result<Option<Arc<Inode>>> {
        let is_dir = u32::from(kind == Kind::Directory);
        let now = now_ns();
        let inode = self.inode(moved)?;
        let replaced = other.map(|(ino, _)| self.inode(ino)).transpose()?;
        if let Some(replaced) = &replaced {
            let mut meta = replaced.meta.write();
            if replaced.kind == Kind::Directory && meta.rec.size > 0 {
                return Err(ENOTEMPTY);
            }
            begin_change()?;
            self.drop_link(replaced, &mut meta, now);
        }
        begin_change()?;
        self.put_entry(from.dir, &mut pair.from, from.hash, from.name, None);
        self.put_entry(to.dir, pair.to(), to.hash, to.name, Some((moved, kind)));
        pair.from.rec.size = pair.from.rec.size.saturating_sub(1);
        pair.from.rec.nlink -= is_dir;
        if replaced.is_none() {
            pair.to().rec.size += 1;
            pair.to().rec.nlink += is_dir;
        }
        self.touch(from, to, pair, now);
        self.moved(&inode, to.dir.ino, now);
        if replaced.is_some() {
            self.note_replacement(&inode);
        }
        Ok(replaced)
    }

    fn exchange(
        &self,
        from: &Side<'_>,
        to: &Side<'_>,
        pair: &mut Pair<'_>,
        (moved, kind): (Ino, Kind),
        (other, other_kind): (Ino, Kind),
    ) -> Result<()> {
        let now = now_ns();
        let (inode, other_inode) = (self.inode(moved)?, self.inode(other)?);
        begin_change()?;
        self.put_entry(
            from.dir,
            &mut pair.from,
            from.hash,
            from.name,
            Some((other, other_kind)),
        );
        self.put_entry(to.dir, pair.to(), to.hash, to.name, Some((moved, kind)));
        let (out, back) = (kind == Kind::Directory, other_kind == Kind::Directory);
        pair.from.rec.nlink = pair.from.rec.nlink + u32::from(back) - u32::from(out);
        let to_meta = pair.to();
        to_meta.rec.nlink = to_meta.rec.nlink + u32::from(out) - u32::from(back);
        self.touch(from, to, pair, now);
        self.moved(&inode, to.dir.ino, now);
        self.moved(&other_inode, from.dir.ino, now);
        self.note_replacement(&inode);
        self.note_replacement(&other_inode);
        Ok(())
    }

    /// Makes the next batch, which has the file's new name, take all present changes of the file's extents, and its size. Does nothing if there are
    /// none, because earlier batches have the contents. `write_replacement` has made sure that one batch can take them.
    fn note_replacement(&self, inode: &Arc<Inode>) {
        let Some(file) = inode.file.lock().clone() else {
            return;
        };
        let meta = inode.meta.read();
        let mut map = file.map.write();
        if meta.stored && meta.committed_size == meta.rec.size && !map.has_changes() {
            return;
        }
        // `write_replacement` has set `synced_size` to the file's size.
        let synced = file.synced_size.load(Ordering::Acquire);
        map.note_replacement(file.size().min(synced));
        let mut share = self.share_of_replacement(inode.ino);
        let before = share.steps();
        map.next_steps(&mut share);
        drop((map, meta));
        self.commits_of(inode.ino).grown(before - share.steps());
    }

    fn touch(&self, from: &Side<'_>, to: &Side<'_>, pair: &mut Pair<'_>, now: i128) {
        pair.from.rec.mtime_ns = now;
        pair.from.rec.ctime_ns = now;
        pair.to().rec.mtime_ns = now;
        pair.to().rec.ctime_ns = now;
        self.mark_dirty(from.dir);
        self.mark_dirty(to.dir);
    }

    fn moved(&self, inode: &Arc<Inode>, parent: Ino, now: i128) {
        let mut meta = inode.meta.write();
        meta.rec.ctime_ns = now;
        meta.rec.parent = parent;
        self.mark_dirty(inode);
    }
}
