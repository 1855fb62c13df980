//! Operations on files and their attributes, by number and by name.

use std::sync::Arc;

use jericho_format::threads::ThreadPolicy;
use jericho_fs::CAPABILITY;
use jericho_fs::Result;
use jericho_fs::types::{Attr, Caller, Ino, SetAttr, SliceId};

use crate::handle::Handle;
use crate::mounted::Mounted;

impl Mounted {
    /// Opens a file for the data path. `writable`: the program may write through the handle. Does not truncate: the kernel sends
    /// a `setattr` for O_TRUNC.
    pub fn open_file(&self, ino: Ino, writable: bool) -> Result<Arc<Handle>> {
        Ok(Handle::new(self.fs().open_file(ino)?, writable))
    }

    /// Closes a handle.
    pub fn close_file(&self, handle: &Arc<Handle>) {
        self.fast.release(handle);
        if handle.writable {
            self.fs().writer_closes(&handle.file);
        }
        self.fs().close_file(&handle.file);
        self.mapped.closed(&handle.file);
    }

    /// Looks up a name; see `Fs::lookup`.
    pub fn lookup(&self, dir: Ino, name: &[u8]) -> Result<Attr> {
        let moment = self.moment();
        let attr = self.fs().lookup(dir, name)?;
        if self.attributes_may_be_kept(attr.ino, moment) {
            return Ok(attr);
        }
        // The kernel sends no forget for a lookup that has failed.
        self.getattr(attr.ino)
            .inspect_err(|_| self.fs().forget(attr.ino, 1))
    }

    /// Returns the attributes of an inode; see `Fs::getattr`.
    pub fn getattr(&self, ino: Ino) -> Result<Attr> {
        self.fast.absorb(ino);
        self.fs().getattr(ino)
    }

    /// Adds a name to an inode; see `Fs::link`.
    pub fn link(&self, ino: Ino, dir: Ino, name: &[u8]) -> Result<Attr> {
        self.fast.absorb(ino);
        self.fs().link(ino, dir, name)
    }

    /// Changes attributes; see `Fs::setattr`.
    pub fn setattr(&self, ino: Ino, set: SetAttr, caller: Caller) -> Result<Attr> {
        self.fast.absorb(ino);
        let gives_privileges = set.perm.is_some_and(|perm| perm & 0o6000 != 0);
        let size = set.size;
        if let Some(bytes) = size {
            // Before inline writers are locked out.
            self.fs().commit_replacement(ino, Some(bytes));
        }
        let set = || self.fs().setattr(ino, set, caller);
        let change = || match size {
            Some(bytes) => {
                let attr = self.fast.resize(ino, size, set)?;
                self.mapped.truncated(ino, bytes);
                Ok(attr)
            }
            None => set(),
        };
        match gives_privileges {
            true => self.fast.give_privileges(ino, change),
            false => change(),
        }
    }

    /// Renames; see `Fs::rename`. If the renamed file replaces another, first absorbs the inline changes of clients to the renamed
    /// file.
    pub fn rename(&self, from: (Ino, &[u8]), to: (Ino, &[u8]), flags: u32) -> Result<()> {
        self.fs()
            .rename_absorbing(from, to, flags, |ino| self.fast.absorb(ino))
    }

    /// Sets an extended attribute; see `Fs::setxattr`, and `Fs::setxattr_of_outsider` when `outsider` is true.
    pub fn setxattr(
        &self,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: u32,
        outsider: bool,
    ) -> Result<()> {
        let change = || match outsider {
            true => self.fs().setxattr_of_outsider(ino, name, value, flags),
            false => self.fs().setxattr(ino, name, value, flags),
        };
        match name == CAPABILITY {
            true => self.fast.give_privileges(ino, change),
            false => change(),
        }
    }

    /// Sets the policy for migrating threads to an inode's data (see `Fs::set_threads`), also for programs that have it open.
    pub fn set_threads(&self, ino: Ino, policy: Option<ThreadPolicy>) -> Result<()> {
        self.fs().set_threads(ino, policy)?;
        if let Some(slot_file) = self.fast.slot_file(ino) {
            let policy = slot_file.file.threads().policy();
            self.fast.info(&slot_file).set_policy(policy);
        }
        Ok(())
    }

    /// Moves an inode to another slice; see `Fs::move_to`.
    pub fn move_to(&self, ino: Ino, slice: SliceId) -> Result<()> {
        let result = self.fs().move_to(ino, slice);
        if let Some(slot_file) = self.fast.slot_file(ino) {
            let home = slot_file.file.layout().home();
            self.fast.info(&slot_file).set_home(home);
        }
        result
    }
}
