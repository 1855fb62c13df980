//! Names, attributes and opening, whichever way the request came.

use std::sync::Arc;

use fuser::Errno;
use jericho_daemon::Handle;
use jericho_fs::Error;
use jericho_fs::types::{Attr, Caller, Ino, Kind};

use crate::convert::errno;
use crate::filesystem::Jericho;

impl Jericho {
    /// What has a name in a directory, with one reference for the kernel; `None`: nothing has.
    pub(crate) fn look_up(&self, dir: Ino, name: &[u8]) -> Result<Option<Attr>, Errno> {
        match self.mounted.lookup(dir, name) {
            Err(Error::Errno(libc::ENOENT)) => Ok(None),
            found => found.map(Some).map_err(|e| errno("lookup", &e)),
        }
    }

    pub(crate) fn attributes(&self, ino: Ino) -> Result<Attr, Errno> {
        self.mounted.getattr(ino).map_err(|e| errno("getattr", &e))
    }

    /// Opens a file; the handle's number.
    pub(crate) fn open_inode(&self, ino: Ino, flags: i32) -> Result<u64, Errno> {
        let truncate = flags & libc::O_TRUNC != 0;
        let handle = self.mounted.open_file(ino, truncate, may_write(flags));
        self.number(handle.map_err(|e| errno("open", &e))?)
    }

    /// Makes a file, or opens the one that somebody else has made meanwhile, with one reference for the kernel.
    pub(crate) fn create_and_open(
        &self,
        dir: Ino,
        name: &[u8],
        perm: u16,
        flags: i32,
        caller: Caller,
    ) -> Result<(Attr, u64), Errno> {
        let fs = self.mounted.fs();
        let (made, flags) = match fs.mknod(dir, name, Kind::File, perm, 0, caller) {
            // Since the kernel looked.
            Err(Error::Errno(libc::EEXIST)) if flags & libc::O_EXCL == 0 => {
                (fs.lookup(dir, name), flags)
            }
            // A file that has just been made is empty.
            made => (made, flags & !libc::O_TRUNC),
        };
        self.open_made(made, flags)
    }

    /// Makes a file without a name (O_TMPFILE), with one reference for the kernel.
    pub(crate) fn open_unnamed(
        &self,
        dir: Ino,
        perm: u16,
        flags: i32,
        caller: Caller,
    ) -> Result<(Attr, u64), Errno> {
        let made = self.mounted.fs().tmpfile(dir, perm, caller);
        self.open_made(made, flags & !libc::O_TRUNC)
    }

    fn open_made(&self, made: jericho_fs::Result<Attr>, flags: i32) -> Result<(Attr, u64), Errno> {
        let attr = made.map_err(|e| errno("create", &e))?;
        match self.open_inode(attr.ino, flags) {
            Ok(fh) => Ok((attr, fh)),
            Err(e) => {
                self.mounted.fs().forget(attr.ino, 1);
                Err(e)
            }
        }
    }

    pub(crate) fn close(&self, fh: u64) -> Result<(), Errno> {
        let handle = self.handles.remove(fh).ok_or(Errno::EBADF)?;
        self.mounted.close_file(&handle);
        Ok(())
    }

    fn number(&self, handle: Arc<Handle>) -> Result<u64, Errno> {
        self.handles.insert(handle.clone()).ok_or_else(|| {
            self.mounted.close_file(&handle);
            Errno::ENFILE
        })
    }
}

fn may_write(flags: i32) -> bool {
    flags & libc::O_ACCMODE != libc::O_RDONLY
}
