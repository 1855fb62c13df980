//! System calls on the descriptors of the program around this library, by number.
//!
//! Used by the library between a program and libc. The library defines libc's symbols itself, so nothing here may use them. The
//! calls go directly to the kernel, return errors as errno, and never change the thread's `errno`.
//!
//! The program may close an fd, or reuse it for another file, at any time. A call here then fails or acts on the other file, as
//! the program's own call would.

use std::ffi::CStr;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;

use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};

/// Result of a call, or the errno.
pub type Result<T> = std::result::Result<T, i32>;

/// Returns a descriptor number in the form that rustix takes. Fails with EBADF for a negative number.
fn borrow(fd: i32) -> Result<BorrowedFd<'static>> {
    if fd < 0 {
        return Err(libc::EBADF);
    }
    // SAFETY: not -1 (checked). The borrow is used for one call, which does not close it; a number without an open file makes
    // that call fail with EBADF.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

fn errno(error: Errno) -> i32 {
    error.raw_os_error()
}

fn place(offset: i64) -> Result<u64> {
    u64::try_from(offset).map_err(|_| libc::EINVAL)
}

/// read(2).
pub fn read(fd: i32, out: &mut [u8]) -> Result<usize> {
    rustix::io::read(borrow(fd)?, out).map_err(errno)
}

/// pread(2).
pub fn pread(fd: i32, out: &mut [u8], offset: i64) -> Result<usize> {
    rustix::io::pread(borrow(fd)?, out, place(offset)?).map_err(errno)
}

