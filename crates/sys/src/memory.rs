//! Shared, node-bound memory: memfd segments, memory policy, population, and the nodes where pages are.
//!
//! The order matters: create, bind a policy, then populate. A page that is touched before its policy is set is allocated on the
//! node of the thread that touched it, and stays there.
//!
//! # Races on the bytes
//! A segment is shared with other threads, other processes and the kernel's I/O, which Rust cannot see. [`Mapping::copy_out`] and
//! [`Mapping::copy_in`] are plain memory copies on raw pointers. No reference to the shared bytes is ever made, so the compiler
//! may not assume that they are stable. A copy may be torn. Therefore every caller does one of two things. It owns the bytes
//! exclusively by protocol (a latch, an I/O in flight). Or it validates after the copy (a version word read before and after,
//! with the fences in `shm`), and discards a copy that does not validate. The copied bytes are integers, which have no invalid
//! bit pattern.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, Mode, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

pub use stream::STREAM_WRITES;

/// Size of the huge pages that the kernel is asked for. Only mappings aligned to it get huge pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// get_mempolicy(2): "the policy of this address"; from linux/mempolicy.h, absent from `libc`.
const MPOL_F_ADDR: libc::c_ulong = 1 << 1;

/// Maximum length of a node mask in bits: the kernel refuses masks that are longer than a page. No machine has that many nodes.
pub(crate) const NODE_LIMIT: u32 = 4096 * 8 - 1;

/// A byte range of a mapping that a transfer reads from or writes to. Keeps the memory mapped.
#[derive(Clone, Debug)]
pub struct Segment {
    /// The mapping.
    pub mapping: Arc<Mapping>,
    /// Byte offset in the mapping.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
}

/// A memfd segment mapped shared into this process. Unmapped on drop.
///
/// Other threads, other processes and the kernel (I/O) may change the contents at any time. The bytes therefore cannot be
/// borrowed as a slice, only copied in and out.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// `len`, or 0 when the mapping is read-only. One comparison with it checks bounds and permission.
    writable_len: usize,
    /// Bytes, from the first on, that keep their memory. See [`Mapping::set_lasting`].
    lasting_len: usize,
    /// `None` for a segment of another process: a client keeps no descriptor of it, because its program may close descriptors that
    /// it does not know.
    fd: Option<OwnedFd>,
}

// SAFETY: the mapping is process-wide: any thread may use its addresses until drop, which needs ownership. No method returns a
// reference to the bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above; methods on a shared reference copy bytes through raw pointers, or make system calls that the kernel
// serialises. Concurrent copies may tear, which the module documents and the callers validate.
unsafe impl Sync for Mapping {}

/// Sets a policy for pages of this process that are allocated later: mbind(2). A kernel built without NUMA (ENOSYS) has only node 0, and binding
/// to it succeeds.
fn set_policy(first: *const u8, len: usize, mode: libc::c_int, node: u32) -> io::Result<()> {
    let bits = u64::BITS;
    let mut mask = vec![0u64; (node / bits + 1) as usize];
    mask[(node / bits) as usize] |= 1 << (node % bits);
    // The kernel reads one bit fewer than the given number, by a historical off-by-one.
    let mask_bits = mask.len() * bits as usize + 1;
    // SAFETY: the mask has the given length. The call changes a policy only, and fails for addresses that are not mapped.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            first,
            len,
            mode as libc::c_ulong,
            mask.as_ptr(),
            mask_bits,
            0 as libc::c_ulong,
        )
    };
    if result == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ENOSYS) && node == 0 {
        return Ok(());
    }
    Err(error)
}

/// Has the kernel take the pages of `bytes` that it allocates from now on from kernel node `node`, as long as it has free memory
/// (MPOL_PREFERRED). `bytes` must start on a page; a part of a page at its end is left out. Fails as [`Mapping::bind`].
pub(crate) fn prefer_node(bytes: &mut [u8], node: u32) -> io::Result<()> {
    let page = rustix::param::page_size();
    let whole = bytes.len() / page * page;
    if node >= NODE_LIMIT || !(bytes.as_ptr() as usize).is_multiple_of(page) {
        return Err(rustix::io::Errno::INVAL.into());
    }
    match whole {
        0 => Ok(()),
        whole => set_policy(bytes.as_ptr(), whole, libc::MPOL_PREFERRED, node),
    }
}

