//! A disk as the kernel sees it: a directory with one regular file, whose bytes are those of a device.
//!
//! Invariants:
//! - The kernel caches no bytes of the file (FOPEN_DIRECT_IO, no shared mappings), so every read and write comes here.
//! - FSYNC is answered after the device has made durable all writes that were answered before. The kernel sends it for fsync(2) and
//!   for the flush of a loop device over the file. It sends none for a write with O_DSYNC: such a write is durable when it is answered.
//! - Reads and writes of whole blocks allocate no memory, once each thread has served a read: the kernel may wait for such a write in
//!   order to get memory. See docs/internals/attach.md.
//! - A panic in a request costs only that request (EIO).

use std::cell::RefCell;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use jericho_export::{Disk, Zeroed, Zeroes};
use jericho_fs::types::{Attr, Kind, StatFs};
use jericho_storage::{AlignedBuffer, BLOCK_BYTES, IoError};
use serde::{Deserialize, Serialize};

use crate::protocol::InHeader;
use crate::protocol::answer::{AttributesOut, EntryOut, Listing, OpenOut, SizeOut, StatFsOut};
use crate::protocol::init::Agreed;
use crate::protocol::request::{FallocateIn, LseekIn, Malformed, Operation, SetAttrIn, Transfer};
use crate::reply::Reply;
use crate::server::{REQUEST_BYTES_MAX, Server, refuse};

/// What `mount` and `/proc/mounts` show as the type of a disk, after "fuse.".
pub const SUBTYPE: &str = "jericho-disk";
/// The attribute that describes the disk: an [`Attached`] as JSON.
pub const ATTACHED: &str = "jericho.attached";
/// The attribute whose read makes the disk durable. Its value is the message of the failure, or empty.
pub const FLUSHED: &str = "jericho.flushed";

/// How long the kernel may cache names and attributes, which never change.
const TTL: Duration = Duration::from_secs(3600);
/// A close makes nothing durable, so it needs no request, which would hang if the device does.
const FILE_FLAGS: u32 = OpenOut::DIRECT_IO | OpenOut::PARALLEL_DIRECT_WRITES | OpenOut::NO_FLUSH;
/// Inode number of the directory.
const ROOT: u64 = 1;
/// Inode number of the file.
pub const FILE: u64 = 2;

thread_local! {
    /// Memory for the bytes of a read.
    static READ: RefCell<AlignedBuffer> = RefCell::new(AlignedBuffer::new(REQUEST_BYTES_MAX as usize));
}

/// What the server of a disk says about itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Attached {
    /// Process that serves the disk.
    pub pid: u32,
    /// The device as its user named it.
    pub device: String,
    /// Changes are refused.
    pub read_only: bool,
}

struct Shared {
    disk: Disk,
    name: OsString,
    uid: u32,
    gid: u32,
    since: SystemTime,
    agreed: Agreed,
    /// The log has a message about a failed request. One is enough.
    has_logged: AtomicBool,
}

/// A handle to the filesystem of a disk. Clones refer to the same disk.
#[derive(Clone)]
pub(crate) struct DiskServer(Arc<Shared>);

impl Server for DiskServer {
    fn agreed(&self) -> &Agreed {
        &self.0.agreed
    }

    fn note_request(&self) {}

    fn serve(
        &self,
        header: &InHeader,
        operation: Result<Operation<'_>, Malformed>,
        reply: Option<Reply>,
    ) {
        match (operation, reply) {
            (Ok(operation), Some(reply)) => self.answer(header.nodeid, operation, reply),
            (Ok(_), None) => {}
            (Err(why), reply) => refuse(why, header, reply),
        }
    }
}

impl DiskServer {
    /// Serves a disk as the file `name`, to the calling user.
    pub(crate) fn new(disk: Disk, name: &OsStr, agreed: Agreed) -> DiskServer {
        DiskServer(Arc::new(Shared {
            disk,
            name: name.to_owned(),
            uid: jericho_sys::process::uid(),
            gid: jericho_sys::process::gid(),
            since: SystemTime::now(),
            agreed,
            has_logged: AtomicBool::new(false),
        }))
    }

