//! The memory that an XDP socket shares with the kernel: chunks for frames, and rings that pass chunks between both (linux/if_xdp.h).

use std::io;
use std::marker::PhantomData;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering, fence};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::memory;

/// Size of a chunk. The kernel allows no more than a page.
pub(crate) const CHUNK_BYTES: usize = 4096;
/// Room that the kernel leaves at the start of a chunk that it fills (XDP_PACKET_HEADROOM).
pub(crate) const HEADROOM_BYTES: usize = 256;

/// Mapped memory, unmapped on drop.
#[derive(Debug)]
struct Mapped {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: any thread may use the addresses until the drop, which needs ownership. No method returns a reference to bytes that are not atomic.
unsafe impl Send for Mapped {}
// SAFETY: as above. `Chunks` and `Ring` say which thread may use which bytes.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn anonymous(bytes: usize) -> io::Result<Mapped> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address of the new mapping, so no other memory changes.
        let base = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, protection, MapFlags::PRIVATE)?
        };
        Mapped::at(base, bytes)
    }

    fn of(socket: BorrowedFd<'_>, at: u64, bytes: usize) -> io::Result<Mapped> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the kernel chooses the address of the new mapping, so no other memory changes.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, protection, flags, socket, at)? };
        Mapped::at(base, bytes)
    }

    fn at(base: *mut core::ffi::c_void, bytes: usize) -> io::Result<Mapped> {
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapped { base, bytes })
    }

    /// Returns the address of some bytes. Panics if they are not in the memory.
    fn place(&self, at: usize, bytes: usize) -> *mut u8 {
        let end = at.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "{bytes} bytes at {at} of {} of an XDP socket",
            self.bytes
        );
        // SAFETY: `at` is in the mapping, or its end.
        unsafe { self.base.as_ptr().add(at) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this is the whole mapping, and nothing uses it after its owner. The kernel keeps the pages that it still uses.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// The memory for frames (UMEM). A chunk belongs to the kernel or to one thread: rings pass it on.
#[derive(Debug)]
pub(crate) struct Chunks(Mapped);

impl Chunks {
    /// Maps the memory, which the kernel allocates on a node if it has free memory there, and registers it for a socket. Fails with ENOBUFS
    /// beyond RLIMIT_MEMLOCK.
    pub fn register(socket: BorrowedFd<'_>, count: usize, node: Option<u32>) -> io::Result<Chunks> {
        let memory = Mapped::anonymous(count * CHUNK_BYTES)?;
        if let Some(node) = node {
            // SAFETY: the new mapping has this length, and nothing else uses it yet.
            let bytes =
                unsafe { std::slice::from_raw_parts_mut(memory.base.as_ptr(), memory.bytes) };
            // Before any page is touched. Without the policy the socket works as well, but perhaps not as fast.
            let _ = memory::prefer_node(bytes, node);
        }
        // A child has no use for it, and the kernel would copy pages that the driver uses.
        // SAFETY: the range is exactly this mapping; the advice changes no contents.
        unsafe {
            let start = memory.base.as_ptr().cast();
            rustix::mm::madvise(start, memory.bytes, Advice::LinuxDontFork)?;
        }
        let registration = Registration {
            start: memory.base.as_ptr() as u64,
            bytes: memory.bytes as u64,
            chunk_bytes: CHUNK_BYTES as u32,
            headroom: 0,
            flags: 0,
            metadata_bytes: 0,
        };
        set_option(socket, libc::XDP_UMEM_REG, &registration)?;
        Ok(Chunks(memory))
    }

    /// Copies bytes into a chunk that belongs to the caller.
    pub fn copy_in(&self, at: u64, bytes: &[u8]) {
        let place = self.0.place(at as usize, bytes.len());
        // SAFETY: `place` checks the range. The chunk belongs to the caller, so neither the kernel nor another thread uses it.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
    }

    /// Copies bytes out of a chunk that belongs to the caller.
    pub fn copy_out(&self, at: u64, bytes: &mut [u8]) {
        let place = self.0.place(at as usize, bytes.len());
        // SAFETY: `place` checks the range. The chunk belongs to the caller, so neither the kernel nor another thread changes it.
        unsafe { ptr::copy_nonoverlapping(place, bytes.as_mut_ptr(), bytes.len()) };
    }
}

/// The kernel's struct xdp_umem_reg. An older kernel takes its start.
#[repr(C)]
struct Registration {
    start: u64,
    bytes: u64,
    chunk_bytes: u32,
    headroom: u32,
    flags: u32,
    metadata_bytes: u32,
}

/// Which ring of a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// Chunks for frames that arrive, to the kernel.
    Fill,
    /// Chunks of frames that were sent, from the kernel.
    Completion,
    /// Frames that have arrived.
    Receive,
    /// Frames to send.
    Send,
}

/// A ring whose entries are of one type. The kernel has its other end.
#[derive(Debug)]
pub(crate) struct Ring<T> {
    memory: Mapped,
    offsets: libc::xdp_ring_offset,
    entries: u32,
    of: PhantomData<T>,
}

/// A type of entries.
///
/// # Safety
/// All bytes are valid values of the type.
pub(crate) unsafe trait Entry: Copy {}
// SAFETY: an integer.
unsafe impl Entry for u64 {}
// SAFETY: it has integers only, and no padding.
unsafe impl Entry for libc::xdp_desc {}

