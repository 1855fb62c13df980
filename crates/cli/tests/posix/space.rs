//! Holes, preallocation, free space and full volumes.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek, statvfs};
use rustix::io::Errno;

use super::support::{Volume, pattern};

fn open(v: &Volume, name: &str) -> File {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(v.at(name))
        .unwrap()
}

fn read(file: &File, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xaa; length];
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

#[test]
fn holes_are_found_before_and_after_the_data_is_on_the_device() {
    let v = Volume::mounted();
    let file = open(&v, "f");
    file.write_all_at(&[1; 4096], 1 << 20).unwrap();
    file.set_len(4 << 20).unwrap();
    for synced in [false, true] {
        if synced {
            file.sync_all().unwrap();
        }
        assert_eq!(seek(&file, SeekFrom::Data(0)), Ok(1 << 20));
        assert_eq!(seek(&file, SeekFrom::Hole(0)), Ok(0));
        assert_eq!(seek(&file, SeekFrom::Hole(1 << 20)), Ok((1 << 20) + 4096));
        assert_eq!(seek(&file, SeekFrom::Data(2 << 20)), Err(Errno::NXIO));
        assert_eq!(seek(&file, SeekFrom::Hole(2 << 20)), Ok(2 << 20));
        assert_eq!(seek(&file, SeekFrom::Hole(5 << 20)), Err(Errno::NXIO));
        assert_eq!(read(&file, 0, 4096), [0; 4096]);
    }
}

#[test]
fn fallocate_allocates_punches_and_zeroes() {
    let v = Volume::mounted();
    let file = open(&v, "f");
    let metadata = || file.metadata().unwrap();
    fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 1 << 20).unwrap();
    assert_eq!((metadata().len(), metadata().blocks()), (0, 2048));
    fallocate(&file, FallocateFlags::empty(), 0, 1 << 20).unwrap();
    assert_eq!(metadata().len(), 1 << 20);
    assert_eq!(read(&file, 4096, 4096), [0; 4096]);

    file.write_all_at(&[7; 1 << 20], 0).unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, punch, 4000, 8292).unwrap();
    assert_eq!(metadata().len(), 1 << 20);
    assert_eq!(
        metadata().blocks(),
        2048 - 16,
        "the two whole pages are free"
    );
    let bytes = read(&file, 0, 16_384);
    for (at, byte) in bytes.iter().enumerate() {
        let expected = if (4000..12_292).contains(&at) { 0 } else { 7 };
        assert_eq!(*byte, expected, "at {at}");
    }
    fallocate(&file, FallocateFlags::ZERO_RANGE, (1 << 20) - 100, 200).unwrap();
    assert_eq!(metadata().len(), (1 << 20) + 100);
    assert_eq!(read(&file, (1 << 20) - 101, 3), [7, 0, 0]);
    v.remount_after_close(file);
    assert_eq!(fs::metadata(v.at("f")).unwrap().len(), (1 << 20) + 100);
    assert_eq!(fs::read(v.at("f")).unwrap()[3999..4001], [7, 0]);
    let unsupported = fallocate(open(&v, "f"), FallocateFlags::COLLAPSE_RANGE, 0, 4096);
    assert_eq!(unsupported, Err(Errno::OPNOTSUPP));
}

impl Volume {
    fn remount_after_close(&self, file: File) {
        drop(file);
        self.remount();
    }
}

#[test]
fn free_space_shrinks_with_writes_and_grows_with_removals() {
    let v = Volume::mounted();
    let free = || statvfs(v.mnt()).unwrap().f_bfree * statvfs(v.mnt()).unwrap().f_frsize;
    let before = free();
    assert!(before > 100 << 20, "{before}");
    fs::write(v.at("f"), pattern(1, 20 << 20)).unwrap();
    assert!(before - free() >= 20 << 20);
    fs::remove_file(v.at("f")).unwrap();
    // The kernel releases a removed file at a later time of its choice.
    let limit = Instant::now() + Duration::from_secs(30);
    while free() + (2 << 20) < before {
        assert!(
            Instant::now() < limit,
            "{before} before, {} after half a minute",
            free()
        );
        File::open(v.mnt()).unwrap().sync_all().unwrap();
    }
    let stat = statvfs(v.mnt()).unwrap();
    assert!(stat.f_files > 0 && stat.f_namemax == 255);
}

