//! Devices and files of a run that are read and written with direct I/O.

use std::sync::Arc;

use jericho_storage::{AlignedBuffer, Device, OpenOptions, open_device};

use crate::case::Case;
use crate::error::{Error, Result};
use crate::random;

/// Opens the device of an instance, or a file in its directory, for direct I/O. Fills a new file with `bytes` bytes.
pub(crate) fn open_direct(case: &Case, index: usize, bytes: u64) -> Result<Arc<dyn Device>> {
    let Some(scratch) = case.scratch else {
        let target = &case.targets[index % case.targets.len()];
        let options = OpenOptions {
            read_only: !case.variant.writes,
            ..OpenOptions::default()
        };
        let device = open_device(&target.path, options);
        return device.map_err(|error| Error::new(error.to_string()));
    };
    let options = OpenOptions {
        create_size: Some(bytes),
        ..OpenOptions::default()
    };
    let path = scratch.dir(index).join(format!("data.{index}"));
    let device = open_device(&path, options).map_err(|error| Error::new(error.to_string()))?;
    // Space that was never written is read without the device.
    let mut chunk = AlignedBuffer::new(1 << 20);
    random::fill(case.seed ^ index as u64, chunk.as_mut_slice());
    let mut at = 0;
    while at < bytes {
        let part = (bytes - at).min(1 << 20) as usize;
        device.write_at(at, &chunk.as_slice()[..part])?;
        at += part as u64;
    }
    device.flush()?;
    Ok(device)
}