/// Sets the policy MPOL_BIND to kernel node `node` on pages of this process. `first` is the begin of a page. Fails as [`Mapping::bind`].
pub(crate) fn bind_pages(first: *const u8, len: usize, node: u32) -> io::Result<()> {
    set_policy(first, len, libc::MPOL_BIND, node)
}

/// Returns the kernel node that holds each page of this process, `None` where no page is present: move_pages(2) in query mode.
pub(crate) fn nodes_of_pages(pages: &[*mut u8]) -> io::Result<Vec<Option<u32>>> {
    if pages.is_empty() {
        return Ok(Vec::new());
    }
    let mut statuses: Vec<libc::c_int> = vec![-libc::ENOENT; pages.len()];
    // SAFETY: both arrays have the given number of entries; with no target nodes the call only fills `statuses`.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0 as libc::c_long,
            pages.len(),
            pages.as_ptr(),
            ptr::null::<libc::c_int>(),
            statuses.as_mut_ptr(),
            0 as libc::c_long,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let nodes = statuses
        .into_iter()
        .map(|status| match u32::try_from(status) {
            Ok(node) => Ok(Some(node)),
            // ENOENT: no page there. EFAULT: the answer of older kernels for a hole in shared memory.
            Err(_) if status == -libc::ENOENT || status == -libc::EFAULT => Ok(None),
            Err(_) => Err(io::Error::from_raw_os_error(-status)),
        });
    nodes.collect()
}

