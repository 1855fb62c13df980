//! The devices of a volume, by index. Queues of transfers share the list, and find devices that are appended later.

use std::sync::Arc;

use crate::{Appended, Device};

/// A list of devices that grows. Clones are the same list.
#[derive(Clone, Default)]
pub struct Devices(Arc<Appended<Arc<dyn Device>>>);

impl Devices {
    /// Returns the number of devices.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there is no device.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns a device.
    pub fn get(&self, index: usize) -> Option<&Arc<dyn Device>> {
        self.0.get(index)
    }

    /// Returns the devices in order, without those appended later.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Device>> {
        self.0.iter()
    }

    /// Appends a device.
    pub fn push(&self, device: Arc<dyn Device>) {
        self.0.append([device]);
    }
}

impl From<&[Arc<dyn Device>]> for Devices {
    fn from(devices: &[Arc<dyn Device>]) -> Devices {
        Devices(Arc::new(devices.iter().cloned().collect()))
    }
}

impl From<&Vec<Arc<dyn Device>>> for Devices {
    fn from(devices: &Vec<Arc<dyn Device>>) -> Devices {
        Devices::from(&devices[..])
    }
}

impl<const N: usize> From<&[Arc<dyn Device>; N]> for Devices {
    fn from(devices: &[Arc<dyn Device>; N]) -> Devices {
        Devices::from(&devices[..])
    }
}

impl From<&Devices> for Devices {
    fn from(devices: &Devices) -> Devices {
        devices.clone()
    }
}
