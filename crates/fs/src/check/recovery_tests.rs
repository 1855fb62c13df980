use jericho_format::PAGE_BYTES;
use jericho_metadata::store::{Change, StoreRef};
use jericho_metadata::testing::{
    MemoryDevice, file_batch, formatted, open_first, opened, take_room,
};
use jericho_volume::OpenMode;

use super::*;
use crate::check::{CheckOptions, Severity, check_devices};

fn opened_for_reading(device: &Arc<MemoryDevice>) -> Volume {
    Volume::open_from_devices(vec![device.clone()], OpenMode::READ).unwrap()
}

/// Returns a volume whose power was cut after `batches` commits of 100 files each.
fn crashed(batches: u64) -> Arc<MemoryDevice> {
    let device = formatted(32, 1);
    let volume = opened(&device);
    volume.mark_dirty().unwrap();
    let (store, allocator) = open_first(&volume, 1 << 20);
    for batch in 0..batches {
        let root = Change::PutValue("batch", batch);
        let mut changes = file_batch(2 + batch * 100, 100, &allocator);
        changes.push(root);
        store.commit(&changes).unwrap();
    }
    device.after_power_cut()
}

/// Returns the bytes of the journal on the device.
fn journal_bytes(device: &Arc<MemoryDevice>) -> std::ops::Range<usize> {
    opened_for_reading(device).superblocks().with(|s| {
        let first = s.slices[0].journal_first_block.get() * PAGE_BYTES;
        let length = u64::from(s.slices[0].journal_blocks.get()) * PAGE_BYTES;
        first as usize..(first + length) as usize
    })
}

fn files(store: &StoreRef) -> u64 {
    store.inode_count().unwrap() - 1
}

fn options(repair: bool) -> CheckOptions {
    CheckOptions {
        repair,
        force: false,
    }
}

/// Checks what becomes of a volume whose journal is damaged: `left` files are there, and a repair makes the volume usable.
#[track_caller]
fn is_read_and_repaired(device: &Arc<MemoryDevice>, left: u64) {
    let refused = jericho_metadata::stores::open(&opened(device), 1 << 20)
        .err()
        .unwrap();
    assert!(matches!(refused, Error::Journal(_)), "{refused}");
    let (store, _allocator) = open_first(&opened_for_reading(device), 1 << 20);
    assert_eq!(files(&store), left);
    drop(store);

    let report = check_devices(vec![device.clone()], options(false)).unwrap();
    let lost = |text: &str| text.contains("the changes from there on are lost");
    assert!(
        report
            .findings
            .iter()
            .any(|f| f.severity == Severity::Damage && lost(&f.text)),
        "{:?}",
        report.findings
    );
    check_devices(vec![device.clone()], options(true)).unwrap();
    let report = check_devices(vec![device.clone()], options(false)).unwrap();
    assert!(!report.findings.iter().any(|f| lost(&f.text)));
    let (store, _allocator) = open_first(&opened(device), 1 << 20);
    assert_eq!(files(&store), left);
    store.commit(&[Change::PutValue("x", 1)]).unwrap();
}

#[test]
fn a_journal_with_damage_in_its_middle_is_read_up_to_there_and_not_written_before_a_repair() {
    let device = crashed(3);
    let area = journal_bytes(&device);
    let bytes = device.bytes();
    let name = b"file-00000102";
    let at = bytes[area.clone()]
        .windows(name.len())
        .position(|w| w == name);
    device.corrupt(area.start + at.unwrap(), b"X");
    is_read_and_repaired(&device, 100);
}

#[test]
fn a_journal_without_headers_is_not_written_before_a_repair() {
    let device = crashed(3);
    let area = journal_bytes(&device);
    device.corrupt(area.start, &[0xff; 2 * PAGE_BYTES as usize]);
    is_read_and_repaired(&device, 0);
}

#[test]
fn a_torn_last_batch_is_dropped_in_silence() {
    let device = crashed(3);
    let area = journal_bytes(&device);
    let bytes = device.bytes();
    let name = b"file-00000202";
    let at = bytes[area.clone()]
        .windows(name.len())
        .position(|w| w == name);
    device.corrupt(area.start + at.unwrap(), b"X");
    let (store, _allocator) = open_first(&opened(&device), 1 << 20);
    assert_eq!(
        (files(&store), store.value("batch").unwrap()),
        (200, Some(1))
    );
}

#[test]
fn a_volume_that_was_full_at_a_crash_takes_removals_after_it() {
    let device = formatted(20, 1);
    let volume = opened(&device);
    let (store, allocator) = open_first(&volume, 1 << 20);
    let all = allocator.available();
    allocator.reserve(all).unwrap();
    let mut blocks = Vec::new();
    allocator
        .allocate(0, None, all as u32, &mut blocks)
        .unwrap();
    store
        .commit(&blocks.into_iter().map(Change::Use).collect::<Vec<_>>())
        .unwrap();
    let mut made = 0;
    while take_room(&store, 100).is_ok() {
        store
            .commit(&file_batch(2 + made, 100, &allocator))
            .unwrap();
        made += 100;
        assert!(made < 1_000_000);
    }
    for round in 0..3 {
        let cut = device.after_power_cut();
        let report = check_devices(vec![cut.clone()], options(false)).unwrap();
        let beyond_repair = |text: &str| text.contains("restore the volume from a backup");
        assert!(
            !report.findings.iter().any(|f| beyond_repair(&f.text)),
            "{round}: {:?}",
            report.findings
        );
        let (store, _allocator) = open_first(&opened(&cut), 1 << 20);
        assert_eq!(files(&store), made);
        for ino in 2..2 + made {
            store.commit(&[Change::DelInode(ino)]).unwrap();
        }
        assert_eq!(files(&store), 0);
    }
}
