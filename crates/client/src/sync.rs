//! Passes sync(2) and syncfs(2) on to the daemons, because the kernel does not tell a FUSE daemon about them.

use jericho_sys::errno;
use jericho_sys::files::{self, Result};

use crate::session::devices;

/// Attribute whose reading makes the daemon write everything back and commit (`fuse::control`).
const SYNC: &str = "jericho.sync";
/// The same for syncfs(2).
const SYNCFS: &str = "jericho.syncfs";

/// Does what syncfs(2) does: makes everything written to the volume of an open file durable, and reports a failed write-back. Returns `None` when the file is on no mount of
/// Jericho, or when its daemon cannot be asked through this file (O_PATH, or no permission to read it).
pub fn sync_of(fd: i32) -> Option<Result<()>> {
    let stat = files::fstat(fd).ok()?;
    if !devices::is_ours(stat.device) {
        return None;
    }
    match files::read_attribute(fd, SYNCFS) {
        Err(errno::EBADF | errno::EACCES | errno::ENODATA | errno::EOPNOTSUPP) => None,
        result => Some(result),
    }
}

/// Does the same for every mount that this process sees. Ignores errors, as sync(2) does.
pub fn sync_all() {
    for directory in devices::directories() {
        let _ = files::read_attribute_at(&directory, SYNC);
    }
}
