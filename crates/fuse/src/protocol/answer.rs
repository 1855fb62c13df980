//! Replies and notifications to the kernel.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jericho_fs::types::{Attr, Kind, StatFs};
use zerocopy::{Immutable, IntoBytes};

use crate::convert::PREFERRED_BYTES;

/// `struct fuse_attr`.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
struct AttrOut {
    ino: u64,
    size: u64,
    blocks: u64,
    /// Seconds of atime, mtime and ctime, which may be negative.
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
            blksize: PREFERRED_BYTES,
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

/// Returns seconds and nanoseconds since 1970. Nanoseconds count forwards even before 1970.
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
    /// Creates an entry whose name and attributes the kernel may cache for these times.
    pub(crate) fn new(a: &Attr, name_kept: Duration, attributes_kept: Duration) -> EntryOut {
        EntryOut {
            nodeid: a.ino,
            generation: u64::from(a.generation),
            entry_valid_s: name_kept.as_secs(),
            attr_valid_s: attributes_kept.as_secs(),
            entry_valid_ns: name_kept.subsec_nanos(),
            attr_valid_ns: attributes_kept.subsec_nanos(),
            attr: AttrOut::new(a),
        }
    }

    /// Creates the answer for a name that does not exist, which the kernel may cache. In a listing, it stands for an entry that
    /// was not looked up.
    pub(crate) fn none(kept: Duration) -> EntryOut {
        EntryOut {
            entry_valid_s: kept.as_secs(),
            entry_valid_ns: kept.subsec_nanos(),
            ..EntryOut::default()
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
    pub(crate) fn new(attr: &Attr, kept: Duration) -> AttributesOut {
        AttributesOut {
            valid_s: kept.as_secs(),
            valid_ns: kept.subsec_nanos(),
            dummy: 0,
            attr: AttrOut::new(attr),
        }
    }
}

/// `struct fuse_sx_time`.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
struct TimeOut {
    seconds: i64,
    nanoseconds: u32,
    reserved: i32,
}

impl TimeOut {
    fn new(t: SystemTime) -> TimeOut {
        let (seconds, nanoseconds) = since_epoch(t);
        TimeOut {
            seconds,
            nanoseconds,
            reserved: 0,
        }
    }
}

/// `struct fuse_statx_out` with its `struct fuse_statx`. The kernel fills in the device numbers.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct StatXOut {
    valid_s: u64,
    valid_ns: u32,
    flags: u32,
    spare: [u64; 2],
    mask: u32,
    blksize: u32,
    attributes: u64,
    nlink: u32,
    uid: u32,
    gid: u32,
    mode: u16,
    spare0: u16,
    ino: u64,
    size: u64,
    blocks: u64,
    attributes_mask: u64,
    atime: TimeOut,
    btime: TimeOut,
    ctime: TimeOut,
    mtime: TimeOut,
    rdev_major: u32,
    rdev_minor: u32,
    dev_major: u32,
    dev_minor: u32,
    spare2: [u64; 14],
}

/// Splits a device number in the kernel's encoding (`new_encode_dev`).
fn device_numbers(rdev: u32) -> (u32, u32) {
    (
        (rdev >> 8) & 0xfff,
        (rdev & 0xff) | ((rdev >> 12) & 0xf_ff00),
    )
}

impl StatXOut {
    pub(crate) fn new(a: &Attr, kept: Duration) -> StatXOut {
        let (rdev_major, rdev_minor) = device_numbers(a.rdev);
        StatXOut {
            valid_s: kept.as_secs(),
            valid_ns: kept.subsec_nanos(),
            mask: libc::STATX_BASIC_STATS | libc::STATX_BTIME,
            blksize: PREFERRED_BYTES,
            nlink: a.nlink,
            uid: a.uid,
            gid: a.gid,
            mode: (mode_of(a.kind) | u32::from(a.perm)) as u16,
            ino: a.ino,
            size: a.size,
            blocks: a.blocks,
            atime: TimeOut::new(a.atime),
            btime: TimeOut::new(a.btime),
            ctime: TimeOut::new(a.ctime),
            mtime: TimeOut::new(a.mtime),
            rdev_major,
            rdev_minor,
            ..StatXOut::default()
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

impl OpenOut {
    /// `FOPEN_DIRECT_IO`.
    pub(crate) const DIRECT_IO: u32 = 1 << 0;
    /// `FOPEN_NOFLUSH`: the kernel sends no FLUSH when a descriptor is closed.
    pub(crate) const NO_FLUSH: u32 = 1 << 5;
    /// `FOPEN_PARALLEL_DIRECT_WRITES`.
    pub(crate) const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

    pub(crate) fn new(fh: u64, open_flags: u32) -> OpenOut {
        OpenOut {
            fh,
            open_flags,
            backing_id: 0,
        }
    }
}

/// `struct fuse_entry_out` and `struct fuse_open_out`: the answer to CREATE.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct CreateOut {
    pub(crate) entry: EntryOut,
    pub(crate) open: OpenOut,
}

/// `struct fuse_write_out` and `struct fuse_getxattr_out`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct SizeOut {
    size: u32,
    padding: u32,
}

impl SizeOut {
    pub(crate) fn new(size: u32) -> SizeOut {
        SizeOut { size, padding: 0 }
    }
}

/// `struct fuse_statfs_out`.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct StatFsOut {
    blocks: u64,
    free: u64,
    available: u64,
    files: u64,
    files_free: u64,
    block_bytes: u32,
    name_max: u32,
    fragment_bytes: u32,
    padding: u32,
    spare: [u32; 6],
}

impl StatFsOut {
    pub(crate) fn new(s: &StatFs) -> StatFsOut {
        StatFsOut {
            blocks: s.blocks,
            free: s.free,
            available: s.free,
            files: s.files,
            files_free: s.files_free,
            block_bytes: 4096,
            name_max: s.name_max,
            fragment_bytes: 4096,
            ..StatFsOut::default()
        }
    }
}

/// `struct fuse_ioctl_out`.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct IoctlOut {
    result: i32,
    flags: u32,
    in_iovs: u32,
    out_iovs: u32,
}

