//! Extended attributes. Access control lists are two of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use jericho_metadata::errno::*;
use jericho_metadata::store::Change;

use crate::core::Core;
use crate::error::{Error, Result};
use crate::fs::Fs;
use crate::inode::{Inode, Meta, Xattr};
use crate::interruption::begin_change;
use crate::names::acl::{ACCESS, Acl, DEFAULT};
use crate::names::namespace::SETGID;
use crate::times::now_ns;
use crate::types::{Ino, Kind};

const NAME_MAX: usize = 255;
const VALUE_MAX: usize = 65_536;
/// Bytes of an attribute in the store besides name and value, and a little more.
const XATTR_BYTES: usize = 64;
const CREATE: u32 = 1;
const REPLACE: u32 = 2;

/// Permissions and ACLs that a new inode gets from its directory's default ACL.
pub struct Inherited {
    pub perm: u16,
    pub access: Option<Box<[u8]>>,
    pub default: Option<Box<[u8]>>,
}

impl Fs {
    /// Returns the value of an attribute. Fails with ENODATA if it does not exist.
    pub fn getxattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let inode = self.core.inode(ino)?;
        self.core.with_xattrs(&inode)?;
        let meta = inode.meta.read();
        match meta.xattrs.as_ref().and_then(|all| all.get(name)) {
            None => Err(ENODATA),
            Some(xattr) => Ok(self.core.value_of(ino, name, xattr)?.into()),
        }
    }

    /// Sets an attribute. `flags` may be XATTR_CREATE (1) or XATTR_REPLACE (2).
    pub fn setxattr(&self, ino: Ino, name: &[u8], value: &[u8], flags: u32) -> Result<()> {
        self.put(ino, name, value, flags, false)
    }

    /// Sets an attribute as `setxattr` does, and clears set-group-id. For an access control list that is set by a user outside of
    /// the file's group.
    pub fn setxattr_of_outsider(
        &self,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: u32,
    ) -> Result<()> {
        self.put(ino, name, value, flags, true)
    }

    fn put(&self, ino: Ino, name: &[u8], value: &[u8], flags: u32, outsider: bool) -> Result<()> {
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(Error::Errno(34)); // ERANGE
        }
        if value.len() > VALUE_MAX {
            return Err(E2BIG);
        }
        if flags & !(CREATE | REPLACE) != 0 {
            return Err(EINVAL);
        }
        let put = || self.put_once(ino, name, value, flags, outsider);
        self.core.with_room(put)
    }

    fn put_once(
        &self,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: u32,
        outsider: bool,
    ) -> Result<()> {
        let core = &self.core;
        let _gates = core.begin(&[ino])?;
        core.store_of(ino)
            .check_room(1, XATTR_BYTES + name.len() + value.len())?;
        let inode = core.inode(ino)?;
        let mut meta = inode.meta.write();
        core.load_xattrs(ino, &mut meta)?;
        let exists = meta
            .xattrs
            .as_ref()
            .is_some_and(|all| all.contains_key(name));
        if flags & CREATE != 0 && exists {
            return Err(EEXIST);
        }
        if flags & REPLACE != 0 && !exists {
            return Err(ENODATA);
        }
        begin_change()?;
        let value = match name {
            ACCESS if inode.kind == Kind::Symlink => return Err(EOPNOTSUPP),
            DEFAULT if inode.kind != Kind::Directory => return Err(Error::Errno(13)), // EACCES
            ACCESS => Acl::parse(value)?.and_then(|acl| {
                meta.rec.perm = meta.rec.perm & !0o777 | acl.mode();
                (!acl.is_mode()).then(|| acl.to_bytes())
            }),
            DEFAULT => Acl::parse(value)?.map(|acl| acl.to_bytes()),
            _ => Some(value.into()),
        };
        if value.is_some() || exists {
            core.put_xattr(&inode, &mut meta, name, value);
        }
        if outsider {
            meta.rec.perm &= !SETGID;
        }
        inode.privileges.forget();
        meta.rec.ctime_ns = now_ns();
        core.mark_dirty(&inode);
        Ok(())
    }

    /// Returns the names of the attributes. A NUL byte ends each.
    pub fn listxattr(&self, ino: Ino) -> Result<Vec<u8>> {
        let inode = self.core.inode(ino)?;
        self.core.with_xattrs(&inode)?;
        let meta = inode.meta.read();
        let mut names = Vec::new();
        for name in meta.xattrs.iter().flat_map(|all| all.keys()) {
            names.extend_from_slice(name);
            names.push(0);
        }
        Ok(names)
    }

    /// Removes an attribute. Fails with ENODATA if it does not exist.
    pub fn removexattr(&self, ino: Ino, name: &[u8]) -> Result<()> {
        let core = &self.core;
        let _gates = core.begin(&[ino])?;
        let inode = core.inode(ino)?;
        let mut meta = inode.meta.write();
        core.load_xattrs(ino, &mut meta)?;
        if !meta
            .xattrs
            .as_ref()
            .is_some_and(|all| all.contains_key(name))
        {
            return Err(ENODATA);
        }
        begin_change()?;
        core.put_xattr(&inode, &mut meta, name, None);
        inode.privileges.forget();
        meta.rec.ctime_ns = now_ns();
        core.mark_dirty(&inode);
        Ok(())
    }
}

