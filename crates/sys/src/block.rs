//! Opens files and block devices for direct I/O, reads their sizes, writes durably, and fills and releases ranges of them.

use std::fs::{File, Metadata};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::ReadWriteFlags;
use rustix::ioctl::{Getter, Setter, opcode};

/// Options for opening a file or device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Open {
    /// Read and write, not only read.
    pub write: bool,
    /// O_DIRECT. EINVAL where the filesystem does not support it.
    pub direct: bool,
    /// O_EXCL without O_CREAT, for block devices. EBUSY while the device is mounted or held with O_EXCL.
    pub exclusive: bool,
    /// Creates the file with mode 0600, because it will hold files of other users. EEXIST when it exists.
    pub create_new: bool,
}

/// Opens `path` with O_CLOEXEC. Never waits for the other end of a FIFO. Fails as open(2) does.
pub fn open(path: &Path, how: Open) -> io::Result<File> {
    let mut flags = OFlags::CLOEXEC | OFlags::NONBLOCK;
    flags |= if how.write {
        OFlags::RDWR
    } else {
        OFlags::RDONLY
    };
    if how.direct {
        flags |= OFlags::DIRECT;
    }
    if how.exclusive {
        flags |= OFlags::EXCL;
    }
    if how.create_new {
        flags |= OFlags::CREATE | OFlags::EXCL;
    }
    let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
    // NONBLOCK was for the open only. On a device it would make io_uring report EAGAIN.
    let status = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, status - OFlags::NONBLOCK)?;
    Ok(File::from(fd))
}

/// Returns whether another block device is stacked on the one with this device number (the directory `holders` of sysfs).
pub fn has_holders(rdev: u64) -> bool {
    let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    std::fs::read_dir(format!("/sys/dev/block/{major}:{minor}/holders"))
        .is_ok_and(|mut holders| holders.next().is_some())
}

/// Returns the size of a block device in bytes: BLKGETSIZE64. Fails with ENOTTY for other files.
pub fn device_size_bytes(device: impl AsFd) -> io::Result<u64> {
    const BLKGETSIZE64: rustix::ioctl::Opcode = opcode::read::<usize>(0x12, 114);
    // SAFETY: BLKGETSIZE64 writes one u64, the type given.
    Ok(unsafe { rustix::ioctl::ioctl(device, Getter::<BLKGETSIZE64, u64>::new())? })
}

/// Returns the smallest unit that a block device can transfer, in bytes: BLKSSZGET.
pub fn logical_block_bytes(device: impl AsFd) -> io::Result<u32> {
    Ok(rustix::fs::ioctl_blksszget(device)?)
}

/// Tells a block device that a range of bytes holds no data: BLKDISCARD. Fails with EOPNOTSUPP when the device cannot discard,
/// and with EINVAL for a range that is not whole sectors.
pub fn discard_device(device: impl AsFd, offset_bytes: u64, length_bytes: u64) -> io::Result<()> {
    const BLKDISCARD: rustix::ioctl::Opcode = opcode::none(0x12, 119);
    let range = [offset_bytes, length_bytes];
    // SAFETY: BLKDISCARD reads two u64, start and length, from the pointer that Setter passes.
    unsafe { rustix::ioctl::ioctl(device, Setter::<BLKDISCARD, [u64; 2]>::new(range)) }?;
    Ok(())
}

/// Releases the storage of a range of a regular file, which reads as zeros afterwards. Fails with EOPNOTSUPP when the filesystem
/// cannot do that.
pub fn punch_hole(file: impl AsFd, offset_bytes: u64, length_bytes: u64) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(
        file,
        flags,
        offset_bytes,
        length_bytes,
    )?)
}

