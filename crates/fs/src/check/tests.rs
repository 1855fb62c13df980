use jericho_format::sums::{self, Sum};
use jericho_format::superblock::{FLAG_DIRTY, OwnerRecord};
use jericho_format::{label, record};
use jericho_metadata::alloc::Blocks;
use jericho_metadata::store::tables::{Row, Table};
use jericho_metadata::store::{Change, Extent, InodeRecord, codec};
use jericho_metadata::testing::{
    MemoryDevice, file_batch, formatted, formatted_with, open_first, opened,
};
use jericho_volume::FormatOptions;
use zerocopy::FromZeros;
use zerocopy::byteorder::little_endian::{U16, U32, U64};

use super::data::check_data_within;
use super::*;
use crate::format::{format, root};
use crate::types::{Ino, Kind, ROOT};

const READ: CheckOptions = CheckOptions {
    repair: false,
    force: false,
};
const REPAIR: CheckOptions = CheckOptions {
    repair: true,
    force: false,
};

/// Room for one or two inodes, for two directories, for one container, and for one extent of each store, so that the sample needs several
/// windows of all kinds.
const TINY: Limits = Limits {
    index_bytes: 1,
    directories_bytes: 40,
    bitmaps_bytes: 1,
    data_bytes: 1,
};

fn run(device: &Arc<MemoryDevice>, options: CheckOptions) -> Report {
    run_within(device, options, Limits::USUAL)
}

fn run_within(device: &Arc<MemoryDevice>, options: CheckOptions, limits: Limits) -> Report {
    let devices: [Arc<dyn Device>; 1] = [device.clone()];
    check_within(&devices, options, limits, &Arc::default()).unwrap()
}

fn entry(volume: &Volume, dir: Ino, name: &str, ino: Ino, kind: Kind) -> Change {
    let hash = volume.hash_name(name.as_bytes());
    Change::PutEntry {
        dir,
        hash,
        name: name.as_bytes().into(),
        ino,
        kind,
    }
}

fn inode(kind: Kind, nlink: u32, size: u64, parent: Ino) -> InodeRecord {
    InodeRecord {
        kind,
        nlink,
        size,
        parent,
        ..root((0, 0))
    }
}

fn blocks(first: u64, count: u32) -> Blocks {
    Blocks {
        slice: 0,
        first,
        count,
    }
}

/// /dir (2), /dir/file (3) with blocks 10..14, /dir/sub (4), /link (5).
fn sample() -> Arc<MemoryDevice> {
    let device = formatted(32, 1);
    let volume = opened(&device);
    let (store, _allocator) = open_first(&volume, 1 << 20);
    let mut file = inode(Kind::File, 1, 16384, 2);
    file.blocks = 4;
    let mut link = inode(Kind::Symlink, 1, 3, ROOT);
    link.target = Some(b"dir"[..].into());
    store
        .commit(&[
            Change::PutInode(ROOT, inode(Kind::Directory, 3, 2, ROOT)),
            Change::PutInode(2, inode(Kind::Directory, 3, 2, ROOT)),
            Change::PutInode(3, file),
            Change::PutInode(4, inode(Kind::Directory, 2, 0, 2)),
            Change::PutInode(5, link),
            entry(&volume, ROOT, "dir", 2, Kind::Directory),
            entry(&volume, 2, "file", 3, Kind::File),
            entry(&volume, 2, "sub", 4, Kind::Directory),
            entry(&volume, ROOT, "link", 5, Kind::Symlink),
            Change::PutExtent(
                3,
                Extent {
                    page: 0,
                    blocks: blocks(10, 4),
                    unwritten: false,
                    summed: false,
                },
            ),
            Change::Use(blocks(10, 4)),
            Change::PutXattr(3, b"user.a"[..].into(), b"1"[..].into()),
            Change::PutInoMark(0, record::INO_MARK_STEP),
            Change::PutValue(record::INODES_NAME, 5),
        ])
        .unwrap();
    drop(store);
    device
}

fn put(table: Table, key: &[u8], value: &[u8]) -> Row {
    Row {
        table,
        key: key.to_vec(),
        value: Some(value.to_vec()),
    }
}

#[test]
fn a_fresh_volume_and_one_with_files_are_sound() {
    assert_eq!(run(&formatted(32, 3), READ).findings, []);
    let report = run(&sample(), READ);
    assert_eq!(report.findings, []);
    assert_eq!(
        (report.directories, report.files, report.used_bytes),
        (3, 2, 4 * 4096)
    );
    let tiny = run_within(&sample(), READ, TINY);
    assert_eq!(tiny.findings, []);
    assert_eq!(
        (tiny.directories, tiny.files, tiny.used_bytes),
        (3, 2, 4 * 4096)
    );
    assert_eq!((report.windows, tiny.windows), (1, 5));
}

