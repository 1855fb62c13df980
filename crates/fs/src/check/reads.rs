//! A device that tells the progress of reading it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use jericho_storage::{Device, IoError};

use super::progress::Progress;

/// A view of a device that counts the bytes read.
pub(super) struct Reads {
    pub device: Arc<dyn Device>,
    pub progress: Arc<Progress>,
}

impl Device for Reads {
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
        self.progress.add_bytes(buf.len() as u64);
        self.device.read_at(offset_bytes, buf)
    }
    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.device.write_at(offset_bytes, buf)
    }
    fn flush(&self) -> Result<(), IoError> {
        self.device.flush()
    }
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        self.device.discard(offset_bytes, length_bytes)
    }
    fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn describe(&self) -> String {
        self.device.describe()
    }
}
