//! Attributes, and the bits that go when a file changes hands or content.

use std::time::SystemTime;

use jericho_fs::Error;
use jericho_fs::types::{Ino, Kind, SetAttr, SetTime};

use crate::convert::{self, errno};
use crate::filesystem::{Jericho, Outcome, caller};
use crate::protocol::InHeader;
use crate::protocol::answer::{AttributesOut, StatXOut};
use crate::protocol::request::SetAttrIn;
use crate::reply::Reply;

impl Jericho {
    pub(crate) fn getattr(&self, ino: Ino, reply: Reply) {
        match self.mounted.getattr(ino) {
            Ok(a) => reply.with(&AttributesOut::new(&a, self.kept(&a))),
            Err(e) => reply.error(errno("getattr", &e)),
        }
    }

    pub(crate) fn statx(&self, ino: Ino, reply: Reply) {
        match self.mounted.getattr(ino) {
            Ok(a) => reply.with(&StatXOut::new(&a, self.kept(&a))),
            Err(e) => reply.error(errno("statx", &e)),
        }
    }

    pub(crate) fn setattr(&self, req: &InHeader, ino: Ino, args: &SetAttrIn, reply: Reply) {
        let Some(mut set) = wanted(args) else {
            return reply.error(libc::EINVAL);
        };
        let result = self
            .strip_privileges(ino, &mut set, req.uid)
            .and_then(|()| self.mounted.setattr(ino, set, caller(req, 0)));
        match result {
            Ok(a) => reply.with(&AttributesOut::new(&a, self.kept(&a))),
            Err(e) => reply.error(errno("setattr", &e)),
        }
    }

    /// The kernel drops set-id bits and file capabilities on chown and on a truncate by those who
    /// may not keep them; with HANDLE_KILLPRIV_V2 that is our work.
    fn strip_privileges(&self, ino: Ino, set: &mut SetAttr, uid: u32) -> Result<(), Error> {
        let chown = set.uid.is_some() || set.gid.is_some();
        let truncated_by_other = set.size.is_some() && uid != 0;
        if !chown && !truncated_by_other {
            return Ok(());
        }
        let attr = self.mounted.fs().getattr(ino)?;
        if attr.kind != Kind::File {
            return Ok(());
        }
        let perm = set.perm.unwrap_or(attr.perm);
        let stripped = without_set_id(perm);
        if stripped != perm && set.perm.is_none() {
            set.perm = Some(stripped);
        }
        match self.mounted.fs().removexattr(ino, b"security.capability") {
            Ok(()) | Err(Error::Errno(libc::ENODATA | libc::EOPNOTSUPP)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// What a truncating open does to set-id bits.
    pub(crate) fn strip_for_truncate(&self, ino: Ino, req: &InHeader) -> Outcome<()> {
        let mut set = SetAttr {
            size: Some(0),
            ..SetAttr::default()
        };
        let stripped = self.strip_privileges(ino, &mut set, req.uid);
        set.size = None;
        match (stripped, set.perm) {
            (Ok(()), Some(_)) => self.mounted.setattr(ino, set, caller(req, 0)).map(drop),
            (result, _) => result,
        }
        .map_err(|e| errno("open", &e))
    }
}

/// What a request sets. `None`: a time that there is not.
fn wanted(args: &SetAttrIn) -> Option<SetAttr> {
    let [atime, mtime, ctime] =
        [0, 1, 2].map(|i| convert::time(args.seconds[i], args.nanoseconds[i]));
    let at = |field, now, time: Option<SystemTime>| match args.valid & (field | now) {
        0 => Some(None),
        set if set & now != 0 => Some(Some(SetTime::Now)),
        _ => time.map(|time| Some(SetTime::At(time))),
    };
    Some(SetAttr {
        perm: args.given(SetAttrIn::MODE, (args.mode & 0o7777) as u16),
        uid: args.given(SetAttrIn::UID, args.uid),
        gid: args.given(SetAttrIn::GID, args.gid),
        size: args.given(SetAttrIn::SIZE, args.size),
        atime: at(SetAttrIn::ATIME, SetAttrIn::ATIME_NOW, atime)?,
        mtime: at(SetAttrIn::MTIME, SetAttrIn::MTIME_NOW, mtime)?,
        ctime: match args.valid & SetAttrIn::CTIME {
            0 => None,
            _ => Some(ctime?),
        },
    })
}

/// The mode without the bits that change who a program runs as. Set-group-id without group execute
/// is something else (mandatory locking, once) and stays.
fn without_set_id(perm: u16) -> u16 {
    let mut perm = perm & !0o4000;
    if perm & 0o010 != 0 {
        perm &= !0o2000;
    }
    perm
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_id_bits_go_but_a_set_group_id_without_execute_stays() {
        assert_eq!(without_set_id(0o6755), 0o755);
        assert_eq!(without_set_id(0o4755), 0o755);
        assert_eq!(without_set_id(0o2745), 0o2745);
        assert_eq!(without_set_id(0o644), 0o644);
    }
}