/// readv(2).
pub fn readv(fd: i32, parts: &mut [IoSliceMut<'_>]) -> Result<usize> {
    rustix::io::readv(borrow(fd)?, parts).map_err(errno)
}

/// preadv(2).
pub fn preadv(fd: i32, parts: &mut [IoSliceMut<'_>], offset: i64) -> Result<usize> {
    rustix::io::preadv(borrow(fd)?, parts, place(offset)?).map_err(errno)
}

/// write(2).
pub fn write(fd: i32, data: &[u8]) -> Result<usize> {
    rustix::io::write(borrow(fd)?, data).map_err(errno)
}

/// writev(2).
pub fn writev(fd: i32, parts: &[IoSlice<'_>]) -> Result<usize> {
    rustix::io::writev(borrow(fd)?, parts).map_err(errno)
}

/// pwrite(2).
pub fn pwrite(fd: i32, data: &[u8], offset: i64) -> Result<usize> {
    rustix::io::pwrite(borrow(fd)?, data, place(offset)?).map_err(errno)
}

/// pwritev(2).
pub fn pwritev(fd: i32, parts: &[IoSlice<'_>], offset: i64) -> Result<usize> {
    rustix::io::pwritev(borrow(fd)?, parts, place(offset)?).map_err(errno)
}

/// lseek(2), with `whence` as in the kernel. Fails with EINVAL for an unknown one.
pub fn lseek(fd: i32, offset: i64, whence: i32) -> Result<i64> {
    let to = match whence {
        libc::SEEK_SET => SeekFrom::Start(place(offset)?),
        libc::SEEK_CUR => SeekFrom::Current(offset),
        libc::SEEK_END => SeekFrom::End(offset),
        // The kernel answers ENXIO to a negative offset: no data is there.
        libc::SEEK_DATA => SeekFrom::Data(u64::try_from(offset).map_err(|_| libc::ENXIO)?),
        libc::SEEK_HOLE => SeekFrom::Hole(u64::try_from(offset).map_err(|_| libc::ENXIO)?),
        _ => return Err(libc::EINVAL),
    };
    rustix::fs::seek(borrow(fd)?, to)
        .map(|at| at as i64)
        .map_err(errno)
}

/// The used part of fstat(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Device number, in the kernel's encoding.
    pub device: u64,
    /// Inode.
    pub inode: u64,
    /// Whether it is a regular file.
    pub is_regular: bool,
    /// Size in bytes.
    pub size: u64,
}

/// fstat(2).
pub fn fstat(fd: i32) -> Result<Stat> {
    let stat = rustix::fs::fstat(borrow(fd)?).map_err(errno)?;
    Ok(Stat {
        device: stat.st_dev,
        inode: stat.st_ino,
        is_regular: stat.st_mode & libc::S_IFMT == libc::S_IFREG,
        size: u64::try_from(stat.st_size).unwrap_or(0),
    })
}

/// Sends the filesystem of an open file a request that the kernel never answers from a cache: fstatfs(2).
pub fn ask_filesystem(fd: i32) -> Result<()> {
    rustix::fs::fstatfs(borrow(fd)?).map_err(errno)?;
    Ok(())
}

/// Asks the filesystem for the attributes of a path, even if the kernel has cached them: statx(2).
pub fn ask_path(dir: i32, path: &CStr) -> Result<()> {
    use rustix::fs::{AtFlags, CWD, StatxFlags};
    let dir = match dir {
        libc::AT_FDCWD => CWD,
        // The kernel ignores the descriptor when the path is absolute.
        _ if path.to_bytes().starts_with(b"/") => CWD,
        _ => borrow(dir)?,
    };
    let flags = AtFlags::STATX_FORCE_SYNC | AtFlags::NO_AUTOMOUNT;
    rustix::fs::statx(dir, path, flags, StatxFlags::BASIC_STATS).map_err(errno)?;
    Ok(())
}

/// Returns the identity of an open file, and the size that the kernel knows: the end for a seek, an append or a copy that the kernel
/// makes now. The kernel answers this without a request to the daemon.
pub fn identify(fd: i32) -> Result<Stat> {
    use rustix::fs::{AtFlags, StatxFlags};
    let how = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let asked = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::SIZE;
    match rustix::fs::statx(borrow(fd)?, c"", how, asked) {
        Ok(stat) => Ok(Stat {
            device: device(stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            is_regular: u32::from(stat.stx_mode) & libc::S_IFMT == libc::S_IFREG,
            size: stat.stx_size,
        }),
        // For emulators that do not implement statx.
        Err(Errno::NOSYS) => fstat(fd),
        Err(error) => Err(errno(error)),
    }
}

/// Returns a device number in the encoding of `fstat`, from its two parts.
pub fn device(major: u32, minor: u32) -> u64 {
    rustix::fs::makedev(major, minor)
}

/// Access mode and flags of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Reading is allowed.
    pub read: bool,
    /// Writing is allowed.
    pub write: bool,
    /// O_APPEND.
    pub append: bool,
    /// O_SYNC or O_DSYNC.
    pub sync: bool,
    /// O_DIRECT.
    pub direct: bool,
    /// O_PATH: no I/O at all.
    pub path: bool,
}

/// fcntl(2), F_GETFL.
pub fn mode(fd: i32) -> Result<Mode> {
    let flags = rustix::fs::fcntl_getfl(borrow(fd)?).map_err(errno)?;
    let access = flags & OFlags::RWMODE;
    Ok(Mode {
        read: access == OFlags::RDONLY || access == OFlags::RDWR,
        write: access == OFlags::WRONLY || access == OFlags::RDWR,
        append: flags.contains(OFlags::APPEND),
        sync: flags.intersects(OFlags::SYNC | OFlags::DSYNC),
        direct: flags.contains(OFlags::DIRECT),
        path: flags.contains(OFlags::PATH),
    })
}

/// Adds O_APPEND to the flags: fcntl(2), F_SETFL.
pub fn set_append(fd: i32) -> Result<()> {
    let fd = borrow(fd)?;
    let flags = rustix::fs::fcntl_getfl(fd).map_err(errno)?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::APPEND).map_err(errno)
}

/// Bytes that Jericho's ioctls carry.
pub const IOCTL_BYTES: usize = 64;

struct Exchange<'a> {
    request: Opcode,
    data: &'a mut [u8; IOCTL_BYTES],
}

// SAFETY: `ioctl` passes only requests that encode a read and write of 64 bytes at the pointer. `data` has 64 bytes, exclusively
// borrowed for the call. The result is not used.
unsafe impl Ioctl for Exchange<'_> {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.request
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        self.data.as_mut_ptr().cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut std::ffi::c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// Makes an ioctl(2) with a request `_IOWR(.., .., 64 bytes)`, which reads and writes `data`. Fails with EINVAL for any other
/// request.
pub fn ioctl(fd: i32, request: u32, data: &mut [u8; IOCTL_BYTES]) -> Result<()> {
    let kind = (request >> 8 & 0xff) as u8;
    let carries = rustix::ioctl::opcode::read_write::<[u8; IOCTL_BYTES]>(kind, request as u8);
    if Opcode::from(request) != carries {
        return Err(libc::EINVAL);
    }
    let exchange = Exchange {
        request: carries,
        data,
    };
    // SAFETY: the request encodes how many bytes are read and written (checked), and `data` has that many.
    unsafe { rustix::ioctl::ioctl(borrow(fd)?, exchange) }.map_err(errno)
}

/// Returns whether the size of this process's files is limited (RLIMIT_FSIZE). The kernel must then handle writes that extend a
/// file, because it sends SIGXFSZ.
pub fn size_is_limited() -> bool {
    size_limit().is_some()
}

/// Returns the largest size that this process may give to a file (RLIMIT_FSIZE). A larger one is answered with SIGXFSZ, which ends
/// the process.
pub fn size_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Fsize).current
}

/// Reads a whole (small) file.
pub fn read_file(path: &str) -> Result<Vec<u8>> {
    use std::os::fd::AsRawFd;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).map_err(errno)?;
    let mut out = vec![];
    let mut part = [0; 4096];
    loop {
        match read(file.as_raw_fd(), &mut part)? {
            0 => return Ok(out),
            n => out.extend_from_slice(&part[..n]),
        }
    }
}

/// Reads an extended attribute of an open file for the effect of reading it, and ignores the value.
pub fn read_attribute(fd: i32, name: &str) -> Result<()> {
    let mut none: [u8; 0] = [];
    let read = rustix::fs::fgetxattr(borrow(fd)?, name, &mut none);
    read.map(drop).map_err(errno)
}

