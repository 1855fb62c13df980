//! Takes larger files and block devices into use, while the volume is open.
//!
//! The order of the durable writes makes a crash at any point leave the old size or the new one: first the file gets longer, and
//! then the superblock names the new blocks. A growth does not change labels (docs/formats/volume.md).

use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::superblock::{FLAG_PREALLOCATED, Superblock};
use jericho_storage::{Device, IoError};
use jericho_sys::errno;

use crate::growth::{self, Refusal};
use crate::space::slices_of;
use crate::volume::Volume;

/// What to grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrowRequest {
    /// Id of the device, as in its label. `None`: all devices that have become larger, or the only one.
    pub device: Option<[u8; 16]>,
    /// New size of the device. A file that is shorter is extended. `None`: the size that the file or hardware has.
    pub size_bytes: Option<u64>,
}

/// A device that has grown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrownDevice {
    /// Name of the device.
    pub name: Arc<str>,
    /// Bytes that the volume used before.
    pub old_bytes: u64,
    /// Bytes that the volume uses now.
    pub new_bytes: u64,
}

/// Why a volume cannot grow. The message names the cause and the remedy. Unless a device has failed, nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    /// The volume is open for reading only.
    #[error("the volume is mounted read-only; mount it for writing first")]
    ReadOnly,
    /// The volume takes no more changes.
    #[error("the volume takes no changes: {0}")]
    Failed(String),
    /// The named device is not one of the volume.
    #[error("the device belongs to another volume; name a device of this one")]
    Foreign,
    /// A size was given for a volume of several devices.
    #[error("the volume has {0} devices: say with --device which of them gets this size")]
    WhichDevice(usize),
    /// The new size is smaller.
    #[error(
        "{device} has {now_bytes} bytes, more than the {asked_bytes} asked for, and shrinking is not supported; give a larger \
         --size"
    )]
    Shrink {
        /// Device.
        device: Arc<str>,
        /// Bytes that the volume uses.
        now_bytes: u64,
        /// Requested size.
        asked_bytes: u64,
    },
    /// The new space is too small to be used.
    #[error("{device} cannot grow by so little: the next possible size is {least_bytes} bytes ({least_mib} MiB)",
        least_mib = least_bytes.div_ceil(1 << 20))]
    TooLittle {
        /// Device.
        device: Arc<str>,
        /// Least new size.
        least_bytes: u64,
    },
    /// The volume was formatted for less space.
    #[error(
        "the volume was formatted too small to grow that far: it can have {most_bytes} bytes at most; give a smaller --size, or \
         copy its files to a new volume"
    )]
    TooMuch {
        /// Largest size of the volume.
        most_bytes: u64,
    },
    /// The superblock has no room for more regions.
    #[error(
        "the volume has grown too often: its table of regions is full; copy its files to a new volume"
    )]
    TooOften,
    /// A block device is smaller than the requested size.
    #[error(
        "{device} has only {present_bytes} bytes; make the device larger first, or give a smaller --size"
    )]
    DeviceEnds {
        /// Device.
        device: Arc<str>,
        /// Its size.
        present_bytes: u64,
    },
    /// The host cannot allocate the space.
    #[error(
        "{device} cannot have {bytes} bytes: {cause}; give a smaller --size, or make room there"
    )]
    NoRoom {
        /// Device.
        device: Arc<str>,
        /// Requested size.
        bytes: u64,
        /// The host's error.
        cause: IoError,
    },
    /// The device was added since the volume was opened, and could not be taken into use.
    #[error(
        "the device was added to the volume since it was mounted, and is not in use; mount the volume again first"
    )]
    Added,
    /// The device with the first blocks of a slice is missing.
    #[error(
        "{device} cannot grow without {missing}, on which its slice begins; mount the volume with that device"
    )]
    Incomplete {
        /// Device.
        device: Arc<str>,
        /// Missing device.
        missing: Arc<str>,
    },
    /// A device failed.
    #[error("{0}; the volume keeps its size until the next mount at least, try again")]
    Io(#[from] IoError),
}

/// One device that is to grow.
struct Step {
    index: u16,
    old_bytes: u64,
    new_bytes: u64,
}

