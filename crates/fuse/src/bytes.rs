//! Reads and writes of the kernel's, whichever way they came.

use std::cell::Cell;
use std::sync::LazyLock;

use crossbeam_queue::ArrayQueue;
use fuser::{Errno, WriteFlags};
use jericho_daemon::{ReadBuffer, WriteMode, WriteSync};
use jericho_fs::Error;

use crate::convert::errno;
use crate::filesystem::Jericho;

/// Buffers kept beside those of the threads, of at most the longest read each: 64 MiB at the very most.
const BUFFERS: usize = 64;

/// Those that came back in threads that have one already. Fresh ones would be zeroed, and large ones mapped, each time.
static SPARE: LazyLock<ArrayQueue<Vec<u8>>> = LazyLock::new(|| ArrayQueue::new(BUFFERS));

thread_local! {
    static OWN: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Where a read gathers its bytes; used again for later ones.
pub(crate) struct Scratch(Vec<u8>);

impl Scratch {
    pub(crate) fn take() -> Scratch {
        let own = OWN.take();
        match own.capacity() {
            0 => Scratch(SPARE.pop().unwrap_or_default()),
            _ => Scratch(own),
        }
    }
}

impl ReadBuffer for Scratch {
    fn first(&mut self, len: usize) -> &mut [u8] {
        self.0.first(len)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let other = OWN.replace(std::mem::take(&mut self.0));
        if other.capacity() > 0 {
            // Full already: then it is freed.
            let _ = SPARE.push(other);
        }
    }
}

/// A write without its bytes.
pub(crate) struct Write {
    /// The thread that writes.
    pub(crate) pid: u32,
    pub(crate) fh: u64,
    pub(crate) offset: u64,
    pub(crate) write_flags: WriteFlags,
    /// Of the descriptor.
    pub(crate) open_flags: i32,
}

impl Write {
    fn mode(&self) -> WriteMode {
        // Pages that the kernel writes back for a mapping carry no flags of a descriptor.
        let of_mapping = self.write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        WriteMode {
            // Appending writes exclude each other in the kernel, which knows the size and has put it into the offset; but
            // for a file that clients make longer inline, whose size the daemon knows better. A mapping's pages go where
            // they are.
            append: self.open_flags & libc::O_APPEND != 0 && !of_mapping,
            sync: match of_mapping {
                true => WriteSync::No,
                false => write_sync(self.open_flags),
            },
            strip_suid: self
                .write_flags
                .contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID),
        }
    }
}

impl Jericho {
    /// Reads from an open file; see `Mounted::read`.
    #[inline]
    pub(crate) fn read_bytes<B: ReadBuffer>(
        &self,
        pid: u32,
        fh: u64,
        offset: u64,
        size: u32,
        buffer: B,
        reply: impl FnOnce(Result<usize, Errno>, B) + Send + 'static,
    ) {
        let open = self.handles.get(fh);
        let Some(handle) = open.as_ref() else {
            return reply(Err(Errno::EBADF), buffer);
        };
        let answer = move |read: Result<usize, Error>, buffer| {
            reply(read.map_err(|e| errno("read", &e)), buffer);
        };
        self.mounted.requested(handle, pid, size as usize);
        self.mounted.read(handle, offset, size, buffer, answer);
    }

    /// Writes to an open file; see `Mounted::write`.
    pub(crate) fn write_bytes(
        &self,
        write: &Write,
        data: &[u8],
        reply: impl FnOnce(Result<u32, Errno>) + Send + 'static,
    ) {
        let open = self.handles.get(write.fh);
        let Some(handle) = open.as_ref() else {
            return reply(Err(Errno::EBADF));
        };
        let answer = move |written: Result<u32, Error>| {
            reply(written.map_err(|e| errno("write", &e)));
        };
        self.mounted.requested(handle, write.pid, data.len());
        self.mounted
            .write(handle, write.offset, data, write.mode(), answer);
    }

    /// `write_bytes`, as far as it can be done without waiting; see `Mounted::try_write`.
    pub(crate) fn try_write(&self, write: &Write, data: &[u8]) -> usize {
        let open = self.handles.get(write.fh);
        let Some(handle) = open.as_ref() else {
            return 0;
        };
        let written = self
            .mounted
            .try_write(handle, write.offset, data, write.mode());
        if written > 0 {
            self.mounted.requested(handle, write.pid, written);
        }
        written
    }
}

fn write_sync(flags: i32) -> WriteSync {
    if flags & libc::O_SYNC == libc::O_SYNC {
        WriteSync::Full
    } else if flags & libc::O_DSYNC != 0 {
        WriteSync::Data
    } else {
        WriteSync::No
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_says_how_durable_its_writes_are() {
        assert_eq!(write_sync(libc::O_RDWR), WriteSync::No);
        assert_eq!(write_sync(libc::O_RDWR | libc::O_DSYNC), WriteSync::Data);
        assert_eq!(write_sync(libc::O_RDWR | libc::O_SYNC), WriteSync::Full);
    }
}
