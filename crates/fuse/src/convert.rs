//! Between the kernel's words (as fuser spells them) and the filesystem's.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{Errno, FileAttr, FileType, INodeNo, TimeOrNow};
use jericho_fs::Error;
use jericho_fs::types::{Attr, Kind, SetTime};

/// st_blksize: what programs read and write in one call when they have no opinion. Each call is a
/// request to us, so it is more than a page.
pub(crate) const PREFERRED_BYTES: u32 = 64 << 10;

pub(crate) fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::File => FileType::RegularFile,
        Kind::Directory => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Fifo => FileType::NamedPipe,
        Kind::Socket => FileType::Socket,
        Kind::CharDevice => FileType::CharDevice,
        Kind::BlockDevice => FileType::BlockDevice,
    }
}

/// The kind that mknod(2) asks for; `None` for those it does not make.
pub(crate) fn kind_of_mode(mode: u32) -> Option<Kind> {
    match mode & libc::S_IFMT {
        0 | libc::S_IFREG => Some(Kind::File),
        libc::S_IFIFO => Some(Kind::Fifo),
        libc::S_IFSOCK => Some(Kind::Socket),
        libc::S_IFCHR => Some(Kind::CharDevice),
        libc::S_IFBLK => Some(Kind::BlockDevice),
        _ => None,
    }
}

pub(crate) fn attr(a: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(a.ino),
        size: a.size,
        blocks: a.blocks,
        atime: a.atime,
        mtime: a.mtime,
        ctime: a.ctime,
        crtime: a.btime,
        kind: file_type(a.kind),
        perm: a.perm,
        nlink: a.nlink,
        uid: a.uid,
        gid: a.gid,
        rdev: a.rdev,
        blksize: PREFERRED_BYTES,
        flags: 0,
    }
}

/// What a directory listing needs to know of an entry that the kernel does not look up: "." and
/// "..", and (number 0) a name that is known not to exist.
pub(crate) fn bare_attr(ino: u64, kind: Kind) -> FileAttr {
    FileAttr {
        ino: INodeNo(ino),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: file_type(kind),
        perm: 0,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: PREFERRED_BYTES,
        flags: 0,
    }
}

/// Undoes what fuser 0.18 does to times before 1970: it subtracts the nanoseconds, which the kernel
/// counts forwards from the (negative) second.
pub(crate) fn time(t: SystemTime) -> SystemTime {
    match UNIX_EPOCH.duration_since(t) {
        Ok(before) if before.subsec_nanos() != 0 => {
            t + Duration::from_nanos(2 * u64::from(before.subsec_nanos()))
        }
        _ => t,
    }
}

pub(crate) fn set_time(t: TimeOrNow) -> SetTime {
    match t {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(t) => SetTime::At(time(t)),
    }
}

/// The errno for the program; what is not an ordinary outcome is also logged, because the errno
/// says little.
pub(crate) fn errno(operation: &'static str, error: &Error) -> Errno {
    if !matches!(error, Error::Errno(_)) {
        tracing::error!(operation, %error, "request failed");
    }
    Errno::from_i32(error.errno())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_before_1970_keeps_its_nanoseconds() {
        // -1.75 s is second -2 and 250,000,000 ns; fuser makes it 2.25 s before the epoch.
        let from_fuser = UNIX_EPOCH - Duration::new(2, 250_000_000);
        assert_eq!(time(from_fuser), UNIX_EPOCH - Duration::new(1, 750_000_000));
        let whole = UNIX_EPOCH - Duration::new(2, 0);
        assert_eq!(time(whole), whole);
        let after = UNIX_EPOCH + Duration::new(2, 250_000_000);
        assert_eq!(time(after), after);
    }

    #[test]
    fn mknod_makes_what_its_mode_says() {
        assert_eq!(kind_of_mode(libc::S_IFREG | 0o644), Some(Kind::File));
        assert_eq!(kind_of_mode(0o644), Some(Kind::File));
        assert_eq!(kind_of_mode(libc::S_IFIFO), Some(Kind::Fifo));
        assert_eq!(kind_of_mode(libc::S_IFDIR), None);
    }
}
