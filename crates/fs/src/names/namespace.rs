//! Operations on names (lookup, create, remove, link) and on attributes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_format::FILE_BYTES_MAX;
use jericho_metadata::errno::*;
use jericho_metadata::numbers::slice_of_ino;
use jericho_metadata::store::{Change, InodeRecord};

use crate::core::{Core, TURN_NAME, check_name};
use crate::error::Result;
use crate::fs::Fs;
use crate::gates::Gates;
use crate::inode::{Inode, Meta};
use crate::interruption::begin_change;
use crate::times::{from_system, now_ns};
use crate::types::*;

/// Bytes of an entry in the store besides its name, and of the rows of an inode besides target and lists. A little more, for the store's
/// own fields.
const ENTRY_BYTES: usize = 64;
const INODE_BYTES: usize = 256;
const SETUID: u16 = 0o4000;
pub(crate) const SETGID: u16 = 0o2000;
const GROUP_EXEC: u16 = 0o010;

/// A new inode to create.
struct New<'a> {
    kind: Kind,
    perm: u16,
    rdev: u32,
    target: Option<&'a [u8]>,
}

impl Fs {
    /// Looks up a name, also "." and "..". Accepts "." for a file that is not a directory, to find an inode by its number.
    pub fn lookup(&self, dir: Ino, name: &[u8]) -> Result<Attr> {
        let core = &self.core;
        if name == b"." {
            let inode = core.inode(dir)?;
            {
                // Counts the reference under the inode's lock, so that a thread that removes the inode later sees it.
                let meta = inode.meta.read();
                if meta.dead {
                    return Err(ESTALE);
                }
                core.table.count_lookup(dir);
            }
            return self.looked_up(&inode);
        }
        let parent = core.directory(dir)?;
        let inode = match name {
            b".." => {
                let meta = parent.meta.read();
                let inode = core.inode(meta.rec.parent)?;
                core.table.count_lookup(inode.ino);
                inode
            }
            _ => {
                check_name(name)?;
                let meta = parent.meta.read();
                let (ino, _) = core
                    .find(&parent, &meta, core.hash(name), name)?
                    .ok_or(ENOENT)?;
                let inode = core.inode(ino)?;
                // The directory's lock is held, so a thread that removes the name later sees the reference.
                core.table.count_lookup(ino);
                inode
            }
        };
        self.looked_up(&inode)
    }

    /// Returns the attributes of an inode whose lookup was counted.
    fn looked_up(&self, inode: &Arc<Inode>) -> Result<Attr> {
        // The kernel does not send FORGET for a lookup that failed.
        (self.core.attr(inode)).inspect_err(|_| self.forget(inode.ino, 1))
    }

    /// Subtracts `n` lookups that the kernel has forgotten.
    pub fn forget(&self, ino: Ino, n: u64) {
        let core = &self.core;
        if core.table.forget(ino, n)
            && let Some(inode) = core.table.get(ino)
        {
            core.reap(&inode);
        }
    }

    /// Returns the attributes of an inode.
    pub fn getattr(&self, ino: Ino) -> Result<Attr> {
        let inode = self.core.inode(ino)?;
        self.core.attr(&inode)
    }

    /// Changes attributes (chmod, chown, utimens), and the size (truncate, which waits for the cache, and for a commit if
    /// the file has just replaced another one by rename).
    pub fn setattr(&self, ino: Ino, set: SetAttr, caller: Caller) -> Result<Attr> {
        let core = &self.core;
        core.may_change_inode(ino)?;
        let inode = core.inode(ino)?;
        if let Some(size) = set.size {
            if size > FILE_BYTES_MAX {
                return Err(EFBIG);
            }
            let file = core.file(&inode)?;
            self.truncate(&file, size)?;
        }
        let _gates = core.begin(&[ino])?;
        let now = now_ns();
        let mut meta = inode.meta.write();
        begin_change()?;
        let rec = &mut meta.rec;
        let mut perm = set.perm.map(|perm| perm & 0o7777);
        if set.drop_set_id && rec.kind != Kind::Directory {
            let kept = perm.unwrap_or(rec.perm);
            perm = Some(without_set_id(kept)).filter(|p| *p != rec.perm);
        }
        if set.uid.is_some() || set.gid.is_some() {
            rec.uid = set.uid.unwrap_or(rec.uid);
            rec.gid = set.gid.unwrap_or(rec.gid);
            if perm.is_none() && caller.uid != 0 && rec.kind == Kind::File {
                perm = Some(without_set_id(rec.perm)).filter(|perm| *perm != rec.perm);
            }
        }
        let at = |time| match time {
            SetTime::Now => now,
            SetTime::At(time) => from_system(time),
        };
        if let Some(time) = set.atime {
            rec.atime_ns = at(time);
        }
        if let Some(time) = set.mtime {
            rec.mtime_ns = at(time);
        }
        rec.ctime_ns = set.ctime.map_or(now, from_system);
        if let Some(perm) = perm {
            inode.privileges.forget();
            rec.perm = perm;
            core.acl_follows_mode(&inode, &mut meta)?;
        }
        core.mark_dirty(&inode);
        drop(meta);
        core.attr(&inode)
    }