/// Returns the ranges of a regular file that have no storage, in order. They read as zeros. Returns none on a filesystem without
/// holes.
pub fn holes(file: &File) -> io::Result<Vec<Range<u64>>> {
    let end = file.metadata()?.len();
    let seek = |to| match rustix::fs::seek(file, to) {
        Ok(at) => Ok(at.min(end)),
        Err(rustix::io::Errno::NXIO) => Ok(end),
        Err(error) => Err(io::Error::from(error)),
    };
    let (mut holes, mut at) = (vec![], 0);
    while at < end {
        let hole = seek(rustix::fs::SeekFrom::Hole(at))?;
        at = seek(rustix::fs::SeekFrom::Data(hole))?;
        if hole < at {
            holes.push(hole..at);
        }
    }
    Ok(holes)
}

/// Returns whether a regular file has storage at an offset, and the end of the run for which that is so: SEEK_DATA, SEEK_HOLE. A
/// filesystem without holes has storage everywhere. Fails beyond the end of the file.
pub fn run_at(file: &File, offset_bytes: u64) -> io::Result<(bool, u64)> {
    let data = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(offset_bytes)) {
        Ok(at) => at,
        Err(rustix::io::Errno::NXIO) => file.metadata()?.len(),
        Err(error) => return Err(error.into()),
    };
    if data > offset_bytes {
        return Ok((false, data));
    }
    let hole = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(offset_bytes))?;
    Ok((true, hole))
}

/// Reserves storage for a range of a regular file, and grows the file if needed. Fails with ENOSPC, or with EOPNOTSUPP when the
/// filesystem cannot do that.
pub fn allocate(file: impl AsFd, offset_bytes: u64, length_bytes: u64) -> io::Result<()> {
    Ok(rustix::fs::fallocate(
        file,
        FallocateFlags::empty(),
        offset_bytes,
        length_bytes,
    )?)
}

/// Fills a range with zeros whose blocks the filesystem holds as written, so that a later write of them changes no metadata:
/// FALLOC_FL_WRITE_ZEROES. Fails with EOPNOTSUPP where the kernel, the filesystem or its device cannot do that.
pub fn write_zeros(file: impl AsFd, offset_bytes: u64, length_bytes: u64) -> io::Result<()> {
    const WRITE_ZEROES: u32 = 0x80;
    let flags = FallocateFlags::from_bits_retain(WRITE_ZEROES);
    Ok(rustix::fs::fallocate(
        file,
        flags,
        offset_bytes,
        length_bytes,
    )?)
}

/// Writes as pwrite(2) does, and makes what it wrote durable before it returns: pwritev2(2) with RWF_DSYNC.
pub fn write_durable(file: impl AsFd, data: &[u8], offset_bytes: u64) -> io::Result<usize> {
    let parts = [IoSlice::new(data)];
    let written = rustix::io::pwritev2(file, &parts, offset_bytes, ReadWriteFlags::DSYNC)?;
    Ok(written)
}

/// Returns whether `write_durable` is one write and one flush, or one write that bypasses the device's cache. True for regular
/// files of ext4 and XFS. A block device is flushed twice: by the write, and by the kernel's sync after it. Other filesystems may
/// commit a tree or a log.
pub fn has_cheap_durable_writes(file: &File, metadata: &Metadata) -> bool {
    /// ext4, XFS.
    const CHEAP: [u32; 2] = [0xef53, 0x5846_5342];
    // The type of this field differs between machines. The magic numbers have 32 bits.
    metadata.is_file()
        && rustix::fs::fstatfs(file).is_ok_and(|fs| CHEAP.contains(&(fs.f_type as u32)))
}

/// The backing file of a loop device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopBacking {
    /// st_dev of the file.
    pub device: u64,
    /// st_ino of the file.
    pub inode: u64,
    /// st_rdev of the file; 0 for a regular file.
    pub rdevice: u64,
    /// Offset in the file at which the loop device begins.
    pub offset_bytes: u64,
}

/// Layout of `struct loop_info64` (linux/loop.h).
#[repr(C)]
pub(crate) struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    /// Number of the device, two numbers of the encryption, and flags.
    pub(crate) numbers: [u32; 4],
    /// The names of the file and of the encryption, 64 bytes each, and a key.
    pub(crate) names: [u8; 160],
    init: [u64; 2],
}