impl Mapping {
    /// Creates and maps a zeroed segment of `len` bytes (rounded up to whole pages) called `name` (shown in /proc/PID/maps).
    /// Populates nothing: bind a policy first. With `huge`, asks for transparent huge pages.
    ///
    /// Seals the segment against growing and shrinking, so that no receiver can truncate it and kill the others with SIGBUS.
    /// Fails with EINVAL for a length of 0 or a name that contains NUL or is longer than 249 bytes, and with ENOMEM and EMFILE.
    pub fn create(name: &str, len: usize, huge: bool) -> io::Result<Mapping> {
        let len = round_up_to_pages(len)?;
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        // A memfd's mode is 0777 at first. Any process with a read-only descriptor could open it for writing through
        // /proc/self/fd.
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::ftruncate(&fd, len as u64)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)?;
        let mapping = Mapping::map(fd, len, true, huge)?;
        if huge {
            // SAFETY: the range is exactly this mapping; the advice changes no contents.
            let advised = unsafe {
                rustix::mm::madvise(mapping.base.as_ptr().cast(), len, Advice::LinuxHugepage)
            };
            match advised {
                // A kernel without transparent huge pages answers EINVAL. The segment then has small pages.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(mapping)
    }

    /// Maps the first `len` bytes (rounded up to whole pages) of a segment received from another process, and closes the
    /// descriptor.
    ///
    /// Fails with EINVAL for a length of 0, and with EACCES or EPERM when `writable` is requested for a read-only descriptor.
    /// Fails with `InvalidData` when the segment is shorter than `len`, or is not sealed against shrinking, because its owner
    /// could then kill this process with a truncation.
    pub fn from_fd(fd: OwnedFd, len: usize, writable: bool) -> io::Result<Mapping> {
        let len = round_up_to_pages(len)?;
        let size = u64::try_from(rustix::fs::fstat(&fd)?.st_size).unwrap_or(0);
        if size < len as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the shared memory segment has {size} bytes instead of {len}"),
            ));
        }
        if !rustix::fs::fcntl_get_seals(&fd)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the shared memory segment is not sealed against shrinking",
            ));
        }
        let mut mapping = Mapping::map(fd, len, writable, len >= HUGE_PAGE_BYTES)?;
        mapping.fd = None;
        Ok(mapping)
    }

    /// Maps `len` bytes, a multiple of the page size. With `aligned`, maps at a multiple of the huge page size, because the
    /// kernel maps huge pages only where file offset and address agree.
    fn map(fd: OwnedFd, len: usize, writable: bool, aligned: bool) -> io::Result<Mapping> {
        let mut protection = ProtFlags::READ;
        if writable {
            protection |= ProtFlags::WRITE;
        }
        let base = if aligned && len >= HUGE_PAGE_BYTES {
            map_aligned(&fd, len, protection)?
        } else {
            // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, &fd, 0)? }
        };
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| io::Error::other("the kernel mapped a segment at address 0"))?;
        let mapping = Mapping {
            base,
            len,
            writable_len: if writable { len } else { 0 },
            lasting_len: len,
            fd: Some(fd),
        };
        // A core dump of any program that has the cache mapped would have the size of the cache and the data of other users, and the kernel would
        // allocate each page that has no memory.
        // SAFETY: the range is exactly this mapping; the advice changes no contents.
        unsafe {
            rustix::mm::madvise(mapping.base.as_ptr().cast(), len, Advice::LinuxDontDump)?;
        }
        Ok(mapping)
    }

    /// Returns the length in bytes, a multiple of 4096.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the mapping is empty (it never is).
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether this process may write through the mapping.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.writable_len != 0
    }

    /// Returns how many bytes, from the first on, keep their memory.
    pub fn lasting_len(&self) -> usize {
        self.lasting_len
    }

    /// Notes that only the first `len` bytes keep their memory, and that [`Mapping::release`] may free the memory of others. So only these first
    /// bytes are registered for I/O: a registration would keep the freed memory, and later transfers would use it in place of the new one.
    pub fn set_lasting(&mut self, len: usize) {
        self.lasting_len = len.min(self.len);
    }

    /// Returns the first byte of the mapping. For `shm` (atomics) and I/O only.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns a descriptor through which the segment cannot be mapped writable. Processes of the same uid can still open it for
    /// writing through /proc. Other users cannot, because of the segment's mode. Fails as open(2) of /proc/self/fd does (no
    /// /proc, EMFILE).
    pub fn read_only_fd(&self) -> io::Result<OwnedFd> {
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", self.fd().as_raw_fd());
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
        Ok(rustix::fs::open(path, flags, Mode::empty())?)
    }

    /// Returns the memfd of a mapping that this process has created. Panics for a mapping of another process's segment, because
    /// its descriptor is closed.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd
            .as_ref()
            .expect("the segment is this process's own")
            .as_fd()
    }

    /// Sets the policy MPOL_BIND to kernel node `node` on a byte range: mbind(2).
    ///
    /// The policy belongs to the segment, so it holds for every process that maps it. It applies to pages that are allocated
    /// later and moves none. The range must start on a page. Fails with EINVAL for a bad range or a node that does not exist or
    /// may not be used (cpuset), and with EPERM where a container forbids the call. A kernel built without NUMA (ENOSYS) has only
    /// node 0, and binding to it succeeds.
    pub fn bind(&self, range: Range<usize>, node: u32) -> io::Result<()> {
        self.set_range_policy(range, libc::MPOL_BIND, node)
    }

    /// Sets the policy MPOL_PREFERRED to kernel node `node` on a byte range: mbind(2). Pages that are allocated later are on this node if it has room.
    /// Otherwise as `bind`, with its errors.
    pub fn prefer(&self, range: Range<usize>, node: u32) -> io::Result<()> {
        self.set_range_policy(range, libc::MPOL_PREFERRED, node)
    }

    fn set_range_policy(
        &self,
        range: Range<usize>,
        mode: libc::c_int,
        node: u32,
    ) -> io::Result<()> {
        self.check_pages(&range)?;
        if node >= NODE_LIMIT {
            return Err(rustix::io::Errno::INVAL.into());
        }
        if range.is_empty() {
            return Ok(());
        }
        // SAFETY: the range lies inside this mapping (checked).
        let first = unsafe { self.base.as_ptr().add(range.start) };
        set_policy(first, range.len(), mode, node)
    }

    /// Returns the kernel node that the page at byte `offset` is bound to, `None` when it has no policy of its own:
    /// get_mempolicy(2). [`Mapping::nodes_of`] returns where pages actually are.
    pub fn bound_node(&self, offset: usize) -> io::Result<Option<u32>> {
        if offset >= self.len {
            return Err(rustix::io::Errno::INVAL.into());
        }
        let mut mode: libc::c_int = 0;
        let mut mask = vec![0u64; (NODE_LIMIT as usize + 1) / 64];
        // SAFETY: `mode` and `mask` are valid for writes of the sizes given; the address is inside
        // this mapping (checked).
        let result = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut mode,
                mask.as_mut_ptr(),
                mask.len() * 64,
                self.base.as_ptr().add(offset),
                MPOL_F_ADDR,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        if mode != libc::MPOL_BIND {
            return Ok(None);
        }
        let node = mask.iter().zip(0u32..).find_map(|(word, index)| {
            (*word != 0).then(|| index * u64::BITS + word.trailing_zeros())
        });
        Ok(node)
    }

    /// Populates a byte range for writing (MADV_POPULATE_WRITE), so that a lack of memory on a node is an error here and not a
    /// SIGBUS later.
    ///
    /// Keeps contents. The range must start on a page. Part of the range may be populated after a failure. Fails with EINVAL for
    /// a bad range, a read-only mapping or a kernel before 5.14. Fails with ENOMEM, or with EFAULT for a page that cannot be
    /// allocated at all (its access would be a SIGBUS).
    ///
    /// Before the kernel reports that a node has no memory, it may kill a process to make room, by its usual choice. Compare with
    /// `limits::node_available_bytes` first.
    pub fn populate(&self, range: Range<usize>) -> io::Result<()> {
        self.check_pages(&range)?;
        if range.is_empty() {
            return Ok(());
        }
        loop {
            // SAFETY: the range lies inside this mapping (checked); populating keeps contents.
            let populated = unsafe {
                let start = self.base.as_ptr().add(range.start);
                rustix::mm::madvise(start.cast(), range.len(), Advice::LinuxPopulateWrite)
            };
            match populated {
                Ok(()) => return Ok(()),
                // The next call skips pages that are there already.
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Populates a byte range (as `populate`, with its errors), on huge pages where the kernel has them (MADV_COLLAPSE). The range must begin
    /// at a multiple of their size. Returns how many bytes are on huge pages: 0 where the kernel (before 6.1) or its administrator refuses,
    /// less than the whole range where memory is fragmented or the length is no multiple of their size.
    ///
    /// The advice of `create` alone is not enough: by default the kernel ignores it for shared memory. Neighbouring pages are
    /// then scattered over the machine's memory, so that a long transfer has a segment for each page and every copy misses the
    /// TLB.
    pub fn populate_huge(&self, range: Range<usize>) -> io::Result<usize> {
        self.check_pages(&range)?;
        let mut huge = 0;
        for start in range.clone().step_by(HUGE_PAGE_BYTES) {
            let end = start + HUGE_PAGE_BYTES;
            if end > range.end {
                break;
            }
            // Populates a small page first, from the node that the policy of the range chooses. The kernel takes the huge page
            // from the same node. Without the small page, the kernel would ignore the policy.
            self.populate(start..start + rustix::param::page_size())?;
            // SAFETY: the range lies inside this mapping; collapsing keeps contents and addresses.
            let collapsed = unsafe {
                let start = self.base.as_ptr().add(start);
                libc::madvise(start.cast(), HUGE_PAGE_BYTES, libc::MADV_COLLAPSE)
            };
            if collapsed == 0 {
                huge += HUGE_PAGE_BYTES;
                continue;
            }
            // The page was in use at this moment; the next one may succeed. Other errors (unknown to this kernel, forbidden, no
            // huge page even after compaction) would repeat, slowly.
            let error = io::Error::last_os_error().raw_os_error();
            if !matches!(error, Some(libc::EAGAIN | libc::EBUSY | libc::EINTR)) {
                break;
            }
        }
        // Maps the pages that are there and allocates the rest.
        self.populate(range)?;
        Ok(huge)
    }

    /// Frees the memory of a byte range that begins at or after [`Mapping::lasting_len`]. The bytes read as zeros afterwards, in every process that
    /// has the segment mapped: an access allocates a page again, by the policy of the range. The caller must ensure
    /// that no transfer uses the range: a transfer in flight would continue with the old pages. Fails with EINVAL for a bad range or one that lasts, and with the errors of fallocate(2).
    pub fn release(&self, range: Range<usize>) -> io::Result<()> {
        self.check_pages(&range)?;
        if range.start < self.lasting_len {
            return Err(rustix::io::Errno::INVAL.into());
        }
        punch(self.fd(), range.start as u64, range.len() as u64)
    }

    /// Returns how many bytes of the segment have memory, whichever process allocated it: fstat(2). Memory that is swapped out counts, too.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        let blocks = rustix::fs::fstat(self.fd())?.st_blocks;
        Ok(u64::try_from(blocks).unwrap_or(0) * 512)
    }

    /// Returns the kernel node that holds the page at each byte offset, `None` where no page is present: move_pages(2) in query
    /// mode.
    ///
    /// The kernel reads this process's page tables, so a page that only another process has touched shows as `None`. Fails with
    /// EINVAL for an offset out of bounds.
    pub fn nodes_of(&self, offsets: &[usize]) -> io::Result<Vec<Option<u32>>> {
        if offsets.iter().any(|offset| *offset >= self.len) {
            return Err(rustix::io::Errno::INVAL.into());
        }
        let pages: Vec<*mut u8> = offsets
            .iter()
            .map(|offset| self.base.as_ptr().wrapping_add(*offset))
            .collect();
        nodes_of_pages(&pages)
    }

    /// Copies `out.len()` bytes from `offset`. Panics when out of bounds. The bytes may be torn if another thread or process
    /// writes them meanwhile; the caller validates.
    #[inline]
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) {
        check_bounds(offset, out.len(), self.len);
        // SAFETY: the source lies inside the mapping (checked), which lives as long as `self`; `out` is exclusive and cannot
        // overlap it, because the mapping's bytes cannot be borrowed.
        unsafe {
            ptr::copy_nonoverlapping(self.base.as_ptr().add(offset), out.as_mut_ptr(), out.len());
        }
    }

    /// Copies `data` to `offset`. Panics when out of bounds, or when the mapping is read-only.
    #[inline]
    pub fn copy_in(&self, offset: usize, data: &[u8]) {
        check_bounds(offset, data.len(), self.writable_len);
        // SAFETY: the target lies inside the mapping (checked), is writable (`writable_len`), and cannot overlap `data`, because
        // the mapping's bytes cannot be borrowed.
        unsafe {
            ptr::copy_nonoverlapping(data.as_ptr(), self.base.as_ptr().add(offset), data.len());
        }
    }

    /// Copies `len` bytes at `offset` to `target_offset` in `target`. Panics when out of bounds, or
    /// when the target is read-only. The ranges may overlap. May tear like `copy_out`.
    #[inline]
    pub fn copy_to(&self, offset: usize, target: &Mapping, target_offset: usize, len: usize) {
        check_bounds(offset, len, self.len);
        check_bounds(target_offset, len, target.writable_len);
        // SAFETY: both ranges lie inside their mappings (checked) and the target is writable;
        // `copy` allows overlap.
        unsafe {
            ptr::copy(
                self.base.as_ptr().add(offset),
                target.base.as_ptr().add(target_offset),
                len,
            );
        }
    }

    /// Zeroes a byte range. Panics when out of bounds, or when the mapping is read-only.
    #[inline]
    pub fn zero(&self, range: Range<usize>) {
        check_bounds(range.start, range.len(), self.writable_len);
        // SAFETY: the range lies inside the mapping (checked) and is writable (`writable_len`).
        unsafe {
            ptr::write_bytes(self.base.as_ptr().add(range.start), 0, range.len());
        }
    }

    fn check_pages(&self, range: &Range<usize>) -> io::Result<()> {
        let aligned = range.start.is_multiple_of(rustix::param::page_size());
        if range.start > range.end || range.end > self.len || !aligned {
            return Err(rustix::io::Errno::INVAL.into());
        }
        Ok(())
    }
}

