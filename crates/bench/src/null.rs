//! A filesystem that does nothing, mounted in the same way as Jericho. It is the ceiling for a daemon behind the kernel's FUSE
//! transport with these flags, this library and this number of threads.
//!
//! Every name in it is a file. Reads return bytes of one buffer, and writes are dropped.

use std::ffi::OsStr;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags,
    ReplyAttr, ReplyCreate, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request,
    SessionACL, TimeOrNow, WriteFlags,
};

use crate::Result;
use crate::settings::Settings;

/// Name of the filesystem in tables.
pub const NAME: &str = "a FUSE filesystem that does nothing";
const TTL: Duration = Duration::from_secs(3600);
const REQUEST_BYTES_MAX: u32 = 1 << 20;
const FILE_BYTES: u64 = 4 << 30;
/// The same value as Jericho's, see crates/fuse.
const BACKGROUND_REQUESTS: u16 = 256;
/// The same as `jericho mount` on a small machine: one thread per CPU, at least four.
const THREADS_MIN: usize = 4;

struct Null {
    bytes: Vec<u8>,
}

fn too_much(limit: u32) -> io::Error {
    io::Error::other(format!("the limit of fuser is {limit}"))
}

fn attr(ino: INodeNo) -> FileAttr {
    let (kind, perm) = match ino {
        INodeNo::ROOT => (FileType::Directory, 0o777),
        _ => (FileType::RegularFile, 0o666),
    };
    let time = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino,
        size: FILE_BYTES,
        blocks: FILE_BYTES / 512,
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind,
        perm,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

/// Returns the inode of a name; never 0, and never the root's.
fn inode(name: &OsStr) -> INodeNo {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    INodeNo(hasher.finish() | 2)
}

/// Returns the flags of Jericho's own descriptors, see crates/fuse.
fn flags() -> FopenFlags {
    FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
}

impl Filesystem for Null {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        for flag in [
            InitFlags::FUSE_ASYNC_READ,
            InitFlags::FUSE_BIG_WRITES,
            InitFlags::FUSE_MAX_PAGES,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        ] {
            // Ignores flags that this kernel does not support, as Jericho does.
            let _ = config.add_capabilities(flag);
        }
        config.set_max_write(REQUEST_BYTES_MAX).map_err(too_much)?;
        config
            .set_max_background(BACKGROUND_REQUESTS)
            .map_err(|limit| too_much(limit.into()))?;
        Ok(())
    }

    fn lookup(&self, _req: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        reply.entry(&TTL, &attr(inode(name)), Generation(0));
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &attr(ino));
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        reply.attr(&TTL, &attr(ino));
    }

    fn create(
        &self,
        _req: &Request,
        _parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        reply.created(
            &TTL,
            &attr(inode(name)),
            Generation(0),
            FileHandle(0),
            flags(),
        );
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), flags());
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        reply.data(&self.bytes[..self.bytes.len().min(size as usize)]);
    }

    fn write(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        reply.written(data.len() as u32);
    }

    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn unlink(&self, _req: &Request, _parent: INodeNo, _name: &OsStr, reply: ReplyEmpty) {
        reply.ok();
    }
}

/// The filesystem that does nothing, mounted and served by threads of this process.
pub struct NullMount {
    mnt: PathBuf,
    /// Unmounts when dropped.
    _session: BackgroundSession,
}

impl NullMount {
    /// Mounts the filesystem in the directory of the run.
    pub fn mount(settings: &Settings) -> Result<NullMount> {
        let mnt = settings.dir.join("null.mnt");
        std::fs::create_dir_all(&mnt)?;
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("null".into()),
            MountOption::DefaultPermissions,
        ];
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
        config.n_threads = Some(cpus.max(THREADS_MIN));
        // Each thread has a channel of its own, if the device can be opened (see crates/fuse).
        let device = File::options().read(true).write(true).open("/dev/fuse");
        config.clone_fd = device.is_ok();
        config.acl = SessionACL::Owner;
        let bytes = vec![0x5a; REQUEST_BYTES_MAX as usize];
        let session = fuser::spawn_mount(Null { bytes }, &mnt, &config)
            .map_err(|e| format!("cannot mount {}: {e}", mnt.display()))?;
        Ok(NullMount {
            mnt,
            _session: session,
        })
    }

    /// Returns the mount point.
    pub fn mnt(&self) -> &Path {
        &self.mnt
    }
}