#[test]
fn a_check_writes_nothing_even_after_a_crash() {
    let device = sample();
    let volume = opened(&device);
    volume.mark_dirty().unwrap();
    let (store, _allocator) = open_first(&volume, 1 << 20);
    store.commit(&[Change::PutValue("x", 1)]).unwrap();
    let cut = device.after_power_cut();
    let before = cut.bytes();
    let report = run(&cut, READ);
    assert!(report.is_sound(), "{:?}", report.findings);
    assert!(report.findings.iter().any(|f| f.severity == Severity::Info));
    assert!(cut.bytes() == before, "the check wrote");
}

#[test]
fn a_store_that_was_not_closed_is_sound() {
    let device = sample();
    let (store, _allocator) = open_first(&opened(&device), 1 << 20);
    store.commit(&[Change::PutValue("x", 1)]).unwrap();
    let report = run(&device.after_power_cut(), READ);
    assert_eq!(report.findings, []);
}

/// Damages the sample, expects a finding with `needle`, repairs, and expects a sound volume.
fn found_and_repaired(needle: &str, changes: impl FnOnce(&Volume) -> Vec<Change>, rows: Vec<Row>) {
    let device = sample();
    let volume = opened(&device);
    let (store, allocator) = open_first(&volume, 1 << 20);
    store.commit(&changes(&volume)).unwrap();
    if !rows.is_empty() {
        store.commit_rows(rows).unwrap();
    }
    drop((store, allocator));
    let damaged = device.bytes();
    for limits in [Limits::USUAL, TINY] {
        device.corrupt(0, &damaged);
        found_and_repaired_within(&device, needle, limits);
    }
}

fn found_and_repaired_within(device: &Arc<MemoryDevice>, needle: &str, limits: Limits) {
    let report = run_within(device, READ, limits);
    assert!(!report.is_sound());
    assert!(
        report.findings.iter().any(|f| f.text.contains(needle)),
        "{needle}: {:?}",
        report.findings
    );
    let repaired = run_within(device, REPAIR, limits);
    assert!(repaired.is_sound(), "{needle}: {:?}", repaired.findings);
    assert!(
        repaired.repaired.iter().any(|f| f.text.contains(needle)),
        "{:?}",
        repaired.repaired
    );
    let again = run_within(device, READ, limits);
    assert_eq!(again.findings, [], "{needle}");
    // Undamaged files are still there, and the volume takes changes.
    let volume = opened(device);
    let (store, _allocator) = open_first(&volume, 1 << 20);
    assert!(store.inode(5).unwrap().is_some());
    store.commit(&[Change::PutValue("x", 1)]).unwrap();
}

fn changed(needle: &str, changes: impl FnOnce(&Volume) -> Vec<Change>) {
    found_and_repaired(needle, changes, vec![]);
}

fn rows(needle: &str, rows: Vec<Row>) {
    found_and_repaired(needle, |_| vec![], rows);
}

#[test]
fn wrong_counts_of_links_and_entries_are_found_and_repaired() {
    changed("link count 7", |_| {
        vec![Change::PutInode(3, inode(Kind::File, 7, 16384, 2))]
    });
    changed("link count 2", |_| {
        vec![Change::PutInode(2, inode(Kind::Directory, 2, 2, ROOT))]
    });
    changed("size 9", |_| {
        vec![Change::PutInode(4, inode(Kind::Directory, 2, 9, 2))]
    });
    changed("says that it is in 1", |_| {
        vec![Change::PutInode(4, inode(Kind::Directory, 2, 0, ROOT))]
    });
}

#[test]
fn images_of_no_block_are_found_and_repaired() {
    let image = [7; 4096];
    let key = |block| jericho_metadata::store::tables::block_key((0, block)).to_vec();
    rows(
        "a logged page is of block",
        vec![put(Table::Logged, &key(1 << 40), &image)],
    );
    rows(
        "a logged page is invalid",
        vec![put(Table::Logged, &key(1)[..9], &image)],
    );
    rows(
        "a logged page is invalid",
        vec![put(Table::Logged, &key(1), &image[..9])],
    );
}

#[test]
fn bad_entries_are_found_and_repaired() {
    changed("does not exist", |v| {
        vec![entry(v, 2, "ghost", 77, Kind::File)]
    });
    changed("wrong type", |v| vec![entry(v, 2, "file", 3, Kind::Fifo)]);
    changed("impossible name", |v| {
        vec![entry(v, 2, "a/b", 3, Kind::File)]
    });
    changed("second name of directory", |v| {
        vec![entry(v, 4, "again", 2, Kind::Directory)]
    });
    changed("is in no directory", |v| {
        vec![entry(v, 3, "x", 5, Kind::Symlink)]
    });
    rows(
        "wrong hash",
        vec![put(
            Table::Entries,
            &record::entry_key(2, 1, b"other"),
            &codec::entry_to_bytes(3, Kind::File),
        )],
    );
}