#[test]
fn a_full_volume_fails_with_enospc_and_stays_usable() {
    let v = Volume::of_size("128M");
    v.mount();
    fs::write(v.at("precious"), pattern(1, 1 << 20)).unwrap();
    let mut file = File::create(v.at("big")).unwrap();
    let chunk = pattern(2, 1 << 20);
    let mut written = 0u64;
    let error = loop {
        match file.write_all(&chunk) {
            Ok(()) => written += 1,
            Err(e) => break e,
        }
        assert!(written < 128, "more than the volume holds");
    };
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
    assert!(written > 32, "full after {written} MiB");
    file.sync_all().expect("accepted data can be written back");
    drop(file);
    assert!(fs::read(v.at("precious")).unwrap() == pattern(1, 1 << 20));
    fs::remove_file(v.at("big")).unwrap();
    File::open(v.mnt()).unwrap().sync_all().unwrap();
    fs::write(v.at("again"), &chunk).unwrap();
    v.umount();
    v.check();
    v.mount();
    assert!(fs::read(v.at("again")).unwrap() == chunk);
}

#[test]
fn the_space_of_a_removed_file_is_free_when_remove_returns() {
    let v = Volume::of_size("128M");
    v.mount();
    let chunk = pattern(3, 1 << 20);
    let fill = |file: &mut File| while file.write_all(&chunk).is_ok() {};
    for round in 0..3 {
        let mut file = File::create(v.at("big")).unwrap();
        fill(&mut file);
        drop(file);
        fs::remove_file(v.at("big")).unwrap();
        fs::write(v.at("next"), &chunk).unwrap_or_else(|e| panic!("{round}: {e}"));
        fs::remove_file(v.at("next")).unwrap();
        let mut file = File::create(v.at("big")).unwrap();
        fs::remove_file(v.at("big")).unwrap();
        fill(&mut file);
        drop(file);
        let file = File::create(v.at("next")).unwrap();
        fallocate(&file, FallocateFlags::empty(), 0, 32 << 20)
            .unwrap_or_else(|e| panic!("fallocate, {round}: {e}"));
        drop(file);
        fs::remove_file(v.at("next")).unwrap();
    }
}

#[test]
fn the_space_of_a_removed_file_is_free_for_many_writers_at_once() {
    // Over the FUSE ring, 8 requests of one user may wait at once. On a machine with many CPUs only 4 may, and the others wait for
    // their turn.
    const WRITERS: usize = 8;
    let v = Volume::of_size("128M");
    v.mount();
    let chunk = pattern(3, 1 << 20);
    for round in 0..3 {
        let files: Vec<File> = (0..WRITERS)
            .map(|n| open(&v, &format!("next{n}")))
            .collect();
        let mut file = File::create(v.at("big")).unwrap();
        while file.write_all(&chunk).is_ok() {}
        fs::remove_file(v.at("big")).unwrap();
        std::thread::scope(|scope| {
            // Some writers find the volume full and wait. The test closes the file while they wait.
            let writers: Vec<_> = (files.iter())
                .map(|mut file| {
                    let chunk = &chunk;
                    scope.spawn(move || file.write_all(chunk))
                })
                .collect();
            drop(file);
            for (n, writer) in writers.into_iter().enumerate() {
                let written = writer.join().unwrap();
                written.unwrap_or_else(|e| panic!("writer {n}, round {round}: {e}"));
            }
        });
        for (n, file) in files.iter().enumerate() {
            assert!(read(file, 0, 1 << 20) == chunk, "writer {n}");
            fs::remove_file(v.at(&format!("next{n}"))).unwrap();
        }
    }
}

#[test]
fn an_open_file_without_a_name_keeps_its_space_until_it_is_closed() {
    let v = Volume::of_size("128M");
    v.mount();
    let chunk = pattern(3, 4 << 20);
    let mut file = File::create(v.at("open")).unwrap();
    fs::remove_file(v.at("open")).unwrap();
    while file.write_all(&chunk).is_ok() {}
    for _ in 0..10 {
        let error = fs::write(v.at("next"), &chunk).expect_err("there is no space");
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
    }
    drop(file);
    v.remount();
    fs::write(v.at("next"), &chunk).unwrap();
}