    /// Creates a file of any kind except directory and symlink. `perm` is the mode before umask and default ACL.
    pub fn mknod(
        &self,
        dir: Ino,
        name: &[u8],
        kind: Kind,
        perm: u16,
        rdev: u32,
        caller: Caller,
    ) -> Result<Attr> {
        if matches!(kind, Kind::Directory | Kind::Symlink) {
            return Err(EINVAL);
        }
        let rdev = if matches!(kind, Kind::CharDevice | Kind::BlockDevice) {
            rdev
        } else {
            0
        };
        self.make(
            dir,
            Some(name),
            New {
                kind,
                perm,
                rdev,
                target: None,
            },
            caller,
        )
    }

    /// Creates a directory.
    pub fn mkdir(&self, dir: Ino, name: &[u8], perm: u16, caller: Caller) -> Result<Attr> {
        let new = New {
            kind: Kind::Directory,
            perm,
            rdev: 0,
            target: None,
        };
        self.make(dir, Some(name), new, caller)
    }

    /// Creates a symbolic link. Fails with ENAMETOOLONG for a target over 4095 bytes.
    pub fn symlink(&self, dir: Ino, name: &[u8], target: &[u8], caller: Caller) -> Result<Attr> {
        if target.len() > TARGET_MAX {
            return Err(ENAMETOOLONG);
        }
        if target.is_empty() {
            return Err(ENOENT);
        }
        let new = New {
            kind: Kind::Symlink,
            perm: 0o777,
            rdev: 0,
            target: Some(target),
        };
        self.make(dir, Some(name), new, caller)
    }

    /// Creates a regular file without a name, placed as if it were in the directory (O_TMPFILE). `link` may give it a name.
    /// Without a name it is removed with its last reference.
    pub fn tmpfile(&self, dir: Ino, perm: u16, caller: Caller) -> Result<Attr> {
        self.make(
            dir,
            None,
            New {
                kind: Kind::File,
                perm,
                rdev: 0,
                target: None,
            },
            caller,
        )
    }

    fn make(&self, dir: Ino, name: Option<&[u8]>, new: New<'_>, caller: Caller) -> Result<Attr> {
        if let Some(name) = name {
            if name == b"." || name == b".." {
                return Err(EEXIST);
            }
            check_name(name)?;
        }
        let core = &self.core;
        core.with_room(|| {
            core.in_gates(&[dir], false, |gates| {
                self.make_in(gates, dir, name, &new, caller)
            })
        })
    }

