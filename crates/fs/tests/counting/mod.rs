//! A device that counts the bytes that a test reads from it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use jericho_storage::{Device, DiscardEffect, IoError};

/// A device that counts the bytes that are read from it.
pub struct Counting {
    pub device: Arc<dyn Device>,
    pub read_bytes: AtomicU64,
}

impl Device for Counting {
    fn name(&self) -> Arc<str> {
        self.device.name()
    }
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }
    fn home_node(&self) -> Option<u32> {
        self.device.home_node()
    }
    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        self.read_bytes
            .fetch_add(buf.len() as u64, Ordering::Relaxed);
        self.device.read_at(offset_bytes, buf)
    }
    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.device.write_at(offset_bytes, buf)
    }
    fn flush(&self) -> Result<(), IoError> {
        self.device.flush()
    }
    fn write_durable(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.device.write_durable(offset_bytes, buf)
    }
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        self.device.discard(offset_bytes, length_bytes)
    }
    fn discard_effect(&self) -> DiscardEffect {
        self.device.discard_effect()
    }
    fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
        // Other reads would pass the count by.
        None
    }
    fn describe(&self) -> String {
        self.device.describe()
    }
}