/// Frees the whole memory of a segment. It reads as zeros afterwards, in every process that has it mapped. Transfers in flight
/// from or to the old pages continue with these pages. The policy and the length stay.
pub fn punch_all(segment: BorrowedFd<'_>) -> io::Result<()> {
    let bytes = u64::try_from(rustix::fs::fstat(segment)?.st_size).unwrap_or(0);
    punch(segment, 0, bytes)
}

/// Frees the memory of `bytes` bytes at `start` of a segment.
fn punch(segment: BorrowedFd<'_>, start: u64, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    loop {
        match rustix::fs::fallocate(segment, flags, start, bytes) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is exactly the mapping that `map` made; no other code unmaps it, and drop needs ownership, so no copy
        // is in progress. The call cannot fail on such a range, so the result is ignored.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[inline]
fn check_bounds(offset: usize, len: usize, limit: usize) {
    if offset > limit || len > limit - offset {
        out_of_bounds(offset, len, limit);
    }
}

#[cold]
#[inline(never)]
fn out_of_bounds(offset: usize, len: usize, limit: usize) -> ! {
    panic!("{len} bytes at offset {offset} of a mapping whose usable length is {limit}")
}

fn round_up_to_pages(len: usize) -> io::Result<usize> {
    match len.checked_next_multiple_of(rustix::param::page_size()) {
        Some(rounded) if rounded > 0 && i64::try_from(rounded).is_ok() => Ok(rounded),
        _ => Err(rustix::io::Errno::INVAL.into()),
    }
}

/// Maps at a multiple of the huge page size: reserves more address space than needed, maps inside of it, and unmaps both ends.
fn map_aligned(fd: &OwnedFd, len: usize, protection: ProtFlags) -> io::Result<*mut libc::c_void> {
    let reserved_len = len
        .checked_add(HUGE_PAGE_BYTES)
        .ok_or(io::Error::from(rustix::io::Errno::NOMEM))?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new reservation at an address that the kernel chooses replaces nothing.
    let reserved = unsafe {
        rustix::mm::mmap_anonymous(ptr::null_mut(), reserved_len, ProtFlags::empty(), flags)?
    };
    let head = (reserved as usize).next_multiple_of(HUGE_PAGE_BYTES) - reserved as usize;
    // `head` is below HUGE_PAGE_BYTES, so `len` bytes after it still lie inside the reservation.
    let base = reserved.wrapping_byte_add(head);
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: MAP_FIXED replaces only a part of the reservation just made, which no other code uses.
    let mapped = unsafe { rustix::mm::mmap(base, len, protection, flags, fd, 0) };
    if let Err(error) = mapped {
        // SAFETY: only this function knows the reservation, and no pointer into it was given out.
        let _ = unsafe { rustix::mm::munmap(reserved, reserved_len) };
        return Err(error.into());
    }
    let tail = reserved_len - head - len;
    // SAFETY: head and tail are parts of the reservation outside of the new mapping. If unmapping fails, they stay reserved
    // address space without memory, which is harmless.
    unsafe {
        if head > 0 {
            let _ = rustix::mm::munmap(reserved, head);
        }
        if tail > 0 {
            let _ = rustix::mm::munmap(base.wrapping_byte_add(len), tail);
        }
    }
    Ok(base)
}

mod stream;
#[cfg(test)]
mod tests;
