//! The filesystem as the kernel sees it: dispatches each request to its method, from the device and from the ring.
//!
//! Invariants:
//! - The daemon is the only writer, and every change comes through this kernel. With each change that it sends, the kernel
//!   updates or drops its cached state of an inode (size after a direct write, link count after unlink, everything after
//!   fallocate). So it may cache entries, attributes and the absence of a name for a long time. Files that programs write inline
//!   are the exception; see `kept`.
//! - Every entry in an answer counts one lookup of its inode; `forget` releases it.
//! - A read or write that hits allocates nothing here. It takes no lock, except that of a handle with few lookups (`handles`).
//! - A panic in a request costs only that request (EIO), not its thread: without threads the mount would hang.

use std::sync::Arc;
use std::time::Duration;

use jericho_daemon::{Handle, Moment, Mounted, with_interruption};
use jericho_fs::Error;
use jericho_fs::types::{Attr, Caller, Kind};

use crate::control::Control;
use crate::convert::errno;
use crate::device::workers_max;
use crate::endable::{ending_before_begin, may_be_ended};
use crate::handles::Handles;
use crate::interrupts::Ending;
use crate::protocol::InHeader;
use crate::protocol::answer::{EntryOut, StatFsOut};
use crate::protocol::init::Agreed;
use crate::protocol::request::{Malformed, Operation};
use crate::reply::{Interrupts, Reply, Ticket};
use crate::server::{Server, refuse};

/// Longest time that the kernel may cache entries and attributes; see the invariants.
pub(crate) const TTL: Duration = Duration::from_secs(3600);
/// Most background requests (read-ahead, asynchronous direct I/O) that may be with the daemon at once.
pub(crate) const BACKGROUND_REQUESTS: u16 = 256;
/// Most requests that may wait for space. Fewer than all background requests, because the releases that free the space are
/// background requests, too.
const SPACE_WAITS: usize = BACKGROUND_REQUESTS as usize * 3 / 4;

/// Operations that signals have ended for their programs may keep one worker or helper of this many.
const BACKGROUND_PART: usize = 4;

/// A handle to the filesystem. Clones refer to the same filesystem.
#[derive(Clone)]
pub(crate) struct Jericho {
    pub(crate) mounted: Arc<Mounted>,
    pub(crate) handles: Arc<Handles<Handle>>,
    pub(crate) control: Arc<Control>,
    pub(crate) interrupts: Interrupts,
    /// The features that the kernel and this side have agreed on.
    pub(crate) agreed: Agreed,
}

impl Jericho {
    pub(crate) fn new(mounted: Arc<Mounted>, agreed: Agreed) -> Jericho {
        mounted.limit_space_waits(SPACE_WAITS);
        // A weak reference: the table outlives no mount.
        let weak = Arc::downgrade(&mounted);
        let is_silent = move || weak.upgrade().is_some_and(|m| m.has_silent_device());
        Jericho {
            handles: Arc::new(Handles::new()),
            control: Arc::new(Control::new(mounted.clone(), agreed.ring())),
            interrupts: Interrupts::new(Box::new(is_silent), workers_max(8) / BACKGROUND_PART),
            mounted,
            agreed,
        }
    }

    #[inline]
    fn answer(&self, header: &InHeader, operation: Operation<'_>, reply: Reply) {
        let (req, ino) = (header, header.nodeid);
        match operation {
            Operation::Read(args) => self.read(req, &args, reply),
            Operation::Write { args, data } => self.write(req, &args, data, reply),
            Operation::Lookup { name } => self.lookup(ino, name, reply),
            Operation::GetAttr => self.getattr(ino, reply),
            Operation::StatX => self.statx(ino, reply),
            Operation::SetAttr(args) => self.setattr(req, ino, &args, reply),
            Operation::ReadLink => self.readlink(ino, reply),
            Operation::Symlink { name, target } => self.symlink(req, ino, name, target, reply),
            Operation::Mknod { args, name } => self.mknod(req, ino, &args, name, reply),
            Operation::Mkdir { args, name } => self.mkdir(req, ino, &args, name, reply),
            Operation::Unlink { name } => self.unlink(ino, name, reply),
            Operation::Rmdir { name } => self.rmdir(ino, name, reply),
            Operation::Rename {
                name,
                dir_to,
                name_to,
                flags,
            } => self.rename((ino, name), (dir_to, name_to), flags, reply),
            Operation::Link { ino: old, name } => self.link(old, ino, name, reply),
            Operation::Open(args) => self.open(ino, &args, reply),
            Operation::Create { args, name } => self.create(req, ino, &args, name, reply),
            Operation::Tmpfile(args) => self.tmpfile(req, ino, &args, reply),
            Operation::StatFs => self.statfs(reply),
            Operation::Release { fh } => self.release(fh, reply),
            Operation::Fsync(args) => self.fsync(&args, reply),
            Operation::SetXattr { args, name, value } => {
                self.setxattr(req, ino, &args, name, value, reply);
            }
            Operation::GetXattr { size, name } => self.getxattr(req, ino, name, size, reply),
            Operation::ListXattr { size } => self.listxattr(ino, size, reply),
            Operation::RemoveXattr { name } => self.removexattr(ino, name, reply),
            Operation::OpenDir => self.opendir(reply),
            Operation::ReadDir(args) => self.readdir(ino, &args, reply),
            Operation::ReadDirPlus(args) => self.readdirplus(ino, &args, reply),
            Operation::FsyncDir => self.fsyncdir(ino, reply),
            Operation::Ioctl { args, data } => self.ioctl(req, &args, data, reply),
            Operation::Fallocate(args) => self.fallocate(req, ino, &args, reply),
            Operation::Lseek(args) => self.lseek(ino, &args, reply),
            Operation::CopyFileRange { args, long } => {
                self.copy_file_range(req, &args, long, reply);
            }
            Operation::ReleaseDir | Operation::Destroy => reply.ok(),
            // Not implemented: fsync reports write-back errors, and a descriptor has no state. The kernel does not ask again.
            Operation::Flush => reply.error(libc::ENOSYS),
            Operation::Other => reply.error(libc::ENOSYS),
            Operation::Init(_) => reply.error(libc::EIO),
            // These have no reply.
            Operation::Forget { .. }
            | Operation::BatchForget(_)
            | Operation::Interrupt { .. }
            | Operation::NotifyReply => {}
        }
    }

