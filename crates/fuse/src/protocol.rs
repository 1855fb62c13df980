//! The kernel's protocol (linux/fuse.h): the common header of every message.
//!
//! A request is a header, the arguments of its operation, and its payload (names, bytes to write). The device delivers
//! these as one message; the ring delivers the arguments and the payload in two places. `request` parses requests,
//! `answer` encodes replies, `init` is the handshake.

pub(crate) mod answer;
pub(crate) mod init;
pub(crate) mod request;

use jericho_sys::fuse_ring::IN_HEADER_BYTES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `enum fuse_opcode`.
pub(crate) mod op {
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const READLINK: u32 = 5;
    pub(crate) const SYMLINK: u32 = 6;
    pub(crate) const MKNOD: u32 = 8;
    pub(crate) const MKDIR: u32 = 9;
    pub(crate) const UNLINK: u32 = 10;
    pub(crate) const RMDIR: u32 = 11;
    pub(crate) const RENAME: u32 = 12;
    pub(crate) const LINK: u32 = 13;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const SETXATTR: u32 = 21;
    pub(crate) const GETXATTR: u32 = 22;
    pub(crate) const LISTXATTR: u32 = 23;
    pub(crate) const REMOVEXATTR: u32 = 24;
    pub(crate) const FLUSH: u32 = 25;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const OPENDIR: u32 = 27;
    pub(crate) const READDIR: u32 = 28;
    pub(crate) const RELEASEDIR: u32 = 29;
    pub(crate) const FSYNCDIR: u32 = 30;
    pub(crate) const CREATE: u32 = 35;
    pub(crate) const INTERRUPT: u32 = 36;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const IOCTL: u32 = 39;
    pub(crate) const NOTIFY_REPLY: u32 = 41;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const READDIRPLUS: u32 = 44;
    pub(crate) const RENAME2: u32 = 45;
    pub(crate) const LSEEK: u32 = 46;
    pub(crate) const COPY_FILE_RANGE: u32 = 47;
    pub(crate) const TMPFILE: u32 = 51;
    pub(crate) const STATX: u32 = 52;
    pub(crate) const COPY_FILE_RANGE_64: u32 = 53;
}

/// `struct fuse_in_header`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InHeader {
    pub(crate) len: u32,
    pub(crate) opcode: u32,
    pub(crate) unique: u64,
    pub(crate) nodeid: u64,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) pid: u32,
    pub(crate) extensions: u16,
    pub(crate) padding: u16,
}

const _: () = assert!(size_of::<InHeader>() == IN_HEADER_BYTES);

impl InHeader {
    pub(crate) fn read(bytes: &[u8; IN_HEADER_BYTES]) -> InHeader {
        zerocopy::transmute!(*bytes)
    }

    /// Returns whether the kernel waits for a reply. The kernel treats a reply that it does not wait for as an error.
    pub(crate) fn wants_reply(&self) -> bool {
        !matches!(
            self.opcode,
            op::FORGET | op::BATCH_FORGET | op::INTERRUPT | op::NOTIFY_REPLY
        )
    }
}

/// `struct fuse_out_header`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct OutHeader {
    pub(crate) len: u32,
    /// 0, a negative errno, or the code of a notification.
    pub(crate) error: i32,
    /// 0 for a notification.
    pub(crate) unique: u64,
}

const _: () = assert!(size_of::<OutHeader>() == 16);
