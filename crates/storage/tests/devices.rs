//! Tests of devices on ordinary files, tmpfs and a loop device.

mod support;

use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

use jericho_storage::{BLOCK_BYTES, Cause, OpenError, OpenOptions, open_device};
use support::{BLOCK, LoopDevice, SmallFilesystem, directories, file_device, pattern};

const EINVAL: i32 = 22;
const EROFS: i32 = 30;
const ENOSPC: i32 = 28;

fn refusal(path: &Path, options: OpenOptions) -> OpenError {
    open_device(path, options).err().expect("a refusal")
}

fn writes_survive_reopening(path: &Path) {
    let data = pattern(1, 300);
    {
        let device = open_device(path, OpenOptions::default()).unwrap();
        // The memory is unaligned and longer than the bounce buffer.
        let mut unaligned = vec![0];
        unaligned.extend_from_slice(&data);
        device.write_at(2 * BLOCK_BYTES, &unaligned[1..]).unwrap();
        device.flush().unwrap();
    }
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let device = open_device(path, options).unwrap();
    let mut read = vec![9; 301 * BLOCK + 1];
    device.read_at(BLOCK_BYTES, &mut read[1..]).unwrap();
    assert!(read[1..=BLOCK].iter().all(|byte| *byte == 0));
    assert!(read[1 + BLOCK..] == data[..]);
}

#[test]
fn bytes_written_to_a_file_are_read_after_reopening() {
    for directory in directories() {
        let device = file_device(directory.path(), 400);
        assert_eq!(device.size_bytes(), 400 * BLOCK_BYTES);
        drop(device);
        writes_survive_reopening(&directory.path().join("volume"));
    }
}

#[test]
fn bytes_written_to_a_block_device_are_read_after_reopening() {
    let Some(device) = LoopDevice::new(400) else {
        return;
    };
    writes_survive_reopening(&device.path);
}

#[test]
fn a_block_device_is_held_exclusively_by_its_writer() {
    let Some(device) = LoopDevice::new(16) else {
        return;
    };
    let writer = open_device(&device.path, OpenOptions::default()).unwrap();
    assert!(
        writer.describe().contains("block device"),
        "{}",
        writer.describe()
    );
    let second = refusal(&device.path, OpenOptions::default());
    assert!(matches!(second, OpenError::Busy { .. }), "{second}");
    let reader = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    assert_eq!(
        open_device(&device.path, reader).unwrap().size_bytes(),
        16 * BLOCK_BYTES
    );
    drop(writer);
    // Another test's child process inherits the descriptor between its fork and its exec.
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Err(error) = open_device(&device.path, OpenOptions::default()) {
        let is_held = matches!(error, OpenError::Busy { .. });
        assert!(is_held && Instant::now() < deadline, "{error}");
    }
}

