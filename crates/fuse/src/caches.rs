//! Makes the kernel drop what it has cached of an inode.

use std::ops::Range;

use jericho_daemon::KernelCache;
use jericho_fs::types::Ino;
use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::protocol::answer::InvalidateInode;
use crate::reply::{Channel, message};

/// The kernel's caches of a mount.
pub(crate) struct Caches(pub Channel);

impl Caches {
    /// Drops cached data. `offset` below 0: attributes only. `len` 0: everything from `offset` on.
    fn invalidate(&self, ino: Ino, offset: i64, len: i64) {
        let what = InvalidateInode { ino, offset, len };
        match message(&self.0, InvalidateInode::CODE, 0, what.as_bytes()) {
            Ok(()) => {}
            // The kernel has cached nothing of the inode.
            Err(Errno::NOENT) => {}
            Err(error) => {
                tracing::debug!(ino, %error, "cannot make the kernel drop what it has cached")
            }
        }
    }
}

impl KernelCache for Caches {
    fn drop_attributes(&self, ino: Ino) {
        self.invalidate(ino, -1, 0);
    }

    fn drop_pages(&self, ino: Ino) {
        self.invalidate(ino, 0, 0);
    }

    fn drop_some_pages(&self, ino: Ino, bytes: Range<u64>) {
        // No file is longer than an i64 can hold.
        self.invalidate(ino, bytes.start as i64, (bytes.end - bytes.start) as i64);
    }
}
