//! What lets a program run with rights that its caller has not: the set-id bits of a file and its capabilities.
//!
//! They vouch for the content, so they go before it changes. Every write asks, so the answer is kept with the inode
//! ([`Privileges`]); what may change it forgets it, under the lock that guards what it is worked out from.

use std::sync::atomic::{AtomicU8, Ordering};

use super::inode::{Inode, Meta};
use super::namespace::without_set_id;
use super::times::now_ns;
use super::{File, Fs};
use crate::error::Result;
use crate::types::Ino;

/// The extended attribute that holds a file's capabilities.
pub const CAPABILITY: &[u8] = b"security.capability";
const SET_ID: u16 = 0o6000;

const UNKNOWN: u8 = 0;
const NONE: u8 = 1;
const SOME: u8 = 2;

/// What is known of an inode's privileges.
#[derive(Default)]
pub struct Privileges(AtomicU8);

impl Privileges {
    /// Of an inode that is being made with this mode.
    pub fn without_capability(perm: u16) -> Privileges {
        let known = Privileges::default();
        known.set(perm & SET_ID != 0);
        known
    }

    /// The mode, or the attribute, is about to change. The inode's lock is held exclusively.
    pub fn forget(&self) {
        self.0.store(UNKNOWN, Ordering::Release);
    }

    fn set(&self, some: bool) {
        self.0
            .store(if some { SOME } else { NONE }, Ordering::Release);
    }
}

fn has_capability(meta: &Meta) -> bool {
    meta.xattrs
        .as_ref()
        .is_some_and(|all| all.contains_key(CAPABILITY))
}

impl File {
    /// Whether it is known that the file has neither set-id bits nor capabilities. Reads one word.
    #[inline]
    pub fn has_no_privileges(&self) -> bool {
        self.inode.privileges.0.load(Ordering::Acquire) == NONE
    }
}

impl Fs {
    /// Whether a file has set-id bits or capabilities. Errors: those of reading its attributes.
    pub fn has_privileges(&self, ino: Ino) -> Result<bool> {
        self.privileges(&*self.core.inode(ino)?)
    }

    fn privileges(&self, inode: &Inode) -> Result<bool> {
        match inode.privileges.0.load(Ordering::Acquire) {
            UNKNOWN => {
                let mut meta = inode.meta.write();
                self.core.load_xattrs(inode.ino, &mut meta)?;
                let some = meta.rec.perm & SET_ID != 0 || has_capability(&meta);
                inode.privileges.set(some);
                Ok(some)
            }
            known => Ok(known == SOME),
        }
    }

    /// Takes the capabilities off a file whose content is about to change, and with `set_id` the set-id bits. May read from
    /// the device, and waits for a commit. Errors: EROFS, those of the store; then the content must not change.
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
        let _gate = core.begin()?;
        let mut meta = inode.meta.write();
        core.load_xattrs(ino, &mut meta)?;
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
