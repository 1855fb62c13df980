//! Opening, creating and closing files.

use std::sync::Arc;
use std::time::Duration;

use jericho_daemon::Handle;
use jericho_fs::Error;
use jericho_fs::types::{Attr, Ino, Kind};
use zerocopy::IntoBytes;

use crate::bytes::{no_access_time, write_sync};
use crate::convert::errno;
use crate::filesystem::{Jericho, Outcome, TTL, caller};
use crate::protocol::InHeader;
use crate::protocol::answer::{CreateOut, EntryOut, OpenOut};
use crate::protocol::request::{CreateIn, OpenIn};
use crate::reply::Reply;

/// The kernel caches nothing, so reads and writes go to the slices. Direct writes to one file run in parallel.
const FILE_FLAGS: u32 = OpenOut::DIRECT_IO | OpenOut::PARALLEL_DIRECT_WRITES;

impl Jericho {
    pub(crate) fn open(&self, ino: Ino, args: &OpenIn, reply: Reply) {
        match self.open_inode(ino, args.flags as i32) {
            Ok(fh) => {
                let out = OpenOut::new(fh, FILE_FLAGS);
                if !reply.deliver(out.as_bytes()) {
                    self.close(fh);
                }
            }
            Err(e) => reply.error(e),
        }
    }

    /// Creates a file with one reference for the kernel. If another request has created the file since the kernel's lookup, opens
    /// that one.
    pub(crate) fn create(
        &self,
        req: &InHeader,
        parent: Ino,
        args: &CreateIn,
        name: &[u8],
        reply: Reply,
    ) {
        let (perm, user) = ((args.mode & 0o7777) as u16, caller(req, args.umask));
        let (fs, flags) = (self.mounted.fs(), args.flags as i32);
        let made = match fs.mknod(parent, name, Kind::File, perm, 0, user) {
            // Another request has created the file since the kernel's lookup. A truncation waits for inline writers, which this
            // thread may not do. After ESTALE, the kernel repeats its lookup, opens the file, and requests the truncation
            // separately.
            Err(Error::Errno(libc::EEXIST)) if flags & libc::O_EXCL == 0 => {
                match flags & libc::O_TRUNC {
                    0 => {
                        let found = self.mounted.lookup(parent, name);
                        return self.reply_created(found, flags, Jericho::kept_after_change, reply);
                    }
                    _ => return reply.error(libc::ESTALE),
                }
            }
            made => made,
        };
        self.reply_created(made, flags, Jericho::kept_of_new, reply);
    }

    /// Creates a file without a name (O_TMPFILE), with one reference for the kernel.
    pub(crate) fn tmpfile(&self, req: &InHeader, dir: Ino, args: &CreateIn, reply: Reply) {
        let (perm, user) = ((args.mode & 0o7777) as u16, caller(req, args.umask));
        let made = self.mounted.fs().tmpfile(dir, perm, user);
        self.reply_created(made, args.flags as i32, Jericho::kept_of_new, reply);
    }

    /// Opens a file and answers. `kept` returns how long the kernel may keep its attributes.
    fn reply_created(
        &self,
        made: jericho_fs::Result<Attr>,
        flags: i32,
        kept: fn(&Jericho, &Attr) -> Duration,
        reply: Reply,
    ) {
        match self.open_made(made, flags) {
            Ok((attr, fh)) => {
                let out = CreateOut {
                    entry: EntryOut::new(&attr, TTL, kept(self, &attr)),
                    open: OpenOut::new(fh, FILE_FLAGS),
                };
                if !reply.deliver(out.as_bytes()) {
                    self.close(fh);
                    self.mounted.fs().forget(attr.ino, 1);
                }
            }
            Err(e) => reply.error(e),
        }
    }

    fn open_made(&self, made: jericho_fs::Result<Attr>, flags: i32) -> Outcome<(Attr, u64)> {
        let attr = made.map_err(|e| errno("create", &e))?;
        match self.open_inode(attr.ino, flags) {
            Ok(fh) => Ok((attr, fh)),
            Err(e) => {
                self.mounted.fs().forget(attr.ino, 1);
                Err(e)
            }
        }
    }

    /// Opens a file. Returns the handle's number. Ignores O_TRUNC: without `FUSE_ATOMIC_O_TRUNC`, the kernel sends a truncation
    /// as a separate request, and a file that was just created is empty.
    fn open_inode(&self, ino: Ino, flags: i32) -> Outcome<u64> {
        let handle = self.mounted.open_file(ino, may_write(flags));
        let handle = handle.map_err(|e| errno("open", &e))?;
        self.mounted.opened(&handle);
        handle.set_sync(write_sync(flags));
        handle.set_no_access_time(no_access_time(flags));
        self.number(handle)
    }

