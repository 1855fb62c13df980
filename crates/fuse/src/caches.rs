//! Telling the kernel that what it caches of an inode is out of date.

use std::io;

use fuser::{INodeNo, Notifier};
use jericho_daemon::KernelCache;
use jericho_fs::types::Ino;

/// The kernel behind a mount.
pub(crate) struct Caches(pub Notifier);

impl Caches {
    /// `offset` < 0: attributes only.
    fn invalidate(&self, ino: Ino, offset: i64) {
        match self.0.inval_inode(INodeNo(ino), offset, 0) {
            Ok(()) => {}
            // It knows nothing of the inode: nothing is out of date.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
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
