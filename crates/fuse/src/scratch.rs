//! Buffers for the bytes of reads.

use std::cell::Cell;
use std::sync::LazyLock;

use crossbeam_queue::ArrayQueue;
use jericho_daemon::ReadBuffer;

/// Number of spare buffers, in addition to one for each thread. Each is at most as large as the longest read, so together at most
/// 64 MiB.
const SPARE_MAX: usize = 64;

/// Buffers that were released by threads that already have one. Without reuse, each read would zero a new buffer. For a large
/// buffer, the allocator would also map memory.
static SPARE: LazyLock<ArrayQueue<Vec<u8>>> = LazyLock::new(|| ArrayQueue::new(SPARE_MAX));

thread_local! {
    static OWN: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A buffer for the bytes of a read. Later reads reuse it.
pub(crate) struct Scratch(Vec<u8>);

impl Scratch {
    /// Takes a buffer, if possible one that was used before.
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
            // When the queue is full, the buffer is freed.
            let _ = SPARE.push(other);
        }
    }
}
