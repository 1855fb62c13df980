//! One method per request of the kernel.
//!
//! Invariants:
//! - The daemon is the only writer, and every change comes through this kernel, which updates or
//!   drops what it has cached of an inode with each change it sends (size after a direct write, link
//!   count after unlink, everything after fallocate). So entries and attributes may be cached for
//!   long, also the absence of a name. Files that programs write inline are the exception: see `ttl`.
//! - Every entry that is answered counts one lookup of its inode; `forget` gives it back.
//! - A read or write that hits allocates nothing and takes no lock here.
//! - A panic in a request costs that request (EIO), not its worker: without workers the mount hangs.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use jericho_daemon::{Handle, Mounted, ReadBuffer};
use jericho_fs::Error;
use jericho_fs::types::{Attr, Caller, DirEntry, Ino, Kind, SetAttr};
use jericho_shm::{Answer, Call};

use crate::bytes::{Scratch, Write};
use crate::control::{Control, PREFIX};
use crate::convert::{self, errno};
use crate::handles::Handles;
use crate::workers::Placement;

/// How long the kernel may keep entries and attributes: see the invariants.
pub(crate) const TTL: Duration = Duration::from_secs(3600);
/// The largest read or write in one request.
pub(crate) const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// Background requests (read-ahead, asynchronous direct I/O) the kernel may have with us at once.
const BACKGROUND_REQUESTS: u16 = 256;
/// Entries of a directory looked up at once for one reply.
const LISTING_BATCH: usize = 64;
/// Read and write go to the slices and are cached nowhere else; writers of one file do not exclude
/// each other in the kernel.
pub(crate) const FILE_FLAGS: FopenFlags =
    FopenFlags::FOPEN_DIRECT_IO.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

/// Cheap to clone: clones are the same filesystem.
#[derive(Clone)]
pub(crate) struct Jericho {
    pub(crate) mounted: Arc<Mounted>,
    pub(crate) handles: Arc<Handles<Handle>>,
    control: Arc<Control>,
    placement: Arc<Placement>,
    /// Whether to ask the kernel for its ring; afterwards, whether it has agreed.
    pub(crate) ring: Arc<AtomicBool>,
}

impl Jericho {
    /// With `ring`, asks the kernel for FUSE over io_uring.
    pub(crate) fn new(mounted: Arc<Mounted>, placement: Placement, ring: bool) -> Jericho {
        let ring = Arc::new(AtomicBool::new(ring));
        let control = Control::new(mounted.clone(), ring.clone());
        Jericho {
            mounted,
            handles: Arc::new(Handles::new()),
            control: Arc::new(control),
            placement: Arc::new(placement),
            ring,
        }
    }

