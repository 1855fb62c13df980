//! Telling the kernel that what it caches of an inode is out of date.

use jericho_daemon::KernelCache;
use jericho_fs::types::Ino;
use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::protocol::answer::InvalidateInode;
use crate::reply::{Channel, message};

/// The kernel behind a mount.
pub(crate) struct Caches(pub Channel);

impl Caches {
    /// `offset` < 0: attributes only.
    fn invalidate(&self, ino: Ino, offset: i64) {
        let what = InvalidateInode {
            ino,
            offset,
            len: 0,
        };
        match message(&self.0, InvalidateInode::CODE, 0, what.as_bytes()) {
            Ok(()) => {}
            // It knows nothing of the inode: nothing is out of date.
            Err(Errno::NOENT) => {}
            Err(error) => tracing::debug!(ino, %error, "the kernel keeps what it has cached"),
        }
    }
}

impl KernelCache for Caches {
    fn drop_attributes(&self, ino: Ino) {
        self.invalidate(ino, -1);
    }

    fn drop_pages(&self, ino: Ino) {
        self.invalidate(ino, 0);
    }
}
