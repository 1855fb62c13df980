//! A volume: its devices with their labels, its superblock, and the regions of its slices.
//!
//! Formats, finds, locks, opens and grows a volume, and adds devices. Does not know what is in the space of the slices or in the metadata region: the
//! caller of a format writes the first contents.
#![forbid(unsafe_code)]

mod add;
mod check_devices;
mod device;
mod error;
mod find;
mod foreign;
mod format;
mod format_paths;
mod grow;
mod growth;
pub mod labels;
mod layout;
mod lock;
mod merge;
mod open;
mod overlay;
mod owner;
mod put_back;
mod space;
pub mod superblocks;
mod take;
mod volume;

pub use add::{AddError, Added, add_device};
pub use device::OpenMode;
pub use error::VolumeError;
pub use format::{FormatOptions, Summary, format_devices};
pub use format_paths::{add, format};
pub use grow::{GrowError, GrowRequest, GrownDevice};
pub use lock::VolumeLock;
pub use open::check_features;
pub use overlay::DeviceOverlay;
pub use space::{Blocks, DeviceRun, SliceId, SliceRegion, SliceSpace};
pub use volume::Volume;

#[cfg(test)]
mod tests;
