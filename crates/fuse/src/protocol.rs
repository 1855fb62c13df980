//! The little of the kernel's protocol (linux/fuse.h) that is read and written here: the rest is `fuser`'s.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jericho_fs::types::{Attr, Kind};
use jericho_sys::fuse_ring::IN_HEADER_BYTES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub(crate) const OP_LOOKUP: u32 = 1;
pub(crate) const OP_GETATTR: u32 = 3;
pub(crate) const OP_OPEN: u32 = 14;
pub(crate) const OP_READ: u32 = 15;
pub(crate) const OP_WRITE: u32 = 16;
pub(crate) const OP_RELEASE: u32 = 18;
pub(crate) const OP_INIT: u32 = 26;
pub(crate) const OP_READDIR: u32 = 28;
pub(crate) const OP_CREATE: u32 = 35;
pub(crate) const OP_DESTROY: u32 = 38;
pub(crate) const OP_READDIRPLUS: u32 = 44;
pub(crate) const OP_TMPFILE: u32 = 51;

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

    /// Of a request that the daemon makes to itself.
    pub(crate) fn of_daemon(opcode: u32, unique: u64, body_bytes: usize) -> InHeader {
        InHeader {
            len: (IN_HEADER_BYTES + body_bytes) as u32,
            opcode,
            unique,
            ..InHeader::default()
        }
    }

    pub(crate) fn bytes(self) -> [u8; IN_HEADER_BYTES] {
        zerocopy::transmute!(self)
    }
}

/// `struct fuse_out_header`.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct OutHeader {
    pub(crate) len: u32,
    /// 0 or a negative errno.
    pub(crate) error: i32,
    pub(crate) unique: u64,
}

impl OutHeader {
    /// The header and what follows it.
    pub(crate) fn split(message: &[u8]) -> Option<(OutHeader, &[u8])> {
        OutHeader::read_from_prefix(message).ok()
    }
}

/// `struct fuse_read_in` and `struct fuse_write_in`, which are alike.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Transfer {
    pub(crate) fh: u64,
    pub(crate) offset: u64,
    pub(crate) size: u32,
    /// `read_flags`, `write_flags`.
    pub(crate) flags: u32,
    pub(crate) lock_owner: u64,
    /// Of the descriptor.
    pub(crate) open_flags: u32,
    pub(crate) padding: u32,
}

/// `struct fuse_create_in`.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Create {
    pub(crate) flags: u32,
    pub(crate) mode: u32,
    pub(crate) umask: u32,
    pub(crate) open_flags: u32,
}

/// What the arguments of an operation begin with; `None` when they are shorter.
pub(crate) fn first<T: FromBytes>(arguments: &[u8]) -> Option<T> {
    Some(T::read_from_prefix(arguments).ok()?.0)
}

/// A name that ends with NUL.
pub(crate) fn name(payload: &[u8]) -> Option<&[u8]> {
    payload.split(|byte| *byte == 0).next()
}

/// `struct fuse_attr`.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
struct AttrOut {
    ino: u64,
    size: u64,
    blocks: u64,
    /// Seconds of atime, mtime and ctime; they may be negative.
    seconds: [i64; 3],
    nanoseconds: [u32; 3],
    mode: u32,
    nlink: u32,
    uid: u32,
    gid: u32,
    rdev: u32,
    blksize: u32,
    flags: u32,
}

impl AttrOut {
    fn new(a: &Attr) -> AttrOut {
        let times = [a.atime, a.mtime, a.ctime].map(since_epoch);
        AttrOut {
            ino: a.ino,
            size: a.size,
            blocks: a.blocks,
            seconds: times.map(|(seconds, _)| seconds),
            nanoseconds: times.map(|(_, nanoseconds)| nanoseconds),
            mode: mode_of(a.kind) | u32::from(a.perm),
            nlink: a.nlink,
            uid: a.uid,
            gid: a.gid,
            rdev: a.rdev,
            blksize: crate::convert::PREFERRED_BYTES,
            flags: 0,
        }
    }
}

