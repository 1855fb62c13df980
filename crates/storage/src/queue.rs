//! Opens queues of transfers.

use std::io;
use std::sync::Arc;

use jericho_sys::doorbell::Doorbell;
use jericho_sys::errno;
use jericho_sys::memory::Mapping;

use crate::pool_queue::PoolQueue;
use crate::ring_queue::RingQueue;
use crate::{Devices, Queue, QueueError, Wake};

impl Wake for Doorbell {
    fn wake(&self) {
        self.ring();
    }
}

/// Opens a queue to `devices` with at most `depth` transfers (at least 1) in flight. Further transfers wait inside the queue.
///
/// Transfers may also go to devices that are appended to the list later. If the queue uses io_uring, these must not be blocking only.
///
/// Uses io_uring when no device is blocking only and the kernel allows it. Otherwise uses a few threads that make blocking
/// calls, which costs more CPU. Registers `buffers` with the io_uring instance, so that the kernel need not pin their pages for
/// each transfer. `buffers` should be the memory that most transfers use. The caller populates it first, and punches no holes into
/// it while the queue is open. If the kernel refuses the registration (RLIMIT_MEMLOCK), transfers work without it. The choice is
/// logged, and `Queue::describe` returns it.
pub fn open_queue(
    devices: impl Into<Devices>,
    buffers: &[Arc<Mapping>],
    depth: u32,
) -> Result<Box<dyn Queue>, QueueError> {
    let devices = &devices.into();
    if let Some(device) = devices.iter().find(|device| device.is_blocking_only()) {
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
/// `Queue::wait` only with a timeout of zero, except to wait for the last transfers before it drops the queue. Fails if io_uring is refused, or a device is blocking only (EOPNOTSUPP).
pub fn open_signalling_queue(
    devices: &Devices,
    depth: u32,
    doorbell: &Doorbell,
) -> Result<Box<dyn Queue>, QueueError> {
    let refused = |source| QueueError {
        action: "use io_uring",
        source,
    };
    if devices.iter().any(|device| device.is_blocking_only()) {
        return Err(refused(io::Error::from_raw_os_error(errno::EOPNOTSUPP)));
    }
    match RingQueue::open_signalling(devices, depth, doorbell) {
        Ok(queue) => Ok(Box::new(queue)),
        Err(error) => Err(refused(error)),
    }
}

/// Opens the fallback queue with threads that make blocking calls, even if io_uring is possible.
pub fn open_pool_queue(
    devices: impl Into<Devices>,
    depth: u32,
) -> Result<Box<dyn Queue>, QueueError> {
    open_threads(&devices.into(), depth, "requested".to_string())
}

fn open_threads(devices: &Devices, depth: u32, why: String) -> Result<Box<dyn Queue>, QueueError> {
    Ok(Box::new(PoolQueue::open(devices, depth, why)?))
}