#[test]
fn inodes_without_a_path_are_put_into_lost_and_found() {
    changed("no name leads to inode 9", |_| {
        vec![Change::PutInode(9, inode(Kind::File, 1, 0, ROOT))]
    });
    let remove = |v: &Volume, dir, name: &[u8]| Change::DelEntry {
        dir,
        hash: v.hash_name(name),
        name: name.into(),
    };
    changed("no name leads to inode 2", |v| {
        vec![remove(v, ROOT, b"dir")]
    });
    // A cycle: /dir is no longer in the root, and is below its own child.
    changed("no name leads to inode", |v| {
        vec![
            remove(v, ROOT, b"dir"),
            entry(v, 4, "up", 2, Kind::Directory),
        ]
    });
}

#[test]
fn a_lost_root_is_created_again() {
    changed("no root directory", |_| vec![Change::DelInode(ROOT)]);
}

#[test]
fn wrong_orphans_are_repaired_and_right_ones_are_only_reported() {
    changed("is to be removed but does not exist", |_| {
        vec![Change::PutOrphan(50)]
    });
    changed("is to be removed but has 1 names", |_| {
        vec![Change::PutOrphan(3)]
    });
    let device = sample();
    let (store, allocator) = open_first(&opened(&device), 1 << 20);
    store
        .commit(&[
            Change::PutInode(8, inode(Kind::File, 0, 0, ROOT)),
            Change::PutOrphan(8),
            Change::PutValue(record::INODES_NAME, 6),
        ])
        .unwrap();
    drop((store, allocator));
    let report = run(&device, READ);
    assert!(
        report.is_sound() && report.findings.len() == 1,
        "{:?}",
        report.findings
    );
}

#[test]
fn attributes_of_missing_inodes_are_found_and_repaired() {
    changed("belongs to inode 60", |_| {
        vec![Change::PutXattr(60, b"user.x"[..].into(), b"1"[..].into())]
    });
}

#[test]
fn bad_extents_are_found_and_repaired() {
    let extent = |page, first, count| Extent {
        page,
        blocks: blocks(first, count),
        unwritten: false,
        summed: false,
    };
    changed("belongs to no file", |_| {
        vec![
            Change::PutExtent(70, extent(0, 40, 2)),
            Change::Use(blocks(40, 2)),
        ]
    });
    changed("ends beyond slice", |_| {
        vec![Change::PutExtent(3, extent(9, 1 << 40, 2))]
    });
    changed("overlaps the one before", |_| {
        vec![
            Change::PutExtent(3, extent(2, 40, 2)),
            Change::Use(blocks(40, 2)),
        ]
    });
    changed("belong to inode 6 (page 0) and to inode 3", |v| {
        vec![
            Change::PutInode(6, inode(Kind::File, 1, 0, ROOT)),
            entry(v, ROOT, "six", 6, Kind::File),
            Change::PutInode(ROOT, inode(Kind::Directory, 3, 3, ROOT)),
            Change::PutExtent(6, extent(0, 12, 4)),
            Change::Use(blocks(14, 2)),
        ]
    });
}

#[test]
fn bitmaps_that_disagree_with_the_extents_are_found_and_repaired() {
    changed(
        "5 blocks in container 0 of slice 0 are marked as used",
        |_| vec![Change::Use(blocks(100, 5))],
    );
    changed(
        "2 blocks in container 0 of slice 0 are in use but marked",
        |_| vec![Change::Free(blocks(11, 2))],
    );
    let key = jericho_metadata::store::tables::container_key(0, 0);
    rows(
        "its counter says 99",
        vec![put(Table::Used, &key, &99u32.to_le_bytes())],
    );
    rows(
        "a bitmap is invalid",
        vec![put(Table::Bitmaps, b"abc", b"")],
    );
}

#[test]
fn records_that_make_no_sense_are_found_and_removed() {
    rows(
        "is invalid",
        vec![put(Table::Inodes, &record::ino_key(90), b"short")],
    );
    rows(
        "impossible inode number",
        vec![put(Table::Inodes, &record::ino_key(1 << 40), b"x")],
    );
}

#[test]
fn wrong_counts_of_inodes_and_blocks_and_low_marks_are_found_and_repaired() {
    changed("says that there are 9 inodes, and there are 5", |_| {
        vec![Change::PutValue(record::INODES_NAME, 9)]
    });
    changed("inode 3 says that it has 5 blocks, and it has 4", |_| {
        let mut file = inode(Kind::File, 1, 16384, 2);
        file.blocks = 5;
        vec![Change::PutInode(3, file)]
    });
    changed("the mark next_ino_0 is 5, and must be more than 5", |_| {
        vec![Change::PutInoMark(0, 5)]
    });
    changed("the mark next_ino_0 is no possible number", |_| {
        vec![Change::PutInoMark(0, 1)]
    });
    rows(
        "there are an impossible number of inodes",
        vec![put(Table::Values, record::INODES_NAME.as_bytes(), b"short")],
    );
}

