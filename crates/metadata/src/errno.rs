//! The errnos of filesystem operations, with their Linux numbers.
#![expect(missing_docs, reason = "errno(3) has the meanings")]

use crate::error::Error;

pub const ENOENT: Error = Error::Errno(2);
pub const EINTR: Error = Error::Errno(4);
pub const EIO: Error = Error::Errno(5);
pub const ENXIO: Error = Error::Errno(6);
pub const E2BIG: Error = Error::Errno(7);
pub const EBUSY: Error = Error::Errno(16);
pub const EEXIST: Error = Error::Errno(17);
pub const ENOTDIR: Error = Error::Errno(20);
pub const EISDIR: Error = Error::Errno(21);
pub const EINVAL: Error = Error::Errno(22);
pub const ENFILE: Error = Error::Errno(23);
pub const EFBIG: Error = Error::Errno(27);
pub const ENOSPC: Error = Error::Errno(28);
pub const EROFS: Error = Error::Errno(30);
pub const EMLINK: Error = Error::Errno(31);
pub const ENAMETOOLONG: Error = Error::Errno(36);
pub const ENOTEMPTY: Error = Error::Errno(39);
pub const ENODATA: Error = Error::Errno(61);
pub const EOPNOTSUPP: Error = Error::Errno(95);
pub const ESHUTDOWN: Error = Error::Errno(108);
pub const ESTALE: Error = Error::Errno(116);
