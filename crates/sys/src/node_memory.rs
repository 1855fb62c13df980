//! Memory of this process on a given NUMA node, as bytes that can be borrowed, and the policy of a thread.
//!
//! [`crate::memory::Mapping`] is memory that other processes share, so nobody can borrow its bytes. This memory is private: a program that
//! measures reads into it and adds it up like any other buffer.

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::slice;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::memory::{NODE_LIMIT, bind_pages, nodes_of_pages};

/// Private, zeroed memory that begins on a page. All of its pages are allocated.
#[derive(Debug)]
pub struct NodeBuffer {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to this value alone, as that of a `Box<[u8]>` does.
unsafe impl Send for NodeBuffer {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for NodeBuffer {}

impl NodeBuffer {
    /// Allocates `len` bytes, rounded up to whole pages. With `node`, binds them to this kernel node (MPOL_BIND). Without it, the pages come from
    /// where the policy of the calling thread says.
    ///
    /// Fails with EINVAL for a length of 0 and a node that does not exist, and with ENOMEM if the node has no room.
    pub fn new(len: usize, node: Option<u32>) -> io::Result<NodeBuffer> {
        let page = rustix::param::page_size();
        let len = match len.checked_next_multiple_of(page) {
            Some(len) if len > 0 && node.is_none_or(|node| node < NODE_LIMIT) => len,
            _ => return Err(rustix::io::Errno::INVAL.into()),
        };
        // SAFETY: a new private mapping at an address of the kernel's choice replaces no memory.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        // From here on a failure unmaps it.
        let buffer = NodeBuffer { base, len };
        if let Some(node) = node {
            bind_pages(base.as_ptr(), len, node)?;
        }
        // SAFETY: the range is exactly this mapping, and populating it changes no contents. So a lack of memory is an error here, not a signal later.
        unsafe {
            rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxPopulateWrite)?;
        }
        Ok(buffer)
    }