#[test]
fn the_number_of_lost_and_found_is_above_the_mark_and_stays_below_the_next_one() {
    let device = sample();
    let (store, allocator) = open_first(&opened(&device), 1 << 20);
    let lost = Change::PutInode(9, inode(Kind::File, 1, 0, ROOT));
    let value = Change::PutValue(record::INODES_NAME, 6);
    store.commit(&[lost, value]).unwrap();
    drop((store, allocator));
    assert!(run(&device, REPAIR).is_sound());
    let (store, _allocator) = open_first(&opened(&device), 1 << 20);
    let hash = opened(&device).hash_name(b"lost+found");
    let found = store.entry(ROOT, hash, b"lost+found").unwrap();
    let step = record::INO_MARK_STEP;
    assert_eq!(found, Some((step, Kind::Directory)));
    let mark = store.value(&record::ino_mark_name(0)).unwrap();
    assert_eq!(mark, Some(2 * step));
}

/// Gives a volume a feature: a build that does not know it must not change the volume.
fn forbid_changes(device: &Arc<MemoryDevice>) {
    let volume = opened(device);
    let change = volume
        .superblocks()
        .update(&[], |s| s.head.read_only.set(1));
    change.unwrap();
}

#[test]
fn a_volume_with_features_that_forbid_changes_is_checked_and_not_repaired() {
    let device = sample();
    forbid_changes(&device);
    assert!(run(&device, CheckOptions::default()).is_sound());
    // Something to repair.
    device.corrupt(4096 + 100, &[0xff; 16]);
    let devices: [Arc<dyn Device>; 1] = [device.clone()];
    let repaired = check_within(&devices, REPAIR, Limits::USUAL, &Arc::default());
    let error = repaired.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("features (0x1)"), "{error}");
}

#[test]
fn flags_and_fields_of_later_versions_are_refused() {
    let value = |at: usize| {
        let mut bytes = codec::inode_to_bytes(&inode(Kind::File, 1, 0, ROOT));
        bytes[at] = 1;
        bytes
    };
    let end = size_of::<record::InodeValue>();
    for offset in record::INODE_UNUSED_AT..end {
        let error = codec::inode_from_bytes(3, &value(offset)).unwrap_err();
        let error = Error::from(error).to_string();
        let why = format!("byte {offset} of the record of inode 3 is 0x1");
        assert!(error.contains(&why), "{error}");
    }
    let extent = Extent {
        page: 0,
        blocks: blocks(1, 1),
        unwritten: true,
        summed: false,
    };
    let mut bytes = codec::extent_to_bytes(&extent);
    bytes[14] |= record::EXTENT_SHARED as u8;
    let error = codec::extent_of_row(&record::extent_key(3, 0), &bytes).unwrap_err();
    let error = Error::from(error).to_string();
    assert!(error.contains("flags 0x3"), "{error}");
}

#[test]
fn a_damaged_copy_of_the_superblock_is_found_and_repaired() {
    let device = sample();
    device.corrupt(4096 + 100, &[0xff; 16]);
    let report = run(&device, READ);
    assert!(
        report.findings.iter().any(|f| f.text.contains("copy 0")),
        "{:?}",
        report.findings
    );
    run(&device, REPAIR);
    assert_eq!(run(&device, READ).findings, []);
}

#[test]
fn a_lost_store_is_reported() {
    let device = sample();
    let at = opened(&device).superblocks().with(|s| {
        let chunk = s.chunks.iter().find(|c| c.position.get() == 0).unwrap();
        chunk.first_block.get() as usize * 4096
    });
    device.corrupt(at, &[0; 4096]);
    let report = run(&device, REPAIR);
    assert!(!report.is_sound());
    assert!(
        report.findings.iter().any(|f| f.text.contains("backup")),
        "{:?}",
        report.findings
    );
}

#[test]
fn a_damaged_label_on_a_file_is_found_and_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volume");
    let mut bytes = sample().bytes();
    bytes[40] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let report = check(&path, READ).unwrap();
    assert!(!report.is_sound());
    assert!(std::fs::read(&path).unwrap() == bytes);
    assert!(check(&path, REPAIR).unwrap().is_sound());
    assert_eq!(check(&path, READ).unwrap().findings, []);
}

#[test]
fn a_damaged_label_of_a_volume_with_features_that_forbid_changes_is_reported_and_not_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volume");
    let device = sample();
    forbid_changes(&device);
    let mut bytes = device.bytes();
    bytes[40] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let error = check(&path, REPAIR).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("features (0x1)"), "{error}");
    assert!(std::fs::read(&path).unwrap() == bytes);
    assert!(!check(&path, READ).unwrap().is_sound());
}

