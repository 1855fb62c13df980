//! Conversions between the kernel's values and the filesystem's.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jericho_fs::Error;
use jericho_fs::types::Kind;

/// st_blksize: the size of the calls of programs that have no preference. More than a page, because each call is a request to the
/// daemon.
pub(crate) const PREFERRED_BYTES: u32 = 64 << 10;

/// Returns the kind that mknod(2) asks for. Returns `None` for kinds that mknod(2) does not create.
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

/// Converts a time from the kernel's form, where nanoseconds count forwards even before 1970. Returns `None` for a
/// time out of range.
pub(crate) fn time(seconds: i64, nanoseconds: u32) -> Option<SystemTime> {
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let second = match seconds {
        0.. => UNIX_EPOCH.checked_add(whole),
        _ => UNIX_EPOCH.checked_sub(whole),
    };
    second?.checked_add(Duration::from_nanos(nanoseconds.into()))
}

/// Returns the errno for the program. Also logs errors that are not ordinary results, because the errno alone says little.
pub(crate) fn errno(operation: &'static str, error: &Error) -> i32 {
    // The daemon logs an outage of write-back once, and not for each request that meets it.
    let is_expected = match error {
        Error::Errno(_) => true,
        Error::Io(error) => error.operation == "write",
        _ => false,
    };
    if !is_expected {
        tracing::error!(operation, %error, "request failed");
    }
    error.errno()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_before_1970_keeps_its_nanoseconds() {
        // -1.75 s is second -2 and 250,000,000 ns.
        let before = UNIX_EPOCH - Duration::new(1, 750_000_000);
        assert_eq!(time(-2, 250_000_000), Some(before));
        let after = UNIX_EPOCH + Duration::new(2, 250_000_000);
        assert_eq!(time(2, 250_000_000), Some(after));
        for seconds in [i64::MIN, i64::MAX] {
            time(seconds, u32::MAX);
        }
    }

    #[test]
    fn mknod_creates_the_kind_that_its_mode_gives() {
        assert_eq!(kind_of_mode(libc::S_IFREG | 0o644), Some(Kind::File));
        assert_eq!(kind_of_mode(0o644), Some(Kind::File));
        assert_eq!(kind_of_mode(libc::S_IFIFO), Some(Kind::Fifo));
        assert_eq!(kind_of_mode(libc::S_IFDIR), None);
    }
}
