//! The filesystem of an open volume: what the mount and the data path call.
//!
//! Skeleton: signatures that `daemon` and `fuse` code against.

use std::sync::Arc;

use jericho_cache::{Object, Slice};

use crate::error::{Error, Result};
use crate::types::*;

/// Called once when an operation that waits for devices is over, perhaps in another thread.
pub type Done = Box<dyn FnOnce(Result<()>) + Send>;

/// How the filesystem is run.
#[derive(Clone, Debug)]
pub struct FsOptions {
    /// Nothing is changed, not even access times.
    pub read_only: bool,
    /// Inodes kept in memory beyond those that are open or dirty.
    pub inode_cache: usize,
    /// Longest time in milliseconds that a change stays only in memory (group commit).
    pub commit_interval_ms: u64,
}

/// A regular file in memory: what the data path needs. Shared by every open descriptor.
pub struct File {
    _todo: (),
}

impl File {
    /// Inode number.
    pub fn ino(&self) -> Ino {
        todo!()
    }
    /// The file as the cache sees it.
    pub fn object(self: &Arc<Self>) -> Arc<dyn Object> {
        todo!()
    }
    /// Slice that caches it now. May change at any time (re-homing): a Get answers `Moved` then.
    pub fn slice(&self) -> SliceId {
        todo!()
    }
    /// Size in bytes now.
    pub fn size(&self) -> u64 {
        todo!()
    }
}

/// The filesystem.
pub struct Fs {
    _todo: (),
}

impl Fs {
    /// Opens the filesystem: reads what it needs, removes what was open without a name at the end of the
    /// last mount, starts the committer thread.
    pub fn open(
        _volume: Arc<crate::volume::Volume>,
        _slices: Vec<Arc<Slice>>,
        _options: FsOptions,
    ) -> Result<Arc<Fs>> {
        todo!()
    }
    /// Writes everything back, commits, marks the volume clean, stops the committer. After it every call
    /// fails with ESHUTDOWN.
    pub fn close(&self) -> Result<()> {
        todo!()
    }

    // --- namespace; names are bytes without '/' or NUL. Each returned Attr of lookup/create/... counts one
    // reference of the kernel (nlookup) that `forget` gives back.
    /// Looks a name up ("." and ".." too).
    pub fn lookup(&self, _dir: Ino, _name: &[u8]) -> Result<Attr> {
        todo!()
    }
    /// The kernel forgets `n` lookups.
    pub fn forget(&self, _ino: Ino, _n: u64) {
        todo!()
    }
    /// stat.
    pub fn getattr(&self, _ino: Ino) -> Result<Attr> {
        todo!()
    }
    /// chmod, chown, utimens, and truncate (waits for the cache: see `setattr` in the docs).
    pub fn setattr(&self, _ino: Ino, _set: SetAttr, _caller: Caller) -> Result<Attr> {
        todo!()
    }
    /// Makes a file of any kind but directory and symlink; `mode` is permissions before umask/default ACL.
    pub fn mknod(&self, _dir: Ino, _name: &[u8], _kind: Kind, _perm: u16, _rdev: u32, _caller: Caller) -> Result<Attr> {
        todo!()
    }
    /// Makes a directory.
    pub fn mkdir(&self, _dir: Ino, _name: &[u8], _perm: u16, _caller: Caller) -> Result<Attr> {
        todo!()
    }
    /// Makes a symbolic link.
    pub fn symlink(&self, _dir: Ino, _name: &[u8], _target: &[u8], _caller: Caller) -> Result<Attr> {
        todo!()
    }
    /// Reads a symbolic link.
    pub fn readlink(&self, _ino: Ino) -> Result<Vec<u8>> {
        todo!()
    }
    /// Hard link.
    pub fn link(&self, _ino: Ino, _dir: Ino, _name: &[u8]) -> Result<Attr> {
        todo!()
    }
    /// Removes a name that is not a directory's.
    pub fn unlink(&self, _dir: Ino, _name: &[u8]) -> Result<()> {
        todo!()
    }
    /// Removes an empty directory.
    pub fn rmdir(&self, _dir: Ino, _name: &[u8]) -> Result<()> {
        todo!()
    }
    /// renameat2(2) with its flags (RENAME_NOREPLACE = 1, RENAME_EXCHANGE = 2; others EINVAL).
    pub fn rename(&self, _dir: Ino, _name: &[u8], _new_dir: Ino, _new_name: &[u8], _flags: u32) -> Result<()> {
        todo!()
    }
    /// Entries after `cookie` (0: from the start, "." and ".." first); calls `each` until it returns false.
    pub fn readdir(&self, _dir: Ino, _cookie: u64, _each: &mut dyn FnMut(DirEntry) -> bool) -> Result<()> {
        todo!()
    }
    /// statfs.
    pub fn statfs(&self) -> Result<StatFs> {
        todo!()
    }