#[test]
fn records_that_no_writer_can_produce_are_refused_by_name_when_used() {
    use crate::{Fs, FsOptions};
    let device = sample();
    let volume = opened(&device);
    let (store, allocator) = open_first(&volume, 1 << 20);
    // /dir and a directory without a name contain each other. One file has an extent that ends beyond its slice. Another file
    // is of a slice that does not exist.
    let overlong = Extent {
        page: 0,
        blocks: blocks(10, u32::MAX),
        unwritten: false,
        summed: false,
    };
    let mut astray = inode(Kind::File, 1, 0, ROOT);
    astray.slice = Some(7);
    store
        .commit(&[
            Change::PutInode(2, inode(Kind::Directory, 3, 2, 9)),
            Change::PutInode(9, inode(Kind::Directory, 2, 0, 2)),
            Change::PutInode(10, astray),
            entry(&volume, ROOT, "astray", 10, Kind::File),
        ])
        .unwrap();
    let row = put(
        Table::Extents,
        &record::extent_key(3, 0),
        &codec::extent_to_bytes(&overlong),
    );
    store.commit_rows(vec![row]).unwrap();
    drop((store, allocator));
    let options = FsOptions {
        read_only: false,
        inode_cache: 100,
        store_cache_bytes: 1 << 20,
        commit_interval_ms: 3_600_000,
    };
    let fs = Fs::open(Arc::new(opened(&device)), vec![], options).unwrap();
    let refused = |result: Result<(), Error>, why: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(fs.rename(2, b"sub", 4, b"moved", 0), "within itself");
    refused(fs.file(3).map(drop), "ends beyond slice 0");
    refused(fs.getattr(10).map(drop), "slice 7");
    drop(fs);
    let report = run(&device, REPAIR);
    assert!(report.is_sound(), "{:?}", report.findings);
}

fn refusal<T>(result: Result<T, VolumeError>, needle: &str) {
    let error = result.err().expect("the call must fail");
    assert!(error.to_string().contains(needle), "{error}");
}

#[test]
fn a_volume_mounted_by_another_host_is_refused_to_readers_too() {
    let dir = tempfile::tempdir().unwrap();
    let file = [dir.path().join("volume")];
    let options = FormatOptions {
        size_bytes: Some(64 << 20),
        ..FormatOptions::default()
    };
    format(&file, &options).unwrap();
    let volume = Volume::open(&file[0], OpenMode::WRITE).unwrap();
    volume
        .superblocks()
        .update(&[], |s| {
            let mut owner = OwnerRecord::new_zeroed();
            owner.boot_id = [9; 16];
            owner.machine = U64::new(9);
            owner.host[..5].copy_from_slice(b"other");
            owner.host_bytes = U16::new(5);
            s.head.owner = owner;
            s.head.flags = U32::new(FLAG_DIRTY);
        })
        .unwrap();
    drop(volume);
    let before = std::fs::read(&file[0]).unwrap();
    refusal(Volume::open(&file[0], OpenMode::READ), "host other");
    refusal(Volume::open(&file[0], OpenMode::WRITE), "--force");
    let check = |force| {
        let options = CheckOptions {
            repair: false,
            force,
        };
        super::check(&file[0], options)
    };
    refusal(check(false), "host other");
    assert!(check(true).unwrap().is_sound());
    assert!(std::fs::read(&file[0]).unwrap() == before);
    // After a takeover the volume belongs to this host, and to no host once it is clean.
    let forced = OpenMode {
        force: true,
        ..OpenMode::WRITE
    };
    let volume = Volume::open(&file[0], forced).unwrap();
    volume.mark_dirty().unwrap();
    Volume::open(&file[0], OpenMode::READ).unwrap();
    volume.mark_clean().unwrap();
    let owner = volume.superblocks().with(|s| s.head.owner);
    assert_eq!(owner, OwnerRecord::new_zeroed());
}

/// Makes directories with the numbers 6 to 5 + `count`, each in the one after it. The last one is in the root. So a check has to read
/// each window of directories often.
fn chain(count: u64) -> Arc<MemoryDevice> {
    let device = sample();
    let volume = opened(&device);
    let (store, allocator) = open_first(&volume, 1 << 20);
    let last = 5 + count;
    let mut changes = vec![
        Change::PutInode(ROOT, inode(Kind::Directory, 4, 3, ROOT)),
        Change::PutValue(record::INODES_NAME, 5 + count),
    ];
    for ino in 6..=last {
        let parent = if ino == last { ROOT } else { ino + 1 };
        let below = u64::from(ino > 6);
        changes.push(Change::PutInode(
            ino,
            inode(Kind::Directory, 2 + below as u32, below, parent),
        ));
        changes.push(entry(&volume, parent, "in", ino, Kind::Directory));
    }
    store.commit(&changes).unwrap();
    drop((store, allocator));
    device
}

