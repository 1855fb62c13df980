//! Errnos of Linux (errno.h), which are part of the protocol.

pub(crate) const EIO: i32 = 5;
pub(crate) const EACCES: i32 = 13;
pub(crate) const EBUSY: i32 = 16;
pub(crate) const EINVAL: i32 = 22;
pub(crate) const EROFS: i32 = 30;
pub(crate) const EPROTO: i32 = 71;
pub(crate) const ENOTUNIQ: i32 = 76;
pub(crate) const EPROTONOSUPPORT: i32 = 93;
pub(crate) const EOPNOTSUPP: i32 = 95;
pub(crate) const ESTALE: i32 = 116;
pub(crate) const ECANCELED: i32 = 125;