impl Volume {
    /// Takes the space of larger devices into use. Returns the devices that have grown: none if no device is larger than the
    /// volume knows, or the device has the requested size already.
    pub fn grow(&self, request: &GrowRequest) -> Result<Vec<GrownDevice>, GrowError> {
        if self.read_only() {
            return Err(GrowError::ReadOnly);
        }
        let _alone = self.lock_growth();
        let mut planned = self.superblocks().with(Superblock::clone);
        let steps = self.plan_growth(request, &mut planned)?;
        if steps.is_empty() {
            return Ok(vec![]);
        }
        let allocates = planned.head.flags.get() & FLAG_PREALLOCATED != 0;
        for step in &steps {
            self.extend(step, allocates.then_some(step.old_bytes))?;
        }
        let needed = devices_of(&steps, &planned);
        // Stores may have changed chunks and their own lengths since `planned` was copied. Only this function changes the rest.
        self.superblocks().update(&needed, |s| {
            for (planned, now) in planned.slices.iter_mut().zip(&s.slices) {
                planned.store_blocks = now.store_blocks;
            }
            s.devices = planned.devices;
            s.regions = planned.regions;
            s.slices = planned.slices;
        })?;
        // Leaves out the slices of a device that was added and is not in use.
        let mut slices = self.superblocks().with(slices_of);
        slices.truncate(self.slices().len());
        self.adopt(slices);
        // Writes the other copy, too, so that the loss of one copy does not cost the space. A failure does not undo the growth.
        if let Err(error) = self.superblocks().update(&[], |_| {}) {
            tracing::warn!(%error, "the older copy of the superblock keeps the size before the growth");
        }
        let grown = steps.iter().map(|step| GrownDevice {
            name: self.device(step).name(),
            old_bytes: step.old_bytes,
            new_bytes: step.new_bytes,
        });
        Ok(grown.collect())
    }

    fn device(&self, step: &Step) -> &Arc<dyn Device> {
        &self.devices()[usize::from(step.index)]
    }

    /// Plans the growth in `planned`. Changes nothing else.
    fn plan_growth(
        &self,
        request: &GrowRequest,
        planned: &mut Superblock,
    ) -> Result<Vec<Step>, GrowError> {
        let is_named = |index: &usize| {
            let uuid = planned.devices[*index].uuid;
            request.device.is_none_or(|device| device == uuid)
        };
        let named: Vec<usize> = (0..planned.devices.len()).filter(is_named).collect();
        if named.is_empty() {
            return Err(GrowError::Foreign);
        }
        if request.size_bytes.is_some() && named.len() > 1 {
            return Err(GrowError::WhichDevice(named.len()));
        }
        let are_several = named.len() > 1;
        let mut steps = vec![];
        for index in named {
            let Some(device) = self.devices().get(index) else {
                if request.device.is_some() {
                    return Err(GrowError::Added);
                }
                continue;
            };
            if device.is_absent() {
                continue;
            }
            let on_it = growth::first_devices(planned, index as u16);
            let needed = on_it
                .iter()
                .map(|needed| &self.devices()[usize::from(*needed)]);
            if let Some(missing) = needed.into_iter().find(|needed| needed.is_absent()) {
                return Err(GrowError::Incomplete {
                    device: device.name(),
                    missing: missing.name(),
                });
            }
            let old_bytes = planned.devices[index].blocks.get() * PAGE_BYTES;
            let new_bytes = match request.size_bytes {
                Some(bytes) => bytes - bytes % PAGE_BYTES,
                None => device.present_bytes()?,
            };
            if new_bytes < old_bytes && request.size_bytes.is_some() {
                return Err(GrowError::Shrink {
                    device: device.name(),
                    now_bytes: old_bytes,
                    asked_bytes: new_bytes,
                });
            }
            // A device that is smaller than the volume needs was truncated. Reads of its missing blocks fail.
            if new_bytes <= old_bytes {
                continue;
            }
            let index = index as u16;
            match growth::grow_device(planned, index, new_bytes / PAGE_BYTES) {
                Ok(()) => steps.push(Step {
                    index,
                    old_bytes,
                    new_bytes,
                }),
                // The other devices may have grown by more.
                Err(Refusal::TooLittle { .. }) if are_several => {
                    tracing::info!(device = %device.name(), "the device has grown by too little to be used");
                }
                Err(refusal) => return Err(explain(refusal, device.name())),
            }
        }
        Ok(steps)
    }

    /// Makes the device as large as planned.
    fn extend(&self, step: &Step, allocate_from: Option<u64>) -> Result<(), GrowError> {
        let device = self.device(step);
        let grown = device.grow(step.new_bytes, allocate_from);
        grown.map_err(|error| match error.errno() {
            errno::EOPNOTSUPP => GrowError::DeviceEnds {
                device: device.name(),
                present_bytes: device.present_bytes().unwrap_or(0),
            },
            errno::ENOSPC => GrowError::NoRoom {
                device: device.name(),
                bytes: step.new_bytes,
                cause: error,
            },
            _ => GrowError::Io(error),
        })
    }
}

/// Returns the devices whose superblocks count for the growth: the devices themselves, and those of the slices that get space.
fn devices_of(steps: &[Step], planned: &Superblock) -> Vec<u16> {
    let mut devices: Vec<u16> = steps.iter().map(|step| step.index).collect();
    let of_slices = steps
        .iter()
        .flat_map(|step| growth::first_devices(planned, step.index));
    devices.extend(of_slices);
    devices.sort_unstable();
    devices.dedup();
    devices
}

fn explain(refusal: Refusal, device: Arc<str>) -> GrowError {
    match refusal {
        Refusal::TooLittle { least_bytes } => GrowError::TooLittle {
            device,
            least_bytes,
        },
        Refusal::Regions => GrowError::TooOften,
        Refusal::Containers { container_bytes } => GrowError::TooMuch {
            most_bytes: growth::most_bytes(container_bytes),
        },
    }
}
