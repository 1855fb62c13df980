//! Privileges of a program file: its set-id bits and its capabilities. The program runs with rights that its caller does not
//! have.
//!
//! Privileges hold for one content only, so they are cleared before the content changes. Every write has to check them, so the
//! inode caches the result (`KnownPrivileges`). A change of the mode or the capabilities clears the cached result. Both
//! the change and the check hold the inode's lock exclusively.

use crate::error::Result;
use crate::fs::Fs;
use crate::inode::{File, Inode, Meta};
use crate::interruption::begin_change;
use crate::names::known_privileges::SET_ID;
use crate::names::namespace::without_set_id;
use crate::times::now_ns;
use crate::types::Ino;

/// The extended attribute that holds a file's capabilities.
pub const CAPABILITY: &[u8] = b"security.capability";

fn has_capability(meta: &Meta) -> bool {
    meta.xattrs
        .as_ref()
        .is_some_and(|all| all.contains_key(CAPABILITY))
}

impl File {
    /// Returns whether the file is known to have neither set-id bits nor capabilities. Loads one word.
    #[inline]
    pub fn has_no_privileges(&self) -> bool {
        self.inode.privileges.get() == Some(false)
    }
}

impl Fs {
    /// Returns whether a file has set-id bits or capabilities. Fails when its attributes cannot be read.
    pub fn has_privileges(&self, ino: Ino) -> Result<bool> {
        self.privileges(&*self.core.inode(ino)?)
    }

    fn privileges(&self, inode: &Inode) -> Result<bool> {
        match inode.privileges.get() {
            None => {
                let mut meta = inode.meta.write();
                self.core.load_xattrs(inode.ino, &mut meta)?;
                let some = meta.rec.perm & SET_ID != 0 || has_capability(&meta);
                inode.privileges.set(some);
                Ok(some)
            }
            Some(known) => Ok(known),
        }
    }

    /// Clears the capabilities of a file whose content is about to change, and with `set_id` also the set-id bits. May read from
    /// the device, and may wait until the committer has room for changes. Fails with EROFS or an error of the store; the content
    /// must then not change.
    pub fn drop_privileges(&self, ino: Ino, set_id: bool) -> Result<()> {
        let core = &self.core;
        let inode = core.inode(ino)?;
        if !self.privileges(&inode)? {
            return Ok(());
        }
        {
            let meta = inode.meta.read();
            let strips = set_id && without_set_id(meta.rec.perm) != meta.rec.perm;
            if !strips && !has_capability(&meta) {
                return Ok(());
            }
        }
        let _gates = core.begin(&[ino])?;
        let mut meta = inode.meta.write();
        core.load_xattrs(ino, &mut meta)?;
        begin_change()?;
        if set_id {
            meta.rec.perm = without_set_id(meta.rec.perm);
        }
        if has_capability(&meta) {
            core.put_xattr(&inode, &mut meta, CAPABILITY, None);
        }
        inode.privileges.forget();
        meta.rec.ctime_ns = now_ns();
        core.mark_dirty(&inode);
        Ok(())
    }
}