impl LoopInfo {
    pub(crate) const FILE_NAME_BYTES: usize = 64;
    pub(crate) const EMPTY: LoopInfo = LoopInfo {
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        size_limit: 0,
        numbers: [0; 4],
        names: [0; 160],
        init: [0; 2],
    };
}
const _: () = assert!(size_of::<LoopInfo>() == 232);

/// Returns the backing file of a loop device (LOOP_GET_STATUS64). Fails with ENXIO when it has none, and with ENOTTY
/// when the device is no loop device.
pub fn loop_backing(device: impl AsFd) -> io::Result<LoopBacking> {
    const LOOP_GET_STATUS64: rustix::ioctl::Opcode = 0x4c05;
    // SAFETY: LOOP_GET_STATUS64 writes one struct loop_info64, the type given (its size is asserted). The type has no
    // invalid bit patterns.
    let info =
        unsafe { rustix::ioctl::ioctl(device, Getter::<LOOP_GET_STATUS64, LoopInfo>::new())? };
    Ok(LoopBacking {
        device: info.device,
        inode: info.inode,
        rdevice: info.rdevice,
        offset_bytes: info.offset,
    })
}

/// Locks a range of a file for its open file description, without waiting. `length_bytes` 0 means up to the end, even as
/// the end moves. The lock ends when every descriptor of the description is closed. An exclusive lock needs a file that is
/// open for writing. Fails with EAGAIN when another description holds a conflicting lock.
pub fn lock_range(
    file: impl AsFd,
    exclusive: bool,
    start_bytes: u64,
    length_bytes: u64,
) -> io::Result<()> {
    let kind = if exclusive {
        libc::F_WRLCK
    } else {
        libc::F_RDLCK
    };
    let place = |bytes: u64| i64::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput);
    let lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: place(start_bytes)?,
        l_len: place(length_bytes)?,
        l_pid: 0,
    };
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: `fd` is open (borrowed) and `lock` is a struct flock that is valid for reads during the call.
    match unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Splits a device number into major and minor.
pub fn device_parts(device: u64) -> (u32, u32) {
    (rustix::fs::major(device), rustix::fs::minor(device))
}

/// Returns the kernel's NUMA node of the hardware behind device number `device` (`st_dev` of a file on it, `st_rdev` of the
/// device itself), from sysfs. Returns `None` when the kernel does not know it: a virtual device, a filesystem without a device,
/// a machine with one node.
pub fn home_node(device: u64) -> Option<u32> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    home_node_below(Path::new("/sys/dev/block").join(format!("{major}:{minor}")))
}

/// Returns the node of the first ancestor that has a `numa_node`; a partition or a disk has none of its own.
fn home_node_below(link: impl AsRef<Path>) -> Option<u32> {
    let directory = std::fs::canonicalize(link).ok()?;
    directory
        .ancestors()
        .find_map(|ancestor| {
            let text = std::fs::read_to_string(ancestor.join("numa_node")).ok()?;
            text.trim().parse::<i64>().ok()
        })
        .and_then(|node| u32::try_from(node).ok()) // -1: unknown
}

/// Returns whether the memory of a direct write must stay unchanged until the write has ended, because a lower layer reads it
/// more than once, for a checksum or for parity.
pub fn needs_stable_writes(file: &File, metadata: &Metadata) -> bool {
    /// Filesystems that checksum data: btrfs, bcachefs, ZFS.
    const WITH_CHECKSUMS: [u32; 3] = [0x9123_683e, 0xca45_1a4e, 0x2fc1_2fc1];
    /// Overlayfs. The filesystem below may be one of these, and may be invisible from here, as in a container.
    const OVERLAY: u32 = 0x794c_7630;
    let needs = |magic| WITH_CHECKSUMS.contains(&magic) || magic == OVERLAY;
    let device = if metadata.file_type().is_block_device() {
        metadata.rdev()
    } else {
        // The type of this field differs between machines. The magic numbers have 32 bits.
        if rustix::fs::fstatfs(file).is_ok_and(|fs| needs(fs.f_type as u32)) {
            return true;
        }
        metadata.dev()
    };
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    needs_stable_writes_below(Path::new("/sys/dev/block").join(format!("{major}:{minor}")))
}