/// `struct fuse_notify_inval_inode_out`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct InvalidateInode {
    pub(crate) ino: u64,
    /// Below 0: attributes only.
    pub(crate) offset: i64,
    pub(crate) len: i64,
}

impl InvalidateInode {
    /// `FUSE_NOTIFY_INVAL_INODE`.
    pub(crate) const CODE: i32 = 2;
}

/// `struct fuse_dirent` without its name.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
struct DirEntryOut {
    ino: u64,
    offset: u64,
    name_len: u32,
    kind: u32,
}

const _: () = {
    assert!(size_of::<AttrOut>() == 88);
    assert!(size_of::<EntryOut>() == 128);
    assert!(size_of::<AttributesOut>() == 104);
    assert!(size_of::<StatXOut>() == 32 + 256);
    assert!(size_of::<OpenOut>() == 16);
    assert!(size_of::<CreateOut>() == 144);
    assert!(size_of::<StatFsOut>() == 80);
    assert!(size_of::<IoctlOut>() == 16);
    assert!(size_of::<InvalidateInode>() == 24);
    assert!(size_of::<DirEntryOut>() == 24);
};

/// Directory entries, limited by the room in the reply.
pub(crate) struct Listing {
    bytes: Vec<u8>,
    room: usize,
}

impl Listing {
    pub(crate) fn new(room: usize) -> Listing {
        Listing {
            bytes: Vec::with_capacity(room.min(64 << 10)),
            room,
        }
    }

    /// Adds an entry. `looked_up`: set in a listing with attributes. Returns false and adds nothing when there is no room.
    pub(crate) fn add(
        &mut self,
        looked_up: Option<&EntryOut>,
        (ino, kind): (u64, Kind),
        cookie: u64,
        name: &[u8],
    ) -> bool {
        let head = looked_up.map_or(&[][..], IntoBytes::as_bytes);
        let entry = DirEntryOut {
            ino,
            offset: cookie,
            name_len: name.len() as u32,
            kind: mode_of(kind) >> 12,
        };
        let len = (head.len() + size_of::<DirEntryOut>() + name.len()).next_multiple_of(8);
        let end = self.bytes.len() + len;
        if end > self.room {
            return false;
        }
        self.bytes.extend_from_slice(head);
        self.bytes.extend_from_slice(entry.as_bytes());
        self.bytes.extend_from_slice(name);
        self.bytes.resize(end, 0);
        true
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

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
    fn a_listing_contains_only_whole_entries() {
        let mut listing = Listing::new(32 + 32 + 23);
        let entry = (7, Kind::File);
        assert!(listing.add(None, entry, 1, b"12345678"));
        assert!(listing.add(None, entry, 2, b"1"));
        assert_eq!(listing.bytes().len(), 64);
        assert!(!listing.add(None, entry, 3, b""));
        assert_eq!(listing.bytes().len(), 64);
        assert_eq!(listing.bytes()[16..20], 8_u32.to_ne_bytes());
        assert_eq!(listing.bytes()[20..24], 8_u32.to_ne_bytes(), "DT_REG");
    }

    #[test]
    fn device_numbers_are_split_as_the_kernel_encodes_them() {
        // makedev(0xabc, 0x54321)
        let encoded = 0x21 | 0xabc << 8 | 0x543 << 20;
        assert_eq!(device_numbers(encoded), (0xabc, 0x5_4321));
    }
}