    fn make_in(
        &self,
        gates: &Gates<'_>,
        dir: Ino,
        name: Option<&[u8]>,
        new: &New<'_>,
        caller: Caller,
    ) -> Result<Option<Attr>> {
        let core = &self.core;
        let parent = core.directory(dir)?;
        let mut meta = parent.meta.write();
        if meta.rec.nlink == 0 {
            return Err(ENOENT);
        }
        let hash = name.map_or(0, |name| core.hash(name));
        if let Some(name) = name
            && core.find(&parent, &meta, hash, name)?.is_some()
        {
            return Err(EEXIST);
        }
        let inherited = core.inherit_acl(&parent, &mut meta, new.kind, new.perm, caller.umask)?;
        let now = now_ns();
        let rec = core.new_record(dir, &meta, name.is_some(), inherited.perm, new, caller, now);
        // Symbolic links and special files have no home.
        let slice = rec.slice.or_else(|| slice_of_ino(dir)).unwrap_or(0);
        if !gates.cover_slice(slice) {
            return Ok(None);
        }
        let own = core.shards.get(core.shards.map().of_slice(slice));
        if let Some(name) = name {
            core.store_of(dir).check_room(1, ENTRY_BYTES + name.len())?;
        }
        let lists = [&inherited.access, &inherited.default];
        let lists = lists.into_iter().flatten();
        let (count, bytes) = lists.fold((0, 0), |(count, bytes), list| {
            (count + 1, bytes + list.len())
        });
        let bytes = INODE_BYTES + bytes + new.target.map_or(0, <[u8]>::len);
        own.store.check_room(count, bytes)?;
        begin_change()?;
        // Last: a mark must not be lost, or a number beyond it could be given out again after a crash.
        let (ino, mark) = core.numbers.take(slice)?;
        if let Some(mark) = mark {
            own.commits.push(mark);
        }
        let inode = Inode::made(ino, rec);
        own.inodes.made();
        if inherited.access.is_some() || inherited.default.is_some() {
            let mut made = inode.meta.write();
            core.put_inherited(&inode, &mut made, inherited);
        }
        let attr = inode.attr(&inode.meta.read());
        core.table.count_lookup(ino);
        core.table.insert(inode.clone());
        core.mark_dirty(&inode);
        match name {
            Some(name) => {
                core.put_entry(&parent, &mut meta, hash, name, Some((ino, new.kind)));
                meta.rec.size += 1;
                let is_dir = new.kind == Kind::Directory;
                meta.rec.nlink += u32::from(is_dir);
                meta.rec.mtime_ns = now;
                meta.rec.ctime_ns = now;
                core.mark_dirty(&parent);
                if is_dir && dir == ROOT {
                    let turn = core.turn.fetch_add(1, Ordering::Relaxed) + 1;
                    let turn = Change::PutValue(TURN_NAME, turn);
                    core.commits_of(ROOT).push(turn);
                }
            }
            None => {
                if new.kind == Kind::File {
                    core.leaving.add(ino);
                }
                own.commits.push(Change::PutOrphan(ino));
            }
        }
        Ok(Some(attr))
    }

    /// Returns the target of a symbolic link.
    pub fn readlink(&self, ino: Ino) -> Result<Vec<u8>> {
        let inode = self.core.inode(ino)?;
        let meta = inode.meta.read();
        meta.rec
            .target
            .as_ref()
            .map(|target| target.to_vec())
            .ok_or(EINVAL)
    }

    /// Creates a hard link.
    pub fn link(&self, ino: Ino, dir: Ino, name: &[u8]) -> Result<Attr> {
        let core = &self.core;
        if name == b"." || name == b".." {
            return Err(EEXIST);
        }
        check_name(name)?;
        core.with_room(|| self.link_once(ino, dir, name))
    }

    fn link_once(&self, ino: Ino, dir: Ino, name: &[u8]) -> Result<Attr> {
        let core = &self.core;
        let _gates = core.begin(&[ino, dir])?;
        let parent = core.directory(dir)?;
        let inode = core.inode(ino)?;
        if inode.kind == Kind::Directory {
            return Err(crate::error::Error::Errno(1)); // EPERM
        }
        let mut meta = parent.meta.write();
        if meta.rec.nlink == 0 {
            return Err(ENOENT);
        }
        let hash = core.hash(name);
        if core.find(&parent, &meta, hash, name)?.is_some() {
            return Err(EEXIST);
        }
        core.store_of(dir).check_room(1, ENTRY_BYTES + name.len())?;
        let now = now_ns();
        {
            let mut linked = inode.meta.write();
            if linked.dead {
                return Err(ENOENT);
            }
            begin_change()?;
            if linked.rec.nlink == 0 {
                inode.unlinked.store(false, Ordering::Release);
                core.leaving.remove(&[ino]);
                core.commits_of(ino).push(Change::DelOrphan(ino));
            }
            linked.rec.nlink = linked.rec.nlink.checked_add(1).ok_or(EMLINK)?;
            linked.rec.ctime_ns = now;
        }
        core.put_entry(&parent, &mut meta, hash, name, Some((ino, inode.kind)));
        meta.rec.size += 1;
        meta.rec.mtime_ns = now;
        meta.rec.ctime_ns = now;
        core.table.count_lookup(ino);
        core.mark_dirty(&parent);
        core.mark_dirty(&inode);
        drop(meta);
        core.attr(&inode)
    }

    /// Removes a name of an inode that is not a directory.
    pub fn unlink(&self, dir: Ino, name: &[u8]) -> Result<()> {
        if name == b"." || name == b".." {
            return Err(EISDIR);
        }
        self.remove(dir, name, false)
    }