impl Core {
    /// Reads the names of the attributes on first use. The names stay in memory with the inode; the values stay in the store.
    pub fn load_xattrs(&self, ino: Ino, meta: &mut Meta) -> Result<()> {
        if meta.xattrs.is_none() {
            let mut all = BTreeMap::new();
            if meta.stored {
                for name in self.store_of(ino).xattr_names(ino)? {
                    all.insert(
                        name,
                        Xattr {
                            value: None,
                            seq: 0,
                        },
                    );
                }
            }
            meta.xattrs = Some(all);
        }
        Ok(())
    }

    fn with_xattrs(&self, inode: &Inode) -> Result<()> {
        if inode.meta.read().xattrs.is_some() {
            return Ok(());
        }
        self.load_xattrs(inode.ino, &mut inode.meta.write())
    }

    fn value_of(&self, ino: Ino, name: &[u8], xattr: &Xattr) -> Result<Box<[u8]>> {
        match &xattr.value {
            Some(value) => Ok(value.clone()),
            None => self.store_of(ino).xattr(ino, name)?.ok_or(ENODATA),
        }
    }

    /// Sets or removes an attribute in memory and in the batch. The caller holds the gate and the inode's lock.
    pub(crate) fn put_xattr(
        &self,
        inode: &Arc<Inode>,
        meta: &mut Meta,
        name: &[u8],
        value: Option<Box<[u8]>>,
    ) {
        let all = meta.xattrs.get_or_insert_default();
        let commits = self.commits_of(inode.ino);
        match value {
            Some(value) => {
                let xattr = Xattr {
                    value: Some(value.clone()),
                    seq: commits.seq(),
                };
                all.insert(name.into(), xattr);
                commits.push(Change::PutXattr(inode.ino, name.into(), value));
                commits.push_xattrs(inode.clone());
            }
            None => {
                all.remove(name);
                commits.push(Change::DelXattr(inode.ino, name.into()));
            }
        }
    }

    /// Returns the permissions and ACLs of a new inode in a directory: from the default ACL, or from the umask if there is
    /// none.
    pub fn inherit_acl(
        &self,
        parent: &Inode,
        meta: &mut Meta,
        kind: Kind,
        perm: u16,
        umask: u32,
    ) -> Result<Inherited> {
        let plain = Inherited {
            perm,
            access: None,
            default: None,
        };
        if kind == Kind::Symlink {
            return Ok(plain);
        }
        self.load_xattrs(parent.ino, meta)?;
        let default = match meta.xattrs.as_ref().and_then(|all| all.get(DEFAULT)) {
            Some(xattr) => Acl::parse(&self.value_of(parent.ino, DEFAULT, xattr)?)?,
            None => None,
        };
        let Some(default) = default else {
            return Ok(Inherited {
                perm: perm & !(umask as u16 & 0o777),
                ..plain
            });
        };
        let (access, perm) = default.inherit(perm);
        Ok(Inherited {
            perm,
            access: (!access.is_mode()).then(|| access.to_bytes()),
            default: (kind == Kind::Directory).then(|| default.to_bytes()),
        })
    }

    /// Sets the ACLs that a new inode inherits.
    pub fn put_inherited(&self, inode: &Arc<Inode>, meta: &mut Meta, inherited: Inherited) {
        for (name, value) in [(ACCESS, inherited.access), (DEFAULT, inherited.default)] {
            if value.is_some() {
                self.put_xattr(inode, meta, name, value);
            }
        }
    }

    /// Makes the access ACL agree with the mode after chmod.
    pub fn acl_follows_mode(&self, inode: &Arc<Inode>, meta: &mut Meta) -> Result<()> {
        self.load_xattrs(inode.ino, meta)?;
        let Some(xattr) = meta.xattrs.as_ref().and_then(|all| all.get(ACCESS)) else {
            return Ok(());
        };
        let value = self.value_of(inode.ino, ACCESS, xattr)?;
        if let Some(mut acl) = Acl::parse(&value)? {
            acl.set_mode(meta.rec.perm);
            self.put_xattr(inode, meta, ACCESS, Some(acl.to_bytes()));
        }
        Ok(())
    }
}