    fn answer(&self, ino: u64, operation: Operation<'_>, reply: Reply) {
        match operation {
            Operation::Read(args) => self.read(&args, reply),
            Operation::Write { args, data } => self.write(&args, data, reply),
            Operation::Fsync(_) | Operation::FsyncDir => self.done(self.0.flush(), reply),
            Operation::Fallocate(args) => self.fallocate(&args, reply),
            Operation::Lseek(args) => self.lseek(&args, reply),
            Operation::Lookup { name } => match ino == ROOT && name == self.0.name.as_bytes() {
                true => reply.with(&EntryOut::new(&self.0.attr(FILE), TTL, TTL)),
                false => reply.error(libc::ENOENT),
            },
            Operation::GetAttr => reply.with(&AttributesOut::new(&self.0.attr(ino), TTL)),
            Operation::SetAttr(args) => self.setattr(ino, &args, reply),
            // The kernel refuses writes, because the mount of a read-only disk is read-only.
            Operation::Open(_) => {
                reply.with(&OpenOut::new(0, FILE_FLAGS));
            }
            Operation::OpenDir => reply.with(&OpenOut::new(0, 0)),
            Operation::ReadDir(args) => self.readdir(&args, reply),
            Operation::StatFs => reply.with(&StatFsOut::new(&self.0.statfs())),
            Operation::GetXattr { name, size } => self.getxattr(name, size, reply),
            Operation::ListXattr { size } => reply.value(&[], size),
            Operation::Release { .. } | Operation::ReleaseDir | Operation::Destroy => reply.ok(),
            Operation::Mknod { .. }
            | Operation::Mkdir { .. }
            | Operation::Symlink { .. }
            | Operation::Link { .. }
            | Operation::Unlink { .. }
            | Operation::Rmdir { .. }
            | Operation::Rename { .. }
            | Operation::Create { .. }
            | Operation::Tmpfile(_) => reply.error(libc::EPERM),
            Operation::SetXattr { .. } | Operation::RemoveXattr { .. } => {
                reply.error(libc::EOPNOTSUPP);
            }
            Operation::ReadLink => reply.error(libc::EINVAL),
            Operation::Ioctl { .. } => reply.error(libc::ENOTTY),
            Operation::Init(_) => reply.error(libc::EIO),
            // The kernel does these itself, or without them.
            Operation::Flush
            | Operation::StatX
            | Operation::ReadDirPlus(_)
            | Operation::CopyFileRange { .. }
            | Operation::Other => reply.error(libc::ENOSYS),
            // These have no reply.
            Operation::Forget { .. }
            | Operation::BatchForget(_)
            | Operation::Interrupt { .. }
            | Operation::NotifyReply => {}
        }
    }

    fn read(&self, args: &Transfer, reply: Reply) {
        let length = self
            .0
            .inside(args.offset, args.size.min(REQUEST_BYTES_MAX).into());
        READ.with_borrow_mut(|buffer| {
            let bytes = &mut buffer.as_mut_slice()[..length as usize];
            match self.0.disk.read_bytes(args.offset, bytes) {
                Ok(()) => reply.bytes(bytes),
                Err(error) => reply.error(self.errno(&error)),
            }
        });
    }

