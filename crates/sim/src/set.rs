//! Devices that lose their power together.

use std::sync::Arc;

use jericho_badlink::Random;
use jericho_storage::{Device, absent_device};

use crate::device::SimDevice;
use crate::supply::PowerSupply;

/// Devices on one power supply, for example the devices of a volume.
#[derive(Clone, Debug)]
pub struct DeviceSet {
    devices: Vec<Arc<SimDevice>>,
    supply: Arc<PowerSupply>,
}

impl DeviceSet {
    /// Puts devices on a power supply of their own.
    pub fn new(devices: impl IntoIterator<Item = SimDevice>) -> DeviceSet {
        let supply = PowerSupply::new();
        let devices = devices
            .into_iter()
            .map(|device| Arc::new(device.on_supply(&supply)))
            .collect();
        DeviceSet { devices, supply }
    }

    /// Returns the devices in order.
    pub fn devices(&self) -> &[Arc<SimDevice>] {
        &self.devices
    }

    /// Returns the devices in order, for the code under test.
    pub fn as_devices(&self) -> Vec<Arc<dyn Device>> {
        let device = |device: &Arc<SimDevice>| Arc::clone(device) as Arc<dyn Device>;
        self.devices.iter().map(device).collect()
    }

    /// Returns the devices in order, with an absent device in place of each missing one.
    pub fn with_missing(&self, missing: &[usize]) -> Vec<Arc<dyn Device>> {
        let device = |(index, device): (usize, Arc<dyn Device>)| match missing.contains(&index) {
            true => absent_device(&device.name(), device.size_bytes()),
            false => device,
        };
        self.as_devices()
            .into_iter()
            .enumerate()
            .map(device)
            .collect()
    }

    /// Returns the power supply.
    pub fn supply(&self) -> &Arc<PowerSupply> {
        &self.supply
    }

    /// Begins to record the changes of all devices; see `SimDevice::record`.
    pub fn record(&self) {
        self.devices.iter().for_each(|device| device.record());
    }

    /// Returns the devices after a power cut. Each device keeps, loses and tears its volatile changes independently of the others.
    pub fn crash(&self, seed: u64) -> DeviceSet {
        DeviceSet::new(self.seeded(seed).map(|(device, seed)| device.crash(seed)))
    }

    /// Returns the devices after a power cut during change number `cut` (`PowerSupply::changes`) of any of them; see
    /// `SimDevice::crash_at`.
    pub fn crash_at(&self, cut: u64, seed: u64) -> DeviceSet {
        DeviceSet::new(
            self.seeded(seed)
                .map(|(device, seed)| device.crash_at(cut, seed)),
        )
    }

    /// Returns each device with a seed of its own.
    fn seeded(&self, seed: u64) -> impl Iterator<Item = (&SimDevice, u64)> {
        self.devices
            .iter()
            .enumerate()
            .map(move |(index, device)| (&**device, Random::of(seed, &[index as u64]).next_u64()))
    }

    /// Returns the set without one device, as when it is missing after the power cut.
    pub fn without(mut self, index: usize) -> DeviceSet {
        self.devices.remove(index);
        self
    }

    /// Returns the set with another device in place of one, for example an older state of it (`SimDevice::as_of_flush`).
    pub fn with(mut self, index: usize, device: SimDevice) -> DeviceSet {
        self.devices[index] = Arc::new(device.on_supply(&self.supply));
        self
    }
}
