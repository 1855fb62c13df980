//! A device that completes everything without I/O, so that a measurement shows the network alone.

use std::sync::Arc;

use jericho_storage::{Device, DiscardEffect, IoError};

struct Null {
    size_bytes: u64,
}

/// Returns a device of a size that forgets writes and reads as zeros.
pub fn null_device(size_bytes: u64) -> Arc<dyn Device> {
    Arc::new(Null { size_bytes })
}

impl Device for Null {
    fn name(&self) -> Arc<str> {
        format!("null:{}", self.size_bytes).into()
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn home_node(&self) -> Option<u32> {
        None
    }

    fn read_at(&self, _offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        buf.fill(0);
        Ok(())
    }

    fn write_at(&self, _offset_bytes: u64, _buf: &[u8]) -> Result<(), IoError> {
        Ok(())
    }

    fn flush(&self) -> Result<(), IoError> {
        Ok(())
    }

    fn discard(&self, _offset_bytes: u64, _length_bytes: u64) -> Result<(), IoError> {
        Ok(())
    }

    fn discard_effect(&self) -> DiscardEffect {
        DiscardEffect::Nothing
    }

    fn is_instant(&self) -> bool {
        true
    }

    fn queue_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }

    fn describe(&self) -> String {
        format!("null:{} (completes without I/O)", self.size_bytes)
    }
}
