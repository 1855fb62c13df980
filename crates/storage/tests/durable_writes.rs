//! Writes that are durable when they return, and areas made for them.

mod support;

use std::process::Command;

use jericho_storage::{BLOCK_BYTES, Cause, Device, OpenOptions, open_device};
use support::{BLOCK, Ext4, LoopDevice, directories, file_device, pattern};

const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;

/// Durable writes of a test that counts what they cost.
const WRITES: u64 = 200;

fn read(device: &dyn Device, block: usize, blocks: usize) -> Vec<u8> {
    let mut bytes = vec![9; blocks * BLOCK];
    device.read_at((block * BLOCK) as u64, &mut bytes).unwrap();
    bytes
}

/// Writes aligned, unaligned and long memory durably, and reads it back.
fn durable_writes_are_read_back(device: &dyn Device) {
    let data = pattern(1, 300);
    for (blocks, shift) in [(1, 0), (1, 1), (3, 8), (300, 0), (300, 1)] {
        let mut memory = vec![0; shift];
        memory.extend_from_slice(&data[..blocks * BLOCK]);
        let before = pattern(2, 302);
        device.write_at(0, &before).unwrap();
        device.write_durable(BLOCK_BYTES, &memory[shift..]).unwrap();
        assert!(read(device, 1, blocks) == data[..blocks * BLOCK]);
        assert!(read(device, 0, 1) == before[..BLOCK]);
        let after = &before[(1 + blocks) * BLOCK..(2 + blocks) * BLOCK];
        assert!(read(device, 1 + blocks, 1) == after);
    }
    device.write_durable(BLOCK_BYTES, &[]).unwrap();
}

#[test]
fn durable_writes_to_a_file_are_read_back() {
    for directory in directories() {
        durable_writes_are_read_back(&*file_device(directory.path(), 400));
    }
    if let Some(filesystem) = Ext4::new(16 * 1024) {
        durable_writes_are_read_back(&*file_device(filesystem.path(), 400));
    }
}

#[test]
fn durable_writes_to_a_block_device_are_read_back() {
    if let Some(device) = LoopDevice::new(400) {
        let device = open_device(&device.path, OpenOptions::default()).unwrap();
        durable_writes_are_read_back(&*device);
    }
}

#[test]
fn a_durable_write_outside_of_the_device_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let device = file_device(directory.path(), 4);
    let buf = vec![0; 2 * BLOCK];
    for (offset, len) in [(1, BLOCK), (0, 100), (3 * BLOCK_BYTES, 2 * BLOCK)] {
        let error = device.write_durable(offset, &buf[..len]).unwrap_err();
        assert_eq!(error.cause, Cause::Errno(EINVAL), "{error}");
        assert_eq!((error.operation, error.offset_bytes), ("write", offset));
        let error = device.write_zeros(offset, len as u64).unwrap_err();
        assert_eq!(error.cause, Cause::Errno(EINVAL), "{error}");
    }
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let device = open_device(&directory.path().join("volume"), options).unwrap();
    let error = device.write_durable(0, &buf).unwrap_err();
    assert_eq!(error.cause, Cause::Errno(EROFS), "{error}");
    let error = device.write_zeros(0, BLOCK_BYTES).unwrap_err();
    assert_eq!(error.cause, Cause::Errno(EROFS), "{error}");
}

/// A device that cannot take the data says so, and its earlier writes can still be made durable.
#[test]
fn a_durable_write_without_space_is_a_failed_write_and_no_failed_flush() {
    let Some(filesystem) = Ext4::new(16 * 1024) else {
        return;
    };
    let device = file_device(filesystem.path(), 64);
    device.write_zeros(0, BLOCK_BYTES).unwrap();
    // Takes the rest of the space.
    let mut rest = std::fs::File::create(filesystem.path().join("rest")).unwrap();
    let mut filled_bytes = u64::MAX;
    while rest.metadata().unwrap().len() != filled_bytes {
        filled_bytes = rest.metadata().unwrap().len();
        let full = std::io::copy(&mut std::io::repeat(1), &mut rest).unwrap_err();
        assert_eq!(full.raw_os_error(), Some(ENOSPC));
        // Gives back what the filesystem reserved for extents and did not need.
        rest.sync_all().unwrap();
    }
    let error = device
        .write_durable(8 * BLOCK_BYTES, &pattern(1, 8))
        .unwrap_err();
    assert_eq!(error.cause, Cause::Errno(ENOSPC), "{error}");
    assert_eq!(error.operation, "write");
    device.flush().unwrap();
    device.write_durable(0, &pattern(1, 1)).unwrap();
}

/// Writes durably, each block once. Returns the blocks written to the hardware, and its flushes.
fn cost(device: &dyn Device, on_loop: &LoopDevice) -> (u64, u64) {
    let data = pattern(3, 1);
    let before = on_loop.writes_and_flushes();
    for n in 0..WRITES {
        device.write_durable(n * BLOCK_BYTES, &data).unwrap();
    }
    let after = on_loop.writes_and_flushes();
    (after.0 - before.0, after.1 - before.1)
}