#[test]
fn a_block_device_smaller_than_required_is_refused() {
    let Some(device) = LoopDevice::new(16) else {
        return;
    };
    let options = OpenOptions {
        create_size: Some(1 << 20),
        ..OpenOptions::default()
    };
    let error = refusal(&device.path, options);
    assert!(
        matches!(
            error,
            OpenError::TooSmall {
                size_bytes: 65_536,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_discarded_range_can_be_written_and_read_again() {
    let directories = directories();
    let mut devices: Vec<_> = directories
        .iter()
        .map(|directory| file_device(directory.path(), 64))
        .collect();
    let on_loop = LoopDevice::new(64);
    if let Some(device) = &on_loop {
        devices.push(open_device(&device.path, OpenOptions::default()).unwrap());
    }
    for device in devices {
        device.write_at(0, &pattern(2, 64)).unwrap();
        device.discard(BLOCK_BYTES, 32 * BLOCK_BYTES).unwrap();
        device.discard(0, 0).unwrap();
        let data = pattern(3, 8);
        device.write_at(4 * BLOCK_BYTES, &data).unwrap();
        let mut read = vec![0; 8 * BLOCK];
        device.read_at(4 * BLOCK_BYTES, &mut read).unwrap();
        assert!(read == data);
        // The blocks around the range are unchanged.
        device.read_at(33 * BLOCK_BYTES, &mut read).unwrap();
        assert!(read == pattern(2, 64)[33 * BLOCK..41 * BLOCK]);
    }
}

#[test]
fn ranges_that_are_not_blocks_of_the_device_are_errors() {
    let directory = tempfile::tempdir().unwrap();
    let device = file_device(directory.path(), 4);
    let mut buf = vec![0; 2 * BLOCK];
    for (offset, len) in [
        (1, BLOCK),
        (0, 100),
        (3 * BLOCK_BYTES, 2 * BLOCK),
        (u64::MAX - 4095, BLOCK),
    ] {
        let error = device.read_at(offset, &mut buf[..len]).unwrap_err();
        assert_eq!(error.cause, Cause::Errno(EINVAL), "{error}");
        assert_eq!((error.operation, error.offset_bytes), ("read", offset));
        assert!(device.write_at(offset, &buf[..len]).is_err());
        assert!(device.discard(offset, len as u64).is_err());
    }
    device.read_at(4 * BLOCK_BYTES, &mut []).unwrap();
}

#[test]
fn a_read_only_device_refuses_writes_and_stays_as_it_was() {
    let directory = tempfile::tempdir().unwrap();
    drop(file_device(directory.path(), 4));
    let path = directory.path().join("volume");
    let before = std::fs::metadata(&path).unwrap();
    let options = OpenOptions {
        read_only: true,
        create_size: Some(8192),
        ..OpenOptions::default()
    };
    let device = open_device(&path, options).unwrap();
    assert!(device.is_read_only());
    assert_eq!(
        device.write_at(0, &[0; BLOCK]).unwrap_err().cause,
        Cause::Errno(EROFS)
    );
    assert_eq!(
        device.discard(0, BLOCK_BYTES).unwrap_err().cause,
        Cause::Errno(EROFS)
    );
    let after = std::fs::metadata(&path).unwrap();
    assert_eq!(
        (before.mtime_nsec(), before.len()),
        (after.mtime_nsec(), after.len())
    );
}

#[test]
fn a_device_that_another_process_truncated_reads_short() {
    for directory in directories() {
        let device = file_device(directory.path(), 8);
        let path = directory.path().join("volume");
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        for end in [3 * BLOCK_BYTES, 3 * BLOCK_BYTES + 100] {
            file.set_len(end).unwrap();
            let error = device
                .read_at(BLOCK_BYTES, &mut vec![0; 4 * BLOCK])
                .unwrap_err();
            let done_bytes = end - BLOCK_BYTES;
            assert_eq!(error.cause, Cause::Short { done_bytes }, "{error}");
            assert_eq!(error.errno(), 5);
            assert_eq!(
                (error.offset_bytes, error.length_bytes),
                (BLOCK_BYTES, 4 * BLOCK_BYTES)
            );
        }
    }
}

#[test]
fn a_full_filesystem_is_enospc_at_the_first_offset_without_space() {
    let Some(filesystem) = SmallFilesystem::new(16) else {
        return;
    };
    let device = file_device(filesystem.path(), 64);
    let error = device.write_at(0, &pattern(4, 64)).unwrap_err();
    assert_eq!(error.cause, Cause::Errno(ENOSPC), "{error}");
    assert_eq!(error.offset_bytes + error.length_bytes, 64 * BLOCK_BYTES);
    assert!(error.offset_bytes <= 16 * BLOCK_BYTES);
    // The blocks before that offset are written.
    let done = error.offset_bytes as usize / BLOCK * BLOCK;
    let mut read = vec![0; done];
    device.read_at(0, &mut read).unwrap();
    assert!(read == pattern(4, 64)[..done]);
}

#[test]
fn provision_takes_space_or_fails() {
    let Some(filesystem) = SmallFilesystem::new(16) else {
        return;
    };
    let path = filesystem.path().join("volume");
    let options = OpenOptions {
        create_size: Some(1 << 30),
        ..OpenOptions::default()
    };
    let device = open_device(&path, options).unwrap();
    device.provision(0, 4 * BLOCK as u64).unwrap();
    assert!(std::fs::metadata(&path).unwrap().blocks() * 512 >= 4 * BLOCK as u64);
    let error = device.provision(0, 1 << 30).unwrap_err();
    assert!(error.to_string().contains("No space left"), "{error}");
}

#[test]
fn every_wrong_path_is_refused_with_its_name_and_its_reason() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path("tiny"), "x").unwrap();
    symlink("nowhere", path("dangling")).unwrap();
    let cases = [
        (path("missing"), "no such file"),
        (path("dangling"), "no such file"),
        (path("tiny"), "has 1 bytes where at least 4096"),
        (directory.path().to_path_buf(), "is a directory"),
        (
            Path::new("/dev/null").to_path_buf(),
            "is a character device",
        ),
    ];
    for read_only in [false, true] {
        for (path, reason) in &cases {
            let error = refusal(
                path,
                OpenOptions {
                    read_only,
                    ..OpenOptions::default()
                },
            );
            let message = error.to_string();
            assert!(message.starts_with(path.to_str().unwrap()), "{message}");
            assert!(message.contains(reason), "{message}");
        }
    }
    let zero = OpenOptions {
        create_size: Some(0),
        ..OpenOptions::default()
    };
    assert!(matches!(
        refusal(&path("zero"), zero),
        OpenError::Missing { .. }
    ));
    assert!(!path("zero").exists());
}

#[test]
fn a_file_gets_exactly_the_requested_size() {
    let directory = tempfile::tempdir().unwrap();
    for blocks in [16, 4, 64] {
        let device = file_device(directory.path(), blocks);
        assert_eq!(device.size_bytes(), blocks as u64 * BLOCK_BYTES);
        let path = directory.path().join("volume");
        assert_eq!(std::fs::metadata(path).unwrap().len(), device.size_bytes());
    }
}

#[test]
fn the_home_node_can_be_given() {
    let directory = tempfile::tempdir().unwrap();
    drop(file_device(directory.path(), 4));
    let options = OpenOptions {
        home_node: Some(3),
        ..OpenOptions::default()
    };
    let device = open_device(&directory.path().join("volume"), options).unwrap();
    assert_eq!(device.home_node(), Some(3));
}

#[test]
fn a_file_grows_and_its_new_blocks_are_usable_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let sized = |bytes| OpenOptions {
        create_size: Some(bytes),
        ..OpenOptions::default()
    };
    let device = open_device(&path, sized(1 << 20)).unwrap();
    let block = vec![7; 4096];
    device.write_at(0, &block).unwrap();
    device.write_at(1 << 20, &block).unwrap_err();
    device.grow(4 << 20, None).unwrap();
    assert_eq!(
        (device.size_bytes(), path.metadata().unwrap().len()),
        (4 << 20, 4 << 20)
    );
    assert!(path.metadata().unwrap().blocks() * 512 < 1 << 20);
    device.write_at((4 << 20) - 4096, &block).unwrap();

    // Another program makes the file longer. The new bytes and some earlier ones get their space.
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len((6 << 20) + 100).unwrap();
    assert_eq!(device.size_bytes(), 4 << 20);
    assert_eq!(device.present_bytes().unwrap(), 6 << 20);
    device.grow(6 << 20, Some(2 << 20)).unwrap();
    assert_eq!(device.size_bytes(), 6 << 20);
    assert!(path.metadata().unwrap().blocks() * 512 >= 4 << 20);
    assert_eq!(path.metadata().unwrap().len(), (6 << 20) + 100);
    let mut read = vec![0; 4096];
    device.read_at(0, &mut read).unwrap();
    assert_eq!(read, block);

    assert_eq!(
        device.grow((8 << 20) + 1, None).unwrap_err().errno(),
        EINVAL
    );
    device.grow(1 << 20, None).unwrap();
    assert_eq!(device.size_bytes(), 6 << 20);
}

#[test]
fn a_file_that_cannot_grow_keeps_its_length_and_its_size() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let sized = OpenOptions {
        create_size: Some(1 << 20),
        ..OpenOptions::default()
    };
    let device = open_device(&path, sized).unwrap();
    // More than any filesystem has.
    let error = device.grow(1 << 62, Some(1 << 20)).unwrap_err();
    assert!(error.to_string().contains("grow"), "{error}");
    assert_eq!(device.size_bytes(), 1 << 20);
    assert_eq!(path.metadata().unwrap().len(), 1 << 20);
    let read_only = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let device = open_device(&path, read_only).unwrap();
    assert_eq!(device.grow(2 << 20, None).unwrap_err().errno(), EROFS);
    assert_eq!(path.metadata().unwrap().len(), 1 << 20);
}

