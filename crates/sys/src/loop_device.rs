//! Makes and removes loop devices: block devices over files (linux/loop.h).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::ioctl::{NoArg, Opcode, Setter};

use crate::block::LoopInfo;

const CONTROL: &str = "/dev/loop-control";
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
const LOOP_CONFIGURE: Opcode = 0x4c0a;
const LOOP_CLR_FD: Opcode = 0x4c01;
const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_DIRECT_IO: u32 = 16;
/// Position of the flags among the numbers of `LoopInfo`.
const FLAGS: usize = 3;
/// How often another process may take the free device first.
const ATTEMPTS_MAX: u32 = 100;

/// Layout of `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_bytes: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}
const _: () = assert!(size_of::<LoopConfig>() == 304);

/// A loop device to make.
#[derive(Clone, Copy, Debug)]
pub struct LoopOptions {
    /// Refuses writes.
    pub read_only: bool,
    /// Smallest unit of a transfer: a power of two from 512 to the page size.
    pub block_bytes: u32,
}

/// Makes a loop device over a file, with direct I/O. Returns its path. The device holds the file. Fails with EACCES or EPERM
/// without the rights, and with ENOENT where the kernel or /dev has no loop devices.
pub fn attach(backing: &File, name: &Path, options: LoopOptions) -> io::Result<PathBuf> {
    let control = rustix::fs::open(CONTROL, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let mut attempts = 0;
    loop {
        attempts += 1;
        // SAFETY: LOOP_CTL_GET_FREE takes no memory; the descriptor is open.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = File::options().read(true).write(true).open(&path)?;
        match configure(&device, backing, name, options) {
            // Another process was faster.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && attempts < ATTEMPTS_MAX => {}
            configured => return configured.map(|()| path),
        }
    }
}

fn configure(device: &File, backing: &File, name: &Path, options: LoopOptions) -> io::Result<()> {
    let read_only = if options.read_only {
        LO_FLAGS_READ_ONLY
    } else {
        0
    };
    let mut info = LoopInfo::EMPTY;
    info.numbers[FLAGS] = LO_FLAGS_DIRECT_IO | read_only;
    // For losetup(8) only; the end is cut off. A NUL stays at the end.
    let name = name.as_os_str().as_encoded_bytes();
    let length = name.len().min(LoopInfo::FILE_NAME_BYTES - 1);
    info.names[..length].copy_from_slice(&name[..length]);
    let config = LoopConfig {
        fd: backing.as_raw_fd() as u32,
        block_bytes: options.block_bytes,
        info,
        reserved: [0; 8],
    };
    // SAFETY: LOOP_CONFIGURE reads one struct loop_config, the type given (its size is asserted).
    unsafe { rustix::ioctl::ioctl(device, Setter::<LOOP_CONFIGURE, LoopConfig>::new(config)) }?;
    Ok(())
}

/// Takes the file away from a loop device. The kernel does that when the last descriptor of the device is closed, this one too.
/// Fails with ENXIO when the device has no file.
pub fn detach(device: impl AsFd) -> io::Result<()> {
    // SAFETY: LOOP_CLR_FD takes no memory.
    unsafe { rustix::ioctl::ioctl(device, NoArg::<LOOP_CLR_FD>::new()) }?;
    Ok(())
}