    fn write(&self, args: &Transfer, data: &[u8], reply: Reply) {
        let length = self.0.inside(args.offset, data.len() as u64);
        if self.0.disk.is_read_only() {
            return reply.error(libc::EROFS);
        }
        if length == 0 && !data.is_empty() {
            return reply.error(libc::ENOSPC);
        }
        let is_durable = args.open_flags as i32 & (libc::O_DSYNC | libc::O_SYNC) != 0;
        let data = &data[..length as usize];
        match (self.0.disk).write_bytes(args.offset, data, is_durable) {
            Ok(()) => reply.with(&SizeOut::new(length as u32)),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    fn fallocate(&self, args: &FallocateIn, reply: Reply) {
        let (disk, mode) = (&self.0.disk, args.mode as i32);
        let end = args.offset.saturating_add(args.length);
        if disk.is_read_only() {
            return reply.error(libc::EROFS);
        }
        let size = libc::FALLOC_FL_KEEP_SIZE;
        let is_punch = mode == libc::FALLOC_FL_PUNCH_HOLE | size;
        let is_zero = mode & !size == libc::FALLOC_FL_ZERO_RANGE;
        if !is_punch && !is_zero && mode & !size != 0 {
            return reply.error(libc::EOPNOTSUPP);
        }
        // A disk does not grow.
        if end > disk.size_bytes() && mode & size == 0 {
            return reply.error(libc::ENOSPC);
        }
        let range = args.offset..args.offset + self.0.inside(args.offset, args.length);
        if range.is_empty() {
            return reply.ok();
        }
        if !is_punch && !is_zero {
            return self.provision(range.start, range.end, reply);
        }
        let how = Zeroes {
            is_durable: false,
            keeps_space: is_zero,
            // Writing the zeros of a hole could take hours: mkfs(8) punches the whole disk. Callers write zeros themselves
            // after EOPNOTSUPP, where they need them.
            must_be_fast: is_punch,
        };
        match disk.write_zeroes(range, how) {
            Ok(Zeroed::Done) => reply.ok(),
            Ok(Zeroed::NotFast) => reply.error(libc::EOPNOTSUPP),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    /// Allocates space for the blocks around a range.
    fn provision(&self, start: u64, end: u64, reply: Reply) {
        let start = start - start % BLOCK_BYTES;
        let length = end.next_multiple_of(BLOCK_BYTES) - start;
        match self.0.disk.device().provision(start, length) {
            // The bytes have a place already.
            Err(error) if !error.is_unsupported() => reply.error(self.errno(&error)),
            Err(error) => reply.error(error.errno()),
            Ok(()) => reply.ok(),
        }
    }

    fn lseek(&self, args: &LseekIn, reply: Reply) {
        let wants_hole = match args.whence as i32 {
            libc::SEEK_DATA => false,
            libc::SEEK_HOLE => true,
            _ => return reply.error(libc::EINVAL),
        };
        let (disk, mut at) = (&self.0.disk, args.offset);
        while at < disk.size_bytes() {
            match disk.extent_at(at) {
                Ok(extent) if extent.is_hole == wants_hole => return reply.with(&at),
                Ok(extent) => at += extent.length_bytes,
                Err(error) => return reply.error(self.errno(&error)),
            }
        }
        // There is a hole at the end of every file.
        match wants_hole && args.offset < disk.size_bytes() {
            true => reply.with(&disk.size_bytes()),
            false => reply.error(libc::ENXIO),
        }
    }

    /// Accepts the size that the file has, and times, without effect. Refuses all else: a disk has the size of its device.
    fn setattr(&self, ino: u64, args: &SetAttrIn, reply: Reply) {
        let attr = self.0.attr(ino);
        let is_other_size = args
            .given(SetAttrIn::SIZE, args.size)
            .is_some_and(|size| size != attr.size);
        let others = SetAttrIn::MODE | SetAttrIn::UID | SetAttrIn::GID;
        match is_other_size || args.valid & others != 0 {
            true => reply.error(libc::EPERM),
            false => reply.with(&AttributesOut::new(&attr, TTL)),
        }
    }

    fn readdir(&self, args: &Transfer, reply: Reply) {
        let mut listing = Listing::new(args.size.min(REQUEST_BYTES_MAX) as usize);
        let entries: [(&[u8], u64, Kind); 3] = [
            (b".", ROOT, Kind::Directory),
            (b"..", ROOT, Kind::Directory),
            (self.0.name.as_bytes(), FILE, Kind::File),
        ];
        for (cookie, (name, ino, kind)) in (1..).zip(entries) {
            if cookie > args.offset && !listing.add(None, (ino, kind), cookie, name) {
                break;
            }
        }
        reply.bytes(listing.bytes());
    }

    fn getxattr(&self, name: &[u8], size: u32, reply: Reply) {
        let disk = &self.0.disk;
        let value = if name == ATTACHED.as_bytes() {
            serde_json::to_vec(&Attached {
                pid: std::process::id(),
                device: disk.device().name().to_string(),
                read_only: disk.is_read_only(),
            })
            .unwrap_or_default()
        } else if name == FLUSHED.as_bytes() {
            let flushed = self.0.flush().map_err(|error| error.to_string());
            flushed.err().unwrap_or_default().into_bytes()
        } else {
            return reply.error(libc::ENODATA);
        };
        reply.value(&value, size);
    }

    fn done(&self, result: Result<(), IoError>, reply: Reply) {
        match result {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    /// Returns the errno for the program. Logs the first error, because the errno alone says little.
    fn errno(&self, error: &IoError) -> i32 {
        match self.0.has_logged.swap(true, Ordering::Relaxed) {
            false => tracing::error!(%error, "a request failed on the device"),
            true => tracing::debug!(%error, "a request failed on the device"),
        }
        error.errno()
    }
}

impl Shared {
    /// Returns how many of the bytes at an offset are inside the disk.
    fn inside(&self, offset: u64, length: u64) -> u64 {
        length.min(self.disk.size_bytes().saturating_sub(offset))
    }

    fn flush(&self) -> Result<(), IoError> {
        tracing::debug!("flush");
        self.disk.flush()
    }

    fn attr(&self, ino: u64) -> Attr {
        let (kind, writable, size) = match ino {
            ROOT => (Kind::Directory, 0o500, 0),
            _ => (Kind::File, 0o600, self.disk.size_bytes()),
        };
        let since = self.since;
        Attr {
            ino,
            generation: 0,
            kind,
            perm: match self.disk.is_read_only() {
                true => writable & 0o500,
                false => writable,
            },
            nlink: 1,
            uid: self.uid,
            gid: self.gid,
            rdev: 0,
            size,
            blocks: size / 512,
            atime: since,
            mtime: since,
            ctime: since,
            btime: since,
        }
    }

    fn statfs(&self) -> StatFs {
        StatFs {
            blocks: self.disk.size_bytes() / BLOCK_BYTES,
            free: 0,
            files: 1,
            files_free: 0,
            name_max: 255,
        }
    }
}