impl<T: Entry> Ring<T> {
    /// Makes a ring of a socket. `entries` is a power of two.
    pub fn new(socket: BorrowedFd<'_>, kind: Kind, entries: u32) -> io::Result<Ring<T>> {
        let (option, at) = match kind {
            Kind::Fill => (libc::XDP_UMEM_FILL_RING, libc::XDP_UMEM_PGOFF_FILL_RING),
            Kind::Completion => (
                libc::XDP_UMEM_COMPLETION_RING,
                libc::XDP_UMEM_PGOFF_COMPLETION_RING,
            ),
            Kind::Receive => (libc::XDP_RX_RING, libc::XDP_PGOFF_RX_RING as u64),
            Kind::Send => (libc::XDP_TX_RING, libc::XDP_PGOFF_TX_RING as u64),
        };
        set_option(socket, option, &entries)?;
        let all = offsets(socket)?;
        let offsets = match kind {
            Kind::Fill => all.fr,
            Kind::Completion => all.cr,
            Kind::Receive => all.rx,
            Kind::Send => all.tx,
        };
        let bytes = offsets.desc as usize + entries as usize * size_of::<T>();
        Ok(Ring {
            memory: Mapped::of(socket, at, bytes)?,
            offsets,
            entries,
            of: PhantomData,
        })
    }

    /// Returns how many entries the user's end may add.
    pub fn room(&self) -> u32 {
        // Acquire: the kernel has read the entries that are free again.
        let taken = self.counter(self.offsets.consumer).load(Ordering::Acquire);
        let added = self.counter(self.offsets.producer).load(Ordering::Relaxed);
        self.entries - added.wrapping_sub(taken).min(self.entries)
    }

    /// Writes the entry `number` after the last one that was added. The caller has room for it, and adds it with `add`.
    pub fn write(&mut self, number: u32, entry: T) {
        let added = self.counter(self.offsets.producer).load(Ordering::Relaxed);
        let place = self.entry(added.wrapping_add(number)).cast::<T>();
        // SAFETY: `entry` checks the place. The kernel does not read it before `add`, and `&mut self` is the only user here.
        unsafe { place.write_unaligned(entry) };
    }

    /// Gives the kernel the entries that were written.
    pub fn add(&mut self, count: u32) {
        let added = self.counter(self.offsets.producer);
        // Release: the kernel sees the entries and the chunks before it sees their number.
        added.store(
            added.load(Ordering::Relaxed).wrapping_add(count),
            Ordering::Release,
        );
    }

    /// Returns how many entries the kernel has added that the user's end has not taken.
    pub fn ready(&self) -> u32 {
        // Acquire: what the kernel wrote into the entries and the chunks is visible.
        let added = self.counter(self.offsets.producer).load(Ordering::Acquire);
        let taken = self.counter(self.offsets.consumer).load(Ordering::Relaxed);
        added.wrapping_sub(taken).min(self.entries)
    }

    /// Returns the entry `number` of those that are ready.
    pub fn read(&self, number: u32) -> T {
        let taken = self.counter(self.offsets.consumer).load(Ordering::Relaxed);
        let place = self.entry(taken.wrapping_add(number)).cast::<T>();
        // SAFETY: `entry` checks the place. All bytes are valid values of T, and the kernel does not change the entry before `take`.
        unsafe { place.read_unaligned() }
    }

    /// Gives the places of entries back to the kernel.
    pub fn take(&mut self, count: u32) {
        let taken = self.counter(self.offsets.consumer);
        // Release: the entries were read before the kernel writes new ones.
        taken.store(
            taken.load(Ordering::Relaxed).wrapping_add(count),
            Ordering::Release,
        );
    }

    /// Returns how many added entries the kernel has not taken.
    pub fn pending(&self) -> u32 {
        self.entries - self.room()
    }

    /// Returns whether the kernel goes on with this ring only after a system call.
    pub fn needs_call(&self) -> bool {
        // The kernel sets the flag, then looks at the entries; this side adds entries, then looks at the flag.
        fence(Ordering::SeqCst);
        let flags = self.counter(self.offsets.flags).load(Ordering::Relaxed);
        flags & libc::XDP_RING_NEED_WAKEUP != 0
    }

    fn counter(&self, at: u64) -> &AtomicU32 {
        let place = self.memory.place(at as usize, size_of::<AtomicU32>());
        // SAFETY: the place is in the mapping, which lives as long as `self`. The kernel aligns its counters, and changes them atomically.
        unsafe { &*place.cast::<AtomicU32>() }
    }

    fn entry(&self, number: u32) -> *mut u8 {
        let number = (number & (self.entries - 1)) as usize;
        let at = self.offsets.desc as usize + number * size_of::<T>();
        self.memory.place(at, size_of::<T>())
    }
}

fn offsets(socket: BorrowedFd<'_>) -> io::Result<libc::xdp_mmap_offsets> {
    let mut all = MaybeUninit::<libc::xdp_mmap_offsets>::zeroed();
    let mut length = size_of::<libc::xdp_mmap_offsets>() as libc::socklen_t;
    // SAFETY: the pointers are those of `all` and of its length.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            libc::XDP_MMAP_OFFSETS,
            all.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    match result {
        // A kernel before 5.4 has shorter offsets, without flags.
        0 if length as usize == size_of::<libc::xdp_mmap_offsets>() => {
            // SAFETY: all bytes were zero, or are the kernel's, and all are valid.
            Ok(unsafe { all.assume_init() })
        }
        0 => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets an option of an XDP socket.
pub(crate) fn set_option<T>(socket: BorrowedFd<'_>, option: i32, value: &T) -> io::Result<()> {
    // SAFETY: the pointer and the length are those of `value`, which the kernel only reads.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            option,
            ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
