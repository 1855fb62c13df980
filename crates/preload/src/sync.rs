//! sync and syncfs: the mounts' daemons are asked, too, since the kernel tells them nothing.

use std::ffi::c_int;

use jericho_client::sync;

use crate::{errno, real};

exports! {
    sync_all as sync: ();
    syncfs as syncfs: (fd: c_int) -> c_int;
}

/// The kernel first: what was written through mappings is the daemons' after that.
pub unsafe fn sync_all() {
    // SAFETY: takes nothing.
    unsafe { real::sync() };
    errno::kept(sync::sync_all);
}

pub unsafe fn syncfs(fd: c_int) -> c_int {
    // SAFETY: the caller's arguments.
    let status = unsafe { real::syncfs(fd) };
    if status != 0 {
        return status;
    }
    match errno::kept(|| sync::sync_of(fd)) {
        Some(Err(errno)) => {
            errno::set(errno);
            -1
        }
        _ => status,
    }
}
