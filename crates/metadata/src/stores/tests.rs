use std::result::Result;
use std::sync::atomic::Ordering;

use jericho_volume::OpenMode;

use super::*;
use crate::store::Change;
use crate::testing::{file_batch, formatted, open_first, opened, take_room};
use crate::types::{Kind, ROOT};

#[test]
fn a_new_volume_has_a_root_directory_and_the_slices_that_were_asked_for() {
    let device = formatted(64, 3);
    let volume = opened(&device);
    assert_eq!(volume.slices().len(), 3);
    let (store, allocator) = open_first(&volume, 1 << 20);
    let root = store.inode(ROOT).unwrap().unwrap();
    assert_eq!(
        (root.kind, root.nlink, root.parent),
        (Kind::Directory, 2, ROOT)
    );
    for slice in volume.slices() {
        assert_eq!(allocator.free_of(slice.id), slice.blocks);
        assert!(
            volume
                .translate(slice.id, slice.blocks - 1, 5)
                .is_some_and(|r| r.blocks == 1)
        );
        assert!(volume.translate(slice.id, slice.blocks, 1).is_none());
    }
}

#[test]
fn only_committed_changes_survive_a_power_cut() {
    let device = formatted(64, 2);
    let volume = opened(&device);
    let (store, allocator) = open_first(&volume, 1 << 20);
    for round in 0..10 {
        let batch = file_batch(2 + round * 100, 100, &allocator);
        store.commit(&batch).unwrap();
        let cut = device.after_power_cut();
        let (found, _) = open_first(&opened(&cut), 1 << 20);
        assert_eq!(found.inode_count().unwrap(), 1 + (round + 1) * 100);
    }
}

#[test]
fn a_volume_opens_after_a_failure_at_any_write() {
    let device = formatted(32, 1);
    let mut failures = 0;
    for budget in 0.. {
        let cut = device.after_power_cut();
        cut.budget.store(budget, Ordering::Relaxed);
        let run = || -> Result<(), Error> {
            let (mut stores, allocator) = open(&opened(&cut), 1 << 20)?;
            let store = stores.remove(0);
            for round in 0..4 {
                let batch = file_batch(2 + round * 300, 300, &allocator);
                let result = store.commit(&batch);
                if result.is_err() {
                    let again = store.commit(&[Change::PutValue("x", 1)]);
                    assert!(again.is_err(), "a failed store took another batch");
                }
                result?;
                if round % 2 == 1 {
                    store.checkpoint()?;
                }
            }
            Ok(())
        };
        let result = run();
        for after in [cut.after_power_cut(), cut.clone()] {
            after.budget.store(u64::MAX, Ordering::Relaxed);
            let (store, allocator) = open_first(&opened(&after), 1 << 20);
            let files = store.inode_count().unwrap() - 1;
            assert!(files % 300 == 0, "found a part of a batch: {files} files");
            store.commit(&file_batch(5000, 1, &allocator)).unwrap();
        }
        match result {
            Ok(()) => break,
            Err(error) => {
                assert!(
                    error.to_string().contains("memory"),
                    "{error} names no device"
                );
                failures += 1;
            }
        }
    }
    assert!(failures > 20, "only {failures} failures");
}

#[test]
fn a_full_metadata_region_refuses_creation_and_lets_removals_through() {
    let device = formatted(20, 1);
    let volume = opened(&device);
    let (store, allocator) = open_first(&volume, 1 << 20);
    // Data takes all space, so that the region cannot grow.
    let mut held = Vec::new();
    let all = allocator.available();
    allocator.reserve(all).unwrap();
    allocator.allocate(0, None, all as u32, &mut held).unwrap();
    let mut made = 0;
    let refused = loop {
        if let Err(error) = take_room(&store, 50) {
            break error;
        }
        store.commit(&file_batch(2 + made, 50, &allocator)).unwrap();
        made += 50;
        assert!(made < 1_000_000);
    };
    assert!(matches!(refused, Error::Errno(28)), "{refused}");
    assert!(made > 1000);
    assert_eq!(store.inode_count().unwrap(), 1 + made);
    for ino in 2..2 + made {
        let hash = ino.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1;
        let name = format!("file-{ino:08}").into_bytes().into_boxed_slice();
        let batch = [
            Change::DelInode(ino),
            Change::DelEntry {
                dir: ROOT,
                hash,
                name,
            },
        ];
        if ino % 50 == 0 || ino < 300 {
            store.commit(&batch).unwrap();
        }
    }
    take_room(&store, 1).unwrap();
    store.close().unwrap();
}

