//! A device that is missing. It stands in the place of a volume's device that was not found, so that the others keep their indices. A device of
//! another host may come back: all that have the missing device then use it.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use jericho_sys::errno;

use crate::schemes::is_remote;
use crate::transfer::{length_bytes, operation};
use crate::{Asynchronous, Cause, Completion, Device, Finish, IoError, Layer, Transfer};

/// A missing device: every operation fails with ENODEV.
struct Missing {
    name: Arc<str>,
    size_bytes: u64,
}

/// The place of a missing device, in front of the device that has come back.
struct Place {
    missing: Missing,
    returned: OnceLock<Arc<dyn Device>>,
}

/// Returns a device that is missing, with the name and the size that it had.
pub fn absent_device(name: &str, size_bytes: u64) -> Arc<dyn Device> {
    Arc::new(Place {
        missing: Missing {
            name: name.into(),
            size_bytes,
        },
        returned: OnceLock::new(),
    })
}

impl Missing {
    fn fail<T>(&self, operation: &'static str, at: u64, bytes: u64) -> Result<T, IoError> {
        Err(IoError {
            operation,
            device: self.name.clone(),
            offset_bytes: at,
            length_bytes: bytes,
            cause: Cause::Errno(errno::ENODEV),
        })
    }
}

impl Device for Missing {
    fn name(&self) -> Arc<str> {
        self.name.clone()
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn is_absent(&self) -> bool {
        true
    }

    fn home_node(&self) -> Option<u32> {
        None
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        self.fail("read", offset_bytes, buf.len() as u64)
    }

    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.fail("write", offset_bytes, buf.len() as u64)
    }

    fn flush(&self) -> Result<(), IoError> {
        self.fail("flush", 0, 0)
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        self.fail("discard", offset_bytes, length_bytes)
    }

    fn write_zeros(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        self.fail("write", offset_bytes, length_bytes)
    }

    fn provision(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        self.fail("provision", offset_bytes, length_bytes)
    }

    fn queue_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }

    fn asynchronous(&self) -> Option<&dyn Asynchronous> {
        Some(self)
    }

    fn describe(&self) -> String {
        format!("{}: missing", self.name)
    }
}

/// So that the queues of a volume without one of its devices still use io_uring for the others.
impl Asynchronous for Missing {
    fn begin(&self, transfer: Transfer, end: Arc<dyn Finish>) {
        let (operation, bytes) = (operation(transfer.direction), length_bytes(&transfer));
        end.finish(Completion {
            tag: transfer.tag,
            result: self.fail(operation, transfer.offset_bytes, bytes),
        });
    }
}

impl Layer for Place {
    fn below(&self) -> &dyn Device {
        match self.returned.get() {
            Some(device) => &**device,
            None => &self.missing,
        }
    }

    fn put_back(&self, device: Arc<dyn Device>) -> bool {
        // Queues have found that this device performs its transfers by itself.
        let is_alike = device.queue_fd().is_none() && device.asynchronous().is_some();
        is_alike && self.returned.set(device).is_ok()
    }

    /// Tells it before the device is back, too: a thread looks only for such a device.
    fn may_fall_silent(&self) -> bool {
        is_remote(Path::new(&*self.missing.name))
    }

    fn write_durable(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.below().write_durable(offset_bytes, buf)
    }

    fn write_zeros(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        self.below().write_zeros(offset_bytes, length_bytes)
    }

    fn asynchronous(&self) -> Option<&dyn Asynchronous> {
        self.below().asynchronous()
    }
}