    // --- extended attributes; POSIX ACLs are the kernel's binary xattrs system.posix_acl_{access,default}
    /// Value.
    pub fn getxattr(&self, _ino: Ino, _name: &[u8]) -> Result<Vec<u8>> {
        todo!()
    }
    /// flags: XATTR_CREATE = 1, XATTR_REPLACE = 2.
    pub fn setxattr(&self, _ino: Ino, _name: &[u8], _value: &[u8], _flags: u32) -> Result<()> {
        todo!()
    }
    /// Names, each ended by NUL.
    pub fn listxattr(&self, _ino: Ino) -> Result<Vec<u8>> {
        todo!()
    }
    /// Removes one.
    pub fn removexattr(&self, _ino: Ino, _name: &[u8]) -> Result<()> {
        todo!()
    }

    // --- files
    /// Opens a regular file (counts an open). `truncate`: O_TRUNC.
    pub fn open_file(&self, _ino: Ino, _truncate: bool) -> Result<Arc<File>> {
        todo!()
    }
    /// The last descriptor of an open is gone; removes the file when it has no name and no open left.
    pub fn close_file(&self, _file: &Arc<File>) {
        todo!()
    }
    /// Before bytes are written: reserves space for pages of the range that have none (ENOSPC, EFBIG,
    /// EROFS). Cheap when the range is placed or reserved already.
    pub fn begin_write(&self, _file: &Arc<File>, _offset: u64, _len: u64) -> Result<()> {
        todo!()
    }
    /// After bytes were written into the cache: extends the size to `offset + len` if that is more, sets the
    /// times, strips set-id bits when `strip_suid`.
    pub fn end_write(&self, _file: &Arc<File>, _offset: u64, _len: u64, _strip_suid: bool) {
        todo!()
    }
    /// After bytes were read: atime (relatime).
    pub fn end_read(&self, _file: &Arc<File>) {
        todo!()
    }
    /// fsync / fdatasync: data written back and flushed, metadata committed (datasync: only what is needed to
    /// read the data). Reports a write-back error not reported to this file yet. `done` may run in
    /// another thread.
    pub fn fsync(&self, _file: &Arc<File>, _datasync: bool, _done: Done) {
        todo!()
    }
    /// Durability of a range only (O_DSYNC, RWF_DSYNC).
    pub fn sync_range(&self, _file: &Arc<File>, _offset: u64, _len: u64, _done: Done) {
        todo!()
    }
    /// fsync of a directory: commits every namespace change made so far.
    pub fn fsync_dir(&self, _ino: Ino, _done: Done) {
        todo!()
    }
    /// Everything.
    pub fn sync_all(&self) -> Result<()> {
        todo!()
    }
    /// fallocate(2) modes: 0, KEEP_SIZE 1, PUNCH_HOLE|KEEP_SIZE 3, ZERO_RANGE 0x10 (| KEEP_SIZE). Others EOPNOTSUPP.
    pub fn fallocate(&self, _file: &Arc<File>, _mode: i32, _offset: u64, _len: u64) -> Result<()> {
        todo!()
    }
    /// SEEK_DATA (`data` true) / SEEK_HOLE; ENXIO past the end. Pages dirty in the cache are data.
    pub fn seek(&self, _file: &Arc<File>, _offset: u64, _data: bool) -> Result<u64> {
        todo!()
    }

    // --- placement
    /// Slice where the inode's data is (files) or what is created in it goes (directories), and whether it was
    /// set on this very inode by a user.
    pub fn placement(&self, _ino: Ino) -> Result<(SliceId, bool)> {
        todo!()
    }
    /// Directories: what is created below from now on goes to `slice`.
    pub fn set_placement(&self, _ino: Ino, _slice: SliceId) -> Result<()> {
        todo!()
    }
    /// Re-homes one inode: a file's data to the slice's cache and space, while it is in use; returns when done and
    /// durable. Directories: as set_placement. Other kinds: nothing to do.
    pub fn move_to(&self, _ino: Ino, _slice: SliceId) -> Result<()> {
        todo!()
    }
    /// The file's blocks by slice: (slice, blocks).
    pub fn blocks_by_slice(&self, _ino: Ino) -> Result<Vec<(SliceId, u64)>> {
        todo!()
    }
    /// The file in memory, without counting an open (for `where`).
    pub fn file(&self, _ino: Ino) -> Result<Arc<File>> {
        todo!()
    }
}

impl From<jericho_cache::Error> for Error {
    fn from(e: jericho_cache::Error) -> Error {
        match e {
            jericho_cache::Error::Io(e) => Error::Io(e),
            e => Error::Errno(e.errno()),
        }
    }
}
