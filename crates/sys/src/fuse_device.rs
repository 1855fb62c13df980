//! The part of `/dev/fuse` that is neither read(2) nor write(2).

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

/// `FUSE_DEV_IOC_CLONE` of linux/fuse.h: _IOR(229, 0, u32).
const CLONE: libc::c_ulong = 0x8004_e500;

/// Opens the device. Errors: ENOENT without the module, EACCES.
pub fn open() -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::open("/dev/fuse", flags, Mode::empty())?)
}

/// Returns another channel to the mount behind `channel`. The kernel keeps apart which channel a request was read from: its
/// reply goes through the same one. Errors: those of `open`; EINVAL or EPERM when `channel` is no mount's.
pub fn clone(channel: impl AsFd) -> io::Result<OwnedFd> {
    let device = open()?;
    let source = channel.as_fd().as_raw_fd() as u32;
    // SAFETY: the request reads one u32 behind the pointer, which is valid for the call; both descriptors are open.
    match unsafe { libc::ioctl(device.as_raw_fd(), CLONE, &raw const source) } {
        0 => Ok(device),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_mount_has_no_channels() {
        let Ok(device) = open() else { return };
        let refused = clone(&device).unwrap_err();
        // Which of both depends on the kernel.
        let errno = refused.raw_os_error();
        assert!(
            matches!(errno, Some(libc::EINVAL | libc::EPERM)),
            "{refused}"
        );
    }
}
