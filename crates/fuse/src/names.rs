//! Names: looking up, creating and removing files, directories and links.

use jericho_fs::Error;
use jericho_fs::types::Ino;
use zerocopy::{FromBytes, IntoBytes};

use crate::convert::{self, errno};
use crate::filesystem::{Jericho, TTL, caller};
use crate::protocol::InHeader;
use crate::protocol::answer::EntryOut;
use crate::protocol::request::{ForgetOne, MkdirIn, MknodIn};
use crate::reply::Reply;

impl Jericho {
    pub(crate) fn lookup(&self, parent: Ino, name: &[u8], reply: Reply) {
        let before = self.mounted.moment();
        match self.mounted.lookup(parent, name) {
            Ok(attr) => {
                if !reply.deliver(self.entry(&attr, before).as_bytes()) {
                    self.forget(attr.ino, 1);
                }
            }
            // Lets the kernel cache that the name does not exist.
            Err(Error::Errno(libc::ENOENT)) => reply.with(&EntryOut::none(TTL)),
            Err(e) => reply.error(errno("lookup", &e)),
        }
    }

    pub(crate) fn forget(&self, ino: Ino, lookups: u64) {
        self.mounted.fs().forget(ino, lookups);
    }

    /// Releases the lookups that `forgets` lists. `forgets` consists of whole [`ForgetOne`]s.
    pub(crate) fn forget_all(&self, forgets: &[u8]) {
        for one in forgets.chunks_exact(size_of::<ForgetOne>()) {
            if let Ok(one) = ForgetOne::read_from_bytes(one) {
                self.forget(one.ino, one.lookups);
            }
        }
    }

    pub(crate) fn readlink(&self, ino: Ino, reply: Reply) {
        match self.mounted.fs().readlink(ino) {
            Ok(target) => reply.bytes(&target),
            Err(e) => reply.error(errno("readlink", &e)),
        }
    }

    pub(crate) fn mknod(
        &self,
        req: &InHeader,
        parent: Ino,
        args: &MknodIn,
        name: &[u8],
        reply: Reply,
    ) {
        let Some(kind) = convert::kind_of_mode(args.mode) else {
            return reply.error(libc::EINVAL);
        };
        let (perm, user) = ((args.mode & 0o7777) as u16, caller(req, args.umask));
        let fs = self.mounted.fs();
        let result = fs.mknod(parent, name, kind, perm, args.rdev, user);
        self.reply_made("mknod", result, reply);
    }

    pub(crate) fn mkdir(
        &self,
        req: &InHeader,
        parent: Ino,
        args: &MkdirIn,
        name: &[u8],
        reply: Reply,
    ) {
        let (perm, user) = ((args.mode & 0o7777) as u16, caller(req, args.umask));
        let result = self.mounted.fs().mkdir(parent, name, perm, user);
        self.reply_made("mkdir", result, reply);
    }

    pub(crate) fn unlink(&self, parent: Ino, name: &[u8], reply: Reply) {
        reply.done("unlink", self.mounted.fs().unlink(parent, name));
    }

    pub(crate) fn rmdir(&self, parent: Ino, name: &[u8], reply: Reply) {
        reply.done("rmdir", self.mounted.fs().rmdir(parent, name));
    }

    pub(crate) fn symlink(
        &self,
        req: &InHeader,
        parent: Ino,
        name: &[u8],
        target: &[u8],
        reply: Reply,
    ) {
        let user = caller(req, 0);
        let result = self.mounted.fs().symlink(parent, name, target, user);
        self.reply_made("symlink", result, reply);
    }

    pub(crate) fn rename(&self, from: (Ino, &[u8]), to: (Ino, &[u8]), flags: u32, reply: Reply) {
        reply.done("rename", self.mounted.rename(from, to, flags));
    }

    pub(crate) fn link(&self, ino: Ino, parent: Ino, name: &[u8], reply: Reply) {
        match self.mounted.link(ino, parent, name) {
            Ok(a) => reply.with(&EntryOut::new(&a, TTL, self.kept_after_change(&a))),
            Err(e) => reply.error(errno("link", &e)),
        }
    }
}
