//! Devices in front of other devices: views that count, the place of a missing device, and the devices of tests that fail.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::{Asynchronous, Device, DiscardEffect, Extent, IoError, write_zeros_in_parts};

/// A device in front of another one. An operation that it does not define passes to the device below. A durable write and a write of
/// zeros are writes and a flush of the layer itself, so that a layer that defines these two sees all of them.
pub trait Layer: Send + Sync {
    /// Returns the device below.
    fn below(&self) -> &dyn Device;
    /// See `Device::present_bytes`.
    fn present_bytes(&self) -> Result<u64, IoError> {
        self.below().present_bytes()
    }
    /// See `Device::grow`.
    fn grow(&self, size_bytes: u64, allocate_from: Option<u64>) -> Result<(), IoError> {
        self.below().grow(size_bytes, allocate_from)
    }
    /// See `Device::read_at`.
    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        self.below().read_at(offset_bytes, buf)
    }
    /// See `Device::write_at`.
    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.below().write_at(offset_bytes, buf)
    }
    /// See `Device::flush`.
    fn flush(&self) -> Result<(), IoError> {
        self.below().flush()
    }
    /// See `Device::write_durable`.
    fn write_durable(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.write_at(offset_bytes, buf)?;
        self.flush()
    }
    /// See `Device::discard`.
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        self.below().discard(offset_bytes, length_bytes)
    }
    /// See `Device::discard_effect`.
    fn discard_effect(&self) -> DiscardEffect {
        self.below().discard_effect()
    }
    /// See `Device::extent_at`.
    fn extent_at(&self, offset_bytes: u64, length_bytes: u64) -> Result<Extent, IoError> {
        self.below().extent_at(offset_bytes, length_bytes)
    }
    /// See `Device::provision`.
    fn provision(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        self.below().provision(offset_bytes, length_bytes)
    }
    /// See `Device::write_zeros`.
    fn write_zeros(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        write_zeros_in_parts(self, offset_bytes, length_bytes)
    }
    /// See `Device::put_back`.
    fn put_back(&self, device: Arc<dyn Device>) -> bool {
        self.below().put_back(device)
    }
    /// See `Device::may_fall_silent`.
    fn may_fall_silent(&self) -> bool {
        self.below().may_fall_silent()
    }
    /// See `Device::is_silent`.
    fn is_silent(&self) -> bool {
        self.below().is_silent()
    }
    /// See `Device::has_abandoned`.
    fn has_abandoned(&self) -> bool {
        self.below().has_abandoned()
    }
    /// See `Device::asynchronous`. `None` by default, because these transfers would pass the layer by.
    fn asynchronous(&self) -> Option<&dyn Asynchronous> {
        None
    }
    /// See `Device::describe`.
    fn describe(&self) -> String {
        self.below().describe()
    }
    /// See `Device::queue_fd`. `None` by default, because transfers of io_uring would pass the layer by.
    fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl<L: Layer + ?Sized> Device for L {
    fn name(&self) -> Arc<str> {
        self.below().name()
    }
    fn size_bytes(&self) -> u64 {
        self.below().size_bytes()
    }
    fn present_bytes(&self) -> Result<u64, IoError> {
        Layer::present_bytes(self)
    }
    fn grow(&self, size_bytes: u64, allocate_from: Option<u64>) -> Result<(), IoError> {
        Layer::grow(self, size_bytes, allocate_from)
    }
    fn home_node(&self) -> Option<u32> {
        self.below().home_node()
    }
    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        Layer::read_at(self, offset_bytes, buf)
    }
    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        Layer::write_at(self, offset_bytes, buf)
    }
    fn flush(&self) -> Result<(), IoError> {
        Layer::flush(self)
    }
    fn write_durable(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        Layer::write_durable(self, offset_bytes, buf)
    }
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        Layer::discard(self, offset_bytes, length_bytes)
    }
    fn discard_effect(&self) -> DiscardEffect {
        Layer::discard_effect(self)
    }
    fn discard_makes_zeros(&self) -> bool {
        self.below().discard_makes_zeros()
    }
    fn extent_at(&self, offset_bytes: u64, length_bytes: u64) -> Result<Extent, IoError> {
        Layer::extent_at(self, offset_bytes, length_bytes)
    }
    fn provision(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        Layer::provision(self, offset_bytes, length_bytes)
    }
    fn write_zeros(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        Layer::write_zeros(self, offset_bytes, length_bytes)
    }
    fn is_absent(&self) -> bool {
        self.below().is_absent()
    }
    fn put_back(&self, device: Arc<dyn Device>) -> bool {
        Layer::put_back(self, device)
    }
    fn may_fall_silent(&self) -> bool {
        Layer::may_fall_silent(self)
    }
    fn is_silent(&self) -> bool {
        Layer::is_silent(self)
    }
    fn has_abandoned(&self) -> bool {
        Layer::has_abandoned(self)
    }
    fn is_read_only(&self) -> bool {
        self.below().is_read_only()
    }
    fn needs_stable_writes(&self) -> bool {
        self.below().needs_stable_writes()
    }
    fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
        Layer::queue_fd(self)
    }
    fn asynchronous(&self) -> Option<&dyn Asynchronous> {
        Layer::asynchronous(self)
    }
    fn network(&self) -> Option<crate::NetworkStat> {
        self.below().network()
    }
    fn describe(&self) -> String {
        Layer::describe(self)
    }
}