fn mode_of(kind: Kind) -> u32 {
    match kind {
        Kind::File => libc::S_IFREG,
        Kind::Directory => libc::S_IFDIR,
        Kind::Symlink => libc::S_IFLNK,
        Kind::Fifo => libc::S_IFIFO,
        Kind::Socket => libc::S_IFSOCK,
        Kind::CharDevice => libc::S_IFCHR,
        Kind::BlockDevice => libc::S_IFBLK,
    }
}

/// Seconds and nanoseconds; the latter count forwards, before 1970, too.
fn since_epoch(t: SystemTime) -> (i64, u32) {
    match t.duration_since(UNIX_EPOCH) {
        Ok(after) => (after.as_secs() as i64, after.subsec_nanos()),
        Err(error) => {
            let before = error.duration();
            match before.subsec_nanos() {
                0 => (-(before.as_secs() as i64), 0),
                nanoseconds => (-(before.as_secs() as i64) - 1, 1_000_000_000 - nanoseconds),
            }
        }
    }
}

/// `struct fuse_entry_out`.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct EntryOut {
    nodeid: u64,
    generation: u64,
    entry_valid_s: u64,
    attr_valid_s: u64,
    entry_valid_ns: u32,
    attr_valid_ns: u32,
    attr: AttrOut,
}

impl EntryOut {
    /// An entry that the kernel may keep for `ttl`; `None`: it may keep that there is none.
    pub(crate) fn new(attr: Option<&Attr>, ttl: Duration) -> EntryOut {
        EntryOut {
            nodeid: attr.map_or(0, |a| a.ino),
            generation: attr.map_or(0, |a| u64::from(a.generation)),
            entry_valid_s: ttl.as_secs(),
            attr_valid_s: ttl.as_secs(),
            entry_valid_ns: ttl.subsec_nanos(),
            attr_valid_ns: ttl.subsec_nanos(),
            attr: attr.map(AttrOut::new).unwrap_or_default(),
        }
    }
}

/// `struct fuse_attr_out`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct AttributesOut {
    valid_s: u64,
    valid_ns: u32,
    dummy: u32,
    attr: AttrOut,
}

impl AttributesOut {
    pub(crate) fn new(attr: &Attr, ttl: Duration) -> AttributesOut {
        AttributesOut {
            valid_s: ttl.as_secs(),
            valid_ns: ttl.subsec_nanos(),
            dummy: 0,
            attr: AttrOut::new(attr),
        }
    }
}

/// `struct fuse_open_out`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct OpenOut {
    pub(crate) fh: u64,
    pub(crate) open_flags: u32,
    pub(crate) backing_id: i32,
}

/// `struct fuse_write_out`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct WriteOut {
    pub(crate) size: u32,
    pub(crate) padding: u32,
}

const _: () = {
    assert!(size_of::<AttrOut>() == 88);
    assert!(size_of::<EntryOut>() == 128);
    assert!(size_of::<AttributesOut>() == 104);
    assert!(size_of::<OpenOut>() == 16);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nanoseconds_count_forwards_before_1970_too() {
        let quarter_past = UNIX_EPOCH - Duration::new(1, 750_000_000);
        assert_eq!(since_epoch(quarter_past), (-2, 250_000_000));
        assert_eq!(since_epoch(UNIX_EPOCH - Duration::from_secs(2)), (-2, 0));
        let after = UNIX_EPOCH + Duration::new(2, 250_000_000);
        assert_eq!(since_epoch(after), (2, 250_000_000));
    }

    #[test]
    fn a_name_ends_at_its_first_nul() {
        assert_eq!(name(b"a b\0\0"), Some(&b"a b"[..]));
        assert_eq!(name(b"whole"), Some(&b"whole"[..]));
    }
}