    fn number(&self, handle: Arc<Handle>) -> Outcome<u64> {
        // The slice, so that opens in different slices share no lock.
        let group = self.mounted.file(&handle).layout().home();
        self.handles.insert(group, handle.clone()).ok_or_else(|| {
            self.mounted.close_file(&handle);
            libc::ENFILE
        })
    }

    /// Returns whether the release of an open file may end its right to write inline.
    pub(crate) fn may_write_inline(&self, fh: u64) -> bool {
        let open = self.handles.get(fh);
        open.as_ref()
            .is_some_and(|handle| handle.may_write_inline())
    }

    pub(crate) fn release(&self, fh: u64, reply: Reply) {
        match self.close(fh) {
            true => reply.ok(),
            false => reply.error(libc::EBADF),
        }
    }

    /// Closes an open file. Returns false if there is none with this number.
    fn close(&self, fh: u64) -> bool {
        let handle = self.handles.remove(fh);
        if let Some(handle) = &handle {
            self.mounted.close_file(handle);
        }
        handle.is_some()
    }
}

fn may_write(flags: i32) -> bool {
    flags & libc::O_ACCMODE != libc::O_RDONLY
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;

    use jericho_daemon::{Mounted, OpenOptions};
    use jericho_fs::format::format;
    use jericho_fs::types::{Caller, ROOT, SetAttr};
    use jericho_topology::Topology;
    use jericho_volume::FormatOptions;
    use zerocopy::FromZeros;

    use super::*;
    use crate::protocol::init::Agreed;

    const OWNER: Caller = Caller {
        uid: 0,
        gid: 0,
        umask: 0,
    };

    /// Returns a mount whose requests come from a test.
    fn filesystem(volume: &std::path::Path) -> Jericho {
        std::fs::File::create(volume).unwrap();
        let options = FormatOptions {
            size_bytes: Some(64 << 20),
            slices: Some(1),
            ..FormatOptions::default()
        };
        format(&[volume.to_owned()], &options).unwrap();
        let options = options_of(volume.to_owned());
        Jericho::new(Mounted::open(options).unwrap(), Agreed::all())
    }

    /// Returns the options of a mount with 8 MiB of cache.
    pub(crate) fn options_of(volume: PathBuf) -> OpenOptions {
        OpenOptions {
            volume,
            devices: vec![],
            read_only: false,
            force: false,
            cache_bytes: Some(8 << 20),
            spill_bytes: 0,
            topology: Topology::from_spec("virtual:1").unwrap(),
            threads: Default::default(),
            with_parent: false,
            move_costs: Default::default(),
            fast_path: Default::default(),
            keeper: None,
        }
    }

    /// Requests to create `name`. Returns the errno of the answer.
    fn create(filesystem: &Jericho, name: &[u8], flags: i32) -> i32 {
        let (mut near, far) = UnixStream::pair().unwrap();
        let channel = Arc::new(Arc::new(far.into()));
        let header = InHeader::new_zeroed();
        let args = CreateIn {
            flags: (libc::O_WRONLY | libc::O_CREAT | flags) as u32,
            mode: 0o644,
            umask: 0,
            open_flags: 0,
        };
        let reply = Reply::device(&channel, 1);
        filesystem.create(&header, ROOT, &args, name, reply);
        let mut answer = [0; 16];
        near.read_exact(&mut answer).unwrap();
        -i32::from_ne_bytes([answer[4], answer[5], answer[6], answer[7]])
    }

    #[test]
    fn a_request_to_create_a_file_never_truncates_an_existing_one() {
        let dir = tempfile::tempdir().unwrap();
        let filesystem = filesystem(&dir.path().join("volume"));
        let mounted = &filesystem.mounted;
        let fs = mounted.fs();
        let attr = (fs.mknod(ROOT, b"file", Kind::File, 0o644, 0, OWNER)).unwrap();
        let set = SetAttr {
            size: Some(5),
            ..SetAttr::default()
        };
        mounted.setattr(attr.ino, set, OWNER).unwrap();
        assert_eq!(create(&filesystem, b"file", libc::O_TRUNC), libc::ESTALE);
        assert_eq!(create(&filesystem, b"file", libc::O_EXCL), libc::EEXIST);
        assert_eq!(create(&filesystem, b"file", 0), 0);
        assert_eq!(mounted.getattr(attr.ino).unwrap().size, 5);
        assert_eq!(create(&filesystem, b"new", libc::O_TRUNC), 0);
        mounted.close().unwrap();
    }
}