#[test]
fn a_volume_opened_read_only_after_a_crash_is_read_and_not_written() {
    let device = formatted(32, 1);
    let volume = opened(&device);
    volume.mark_dirty().unwrap();
    let (store, allocator) = open_first(&volume, 1 << 20);
    store.commit(&file_batch(2, 300, &allocator)).unwrap();
    let cut = device.after_power_cut();
    cut.budget.store(0, Ordering::Relaxed);
    let volume = Volume::open_from_devices(vec![cut.clone()], OpenMode::READ).unwrap();
    let (store, _allocator) = open_first(&volume, 1 << 20);
    assert_eq!(store.inode_count().unwrap(), 301);
    assert!(matches!(
        store.commit(&[Change::DelInode(2)]),
        Err(Error::Errno(30))
    ));
}

#[test]
fn a_batch_that_does_not_fit_is_refused_whole_and_smaller_ones_still_go_through() {
    let device = formatted(20, 1);
    let (store, allocator) = open_first(&opened(&device), 1 << 20);
    store.commit(&file_batch(2, 500, &allocator)).unwrap();
    let all = allocator.available();
    allocator.reserve(all).unwrap();
    let huge: Vec<Change> = (0..200_000)
        .map(|ino| Change::PutXattr(2, format!("user.{ino}").into_bytes().into(), [7; 64].into()))
        .collect();
    for _ in 0..2 {
        assert!(matches!(store.commit(&huge), Err(Error::Errno(28))));
        assert_eq!(store.xattr_names(2).unwrap().len(), 0);
        assert_eq!(store.inode_count().unwrap(), 501);
    }
    store
        .commit(&[Change::DelInode(2), Change::PutValue("x", 4)])
        .unwrap();
    assert_eq!(store.inode_count().unwrap(), 500);
    drop((store, allocator));
    let (store, _allocator) = open_first(&opened(&device), 1 << 20);
    assert_eq!(
        (store.inode_count().unwrap(), store.value("x").unwrap()),
        (500, Some(4))
    );
}

#[test]
fn the_metadata_region_grows_into_the_slices() {
    let device = formatted(64, 2);
    let volume = opened(&device);
    let before = volume.superblocks().with(|s| s.chunks.len());
    let count = {
        let (store, allocator) = open_first(&volume, 4 << 20);
        let mut ino = 2;
        while volume.superblocks().with(|s| s.chunks.len()) == before {
            let mut batch = file_batch(ino, 500, &allocator);
            let value = vec![7; 2000].into_boxed_slice();
            let attribute = |ino| Change::PutXattr(ino, b"user.long"[..].into(), value.clone());
            batch.extend((ino..ino + 500).map(attribute));
            store.commit(&batch).unwrap();
            ino += 500;
        }
        store.inode_count().unwrap()
    };
    drop(volume);
    let volume = opened(&device);
    let (store, allocator) = open_first(&volume, 4 << 20);
    assert_eq!(store.inode_count().unwrap(), count);
    let capacity: u64 = volume.slices().iter().map(|s| s.blocks).sum();
    let chunks = volume.superblocks().with(|s| s.chunks.len() - before) as u64 * 64;
    assert_eq!(allocator.available(), capacity - chunks - (count - 1));
}
