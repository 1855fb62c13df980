//! Attributes, and the privilege bits that are cleared when a file's owner or content changes.

use std::time::SystemTime;

use jericho_fs::types::{Ino, SetAttr, SetTime};

use crate::convert::{self, errno};
use crate::filesystem::{Jericho, caller};
use crate::protocol::InHeader;
use crate::protocol::answer::{AttributesOut, StatXOut};
use crate::protocol::request::SetAttrIn;
use crate::reply::Reply;

impl Jericho {
    pub(crate) fn getattr(&self, ino: Ino, reply: Reply) {
        let before = self.mounted.moment();
        match self.mounted.getattr(ino) {
            Ok(a) => reply.with(&AttributesOut::new(&a, self.kept(&a, before))),
            Err(e) => reply.error(errno("getattr", &e)),
        }
    }

    pub(crate) fn statx(&self, ino: Ino, reply: Reply) {
        let before = self.mounted.moment();
        match self.mounted.getattr(ino) {
            Ok(a) => reply.with(&StatXOut::new(&a, self.kept(&a, before))),
            Err(e) => reply.error(errno("statx", &e)),
        }
    }

    /// Sets attributes. The kernel decides about set-id bits (HANDLE_KILLPRIV_V2). Each change of owner or size clears
    /// capabilities.
    pub(crate) fn setattr(&self, req: &InHeader, ino: Ino, args: &SetAttrIn, reply: Reply) {
        let Some(set) = wanted(args) else {
            return reply.error(libc::EINVAL);
        };
        let changes_hands = set.uid.is_some() || set.gid.is_some() || set.size.is_some();
        let stripped = match changes_hands {
            true => self.mounted.fs().drop_privileges(ino, false),
            false => Ok(()),
        };
        let result = stripped.and_then(|()| self.mounted.setattr(ino, set, caller(req, 0)));
        match result {
            Ok(a) => reply.with(&AttributesOut::new(&a, self.kept_after_change(&a))),
            Err(e) => reply.error(errno("setattr", &e)),
        }
    }
}

/// Converts what a request sets. Returns `None` for a time that cannot be represented.
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
        drop_set_id: args.drops_set_id(),
        atime: at(SetAttrIn::ATIME, SetAttrIn::ATIME_NOW, atime)?,
        mtime: at(SetAttrIn::MTIME, SetAttrIn::MTIME_NOW, mtime)?,
        ctime: match args.valid & SetAttrIn::CTIME {
            0 => None,
            _ => Some(ctime?),
        },
    })
}
