//! Extended attributes: those of files, and those through which the command talks to the daemon.

use jericho_fs::types::Ino;

use crate::control::{GROW, PREFIX, SYNC, SYNCFS, TRIM};
use crate::convert::errno;
use crate::filesystem::Jericho;
use crate::protocol::InHeader;
use crate::protocol::request::SetXattrIn;
use crate::reply::Reply;

/// Room that suffices for the answer to a trim.
const TRIM_BYTES_MAX: usize = 256;
/// Room that suffices for the answer to a growth: paths of 64 devices.
const GROW_BYTES_MAX: usize = 64 << 10;

impl Jericho {
    pub(crate) fn setxattr(
        &self,
        req: &InHeader,
        ino: Ino,
        args: &SetXattrIn,
        name: &[u8],
        value: &[u8],
        reply: Reply,
    ) {
        match ours(name) {
            Some(name) => self
                .control
                .set(ino, name, value, req.uid, |result| match result {
                    Ok(()) => reply.ok(),
                    Err(e) => reply.error(e),
                }),
            None => {
                let outsider = args.is_of_outsider();
                let result = self
                    .mounted
                    .setxattr(ino, name, value, args.flags, outsider);
                reply.done("setxattr", result);
            }
        }
    }

    pub(crate) fn getxattr(&self, req: &InHeader, ino: Ino, name: &[u8], size: u32, reply: Reply) {
        let value = match ours(name) {
            Some(name) if name == SYNC || name == SYNCFS => {
                return self.control.sync(name, move |result| match result {
                    Ok(()) => reply.value(&[], size),
                    Err(e) => reply.error(e),
                });
            }
            // A caller that asks only for the length must not start the operation.
            Some(name) if name.starts_with(TRIM) && size == 0 => Ok(vec![0; TRIM_BYTES_MAX]),
            Some(name) if name.starts_with(TRIM) => {
                return self
                    .control
                    .trim_part(name, req.uid, move |result| match result {
                        Ok(value) => reply.value(&value, size),
                        Err(e) => reply.error(e),
                    });
            }
            Some(name) if name.starts_with(GROW) && size == 0 => Ok(vec![0; GROW_BYTES_MAX]),
            Some(name) if name.starts_with(GROW) => {
                return self
                    .control
                    .grow(name, req.uid, move |result| match result {
                        Ok(value) => reply.value(&value, size),
                        Err(e) => reply.error(e),
                    });
            }
            Some(name) => self.control.get(ino, name),
            None => self
                .mounted
                .fs()
                .getxattr(ino, name)
                .map_err(|e| errno("getxattr", &e)),
        };
        match value {
            Ok(value) => reply.value(&value, size),
            Err(e) => reply.error(e),
        }
    }

    pub(crate) fn listxattr(&self, ino: Ino, size: u32, reply: Reply) {
        match self.mounted.fs().listxattr(ino) {
            Ok(names) => reply.value(&names, size),
            Err(e) => reply.error(errno("listxattr", &e)),
        }
    }

    pub(crate) fn removexattr(&self, ino: Ino, name: &[u8], reply: Reply) {
        match ours(name) {
            Some(_) => reply.error(libc::EOPNOTSUPP),
            None => reply.done("removexattr", self.mounted.fs().removexattr(ino, name)),
        }
    }
}

/// Returns whether an attribute is one through which the command talks to the daemon.
pub(crate) fn is_of_control(name: &[u8]) -> bool {
    ours(name).is_some()
}

fn ours(name: &[u8]) -> Option<&str> {
    let name = std::str::from_utf8(name).ok()?;
    Some(name).filter(|n| n.starts_with(PREFIX))
}
