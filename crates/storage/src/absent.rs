//! A device that is missing. It stands in the place of a volume's device that was not found, so that the others keep their indices. A device of
//! another host may come back: all that have the missing device then use it.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use jericho_sys::errno;

use crate::schemes::is_remote;

use crate::transfer::{length_bytes, operation};
use crate::{Asynchronous, Cause, Completion, Device, DiscardEffect, Finish, IoError, Transfer};

/// A missing device: every operation fails with ENODEV, until the device has come back.
struct Absent {
    name: Arc<str>,
    size_bytes: u64,
    returned: OnceLock<Arc<dyn Device>>,
}

/// Returns a device that is missing, with the name and the size that it had.
pub fn absent_device(name: &str, size_bytes: u64) -> Arc<dyn Device> {
    Arc::new(Absent {
        name: name.into(),
        size_bytes,
        returned: OnceLock::new(),
    })
}

impl Absent {
    fn returned(&self) -> Option<&dyn Device> {
        self.returned.get().map(|device| &**device)
    }

    fn fail<T>(&self, operation: &'static str, at: u64, bytes: usize) -> Result<T, IoError> {
        Err(IoError {
            operation,
            device: self.name.clone(),
            offset_bytes: at,
            length_bytes: bytes as u64,
            cause: Cause::Errno(errno::ENODEV),
        })
    }
}

impl Device for Absent {
    fn name(&self) -> Arc<str> {
        self.name.clone()
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn may_fall_silent(&self) -> bool {
        is_remote(Path::new(&*self.name))
    }

    fn is_absent(&self) -> bool {
        self.returned().is_none()
    }

    fn put_back(&self, device: Arc<dyn Device>) -> bool {
        // Queues have found that this device performs its transfers by itself.
        let is_alike = device.queue_fd().is_none() && device.asynchronous().is_some();
        is_alike && self.returned.set(device).is_ok()
    }

    fn is_silent(&self) -> bool {
        self.returned().is_some_and(Device::is_silent)
    }

    fn home_node(&self) -> Option<u32> {
        self.returned().and_then(Device::home_node)
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        match self.returned() {
            Some(device) => device.read_at(offset_bytes, buf),
            None => self.fail("read", offset_bytes, buf.len()),
        }
    }

    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        match self.returned() {
            Some(device) => device.write_at(offset_bytes, buf),
            None => self.fail("write", offset_bytes, buf.len()),
        }
    }

    fn flush(&self) -> Result<(), IoError> {
        match self.returned() {
            Some(device) => device.flush(),
            None => self.fail("flush", 0, 0),
        }
    }

    fn write_durable(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        match self.returned() {
            Some(device) => device.write_durable(offset_bytes, buf),
            None => self.fail("write", offset_bytes, buf.len()),
        }
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        match self.returned() {
            Some(device) => device.discard(offset_bytes, length_bytes),
            None => self.fail("discard", offset_bytes, length_bytes as usize),
        }
    }

    fn discard_effect(&self) -> DiscardEffect {
        self.returned()
            .map_or(DiscardEffect::Nothing, Device::discard_effect)
    }

    fn write_zeros(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        match self.returned() {
            Some(device) => device.write_zeros(offset_bytes, length_bytes),
            None => self.fail("write", offset_bytes, length_bytes as usize),
        }
    }

    fn provision(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        match self.returned() {
            Some(device) => device.provision(offset_bytes, length_bytes),
            None => self.fail("provision", offset_bytes, length_bytes as usize),
        }
    }

    fn queue_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }

    fn asynchronous(&self) -> Option<&dyn Asynchronous> {
        Some(self)
    }

    fn describe(&self) -> String {
        match self.returned() {
            Some(device) => device.describe(),
            None => format!("{}: missing", self.name),
        }
    }
}

/// So that the queues of a volume without one of its devices still use io_uring for the others.
impl Asynchronous for Absent {
    fn begin(&self, transfer: Transfer, end: Arc<dyn Finish>) {
        if let Some(device) = self.returned().and_then(Device::asynchronous) {
            return device.begin(transfer, end);
        }
        let (operation, bytes) = (operation(transfer.direction), length_bytes(&transfer));
        end.finish(Completion {
            tag: transfer.tag,
            result: self.fail(operation, transfer.offset_bytes, bytes as usize),
        });
    }
}