#[test]
fn directories_beyond_the_memory_for_them_are_followed_to_the_root() {
    let device = chain(40);
    for limits in [Limits::USUAL, TINY] {
        let report = run_within(&device, READ, limits);
        assert_eq!(report.findings, []);
        assert_eq!(report.directories, 43);
    }
    // The last directory is in the first one, and no longer in the root.
    let volume = opened(&device);
    let (store, allocator) = open_first(&volume, 1 << 20);
    let changes = [
        Change::DelEntry {
            dir: ROOT,
            hash: volume.hash_name(b"in"),
            name: b"in"[..].into(),
        },
        Change::PutInode(ROOT, inode(Kind::Directory, 3, 2, ROOT)),
        Change::PutInode(6, inode(Kind::Directory, 3, 1, 7)),
        Change::PutInode(45, inode(Kind::Directory, 3, 1, 6)),
        entry(&volume, 6, "in", 45, Kind::Directory),
    ];
    store.commit(&changes).unwrap();
    drop((store, allocator));
    let damaged = device.bytes();
    for limits in [Limits::USUAL, TINY] {
        device.corrupt(0, &damaged);
        let report = run_within(&device, READ, limits);
        // The check reports one directory of the cycle, or only that there is a cycle if its directories do not fit.
        assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
        assert_eq!(report.findings[0].severity, Severity::Damage);
    }
    device.corrupt(0, &damaged);
    let repaired = run(&device, REPAIR);
    assert!(repaired.is_sound(), "{:?}", repaired.findings);
    assert_eq!((repaired.directories, repaired.files), (44, 2));
}

#[test]
fn more_windows_read_entries_again_and_nothing_else() {
    let device = chain(200);
    let rows = |limits| {
        let progress = Arc::new(Progress::default());
        let devices: [Arc<dyn Device>; 1] = [device.clone()];
        let report = check_within(&devices, READ, limits, &progress).unwrap();
        assert_eq!(report.findings, []);
        (report.windows, progress.rows())
    };
    let (one, rows_of_one) = rows(Limits::USUAL);
    let (many, rows_of_many) = rows(Limits {
        index_bytes: 50 * (17 + 24),
        ..Limits::USUAL
    });
    assert_eq!(one, 1);
    assert_eq!(many, 205u64.div_ceil(50));
    let entries = 204;
    // A window ends at an inode that it reads and does not have.
    assert_eq!(
        rows_of_many,
        rows_of_one + (many - 1) * entries + (many - 1)
    );
}

#[test]
fn rows_in_the_stores_of_two_slices_are_compared_as_one_volume() {
    let volume = opened(&formatted(64, 2));
    let container_blocks = volume.superblocks().with(|s| s.head.container_blocks.get());
    let store =
        || jericho_metadata::store::StoreRef::from(Store::in_memory(container_blocks).unwrap());
    let all = vec![store(), store()];
    let (dir, file) = (record::ino_of(1, 1), record::ino_of(1, 2));
    let extent = Extent {
        page: 0,
        blocks: blocks(10, 4),
        unwritten: false,
        summed: false,
    };
    let mut of_file = inode(Kind::File, 2, 16384, dir);
    of_file.blocks = 4;
    all[0]
        .commit(&[
            Change::PutInode(ROOT, inode(Kind::Directory, 3, 2, ROOT)),
            entry(&volume, ROOT, "dir", dir, Kind::Directory),
            entry(&volume, ROOT, "link", file, Kind::File),
            // The file is of slice 1, and its blocks are of slice 0.
            Change::Use(blocks(10, 4)),
            Change::PutValue(record::INODES_NAME, 1),
        ])
        .unwrap();
    all[1]
        .commit(&[
            Change::PutInode(dir, inode(Kind::Directory, 2, 1, ROOT)),
            Change::PutInode(file, of_file),
            entry(&volume, dir, "file", file, Kind::File),
            Change::PutExtent(file, extent),
            Change::PutXattr(file, b"user.a"[..].into(), b"1"[..].into()),
            Change::PutInoMark(1, record::INO_MARK_STEP),
            Change::PutValue(record::INODES_NAME, 2),
        ])
        .unwrap();
    let progress = Progress::default();
    let found = |limits| {
        let stores = Stores::new(all.clone(), &volume, &progress);
        let pass = pass_over(&volume, &stores, limits).unwrap();
        assert_eq!((pass.directories, pass.files, pass.used_blocks), (2, 1, 4));
        pass.found
    };
    for limits in [Limits::USUAL, TINY] {
        assert_eq!(found(limits).findings, []);
    }
    // A row in the wrong store counts for nothing and is removed, once.
    all[0]
        .commit(&[Change::PutInode(file, inode(Kind::Fifo, 7, 9, ROOT))])
        .unwrap();
    for limits in [Limits::USUAL, TINY] {
        let found = found(limits);
        let texts: Vec<&str> = found.findings.iter().map(|f| &f.text[..]).collect();
        assert_eq!(texts.len(), 1, "{texts:?}");
        assert!(texts[0].contains("metadata of another slice"), "{texts:?}");
        assert_eq!(found.fixes.len(), 1);
    }
}

#[test]
fn a_volume_of_format_1_is_neither_checked_nor_repaired_nor_changed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volume");
    let mut bytes = sample().bytes();
    let LabelState::Valid(mut label) = label::Label::decode(&bytes[..4096]) else {
        panic!("the volume has a label");
    };
    label.version = U32::new(1);
    bytes[..4096].copy_from_slice(&label.encode());
    std::fs::write(&path, &bytes).unwrap();
    for options in [READ, REPAIR] {
        refusal(
            super::check(&path, options),
            "jericho 0.1.0 without a journal",
        );
    }
    assert!(std::fs::read(&path).unwrap() == bytes);
}