    /// Returns the kernel node of each page: move_pages(2) in query mode. `None`: the page is not present.
    pub fn nodes(&self) -> io::Result<Vec<Option<u32>>> {
        let page = rustix::param::page_size();
        let pages = (0..self.len / page).map(|index| self.base.as_ptr().wrapping_add(index * page));
        nodes_of_pages(&pages.collect::<Vec<_>>())
    }
}

impl Deref for NodeBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has `len` initialised bytes, lives as long as `self`, and only `&mut self` writes to it.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl DerefMut for NodeBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` excludes all other references.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for NodeBuffer {
    fn drop(&mut self) {
        // SAFETY: the range is exactly this mapping, and no reference outlives `self`. A failure leaves the memory mapped.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Has the kernel take all pages that the calling thread allocates from now on from kernel node `node`: set_mempolicy(2) with MPOL_BIND. The pages
/// of the page cache that its reads and writes fill are among them, but not memory with a policy of its own. `None`: the default policy, the
/// node of the CPU.
///
/// Fails with EINVAL for a node that does not exist or may not be used. A kernel built without NUMA (ENOSYS) has only node 0, and binding to it
/// succeeds.
pub fn set_thread_policy(node: Option<u32>) -> io::Result<()> {
    let mut mask = [0u64; (NODE_LIMIT as usize + 1).div_ceil(64)];
    let (mode, first, bits) = match node {
        None => (libc::MPOL_DEFAULT, ptr::null(), 0),
        Some(node) if node < NODE_LIMIT => {
            mask[node as usize / 64] |= 1 << (node % 64);
            // The kernel reads one bit fewer than the given number. The last one is of no node.
            (libc::MPOL_BIND, mask.as_ptr(), mask.len() * 64)
        }
        Some(_) => return Err(rustix::io::Errno::INVAL.into()),
    };
    // SAFETY: the mask has the given number of bits, or none for a null pointer, and the call reads it only.
    let result =
        unsafe { libc::syscall(libc::SYS_set_mempolicy, mode as libc::c_long, first, bits) };
    if result == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENOSYS) if node.is_none_or(|node| node == 0) => Ok(()),
        _ => Err(error),
    }
}

/// Returns the kernel node of the page of the page cache at each offset of a file. Reads a page from the file if the kernel has not cached it. Fails with
/// EINVAL for an offset that is not in the first `len` bytes, and with EFAULT if the file is shorter.
pub fn nodes_of_file(
    file: BorrowedFd<'_>,
    len: usize,
    offsets: &[usize],
) -> io::Result<Vec<Option<u32>>> {
    if len == 0 || offsets.iter().any(|offset| *offset >= len) {
        return Err(rustix::io::Errno::INVAL.into());
    }
    let page = rustix::param::page_size();
    // SAFETY: a new mapping at an address of the kernel's choice replaces no memory, and nobody reads or writes its bytes here.
    let base = unsafe {
        rustix::mm::mmap(
            ptr::null_mut(),
            len,
            ProtFlags::READ,
            MapFlags::SHARED,
            file,
            0,
        )
    }?;
    let pages = offsets
        .iter()
        .map(|offset| base.cast::<u8>().wrapping_add(offset / page * page));
    let pages: Vec<*mut u8> = pages.collect();
    // The kernel knows a page of this process only once it is mapped.
    let mapped = pages.iter().try_for_each(|first| {
        // SAFETY: the page is inside of the mapping. A page that cannot be read is an error of this call, not a signal.
        unsafe { rustix::mm::madvise(first.cast(), page, Advice::LinuxPopulateRead) }
    });
    let nodes = mapped
        .map_err(io::Error::from)
        .and_then(|()| nodes_of_pages(&pages));
    // SAFETY: the range is exactly this mapping, to which no reference exists. A failure leaves it mapped.
    let _ = unsafe { rustix::mm::munmap(base, len) };
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_on_its_node_as_the_kernel_says() {
        let mut buffer = NodeBuffer::new(3 * 4096 - 1, Some(0)).unwrap();
        assert_eq!(buffer.len(), 3 * 4096);
        assert!(buffer.iter().all(|byte| *byte == 0));
        buffer[4096] = 7;
        assert_eq!(buffer[4096], 7);
        assert_eq!(buffer.nodes().unwrap(), [Some(0); 3]);
    }

    #[test]
    fn a_buffer_on_a_node_that_does_not_exist_is_refused() {
        assert!(NodeBuffer::new(4096, Some(NODE_LIMIT)).is_err());
        assert!(NodeBuffer::new(4096, Some(NODE_LIMIT - 1)).is_err());
        assert!(NodeBuffer::new(0, None).is_err());
    }

    #[test]
    fn the_pages_of_a_file_are_found_where_the_policy_of_the_writer_says() {
        use std::io::Write;
        use std::os::fd::AsFd;

        set_thread_policy(Some(0)).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 3 * 4096]).unwrap();
        set_thread_policy(None).unwrap();
        let nodes = nodes_of_file(file.as_fd(), 3 * 4096, &[0, 8192, 9000]).unwrap();
        assert_eq!(nodes, [Some(0); 3]);
        assert!(nodes_of_file(file.as_fd(), 4096, &[4096]).is_err());
        assert!(nodes_of_file(file.as_fd(), 8 * 4096, &[7 * 4096]).is_err());
        assert!(nodes_of_file(file.as_fd(), 0, &[]).is_err());
    }

    #[test]
    fn a_policy_of_a_thread_is_set_and_taken_back() {
        set_thread_policy(Some(0)).unwrap();
        let buffer = NodeBuffer::new(4096, None).unwrap();
        assert_eq!(buffer.nodes().unwrap(), [Some(0)]);
        set_thread_policy(None).unwrap();
        assert!(set_thread_policy(Some(NODE_LIMIT - 1)).is_err());
        assert!(set_thread_policy(Some(NODE_LIMIT)).is_err());
    }
}
