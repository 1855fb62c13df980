//! A device that counts the bytes that a test reads from it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use jericho_storage::{Device, IoError, Layer};

/// A device that counts the bytes that are read from it.
pub struct Counting {
    pub device: Arc<dyn Device>,
    pub read_bytes: AtomicU64,
}

impl Layer for Counting {
    fn below(&self) -> &dyn Device {
        &*self.device
    }
    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        self.read_bytes
            .fetch_add(buf.len() as u64, Ordering::Relaxed);
        self.device.read_at(offset_bytes, buf)
    }
    fn write_durable(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.device.write_durable(offset_bytes, buf)
    }
}
