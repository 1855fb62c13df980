//! The operations on `/dev/fuse` other than read(2) and write(2).

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

/// `FUSE_DEV_IOC_CLONE` of linux/fuse.h: _IOR(229, 0, u32).
const CLONE: libc::c_ulong = 0x8004_e500;

/// Opens the device. Fails with ENOENT without the kernel module, and with EACCES.
pub fn open() -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::open("/dev/fuse", flags, Mode::empty())?)
}

/// Returns another channel to the mount behind `channel`. The kernel records through which channel it delivered a request,
/// and expects the reply on the same one. Fails as `open` does, and with EINVAL or EPERM when `channel` belongs to no
/// mount.
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
    fn a_device_without_a_mount_cannot_be_cloned() {
        let Ok(device) = open() else { return };
        let refused = clone(&device).unwrap_err();
        // The errno depends on the kernel.
        let errno = refused.raw_os_error();
        assert!(
            matches!(errno, Some(libc::EINVAL | libc::EPERM)),
            "{refused}"
        );
    }
}
