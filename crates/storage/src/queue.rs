//! Opens queues of transfers. Holds the code that both kinds of queues share.

use std::io;
use std::sync::Arc;

use jericho_sys::doorbell::Doorbell;
use jericho_sys::errno;
use jericho_sys::memory::Mapping;

use crate::handle::is_in_range;
use crate::pool_queue::PoolQueue;
use crate::ring_queue::RingQueue;
use crate::{BLOCK_BYTES, Cause, Device, Direction, IoError, Queue, Transfer, Wake};

/// Why a queue could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} for the I/O queue: {source}")]
pub struct QueueError {
    /// For example "start threads".
    pub action: &'static str,
    /// The kernel's reason.
    #[source]
    pub source: io::Error,
}

impl Wake for Doorbell {
    fn wake(&self) {
        self.ring();
    }
}

/// Opens a queue to `devices` with at most `depth` transfers (at least 1) in flight. Further transfers wait inside the queue.
///
/// Uses io_uring when every device has a descriptor and the kernel allows it. Otherwise uses a few threads that make blocking
/// calls, which costs more CPU. Registers `buffers` with the io_uring instance, so that the kernel need not pin their pages for
/// each transfer. Give the segments that most transfers use, populated, and never punch them while the queue is open. If the
/// kernel refuses the registration (RLIMIT_MEMLOCK), transfers work without it. The choice is logged, and `Queue::describe`
/// returns it.
pub fn open_queue(
    devices: &[Arc<dyn Device>],
    buffers: &[Arc<Mapping>],
    depth: u32,
) -> Result<Box<dyn Queue>, QueueError> {
    if let Some(device) = devices.iter().find(|device| device.queue_fd().is_none()) {
        let why = format!("{} supports only blocking calls", device.name());
        return open_threads(devices, depth, why);
    }
    match RingQueue::open(devices, buffers, depth) {
        Ok(queue) => {
            tracing::debug!(queue = queue.describe(), "opened an I/O queue");
            Ok(Box::new(queue))
        }
        Err(error) => {
            tracing::warn!(%error, "io_uring is refused; using threads, which costs more CPU");
            open_threads(devices, depth, format!("io_uring is refused: {error}"))
        }
    }
}

/// Opens a queue for an owner that sleeps elsewhere. Completions ring `doorbell` while the owner sleeps, and the owner calls
/// `Queue::wait` only with a timeout of zero. Fails if io_uring is refused, or a device has no descriptor (EOPNOTSUPP).
pub fn open_signalling_queue(
    devices: &[Arc<dyn Device>],
    depth: u32,
    doorbell: &Doorbell,
) -> Result<Box<dyn Queue>, QueueError> {
    let refused = |source| QueueError {
        action: "use io_uring",
        source,
    };
    if devices.iter().any(|device| device.queue_fd().is_none()) {
        return Err(refused(io::Error::from_raw_os_error(errno::EOPNOTSUPP)));
    }
    match RingQueue::open_signalling(devices, depth, doorbell) {
        Ok(queue) => Ok(Box::new(queue)),
        Err(error) => Err(refused(error)),
    }
}

/// Opens the fallback queue with threads that make blocking calls, even if io_uring is possible.
pub fn open_pool_queue(
    devices: &[Arc<dyn Device>],
    depth: u32,
) -> Result<Box<dyn Queue>, QueueError> {
    open_threads(devices, depth, "requested".to_string())
}

fn open_threads(
    devices: &[Arc<dyn Device>],
    depth: u32,
    why: String,
) -> Result<Box<dyn Queue>, QueueError> {
    Ok(Box::new(PoolQueue::open(devices, depth, why)?))
}

/// Returns the name of an operation in errors.
pub(crate) fn operation(direction: Direction) -> &'static str {
    match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    }
}

/// Returns the number of bytes that a transfer moves. Saturates; `check` refuses a length that large.
pub(crate) fn length_bytes(transfer: &Transfer) -> u64 {
    transfer
        .segments
        .iter()
        .fold(0, |sum, segment| sum.saturating_add(segment.len as u64))
}

/// Refuses invalid transfers. Fails with EINVAL for blocks that the device does not have or that are not whole. Fails with EFAULT
/// for memory that is outside of its mapping or must not be written. Fails with EROFS for a write to a read-only device.
pub(crate) fn check(transfer: &Transfer, devices: &[Arc<dyn Device>]) -> Result<(), IoError> {
    let length_bytes = length_bytes(transfer);
    let device = devices.get(usize::from(transfer.device));
    let refuse = |errno| {
        let name = device.map_or_else(
            || format!("device number {} of {}", transfer.device, devices.len()).into(),
            |device| device.name(),
        );
        Err(IoError {
            operation: operation(transfer.direction),
            device: name,
            offset_bytes: transfer.offset_bytes,
            length_bytes,
            cause: Cause::Errno(errno),
        })
    };
    let Some(device) = device else {
        return refuse(errno::EINVAL);
    };
    if !is_in_range(transfer.offset_bytes, length_bytes, device.size_bytes()) {
        return refuse(errno::EINVAL);
    }
    for segment in &transfer.segments {
        let block = BLOCK_BYTES as usize;
        if !segment.offset.is_multiple_of(block) || !segment.len.is_multiple_of(block) {
            return refuse(errno::EINVAL);
        }
        let end = segment.offset.checked_add(segment.len);
        if end.is_none_or(|end| end > segment.mapping.len())
            || (transfer.direction == Direction::Read && !segment.mapping.is_writable())
        {
            return refuse(errno::EFAULT);
        }
    }
    if transfer.direction == Direction::Write && device.is_read_only() {
        return refuse(errno::EROFS);
    }
    Ok(())
}
