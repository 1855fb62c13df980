//! JERICHO_REPORT: the report of calls that were served inline and of others, written when the program ends.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_int};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use jericho_client::fd;

use crate::{errno, real};

/// Whether the user has asked for a report. `prepare` sets it once.
static REQUESTED: AtomicBool = AtomicBool::new(false);
/// Device and inode of standard error at the start. At the end, fd 2 may be any file, also one with the program's data.
static DEVICE: AtomicU64 = AtomicU64::new(0);
static INODE: AtomicU64 = AtomicU64::new(0);

/// The file to append to; empty: standard error. A copy, because programs write their status over their environment.
struct Path(UnsafeCell<[u8; 4096]>);

// SAFETY: written by `prepare`, before the program's threads exist, and only read afterwards.
unsafe impl Sync for Path {}

static PATH: Path = Path(UnsafeCell::new([0; 4096]));

/// Reads JERICHO_REPORT from the environment. Runs at the start of the program, in its only thread.
pub fn prepare() {
    // SAFETY: the name is a C string; the program runs no other thread that could change the
    // environment.
    let value = unsafe { libc::getenv(c"JERICHO_REPORT".as_ptr()) };
    if value.is_null() {
        return;
    }
    // SAFETY: getenv returns a C string.
    let value = unsafe { CStr::from_ptr(value) }.to_bytes_with_nul();
    match value {
        b"\0" | b"0\0" => return,
        [b'/', ..] => {
            // SAFETY: no other code reads or writes it yet.
            let path = unsafe { &mut *PATH.0.get() };
            // A longer path could not be opened anyway.
            let Some(room) = path.get_mut(..value.len()) else {
                return;
            };
            room.copy_from_slice(value);
        }
        _ => {
            let Some((device, inode)) = standard_error() else {
                return;
            };
            DEVICE.store(device, Relaxed);
            INODE.store(inode, Relaxed);
        }
    }
    REQUESTED.store(true, Relaxed);
}

/// Returns device and inode of fd 2; `None` when it is closed.
fn standard_error() -> Option<(u64, u64)> {
    // SAFETY: all zeros is a valid struct stat, which fstat may fill.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        let status = errno::kept(|| real::fstat(2, &raw mut stat));
        (status == 0).then_some((stat.st_dev, stat.st_ino))
    }
}

/// Writes the report, if the user has asked for one and its destination still exists.
pub fn write() {
    if REQUESTED.load(Relaxed) {
        errno::kept(write_requested);
    }
}

fn write_requested() {
    // SAFETY: no code writes it any more.
    let path = unsafe { &*PATH.0.get() };
    if path[0] == 0 {
        if standard_error() == Some((DEVICE.load(Relaxed), INODE.load(Relaxed))) {
            write_to(2);
        }
        return;
    }
    let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_CREAT | libc::O_CLOEXEC;
    // SAFETY: `path` is a C string: `prepare` copied it with its zero byte.
    unsafe {
        let fd = real::open(path.as_ptr().cast(), flags, 0o666);
        if fd >= 0 {
            write_to(fd);
            real::close(fd);
        }
    }
}

fn write_to(fd: c_int) {
    let mut out = Buffered {
        fd,
        bytes: [0; 4096],
        length: 0,
    };
    // After an error there is no destination left for a message.
    let process = std::process::id();
    let _ = writeln!(out, "jericho: process {process}");
    let heading = out.length;
    let _ = fd::report(&mut out);
    // A process that used no file of a mount is not worth a line.
    if out.length != heading {
        let _ = out.flush();
    }
}

/// A writer that allocates nothing. A report that fits is written with one call.
struct Buffered {
    fd: c_int,
    bytes: [u8; 4096],
    length: usize,
}

impl Write for Buffered {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        if self.length == self.bytes.len() {
            self.flush()?;
        }
        let room = &mut self.bytes[self.length..];
        let taken = data.len().min(room.len());
        room[..taken].copy_from_slice(&data[..taken]);
        self.length += taken;
        Ok(taken)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        let mut ahead = &self.bytes[..self.length];
        self.length = 0;
        while !ahead.is_empty() {
            // SAFETY: `ahead` has that many bytes.
            let written = unsafe { real::write(self.fd, ahead.as_ptr().cast(), ahead.len()) };
            match usize::try_from(written) {
                Ok(bytes) if bytes > 0 => ahead = ahead.get(bytes..).unwrap_or(&[]),
                _ => return Err(std::io::ErrorKind::WriteZero.into()),
            }
        }
        Ok(())
    }
}
