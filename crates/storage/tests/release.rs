//! A test in a file of its own. Tests of one process run at the same time, and other tests start programs, which hold a copy of
//! every descriptor between fork and exec.

mod support;

use std::sync::Arc;

use jericho_storage::{Direction, OpenOptions, Transfer, open_device, open_queue};
use support::{LoopDevice, memory, segment};

#[test]
fn a_device_is_free_again_once_its_queue_and_handle_are_dropped() {
    let Some(device) = LoopDevice::new(64) else {
        return;
    };
    let mapping = memory(1);
    for _ in 0..20 {
        // The open is exclusive, so it fails if the io_uring of the last round still holds the device.
        let opened = open_device(&device.path, OpenOptions::default()).unwrap();
        let mut queue = open_queue(&[opened], &[Arc::clone(&mapping)], 4).unwrap();
        queue.submit(Transfer {
            tag: 0,
            device: 0,
            direction: Direction::Write,
            offset_bytes: 0,
            segments: vec![segment(&mapping, 0, 1)],
        });
        let mut completions = Vec::new();
        queue.wait(&mut completions, None);
        completions.remove(0).result.unwrap();
    }
}