fn needs_stable_writes_below(link: impl AsRef<Path>) -> bool {
    queue_attribute(link, "stable_writes").is_some_and(|text| text == "1")
}

/// Returns whether a block device (`st_rdev`) can discard, by its queue's `discard_max_bytes`.
pub fn can_discard(device: u64) -> bool {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    can_discard_below(Path::new("/sys/dev/block").join(format!("{major}:{minor}")))
}

fn can_discard_below(link: impl AsRef<Path>) -> bool {
    let most = queue_attribute(link, "discard_max_bytes");
    most.and_then(|text| text.parse::<u64>().ok())
        .is_some_and(|bytes| bytes > 0)
}

/// Reads an attribute of a device's queue. A partition uses the queue of its disk, which is the directory above it.
fn queue_attribute(link: impl AsRef<Path>, name: &str) -> Option<String> {
    let directory = std::fs::canonicalize(link).ok()?;
    let text = directory
        .ancestors()
        .take(2)
        .find_map(|disk| std::fs::read_to_string(disk.join("queue").join(name)).ok())?;
    Some(text.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_new_file_is_private_and_an_old_one_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("volume");
        let create = Open {
            write: true,
            create_new: true,
            ..Open::default()
        };
        let file = open(&path, create).unwrap();
        assert_eq!(file.metadata().unwrap().mode() & 0o7077, 0);
        assert_eq!(
            open(&path, create).unwrap_err().kind(),
            io::ErrorKind::AlreadyExists
        );
    }

    #[test]
    fn opening_a_fifo_does_not_wait_for_a_writer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )
        .unwrap();
        assert!(
            !open(&path, Open::default())
                .unwrap()
                .metadata()
                .unwrap()
                .is_file()
        );
    }

    #[test]
    fn a_file_has_holes_where_nothing_was_written() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(holes(&file).unwrap(), []);
        file.set_len(3 << 20).unwrap();
        let whole = 0..3 << 20;
        assert_eq!(holes(&file).unwrap(), std::slice::from_ref(&whole));
        file.write_all_at(&[1; 65536], 1 << 20).unwrap();
        let expected = [0..1 << 20, (1 << 20) + 65536..3 << 20];
        assert_eq!(holes(&file).unwrap(), expected);
        file.write_all_at(&vec![1; 3 << 20], 0).unwrap();
        assert_eq!(holes(&file).unwrap(), []);
    }

    #[test]
    fn a_punched_range_reads_as_zeros_and_uses_no_space() {
        let file = tempfile::tempfile().unwrap();
        allocate(&file, 0, 1 << 20).unwrap();
        file.write_all_at(&[1; 8192], 0).unwrap();
        let before = file.metadata().unwrap().blocks();
        punch_hole(&file, 0, 1 << 19).unwrap();
        assert!(file.metadata().unwrap().blocks() < before);
        assert_eq!(file.metadata().unwrap().len(), 1 << 20);
        let mut byte = [9];
        file.read_exact_at(&mut byte, 4096).unwrap();
        assert_eq!(byte, [0]);
    }

    #[test]
    fn a_durable_write_writes_at_its_offset() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(write_durable(&file, b"hello", 3).unwrap(), 5);
        assert_eq!(write_durable(&file, b"abc", 0).unwrap(), 3);
        let mut out = [0; 9];
        assert_eq!(file.read_at(&mut out, 0).unwrap(), 8);
        assert_eq!(&out[..8], b"abchello");
        let directory = File::open("/").unwrap();
        assert!(write_durable(&directory, b"x", 0).is_err());
        assert!(!has_cheap_durable_writes(
            &directory,
            &directory.metadata().unwrap()
        ));
    }

    #[test]
    fn zeros_replace_bytes_or_nothing_changes() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 3 * 4096], 0).unwrap();
        let expected = match write_zeros(&file, 4096, 4096) {
            Ok(()) => 0,
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
                7
            }
        };
        let mut out = [9; 3 * 4096];
        file.read_exact_at(&mut out, 0).unwrap();
        assert!(out[4096..8192].iter().all(|byte| *byte == expected));
        assert!(out[..4096].iter().all(|byte| *byte == 7));
        assert!(out[8192..].iter().all(|byte| *byte == 7));
    }

    #[test]
    fn a_file_is_not_a_block_device() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(
            device_size_bytes(&file).unwrap_err().raw_os_error(),
            Some(libc::ENOTTY)
        );
    }

    #[test]
    fn a_lock_excludes_others_from_its_range_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [0; 100]).unwrap();
        let open = || File::options().read(true).write(true).open(&path).unwrap();
        let holder = open();
        lock_range(&holder, true, 10, 10).unwrap();
        let other = open();
        let refused = |exclusive, start, len| {
            lock_range(&other, exclusive, start, len)
                .is_err_and(|e| e.raw_os_error() == Some(libc::EAGAIN))
        };
        assert!(refused(true, 0, 0) && refused(false, 19, 1));
        lock_range(&other, true, 20, 0).unwrap();
        drop(holder);
        lock_range(&other, true, 0, 0).unwrap();
    }

    #[test]
    fn a_file_is_not_a_loop_device() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(
            loop_backing(&file).unwrap_err().raw_os_error(),
            Some(libc::ENOTTY)
        );
    }

    #[test]
    fn the_home_of_a_partition_is_that_of_the_adapter_above_it() {
        let dir = tempfile::tempdir().unwrap();
        let adapter = dir.path().join("pci0000:00/0000:00:05.0");
        let partition = adapter.join("nvme/nvme0/nvme0n1/nvme0n1p1");
        std::fs::create_dir_all(&partition).unwrap();
        assert_eq!(home_node_below(&partition), None);
        std::fs::write(adapter.join("numa_node"), "1\n").unwrap();
        assert_eq!(home_node_below(&partition), Some(1));
        std::fs::write(adapter.join("numa_node"), "-1\n").unwrap();
        assert_eq!(home_node_below(&partition), None);
    }

    #[test]
    fn a_partition_discards_when_its_disk_does() {
        let dir = tempfile::tempdir().unwrap();
        let partition = dir.path().join("sda/sda1");
        std::fs::create_dir_all(&partition).unwrap();
        assert!(!can_discard_below(&partition));
        let queue = dir.path().join("sda/queue");
        std::fs::create_dir_all(&queue).unwrap();
        for (text, expected) in [("0\n", false), ("4294966784\n", true)] {
            std::fs::write(queue.join("discard_max_bytes"), text).unwrap();
            assert_eq!(can_discard_below(&partition), expected);
        }
    }

    #[test]
    fn a_partition_needs_stable_writes_when_its_disk_does() {
        let dir = tempfile::tempdir().unwrap();
        let partition = dir.path().join("md0/md0p1");
        std::fs::create_dir_all(&partition).unwrap();
        assert!(!needs_stable_writes_below(&partition));
        let queue = dir.path().join("md0/queue");
        std::fs::create_dir_all(&queue).unwrap();
        for (text, expected) in [("0\n", false), ("1\n", true)] {
            std::fs::write(queue.join("stable_writes"), text).unwrap();
            assert_eq!(needs_stable_writes_below(&partition), expected);
            assert_eq!(needs_stable_writes_below(dir.path().join("md0")), expected);
        }
    }
}