#[test]
fn damage_in_the_middle_of_the_journal_names_its_block_and_says_how_much_is_lost() {
    let device = formatted(32, 1);
    let volume = opened(&device);
    volume.mark_dirty().unwrap();
    let (store, allocator) = open_first(&volume, 1 << 20);
    for batch in 0..4 {
        let changes = file_batch(2 + batch * 100, 100, &allocator);
        store.commit(&changes).unwrap();
    }
    let device = device.after_power_cut();
    let block = |bytes: &[u8]| {
        let found = bytes.windows(13).position(|w| w == b"file-00000102");
        found.unwrap() / 4096
    };
    let journal = volume.superblocks().with(|s| {
        let first = s.slices[0].journal_first_block.get() as usize;
        first..first + s.slices[0].journal_blocks.get() as usize
    });
    let bytes = device.bytes();
    let at = journal.start + block(&bytes[journal.start * 4096..journal.end * 4096]);
    device.corrupt(at * 4096 + 2000, b"XXXX");
    let damaged = device.bytes();
    let says = |text: &str| {
        for part in [
            "the journal on memory is damaged: block ",
            "its checksum is wrong",
            "are lost, with at least 3 batches of changes",
        ] {
            assert!(text.contains(part), "{text}");
        }
    };
    // Refused for writing.
    let refused = jericho_metadata::stores::open(&opened(&device), 1 << 20)
        .err()
        .unwrap();
    says(&refused.to_string());
    assert!(refused.to_string().contains("--read-only"), "{refused}");
    // redb may have written its header. The journal and everything else is as before.
    let journal_bytes = |bytes: &[u8]| bytes[journal.start * 4096..journal.end * 4096].to_vec();
    assert!(journal_bytes(&device.bytes()) == journal_bytes(&damaged));
    let damaged = device.bytes();
    let report = run(&device, READ);
    says(
        &report
            .findings
            .iter()
            .find(|f| f.severity == Severity::Damage)
            .unwrap()
            .text,
    );
    assert!(device.bytes() == damaged);
    let repaired = run(&device, REPAIR);
    says(&repaired.repaired[0].text);
    // The first batch is left.
    let (store, _allocator) = open_first(&opened(&device), 1 << 20);
    assert_eq!(store.inode_count().unwrap(), 101);
}

#[test]
fn a_store_with_all_inodes_has_the_memory_that_the_others_leave() {
    let volume = opened(&formatted(64, 2));
    let container_blocks = volume.superblocks().with(|s| s.head.container_blocks.get());
    let store =
        || jericho_metadata::store::StoreRef::from(Store::in_memory(container_blocks).unwrap());
    let all = vec![store(), store()];
    let count = 176;
    let in_root = inode(Kind::Directory, 2, count, ROOT);
    let mut of_root = vec![Change::PutInode(ROOT, in_root)];
    let mut of_files = vec![Change::PutInoMark(1, record::INO_MARK_STEP)];
    for counter in 1..=count {
        let ino = record::ino_of(1, counter);
        let name = format!("{counter}");
        of_root.push(entry(&volume, ROOT, &name, ino, Kind::File));
        of_files.push(Change::PutInode(ino, inode(Kind::File, 1, 0, ROOT)));
    }
    of_root.push(Change::PutValue(record::INODES_NAME, 1));
    of_files.push(Change::PutValue(record::INODES_NAME, count));
    all[0].commit(&of_root).unwrap();
    all[1].commit(&of_files).unwrap();
    let progress = Progress::default();
    let stores = Stores::new(all, &volume, &progress);
    let limits = Limits {
        index_bytes: 60 * 17,
        ..Limits::USUAL
    };
    let pass = pass_over(&volume, &stores, limits).unwrap();
    assert_eq!(pass.found.findings, []);
    assert_eq!((pass.directories, pass.files), (1, count));
    // With half of the memory each in the first window there would be four.
    assert_eq!(pass.windows, 3);
}

#[test]
fn checksums_that_disagree_with_the_extents_are_found_and_repaired() {
    let sums = |group, pages: &[(usize, Sum)]| {
        let change = sums::encode(pages.iter().copied());
        Change::Sums(3, group, change.into())
    };
    // The sample has no checksums, and its file has four pages.
    changed("checksum of inode 3 at page 2", |_| {
        vec![sums(0, &[(2, Sum::Of(1))])]
    });
    changed("checksum of inode 3 at page 2305", |_| {
        vec![sums(9, &[(1, Sum::Bare)])]
    });
    rows(
        "a row of checksums is invalid",
        vec![put(Table::Sums, &record::sums_key(3, 0), &[9])],
    );
    rows(
        "a row of checksums is invalid",
        vec![put(Table::Sums, &[1; 15], &[])],
    );
    changed("has a wrong checksum flag", |_| {
        let extent = Extent {
            page: 0,
            blocks: blocks(10, 4),
            unwritten: false,
            summed: true,
        };
        vec![Change::PutExtent(3, extent)]
    });
}