    /// Runs one request. What it holds of the reply is dropped by a panic, which answers EIO.
    #[inline]
    fn request(&self, operation: &'static str, run: impl FnOnce()) {
        self.placement.bind_this_thread();
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            tracing::error!(
                operation,
                "a request panicked; it was answered with an I/O error"
            );
        }
    }

    /// Runs `call` with the open file of `fh`, or answers EBADF through `reply`'s error method.
    #[inline]
    fn with_handle<R>(
        &self,
        fh: FileHandle,
        reply: R,
        bad: fn(R, Errno),
        call: impl FnOnce(&Arc<Handle>, R),
    ) {
        match self.handles.get(fh.0).as_ref() {
            Some(handle) => call(handle, reply),
            None => bad(reply, Errno::EBADF),
        }
    }

    /// How long the kernel may keep an inode's attributes (and, since fuser has one time for both, its name).
    pub(crate) fn ttl(&self, ino: Ino) -> Duration {
        if self.mounted.attributes_may_be_kept(ino) {
            TTL
        } else {
            Duration::ZERO
        }
    }

    fn reply_entry(&self, operation: &'static str, result: Result<Attr, Error>, reply: ReplyEntry) {
        match result {
            Ok(a) => reply.entry(
                &self.ttl(a.ino),
                &convert::attr(&a),
                Generation(u64::from(a.generation)),
            ),
            Err(e) => reply.error(errno(operation, &e)),
        }
    }

    fn reply_empty(operation: &'static str, result: Result<(), Error>, reply: ReplyEmpty) {
        match result {
            Ok(()) => reply.ok(),
            Err(e) => reply.error(errno(operation, &e)),
        }
    }

    /// The kernel drops set-id bits and file capabilities on chown and on a truncate by those who
    /// may not keep them; with HANDLE_KILLPRIV_V2 that is our work. The protocol's flag for a
    /// truncate does not get through fuser: everybody but root counts as somebody who may not.
    fn strip_privileges(&self, ino: Ino, set: &mut SetAttr, uid: u32) -> Result<(), Error> {
        let chown = set.uid.is_some() || set.gid.is_some();
        let truncated_by_other = set.size.is_some() && uid != 0;
        if !chown && !truncated_by_other {
            return Ok(());
        }
        let attr = self.mounted.fs().getattr(ino)?;
        if attr.kind != Kind::File {
            return Ok(());
        }
        let perm = set.perm.unwrap_or(attr.perm);
        let stripped = without_set_id(perm);
        if stripped != perm && set.perm.is_none() {
            set.perm = Some(stripped);
        }
        match self.mounted.fs().removexattr(ino, b"security.capability") {
            Ok(()) | Err(Error::Errno(libc::ENODATA | libc::EOPNOTSUPP)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// What a truncating open does to set-id bits.
    fn strip_for_truncate(&self, ino: Ino, req: &Request) -> Result<(), Errno> {
        let mut set = SetAttr {
            size: Some(0),
            ..SetAttr::default()
        };
        let stripped = self.strip_privileges(ino, &mut set, req.uid());
        set.size = None;
        match (stripped, set.perm) {
            (Ok(()), Some(_)) => self.mounted.setattr(ino, set, caller(req, 0)).map(drop),
            (result, _) => result,
        }
        .map_err(|e| errno("open", &e))
    }

    /// Calls `each` for the entries after `cookie`, in batches: the directory is not held while
    /// `each` looks an entry up. `each` gives false when the reply is full.
    fn list(
        &self,
        dir: Ino,
        mut cookie: u64,
        each: &mut dyn FnMut(DirEntry) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        loop {
            let mut batch = Vec::with_capacity(LISTING_BATCH);
            self.mounted.fs().readdir(dir, cookie, &mut |entry| {
                batch.push(entry);
                batch.len() < LISTING_BATCH
            })?;
            let whole = batch.len() >= LISTING_BATCH;
            for entry in batch {
                cookie = entry.cookie;
                if !each(entry)? {
                    return Ok(());
                }
            }
            if !whole {
                return Ok(());
            }
        }
    }
}

/// The mode without the bits that change who a program runs as. Set-group-id without group execute
/// is something else (mandatory locking, once) and stays.
fn without_set_id(perm: u16) -> u16 {
    let mut perm = perm & !0o4000;
    if perm & 0o010 != 0 {
        perm &= !0o2000;
    }
    perm
}

fn caller(req: &Request, umask: u32) -> Caller {
    Caller {
        uid: req.uid(),
        gid: req.gid(),
        umask,
    }
}

fn ours(name: &OsStr) -> Option<&str> {
    name.to_str().filter(|n| n.starts_with(PREFIX))
}

/// The two-step protocol of getxattr and listxattr: size 0 asks for the length.
fn reply_value(reply: ReplyXattr, value: &[u8], size: u32) {
    if size == 0 {
        reply.size(value.len() as u32);
    } else if value.len() > size as usize {
        reply.error(Errno::ERANGE);
    } else {
        reply.data(value);
    }
}

impl Filesystem for Jericho {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Each is worth having alone: what this kernel does not know is left out.
        for flag in [
            InitFlags::FUSE_ASYNC_READ,
            InitFlags::FUSE_BIG_WRITES,
            InitFlags::FUSE_MAX_PAGES,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_DONT_MASK,
            InitFlags::FUSE_POSIX_ACL,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_EXPORT_SUPPORT,
            InitFlags::FUSE_HAS_IOCTL_DIR,
        ] {
            if config.add_capabilities(flag).is_err() {
                tracing::debug!(?flag, "this kernel does not offer it");
            }
        }
        if self.ring.load(Ordering::Relaxed) {
            let agreed = config.add_capabilities(InitFlags::FUSE_OVER_IO_URING);
            self.ring.store(agreed.is_ok(), Ordering::Relaxed);
        }
        let too_much = |limit| io::Error::other(format!("the limit of fuser is {limit}"));
        config.set_max_write(REQUEST_BYTES_MAX).map_err(too_much)?;
        let background = |limit: u16| io::Error::other(format!("the limit of fuser is {limit}"));
        config
            .set_max_background(BACKGROUND_REQUESTS)
            .map_err(background)?;
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.request("lookup", || {
            match self.look_up(parent.0, name.as_bytes()) {
                // Number 0: the kernel may remember that there is no such name.
                Ok(None) => {
                    reply.entry(&TTL, &convert::bare_attr(0, Kind::File), Generation(0));
                }
                Ok(Some(attr)) => self.reply_entry("lookup", Ok(attr), reply),
                Err(e) => reply.error(e),
            }
        });
    }

    fn forget(&self, _req: &Request, ino: INodeNo, nlookup: u64) {
        self.request("forget", || self.mounted.fs().forget(ino.0, nlookup));
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        self.request("getattr", || match self.attributes(ino.0) {
            Ok(a) => reply.attr(&self.ttl(a.ino), &convert::attr(&a)),
            Err(e) => reply.error(e),
        });
    }

    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        self.request("setattr", || {
            let mut set = SetAttr {
                perm: mode.map(|m| (m & 0o7777) as u16),
                uid,
                gid,
                size,
                atime: atime.map(convert::set_time),
                mtime: mtime.map(convert::set_time),
                ctime: ctime.map(convert::time),
            };
            let result = self
                .strip_privileges(ino.0, &mut set, req.uid())
                .and_then(|()| self.mounted.setattr(ino.0, set, caller(req, 0)));
            match result {
                Ok(a) => reply.attr(&self.ttl(a.ino), &convert::attr(&a)),
                Err(e) => reply.error(errno("setattr", &e)),
            }
        });
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        self.request("readlink", || match self.mounted.fs().readlink(ino.0) {
            Ok(target) => reply.data(&target),
            Err(e) => reply.error(errno("readlink", &e)),
        });
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        self.request("mknod", || {
            let Some(kind) = convert::kind_of_mode(mode) else {
                return reply.error(Errno::EINVAL);
            };
            let (perm, who) = ((mode & 0o7777) as u16, caller(req, umask));
            let result = self
                .mounted
                .fs()
                .mknod(parent.0, name.as_bytes(), kind, perm, rdev, who);
            self.reply_entry("mknod", result, reply);
        });
    }

    fn mkdir(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        self.request("mkdir", || {
            let perm = (mode & 0o7777) as u16;
            let result =
                self.mounted
                    .fs()
                    .mkdir(parent.0, name.as_bytes(), perm, caller(req, umask));
            self.reply_entry("mkdir", result, reply);
        });
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.request("unlink", || {
            let result = self.mounted.fs().unlink(parent.0, name.as_bytes());
            Self::reply_empty("unlink", result, reply);
        });
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.request("rmdir", || {
            let result = self.mounted.fs().rmdir(parent.0, name.as_bytes());
            Self::reply_empty("rmdir", result, reply);
        });
    }

    fn symlink(
        &self,
        req: &Request,
        parent: INodeNo,
        link_name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        self.request("symlink", || {
            let target = target.as_os_str().as_bytes();
            let result =
                self.mounted
                    .fs()
                    .symlink(parent.0, link_name.as_bytes(), target, caller(req, 0));
            self.reply_entry("symlink", result, reply);
        });
    }

    fn rename(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        self.request("rename", || {
            let (from, to) = (name.as_bytes(), newname.as_bytes());
            let result = self
                .mounted
                .fs()
                .rename(parent.0, from, newparent.0, to, flags.bits());
            Self::reply_empty("rename", result, reply);
        });
    }

    fn link(
        &self,
        _req: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        self.request("link", || {
            let result = self
                .mounted
                .fs()
                .link(ino.0, newparent.0, newname.as_bytes());
            self.reply_entry("link", result, reply);
        });
    }

    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.request("open", || {
            let truncated = match flags.0 & libc::O_TRUNC {
                0 => Ok(()),
                _ => self.strip_for_truncate(ino.0, req),
            };
            let opened = truncated.and_then(|()| self.open_inode(ino.0, flags.0));
            match opened {
                Ok(fh) => reply.opened(FileHandle(fh), FILE_FLAGS),
                Err(e) => reply.error(e),
            }
        });
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        self.request("create", || {
            let (perm, who) = ((mode & 0o7777) as u16, caller(req, umask));
            match self.create_and_open(parent.0, name.as_bytes(), perm, flags, who) {
                Ok((attr, fh)) => {
                    let generation = Generation(u64::from(attr.generation));
                    let attr = convert::attr(&attr);
                    reply.created(&TTL, &attr, generation, FileHandle(fh), FILE_FLAGS);
                }
                Err(e) => reply.error(e),
            }
        });
    }

    fn read(
        &self,
        req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.request("read", || {
            let answer = move |read, mut buffer: Scratch| match read {
                Ok(len) => reply.data(buffer.first(len)),
                Err(e) => reply.error(e),
            };
            self.read_bytes(req.pid(), fh.0, offset, size, Scratch::take(), answer);
        });
    }

    fn write(
        &self,
        req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.request("write", || {
            let answer = move |written| match written {
                Ok(n) => reply.written(n),
                Err(e) => reply.error(e),
            };
            let write = Write {
                pid: req.pid(),
                fh: fh.0,
                offset,
                write_flags,
                open_flags: flags.0,
            };
            self.write_bytes(&write, data, answer);
        });
    }

    /// Not wanted: write-back errors are reported by fsync, and nothing is kept per descriptor. The
    /// kernel does not ask again.
    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn release(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.request("release", || match self.close(fh.0) {
            Ok(()) => reply.ok(),
            Err(e) => reply.error(e),
        });
    }

    fn fsync(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        datasync: bool,
        reply: ReplyEmpty,
    ) {
        self.request("fsync", || {
            self.with_handle(fh, reply, ReplyEmpty::error, |handle, reply| {
                let done = Box::new(move |result| Self::reply_empty("fsync", result, reply));
                self.mounted.fsync(handle, datasync, done);
            });
        });
    }

    fn opendir(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // A listing continues by cookie: nothing is kept per descriptor.
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn readdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        self.request("readdir", || {
            let result = self.list(ino.0, offset, &mut |e| {
                let kind = convert::file_type(e.kind);
                Ok(!reply.add(INodeNo(e.ino), e.cookie, kind, OsStr::from_bytes(&e.name)))
            });
            match result {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(errno("readdir", &e)),
            }
        });
    }

    fn readdirplus(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        self.request("readdirplus", || {
            let fs = self.mounted.fs();
            let mut any = false;
            let result = self.list(ino.0, offset, &mut |e| {
                let name = OsStr::from_bytes(&e.name);
                if e.name == b"." || e.name == b".." {
                    // The kernel takes no reference of these.
                    let attr = convert::bare_attr(e.ino, e.kind);
                    let zero = Duration::ZERO;
                    any = true;
                    return Ok(!reply.add(attr.ino, e.cookie, name, &zero, &attr, Generation(0)));
                }
                let attr = match self.mounted.lookup(ino.0, &e.name) {
                    Ok(attr) => attr,
                    // Removed since it was listed.
                    Err(Error::Errno(libc::ENOENT)) => return Ok(true),
                    Err(error) => return Err(error),
                };
                let generation = Generation(u64::from(attr.generation));
                let a = convert::attr(&attr);
                let ttl = self.ttl(attr.ino);
                let full = reply.add(a.ino, e.cookie, name, &ttl, &a, generation);
                if full {
                    fs.forget(attr.ino, 1);
                } else {
                    any = true;
                }
                Ok(!full)
            });
            match result {
                Ok(()) => reply.ok(),
                // What is in the reply already counts its lookups and must reach the kernel; the
                // next call meets the error again.
                Err(_) if any => reply.ok(),
                Err(e) => reply.error(errno("readdirplus", &e)),
            }
        });
    }

    fn fsyncdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        self.request("fsyncdir", || {
            let done = Box::new(move |result| Self::reply_empty("fsyncdir", result, reply));
            self.mounted.fs().fsync_dir(ino.0, done);
        });
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        self.request("statfs", || match self.mounted.fs().statfs() {
            Ok(s) => reply.statfs(
                s.blocks,
                s.free,
                s.free,
                s.files,
                s.files_free,
                4096,
                s.name_max,
                4096,
            ),
            Err(e) => reply.error(errno("statfs", &e)),
        });
    }

    fn setxattr(
        &self,
        req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        self.request("setxattr", || match ours(name) {
            Some(name) => self
                .control
                .set(ino.0, name, value, req.uid(), |result| match result {
                    Ok(()) => reply.ok(),
                    Err(e) => reply.error(Errno::from_i32(e)),
                }),
            None => {
                let fs = self.mounted.fs();
                let result = fs.setxattr(ino.0, name.as_bytes(), value, flags as u32);
                Self::reply_empty("setxattr", result, reply);
            }
        });
    }

    fn getxattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        self.request("getxattr", || {
            let value = match ours(name) {
                Some(name) => self.control.get(ino.0, name).map_err(Errno::from_i32),
                None => self
                    .mounted
                    .fs()
                    .getxattr(ino.0, name.as_bytes())
                    .map_err(|e| errno("getxattr", &e)),
            };
            match value {
                Ok(value) => reply_value(reply, &value, size),
                Err(e) => reply.error(e),
            }
        });
    }

    fn listxattr(&self, _req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.request("listxattr", || match self.mounted.fs().listxattr(ino.0) {
            Ok(names) => reply_value(reply, &names, size),
            Err(e) => reply.error(errno("listxattr", &e)),
        });
    }

    fn removexattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.request("removexattr", || match ours(name) {
            Some(_) => reply.error(Errno::EOPNOTSUPP),
            None => {
                let result = self.mounted.fs().removexattr(ino.0, name.as_bytes());
                Self::reply_empty("removexattr", result, reply);
            }
        });
    }

    fn fallocate(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        self.request("fallocate", || {
            self.with_handle(fh, reply, ReplyEmpty::error, |handle, reply| {
                let result = self.mounted.fallocate(handle, mode, offset, length);
                Self::reply_empty("fallocate", result, reply);
            });
        });
    }

    fn lseek(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        self.request("lseek", || {
            self.with_handle(fh, reply, ReplyLseek::error, |handle, reply| {
                // The kernel does the other kinds itself.
                let data = match whence {
                    libc::SEEK_DATA => true,
                    libc::SEEK_HOLE => false,
                    _ => return reply.error(Errno::EINVAL),
                };
                let Ok(offset) = u64::try_from(offset) else {
                    return reply.error(Errno::ENXIO);
                };
                self.mounted.settle(ino.0);
                match self
                    .mounted
                    .fs()
                    .seek(self.mounted.file(handle), offset, data)
                {
                    Ok(found) => reply.offset(found as i64),
                    Err(e) => reply.error(errno("lseek", &e)),
                }
            });
        });
    }

    /// The kernel copies through its own buffers then, and does not ask again.
    fn copy_file_range(
        &self,
        _req: &Request,
        _ino_in: INodeNo,
        _fh_in: FileHandle,
        _offset_in: u64,
        _ino_out: INodeNo,
        _fh_out: FileHandle,
        _offset_out: u64,
        _len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        flags: IoctlFlags,
        cmd: u32,
        in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        self.request("ioctl", || {
            // A directory has no handle of ours.
            if flags.contains(IoctlFlags::FUSE_IOCTL_DIR) {
                return reply.error(Errno::ENOTTY);
            }
            let call = match Call::decode(cmd, in_data) {
                Ok(Some(call)) => call,
                Ok(None) => return reply.error(Errno::ENOTTY),
                Err(why) => return reply.ioctl(0, &Answer::refused(why).encode()),
            };
            let uid = req.uid();
            self.with_handle(fh, reply, ReplyIoctl::error, |handle, reply| {
                self.mounted.call(handle, call, uid, move |answer: Answer| {
                    reply.ioctl(0, &answer.encode());
                });
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_id_bits_go_but_a_set_group_id_without_execute_stays() {
        assert_eq!(without_set_id(0o6755), 0o755);
        assert_eq!(without_set_id(0o4755), 0o755);
        assert_eq!(without_set_id(0o2745), 0o2745);
        assert_eq!(without_set_id(0o644), 0o644);
    }
}