    /// Returns what holds the reply to a request while the request waits.
    pub(crate) fn ticket(&self, header: &InHeader) -> Ticket {
        self.interrupts.ticket(header.unique, header.pid)
    }

    /// Calls `call` with the open file of `fh`, or answers EBADF.
    #[inline]
    pub(crate) fn with_handle(
        &self,
        fh: u64,
        reply: Reply,
        call: impl FnOnce(&Arc<Handle>, Reply),
    ) {
        match self.handles.get(fh).as_ref() {
            Some(handle) => call(handle, reply),
            None => reply.error(libc::EBADF),
        }
    }

    /// Returns how long the kernel may keep an inode's attributes, which were read after `read`.
    pub(crate) fn kept(&self, attr: &Attr, read: Moment) -> Duration {
        // A write clears the set-id bits, but the kernel would keep the mode that it knows. With a lifetime of 0, the kernel asks
        // before each use, so no program runs with the cleared bits.
        let is_file = attr.kind == Kind::File;
        let set_id = is_file && attr.perm & 0o6000 != 0;
        if !set_id && (!is_file || self.mounted.attributes_may_be_kept(attr.ino, read)) {
            TTL
        } else {
            Duration::ZERO
        }
    }

    /// Returns how long the kernel may keep the attributes of an inode that it knew before the request.
    ///
    /// If the first writer of a file is granted at this moment, the kernel is told to forget the file's attributes. It ignores an
    /// answer to a question for them that is on its way, but it accepts the answer to a change. So it does not keep that one.
    pub(crate) fn kept_after_change(&self, attr: &Attr) -> Duration {
        match attr.kind {
            Kind::File => Duration::ZERO,
            _ => TTL,
        }
    }

    /// Returns the kernel's view of an inode that has a name. Its attributes were read after `read`.
    pub(crate) fn entry(&self, attr: &Attr, read: Moment) -> EntryOut {
        EntryOut::new(attr, TTL, self.kept(attr, read))
    }

    /// Returns how long the kernel may keep the attributes of an inode that the request has made. No program can open it before the
    /// answer: the kernel keeps its directory locked until then, or it has no name.
    pub(crate) fn kept_of_new(&self, attr: &Attr) -> Duration {
        self.kept(attr, self.mounted.moment())
    }

    /// Answers a request that makes an inode.
    pub(crate) fn reply_made(
        &self,
        operation: &'static str,
        result: Result<Attr, Error>,
        reply: Reply,
    ) {
        match result {
            Ok(a) => reply.with(&EntryOut::new(&a, TTL, self.kept_of_new(&a))),
            Err(e) => reply.error(errno(operation, &e)),
        }
    }

    fn statfs(&self, reply: Reply) {
        match self.mounted.fs().statfs() {
            Ok(s) => reply.with(&StatFsOut::new(&s)),
            Err(e) => reply.error(errno("statfs", &e)),
        }
    }
}

impl Server for Jericho {
    fn agreed(&self) -> &Agreed {
        &self.agreed
    }

    fn note_request(&self) {
        self.mounted.note_request();
    }

    fn serve(
        &self,
        header: &InHeader,
        operation: Result<Operation<'_>, Malformed>,
        reply: Option<Reply>,
    ) {
        match (operation, reply) {
            (Ok(operation), Some(reply)) => {
                let is_read = matches!(operation, Operation::Read(_));
                let keeps_its_hold = || is_read || may_be_ended(&operation);
                let Some(reply) = reply.begin(keeps_its_hold) else {
                    return;
                };
                if !self.mounted.may_fall_silent() || !may_be_ended(&operation) {
                    return self.answer(header, operation, reply);
                }
                let reply = reply.hold(self.ticket(header), Ending::Answer);
                let interruption = reply.interruption();
                with_interruption(interruption, || self.answer(header, operation, reply));
            }
            (Ok(Operation::Interrupt { unique }), None) => self.interrupts.came(unique),
            (Ok(Operation::Forget { lookups }), None) => self.forget(header.nodeid, lookups),
            (Ok(Operation::BatchForget(forgets)), None) => self.forget_all(forgets),
            (Ok(_), None) => {}
            (Err(why), reply) => refuse(why, header, reply),
        }
    }

    fn serves_reports(&self) -> bool {
        true
    }

    fn needs_reports(&self) -> bool {
        self.mounted.has_silent_device()
    }

    fn park(
        &self,
        header: &InHeader,
        operation: &Result<Operation<'_>, Malformed>,
        reply: Reply,
    ) -> Reply {
        match operation.as_ref().ok().and_then(ending_before_begin) {
            Some(ending) => reply.park(self.ticket(header), ending),
            None => reply,
        }
    }

    fn look_for_dying(&self) {
        self.interrupts.look_for_dying();
    }
}

/// Returns the user on whose behalf a request is made.
pub(crate) fn caller(req: &InHeader, umask: u32) -> Caller {
    Caller {
        uid: req.uid,
        gid: req.gid,
        umask,
    }
}

/// Lets an operation return an errno with `?`.
pub(crate) type Outcome<T> = Result<T, i32>;