#[test]
fn data_without_checksums_is_found_and_repaired() {
    let device = formatted_with(
        32,
        &FormatOptions {
            slices: Some(1),
            checksums: true,
            ..FormatOptions::default()
        },
    );
    let volume = opened(&device);
    let (store, allocator) = open_first(&volume, 1 << 20);
    let extent = Extent {
        page: 250,
        blocks: blocks(10, 20),
        unwritten: false,
        summed: true,
    };
    let change = sums::encode((0..13).map(|at| (at, Sum::Of(5))));
    let mut file = inode(Kind::File, 1, 0, ROOT);
    file.blocks = 20;
    store
        .commit(&[
            Change::PutInode(3, file),
            entry(&volume, ROOT, "file", 3, Kind::File),
            Change::PutInode(ROOT, inode(Kind::Directory, 2, 1, ROOT)),
            Change::PutExtent(3, extent),
            Change::Use(extent.blocks),
            Change::Sums(3, 1, change.into()),
            Change::PutInoMark(0, record::INO_MARK_STEP),
            Change::PutValue(record::INODES_NAME, 2),
        ])
        .unwrap();
    drop((store, allocator));
    let report = run(&device, READ);
    let damage = report.findings.iter().map(|found| &found.text);
    let of_sums = damage.filter(|text| text.contains("checksum"));
    let damage: Vec<String> = of_sums.cloned().collect();
    // The pages of the first row, and the last one of the second.
    let expected =
        [250, 269].map(|page| format!("the data of inode 3 at page {page} has no checksum"));
    assert_eq!(damage, expected);
    let report = run(&device, REPAIR);
    assert!(report.is_sound(), "{:?}", report.findings);
}

/// A volume with checksums and /dir/sub/file (7), which has a block in each second page, and wrong checksums of two of them.
fn with_damaged_data() -> Arc<MemoryDevice> {
    const PAGES: u64 = 40;
    let options = FormatOptions {
        slices: Some(1),
        checksums: true,
        ..FormatOptions::default()
    };
    let device = formatted_with(32, &options);
    let volume = opened(&device);
    let (store, allocator) = open_first(&volume, 1 << 20);
    let mut file = inode(Kind::File, 1, PAGES * 4096, 4);
    file.blocks = PAGES / 2;
    let zeros = sums::checksum(&[0; 4096]);
    let sum = |page| match page {
        10 | 30 => Sum::Of(zeros ^ 1),
        _ => Sum::Of(zeros),
    };
    let change = sums::encode((0..PAGES as usize).step_by(2).map(|page| (page, sum(page))));
    let mut changes = vec![
        Change::PutInode(ROOT, inode(Kind::Directory, 3, 1, ROOT)),
        Change::PutInode(2, inode(Kind::Directory, 3, 1, ROOT)),
        Change::PutInode(4, inode(Kind::Directory, 2, 1, 2)),
        Change::PutInode(7, file),
        entry(&volume, ROOT, "dir", 2, Kind::Directory),
        entry(&volume, 2, "sub", 4, Kind::Directory),
        entry(&volume, 4, "file", 7, Kind::File),
        Change::Sums(7, 0, change.into()),
        Change::PutInoMark(0, record::INO_MARK_STEP),
        Change::PutValue(record::INODES_NAME, 4),
    ];
    // From the last page on, so that the blocks are not in the order of the pages.
    for at in 0..PAGES / 2 {
        let page = PAGES - 2 - 2 * at;
        let own = blocks(10 + 2 * at, 1);
        let extent = Extent {
            page,
            blocks: own,
            unwritten: false,
            summed: true,
        };
        changes.extend([Change::PutExtent(7, extent), Change::Use(own)]);
    }
    store.commit(&changes).unwrap();
    drop((store, allocator));
    device
}

#[test]
fn data_is_read_in_batches_that_the_memory_bounds() {
    let device = with_damaged_data();
    let devices: [Arc<dyn Device>; 1] = [device.clone()];
    for limits in [Limits::USUAL, TINY] {
        let mut report = run_within(&device, READ, limits);
        assert_eq!(report.findings, []);
        let progress = Arc::default();
        check_data_within(&devices, &mut report, limits, &progress).unwrap();
        let texts = report.findings.iter().map(|finding| &finding.text);
        let expected = [10, 30].map(|page| {
            format!(
                "/dir/sub/file (inode 7), offset {}: the data is damaged: ",
                page * 4096
            )
        });
        assert_eq!(texts.clone().count(), 2, "{:?}", report.findings);
        assert!(
            texts
                .zip(&expected)
                .all(|(text, begin)| text.starts_with(begin))
        );
        assert_eq!((report.damaged_pages, report.data_findings), (2, 2));
        assert_eq!(report.read_bytes, Some(20 * 4096));
        assert_eq!(progress.state(), (Stage::Data, 20 * 4096, Some(20 * 4096)));
    }
}