#[test]
fn a_sparse_file_reports_its_holes_in_whole_blocks() {
    for directory in directories() {
        let device = file_device(directory.path(), 400);
        let all = device.size_bytes();
        let extents = |mut at: u64| {
            let mut found = vec![];
            while at < all {
                let extent = device.extent_at(at, all - at).unwrap();
                found.push((extent.length_bytes / BLOCK_BYTES, extent.is_hole));
                at += extent.length_bytes;
            }
            found
        };
        assert_eq!(extents(0), [(400, true)]);
        device.write_at(64 * BLOCK_BYTES, &pattern(1, 16)).unwrap();
        assert_eq!(extents(0), [(64, true), (16, false), (320, true)]);
        assert_eq!(extents(70 * BLOCK_BYTES), [(10, false), (320, true)]);
        // The run is cut off at the requested length.
        let part = device.extent_at(0, 3 * BLOCK_BYTES).unwrap();
        assert_eq!((part.length_bytes, part.is_hole), (3 * BLOCK_BYTES, true));
        device.discard(64 * BLOCK_BYTES, 8 * BLOCK_BYTES).unwrap();
        assert!(device.discard_makes_zeros());
        assert_eq!(extents(0), [(72, true), (8, false), (320, true)]);
        assert_eq!(
            device.extent_at(all, BLOCK_BYTES).unwrap_err().errno(),
            EINVAL
        );
    }
}
