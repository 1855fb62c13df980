//! Views of devices that report the progress of reads, or remember the place of the last read.
//!
//! redb verifies a page as soon as it has read it, and reads each page once. So if it finds damage, the last read was of that page.

use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::superblock::{CHUNK_SPARE, Superblock};
use jericho_storage::{Device, IoError, Layer};
use parking_lot::Mutex;

use super::progress::Progress;

/// The last read of the devices of a volume.
#[derive(Default)]
pub(super) struct LastRead(Mutex<Option<Place>>);

#[derive(Clone, Copy)]
struct Place {
    /// Index of the device.
    device: usize,
    offset_bytes: u64,
    length_bytes: u64,
}

impl LastRead {
    /// Returns views of the devices of a volume, and the place that holds their last read.
    pub fn over(devices: &[Arc<dyn Device>]) -> (Vec<Arc<dyn Device>>, Arc<LastRead>) {
        let last = Arc::new(LastRead::default());
        let view = |(index, device): (usize, &Arc<dyn Device>)| -> Arc<dyn Device> {
            Arc::new(Reads {
                device: device.clone(),
                progress: None,
                last: Some((index, last.clone())),
            })
        };
        let views = devices.iter().enumerate().map(view).collect();
        (views, last)
    }

    /// Describes the place of the last read: on the device, and in the metadata region. `name` is the name of a device.
    pub fn describe(&self, superblock: &Superblock, name: impl Fn(usize) -> String) -> String {
        let Some(place) = *self.0.lock() else {
            return "nothing was read".into();
        };
        let block = place.offset_bytes / PAGE_BYTES;
        let end = place.offset_bytes + place.length_bytes;
        let on_device = format!(
            "at bytes {}..{end} of {} (block {block})",
            place.offset_bytes,
            name(place.device)
        );
        let blocks = u64::from(superblock.head.chunk_blocks.get());
        let has_it = |first: u64| (first..first + blocks).contains(&block);
        let mut chunks = superblock.chunks.iter();
        let chunk = chunks.find(|chunk| {
            usize::from(chunk.device.get()) == place.device
                && chunk.position.get() != CHUNK_SPARE
                && has_it(chunk.first_block.get())
        });
        match chunk {
            Some(chunk) => {
                let within = block - chunk.first_block.get();
                let first = (u64::from(chunk.position.get()) * blocks + within) * PAGE_BYTES;
                let end = first + place.length_bytes;
                format!("{on_device}, bytes {first}..{end} of the metadata region")
            }
            None => on_device,
        }
    }
}

/// A view of a device that counts the bytes read, or remembers the last read.
pub(super) struct Reads {
    device: Arc<dyn Device>,
    progress: Option<Arc<Progress>>,
    /// With the device's index in the volume.
    last: Option<(usize, Arc<LastRead>)>,
}

impl Reads {
    /// Returns a view that counts the bytes read.
    pub fn counted(device: Arc<dyn Device>, progress: Arc<Progress>) -> Arc<dyn Device> {
        Arc::new(Reads {
            device,
            progress: Some(progress),
            last: None,
        })
    }
}

impl Layer for Reads {
    fn below(&self) -> &dyn Device {
        &*self.device
    }
    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        let length_bytes = buf.len() as u64;
        if let Some(progress) = &self.progress {
            progress.add_bytes(length_bytes);
        }
        if let Some((device, last)) = &self.last {
            *last.0.lock() = Some(Place {
                device: *device,
                offset_bytes,
                length_bytes,
            });
        }
        self.device.read_at(offset_bytes, buf)
    }
}