#[test]
fn a_durable_write_to_a_block_device_costs_one_write_and_one_flush() {
    let Some(on_loop) = LoopDevice::new(256) else {
        return;
    };
    let device = open_device(&on_loop.path, OpenOptions::default()).unwrap();
    assert_eq!(cost(&*device, &on_loop), (WRITES, WRITES));
}

/// Returns how often the calling thread has slept.
fn sleeps() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = |line: &&str| line.starts_with("voluntary_ctxt_switches:");
    let line = status.lines().find(line).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_durable_write_to_a_block_device_sleeps_once_and_shares_flushes_with_others() {
    let Some(on_loop) = LoopDevice::new(256) else {
        return;
    };
    let device = open_device(&on_loop.path, OpenOptions::default()).unwrap();
    if !device.describe().contains(", io_uring") {
        return;
    }
    let before = sleeps();
    cost(&*device, &on_loop);
    let slept = sleeps() - before;
    // A write and a flush by two system calls sleep twice.
    assert!(slept < WRITES * 3 / 2, "{slept} sleeps");
    let before = on_loop.writes_and_flushes();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| cost(&*device, &on_loop));
        }
    });
    let after = on_loop.writes_and_flushes();
    assert_eq!(after.0 - before.0, 4 * WRITES);
    assert!(after.1 - before.1 < 4 * WRITES);
}

#[test]
fn a_durable_write_to_a_written_area_of_a_file_costs_one_write_and_one_flush() {
    let Some(filesystem) = Ext4::new(16 * 1024) else {
        return;
    };
    let device = file_device(filesystem.path(), 256);
    device.write_zeros(0, WRITES * BLOCK_BYTES).unwrap();
    let (writes, flushes) = cost(&*device, &filesystem.device);
    // The filesystem's own journal adds a few when it commits, every five seconds.
    let expected = WRITES..WRITES * 5 / 4;
    assert!(expected.contains(&writes), "{writes} writes");
    assert!(expected.contains(&flushes), "{flushes} flushes");
}

#[test]
fn zeros_replace_what_was_there_and_nothing_else() {
    let mut devices = vec![];
    let directories = directories();
    for directory in &directories {
        devices.push(file_device(directory.path(), 600));
    }
    let on_loop = LoopDevice::new(600);
    if let Some(device) = &on_loop {
        devices.push(open_device(&device.path, OpenOptions::default()).unwrap());
    }
    for device in devices {
        let before = pattern(4, 600);
        device.write_at(0, &before).unwrap();
        device.write_zeros(BLOCK_BYTES, 598 * BLOCK_BYTES).unwrap();
        assert!(read(&*device, 1, 598).iter().all(|byte| *byte == 0));
        assert!(read(&*device, 0, 1) == before[..BLOCK]);
        assert!(read(&*device, 599, 1) == before[599 * BLOCK..]);
        device.write_zeros(0, 0).unwrap();
    }
}

/// Returns the extents of a file, as `filefrag` describes them.
fn extents(path: &std::path::Path) -> Vec<String> {
    let output = Command::new("filefrag")
        .arg("-v")
        .arg(path)
        .output()
        .unwrap();
    assert!(output.status.success());
    let is_extent = |line: &&str| line.split(':').count() >= 4 && !line.contains("ext:");
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(is_extent)
        .map(str::to_string)
        .collect()
}

#[test]
fn no_block_of_a_zeroed_area_is_unwritten() {
    let Some(filesystem) = Ext4::new(16 * 1024) else {
        return;
    };
    let device = file_device(filesystem.path(), 4096);
    let path = filesystem.path().join("volume");
    assert!(extents(&path).is_empty(), "the file is sparse");
    device.provision(0, 2048 * BLOCK_BYTES).unwrap();
    let is_unwritten = |line: &String| line.contains("unwritten");
    assert!(extents(&path).iter().all(is_unwritten));
    // Half of the area has space already.
    device
        .write_zeros(1024 * BLOCK_BYTES, 2048 * BLOCK_BYTES)
        .unwrap();
    let holes = jericho_sys::block::holes(&std::fs::File::open(&path).unwrap()).unwrap();
    let (before, after) = (
        0..1024 * BLOCK_BYTES,
        3072 * BLOCK_BYTES..4096 * BLOCK_BYTES,
    );
    assert_eq!(holes, [before, after], "unwritten blocks read as holes");
    let extents = extents(&path);
    let unwritten = extents.iter().filter(|line| is_unwritten(line)).count();
    let in_the_area = |line: &String| {
        let logical = line.split(':').nth(1).unwrap();
        let first = logical.split("..").next().unwrap().trim();
        (1024..3072).contains(&first.parse::<u64>().unwrap())
    };
    assert!(unwritten > 0 && extents.len() > unwritten);
    assert!(
        !extents
            .iter()
            .any(|line| in_the_area(line) && is_unwritten(line))
    );
}
