//! A device that is missing. It stands in the place of a volume's device that was not found, so that the others keep their indices.

use std::path::Path;
use std::sync::Arc;

use jericho_sys::errno;

use crate::schemes::is_remote;

use crate::transfer::{length_bytes, operation};
use crate::{Asynchronous, Cause, Completion, Device, Finish, IoError, Transfer};

/// A missing device: every operation fails with ENODEV.
struct Absent {
    name: Arc<str>,
    size_bytes: u64,
}

/// Returns a device that is missing, with the name and the size that it had.
pub fn absent_device(name: &str, size_bytes: u64) -> Arc<dyn Device> {
    Arc::new(Absent {
        name: name.into(),
        size_bytes,
    })
}

impl Absent {
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
        true
    }

    fn home_node(&self) -> Option<u32> {
        None
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        self.fail("read", offset_bytes, buf.len())
    }

    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.fail("write", offset_bytes, buf.len())
    }

    fn flush(&self) -> Result<(), IoError> {
        self.fail("flush", 0, 0)
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        self.fail("discard", offset_bytes, length_bytes as usize)
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
impl Asynchronous for Absent {
    fn begin(&self, transfer: Transfer, end: Arc<dyn Finish>) {
        let (operation, bytes) = (operation(transfer.direction), length_bytes(&transfer));
        end.finish(Completion {
            tag: transfer.tag,
            result: self.fail(operation, transfer.offset_bytes, bytes as usize),
        });
    }
}
