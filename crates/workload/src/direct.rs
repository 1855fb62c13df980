//! Devices and files of a run that are read and written with direct I/O.

use std::path::PathBuf;
use std::sync::Arc;

use jericho_storage::{Device, OpenOptions, open_device};

use crate::case::Case;
use crate::error::{Error, Result};
use crate::part::Part;
use crate::placement::{Use, Way};
use crate::random;

/// The devices of a run. Each is opened once: while a block device is open for writing, the kernel refuses to open it again.
pub(crate) struct Devices(Vec<Arc<dyn Device>>);

impl Devices {
    /// Opens the devices of a run. Opens nothing if the run has directories.
    pub(crate) fn open(case: &Case) -> Result<Devices> {
        let devices = case.devices().iter().map(|target| {
            let options = OpenOptions {
                read_only: !case.variant.writes,
                ..OpenOptions::default()
            };
            open_device(&target.path, options).map_err(|error| Error::new(error.to_string()))
        });
        devices.collect::<Result<_>>().map(Devices)
    }

    /// Returns the device of an instance. In a directory, makes a file for it, with `bytes` bytes.
    pub(crate) fn of(&self, case: &Case, index: usize, bytes: u64) -> Result<Arc<dyn Device>> {
        if case.scratch.is_none() {
            return Ok(self.0[index % self.0.len()].clone());
        }
        let device = case.files.create_direct(&path(case, index), bytes)?;
        // Space that was never written is read without the device.
        let seed = case.seed ^ index as u64;
        random::pieces(seed, bytes, case.stopping, |at, piece| {
            Ok(device.write_at(at, piece)?)
        })?;
        device.flush()?;
        Ok(device)
    }
}

/// Returns whether the placement has the thread add up all bytes that it has read. The papers' placements of direct I/O say so. Of the others,
/// zmIO adds up, as its paper's uses do, and dd does not.
pub(crate) fn adds(case: &Case, without_name: bool) -> bool {
    let says = match case.placement.only {
        Some(Way::Direct) => true,
        _ => without_name,
    };
    says && !case.variant.writes && matches!(case.placement.usage, Use::Load(_))
}

/// Returns the sum of bytes.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().map(|byte| u64::from(*byte)).sum()
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

/// Returns the file of an instance, which has `bytes` bytes, or its part of a device: from its first request to the end.
pub(crate) fn part(case: &Case, devices: &Devices, index: usize, bytes: u64) -> Result<Part> {
    let paths = vec![path(case, index)];
    if case.scratch.is_some() {
        return Ok(Part {
            paths,
            offset: 0,
            bytes,
        });
    }
    let device = devices.of(case, index, bytes)?;
    let request_bytes = case.variant.request_bytes as u64;
    let requests = requests_of(&*device, case.variant.request_bytes)?;
    let first = first_request(case, index, requests);
    Ok(Part {
        paths,
        offset: first * request_bytes,
        bytes: (requests - first) * request_bytes,
    })
}

/// Returns the path of the device of an instance, or of its file.
fn path(case: &Case, index: usize) -> PathBuf {
    match case.scratch {
        Some(scratch) => scratch.dir(index).join(format!("data.{index}")),
        None => case.targets[index % case.targets.len()].path.clone(),
    }
}
