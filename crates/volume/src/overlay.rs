//! A device whose writes stay in memory: for checks and for volumes that are opened read-only, because opening the metadata
//! store after a crash writes.

use std::collections::HashMap;
use std::sync::Arc;

use jericho_storage::{BLOCK_BYTES, Device, IoError};
use parking_lot::RwLock;

const BLOCK: usize = BLOCK_BYTES as usize;

/// A view of a device. Reads return the bytes written to the view; the device itself never changes.
pub struct DeviceOverlay {
    base: Arc<dyn Device>,
    written: RwLock<HashMap<u64, Box<[u8]>>>,
}

impl DeviceOverlay {
    /// Returns a view of `base`.
    pub fn over(base: Arc<dyn Device>) -> Arc<dyn Device> {
        Arc::new(DeviceOverlay {
            base,
            written: RwLock::new(HashMap::new()),
        })
    }
}

impl Device for DeviceOverlay {
    fn name(&self) -> Arc<str> {
        self.base.name()
    }
    fn size_bytes(&self) -> u64 {
        self.base.size_bytes()
    }
    fn is_absent(&self) -> bool {
        self.base.is_absent()
    }
    fn home_node(&self) -> Option<u32> {
        self.base.home_node()
    }
    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        self.base.read_at(offset_bytes, buf)?;
        let written = self.written.read();
        if written.is_empty() {
            return Ok(());
        }
        for (index, block) in buf.chunks_exact_mut(BLOCK).enumerate() {
            if let Some(bytes) = written.get(&(offset_bytes / BLOCK_BYTES + index as u64)) {
                block.copy_from_slice(bytes);
            }
        }
        Ok(())
    }
    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        let mut written = self.written.write();
        for (index, block) in buf.chunks_exact(BLOCK).enumerate() {
            written.insert(offset_bytes / BLOCK_BYTES + index as u64, block.into());
        }
        Ok(())
    }
    fn flush(&self) -> Result<(), IoError> {
        Ok(())
    }
    fn discard(&self, _offset_bytes: u64, _length_bytes: u64) -> Result<(), IoError> {
        Ok(())
    }
    fn queue_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }
    fn describe(&self) -> String {
        format!("{}, writes kept in memory", self.base.describe())
    }
}