    /// Removes an empty directory.
    pub fn rmdir(&self, dir: Ino, name: &[u8]) -> Result<()> {
        match name {
            b"." => Err(EINVAL),
            b".." => Err(ENOTEMPTY),
            name => self.remove(dir, name, true),
        }
    }

    fn remove(&self, dir: Ino, name: &[u8], is_dir: bool) -> Result<()> {
        check_name(name)?;
        let core = &self.core;
        let inode = core.in_gates(&[dir], true, |gates| {
            self.remove_in(gates, dir, name, is_dir)
        })?;
        core.reap(&inode);
        Ok(())
    }

    /// Removes a name. Returns the inode that had it.
    fn remove_in(
        &self,
        gates: &Gates<'_>,
        dir: Ino,
        name: &[u8],
        is_dir: bool,
    ) -> Result<Option<Arc<Inode>>> {
        let core = &self.core;
        let parent = core.directory(dir)?;
        let mut meta = parent.meta.write();
        let hash = core.hash(name);
        let (ino, kind) = core.find(&parent, &meta, hash, name)?.ok_or(ENOENT)?;
        match (is_dir, kind == Kind::Directory) {
            (true, false) => return Err(ENOTDIR),
            (false, true) => return Err(EISDIR),
            _ if !gates.cover(ino) => return Ok(None),
            _ => {}
        }
        let inode = core.inode(ino)?;
        let now = now_ns();
        {
            let mut gone = inode.meta.write();
            if is_dir && gone.rec.size > 0 {
                return Err(ENOTEMPTY);
            }
            begin_change()?;
            core.drop_link(&inode, &mut gone, now);
        }
        core.put_entry(&parent, &mut meta, hash, name, None);
        meta.rec.size = meta.rec.size.saturating_sub(1);
        meta.rec.nlink -= u32::from(is_dir);
        meta.rec.mtime_ns = now;
        meta.rec.ctime_ns = now;
        core.mark_dirty(&parent);
        Ok(Some(inode))
    }
}

/// Returns the mode after chown by an ordinary user, which clears the set-id bits of a file.
pub(crate) fn without_set_id(perm: u16) -> u16 {
    let set_gid = if perm & GROUP_EXEC != 0 { SETGID } else { 0 };
    perm & !(SETUID | set_gid)
}

impl Core {
    /// Returns the record of a new inode in a directory with this metadata.
    #[expect(clippy::too_many_arguments, reason = "called once, by `make`")]
    fn new_record(
        &self,
        dir: Ino,
        meta: &Meta,
        has_name: bool,
        perm: u16,
        new: &New<'_>,
        caller: Caller,
        now: i128,
    ) -> InodeRecord {
        let is_dir = new.kind == Kind::Directory;
        let set_gid = meta.rec.perm & SETGID != 0;
        let slice =
            matches!(new.kind, Kind::Directory | Kind::File).then(|| self.home_for(meta, new.kind));
        InodeRecord {
            kind: new.kind,
            perm: perm & 0o7777 | if is_dir && set_gid { SETGID } else { 0 },
            nlink: match has_name {
                false => 0,
                true if is_dir => 2,
                true => 1,
            },
            uid: caller.uid,
            gid: if set_gid { meta.rec.gid } else { caller.gid },
            rdev: new.rdev,
            generation: self.generation,
            size: new.target.map_or(0, |target| target.len() as u64),
            atime_ns: now,
            mtime_ns: now,
            ctime_ns: now,
            btime_ns: now,
            slice,
            placement: None,
            threads: meta.rec.threads.inherited(),
            parent: dir,
            blocks: 0,
            target: new.target.map(Into::into),
        }
    }

    /// Returns the attributes of an inode.
    pub fn attr(&self, inode: &Arc<Inode>) -> Result<Attr> {
        let meta = inode.meta.read();
        Ok(inode.attr(&meta))
    }

    /// Removes one link from the count. Without links the inode is an orphan. The caller holds the gate and the inode's lock.
    pub fn drop_link(&self, inode: &Arc<Inode>, meta: &mut Meta, now: i128) {
        meta.rec.nlink = match inode.kind {
            Kind::Directory => 0,
            _ => meta.rec.nlink.saturating_sub(1),
        };
        meta.rec.ctime_ns = now;
        if meta.rec.nlink == 0 {
            inode.unlinked.store(true, Ordering::Release);
            if inode.kind == Kind::File {
                self.leaving.add(inode.ino);
            }
            (self.commits_of(inode.ino)).push(Change::PutOrphan(inode.ino));
        }
        self.mark_dirty(inode);
    }
}
