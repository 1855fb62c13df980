//! Devices and files of a run that are read and written with direct I/O.

use std::sync::Arc;

use jericho_storage::{Device, OpenOptions, open_device};

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
    random::pieces(case.seed ^ index as u64, bytes, |at, piece| {
        Ok(device.write_at(at, piece)?)
    })?;
    device.flush()?;
    Ok(device)
}

/// Returns the number of whole requests that a device has room for. Fails if there is none.
pub(crate) fn requests_of(device: &dyn Device, request_bytes: usize) -> Result<u64> {
    match device.size_bytes() / request_bytes as u64 {
        0 => Err(Error::new(format!(
            "{}: is smaller than one request of {request_bytes} bytes",
            device.name()
        ))),
        requests => Ok(requests),
    }
}

/// Returns the number of the request with which a thread begins. Threads that share a device begin at different places, as on devices of their own.
pub(crate) fn first_request(case: &Case, index: usize, requests: u64) -> u64 {
    if case.scratch.is_some() {
        return 0;
    }
    let sharing = case.seats.len().div_ceil(case.targets.len()) as u64;
    let part = (index / case.targets.len()) as u64;
    requests / sharing.max(1) * part % requests
}
