//! sync(2) and syncfs(2): the kernel does not tell a FUSE daemon of them, so the library does.

use jericho_sys::{errno, files};

use crate::devices;
use crate::fd::Result;

/// Reading it has the daemon write everything back and commit (`fuse::control`).
const SYNC: &str = "jericho.sync";

/// Makes all that was written to the volume of an open file durable. `None`: it is no mount of Jericho's, or one whose
/// daemon can't be asked through this file (O_PATH, no permission to read it).
pub fn sync_of(fd: i32) -> Option<Result<()>> {
    let stat = files::fstat(fd).ok()?;
    if !devices::is_ours(stat.device) {
        return None;
    }
    match files::read_attribute(fd, SYNC) {
        Err(errno::EBADF | errno::EACCES | errno::ENODATA | errno::EOPNOTSUPP) => None,
        result => Some(result),
    }
}

/// The same for every mount that this process sees. As with sync(2), nobody is told of errors.
pub fn sync_all() {
    for directory in devices::directories() {
        let _ = files::read_attribute_at(&directory, SYNC);
    }
}