/// Does the same as `read_attribute` for the file at a path.
pub fn read_attribute_at(path: &[u8], name: &str) -> Result<()> {
    let mut none: [u8; 0] = [];
    let read = rustix::fs::getxattr(path, name, &mut none);
    read.map(drop).map_err(errno)
}

/// Returns the realtime clock at the resolution of the kernel's tick, in nanoseconds. Makes no system call where the kernel has a
/// vDSO.
pub fn coarse_realtime_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is valid for writes. The clock exists since Linux 2.6.32; the call cannot fail for another reason.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME_COARSE, &raw mut now) };
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}

/// Words that read as 0 in a child of fork(2), even if the parent changed them.
#[derive(Debug)]
pub struct ForkMark(&'static [AtomicU64; 8]);

impl ForkMark {
    /// Creates the words; they are never freed. Fails with EINVAL on a kernel before 4.14.
    pub fn new() -> Result<ForkMark> {
        use rustix::mm::{Advice, MapFlags, ProtFlags};
        let len = rustix::param::page_size();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
        let page = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, protection, MapFlags::PRIVATE)
        }
        .map_err(errno)?;
        // SAFETY: the range is exactly the mapping just made; the advice changes no contents here.
        if let Err(error) = unsafe { rustix::mm::madvise(page, len, Advice::LinuxWipeOnFork) } {
            // SAFETY: the range is the mapping just made, and no pointer into it exists.
            let _ = unsafe { rustix::mm::munmap(page, len) };
            return Err(errno(error));
        }
        // SAFETY: the page is zeroed, aligned, writable, larger than the words, and stays mapped for as long as the process
        // lives.
        Ok(ForkMark(unsafe { &*page.cast::<[AtomicU64; 8]>() }))
    }

    /// Returns one of the eight words.
    #[inline]
    pub fn word(&self, index: usize) -> &AtomicU64 {
        &self.0[index]
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn bytes_go_to_the_given_offsets_and_errors_are_returned() {
        let file = tempfile::tempfile().unwrap();
        let fd = file.as_raw_fd();
        assert_eq!(pwrite(fd, b"hello", 3), Ok(5));
        let parts = [IoSlice::new(b"a"), IoSlice::new(b"bc")];
        assert_eq!(pwritev(fd, &parts, 0), Ok(3));
        let mut out = [0; 10];
        assert_eq!(pread(fd, &mut out, 0), Ok(8));
        assert_eq!(&out[..8], b"abchello");
        assert_eq!(lseek(fd, -2, libc::SEEK_END), Ok(6));
        assert_eq!(read(fd, &mut out), Ok(2));
        assert_eq!(write(fd, b"!"), Ok(1));
        assert_eq!(lseek(fd, 0, libc::SEEK_CUR), Ok(9));
        assert_eq!(lseek(fd, 0, 77), Err(libc::EINVAL));
        assert_eq!(pread(fd, &mut out, -1), Err(libc::EINVAL));
        assert_eq!(pread(-1, &mut out, 0), Err(libc::EBADF));
        let stat = fstat(fd).unwrap();
        assert_eq!((stat.is_regular, stat.size), (true, 9));
        let mode = mode(fd).unwrap();
        assert!(mode.read && mode.write && !mode.append && !mode.direct);
    }

    #[test]
    fn a_file_refuses_an_unknown_request() {
        let file = tempfile::tempfile().unwrap();
        let mut data = [7; IOCTL_BYTES];
        let ask = |request, data: &mut _| ioctl(file.as_raw_fd(), request, data);
        assert_eq!(ask(0xc040_4a01, &mut data), Err(libc::ENOTTY));
        // FIONREAD, which does not write 64 bytes.
        assert_eq!(ask(0x541b, &mut data), Err(libc::EINVAL));
        assert_eq!(data, [7; IOCTL_BYTES]);
    }

    #[test]
    fn a_file_is_read_whole() {
        let status = read_file("/proc/self/status").unwrap();
        assert!(status.starts_with(b"Name:"));
        assert_eq!(read_file("/does/not/exist"), Err(libc::ENOENT));
    }

    #[test]
    fn the_mark_is_zero_in_a_child() {
        let mark = ForkMark::new().unwrap();
        mark.word(0).store(7, Ordering::Relaxed);
        let get = || mark.word(0).load(Ordering::Relaxed);
        // SAFETY: the child only reads a word and exits, which is allowed after a fork of a process with threads.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: exits the child without running code of the parent.
            unsafe { libc::_exit(if get() == 0 { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: `status` is valid for writes; the child is this process's.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!((status, get()), (0, 7));
    }

    #[test]
    fn the_coarse_clock_is_the_realtime_clock() {
        let before = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap()
            .as_secs();
        let now = coarse_realtime_ns() / 1_000_000_000;
        assert!(now + 2 >= before && now <= before + 3600);
    }
}
