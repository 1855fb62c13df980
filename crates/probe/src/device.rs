//! Rates of a device: sequential reads into memory of each node, by threads of each node.
//!
//! The device is opened for reading only, with direct I/O if it accepts that. Its contents are read and ignored.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jericho_storage::{
    BLOCK_BYTES, Device, Direction, OpenOptions, Queue, Segment, Transfer, open_device, open_queue,
};
use jericho_sys::memory::Mapping;
use jericho_topology::Topology;

use crate::error::ProbeError;
use crate::report::{DeviceRates, nothing};
use crate::threads::{Reason, on_cpus};

/// Size of a transfer, and how many are in flight: enough for the full rate of a fast device.
const TRANSFER_BYTES: u64 = 1 << 20;
const DEPTH: u64 = 16;
/// Length of the buffer on each node.
pub(crate) const BUFFER_BYTES: usize = (TRANSFER_BYTES * DEPTH) as usize;

/// Opens a device for reading.
pub(crate) fn open(path: &Path) -> Result<Arc<dyn Device>, ProbeError> {
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    Ok(open_device(path, options)?)
}

/// Returns the facts of a device, without rates.
pub(crate) fn facts(device: &dyn Device, path: &Path, topology: &Topology) -> DeviceRates {
    DeviceRates {
        name: path.display().to_string(),
        description: device.describe(),
        size_bytes: device.size_bytes(),
        home_node: topology.node_of_block_device(path).map(|node| node.0),
        read_bytes_per_s: nothing(topology.nodes.len()),
    }
}

/// Returns the rate in bytes a second at which a thread on `cpus` reads a device into a buffer.
pub(crate) fn read_rate(
    device: &Arc<dyn Device>,
    cpus: &[u32],
    buffer: &Arc<Mapping>,
    time: Duration,
) -> Result<u64, Reason> {
    on_cpus(cpus, || {
        let devices = [device.clone()];
        let mut queue = open_queue(&devices, std::slice::from_ref(buffer), DEPTH as u32)
            .map_err(|error| error.to_string())?;
        read_for(&mut *queue, device.size_bytes(), buffer, time)
    })?
}

fn read_for(
    queue: &mut dyn Queue,
    size_bytes: u64,
    buffer: &Arc<Mapping>,
    time: Duration,
) -> Result<u64, Reason> {
    // A device that is shorter than all transfers in flight is read in parts of its own size.
    let length = TRANSFER_BYTES.min(size_bytes) / BLOCK_BYTES * BLOCK_BYTES;
    let (begun, mut next, mut bytes) = (Instant::now(), 0, 0);
    let mut submit = |queue: &mut dyn Queue, place: u64| {
        if next + length > size_bytes {
            next = 0;
        }
        queue.submit(Transfer {
            tag: place,
            device: 0,
            direction: Direction::Read,
            offset_bytes: next,
            segments: vec![Segment {
                mapping: buffer.clone(),
                offset: (place * TRANSFER_BYTES) as usize,
                len: length as usize,
            }],
        });
        next += length;
    };
    for place in 0..DEPTH {
        submit(queue, place);
    }
    let mut ended = Vec::new();
    loop {
        queue.wait(&mut ended, None);
        let is_over = begun.elapsed() >= time;
        for completion in ended.drain(..) {
            completion.result.map_err(|error| error.to_string())?;
            bytes += length;
            if !is_over {
                submit(queue, completion.tag);
            }
        }
        if is_over {
            break;
        }
    }
    let rate = bytes as f64 / begun.elapsed().as_secs_f64();
    // What is still in flight does not count.
    while queue.in_flight() > 0 {
        queue.wait(&mut ended, None);
    }
    Ok((rate as u64).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_read_and_cannot_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("device");
        // A little more than two transfers, and no whole number of blocks.
        std::fs::write(&path, vec![7; (2 << 20) + 5000]).unwrap();
        let before = std::fs::metadata(&path).unwrap().modified().unwrap();
        let device = open(&path).unwrap();
        assert!(device.is_read_only());
        let refused = device.write_at(0, &[0; BLOCK_BYTES as usize]).unwrap_err();
        assert_eq!(refused.errno(), jericho_sys::errno::EROFS);
        let topology = Topology::from_spec("virtual:1").unwrap();
        let (mapping, _) = crate::buffer::bound(&topology.nodes[0], BUFFER_BYTES).unwrap();
        let buffer = Arc::new(mapping);
        let cpus = &topology.nodes[0].cpus;
        let rate = read_rate(&device, cpus, &buffer, Duration::from_millis(20)).unwrap();
        assert!(rate > 0);
        let mut read = [0; 16];
        buffer.copy_out(0, &mut read);
        assert_eq!(read, [7; 16]);
        assert_eq!(
            std::fs::metadata(&path).unwrap().modified().unwrap(),
            before
        );
        assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 7));
    }

    #[test]
    fn a_missing_device_is_named() {
        let error = open(Path::new("/no/such/device")).err().unwrap();
        assert!(error.to_string().contains("/no/such/device"), "{error}");
    }
}
