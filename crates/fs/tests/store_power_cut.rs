//! Power cuts during all operations of the store, with writes lost, reordered and torn.

use std::sync::Arc;

use jericho_format::record;
use jericho_fs::Error;
use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Kind, ROOT};
use jericho_metadata::alloc::Allocator;
use jericho_metadata::store::{Change, Extent, InodeRecord, Store};
use jericho_sim::{FaultPlan, SimDevice};
use jericho_storage::Device;
use jericho_volume::{FormatOptions, OpenMode, Volume};

/// Enough for several transactions of a checkpoint: on a small volume each has 256 rows.
const FILES_PER_BATCH: u64 = 200;
/// Files of a batch that the next one removes.
const REMOVED_PER_BATCH: u64 = 50;
const BATCHES: u64 = 3;

/// Returns the number of files after this many batches.
fn files_after(batches: u64) -> u64 {
    batches * FILES_PER_BATCH - batches.saturating_sub(1) * REMOVED_PER_BATCH
}

fn open(device: &Arc<SimDevice>) -> Result<Volume, Error> {
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    let mode = OpenMode::WRITE;
    Volume::open_from_devices(devices, mode).map_err(|e| Error::Store(e.to_string()))
}

/// Creates files in the root and removes some of the batch before, so that the volume is sound after each batch.
fn batch(
    volume: &Volume,
    store: &Store,
    allocator: &Allocator,
    number: u64,
) -> Result<Vec<Change>, Error> {
    let file = |ino: u64| InodeRecord {
        kind: Kind::File,
        perm: 0o644,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        generation: 1,
        size: 4096,
        atime_ns: 0,
        mtime_ns: ino.into(),
        ctime_ns: 0,
        btime_ns: 0,
        slice: Some(0),
        placement: None,
        threads: Default::default(),
        parent: ROOT,
        blocks: 1,
        target: None,
    };
    let root = InodeRecord {
        kind: Kind::Directory,
        nlink: 2,
        size: files_after(number + 1),
        slice: None,
        blocks: 0,
        ..file(ROOT)
    };
    let mut changes = vec![
        Change::PutInode(ROOT, root),
        Change::PutInoMark(0, record::INO_MARK_STEP),
        Change::PutValue(record::INODES_NAME, 1 + files_after(number + 1)),
    ];
    let name_of = |ino: u64| format!("file-{ino}").into_bytes().into_boxed_slice();
    for index in 0..FILES_PER_BATCH {
        let ino = 2 + number * FILES_PER_BATCH + index;
        let name = name_of(ino);
        let mut ranges = Vec::new();
        allocator.reserve(1)?;
        allocator.allocate(0, None, 1, &mut ranges)?;
        for blocks in ranges {
            let extent = Extent {
                page: 0,
                blocks,
                unwritten: false,
                summed: false,
            };
            changes.push(Change::PutExtent(ino, extent));
            changes.push(Change::Use(blocks));
        }
        let hash = volume.hash_name(&name);
        changes.push(Change::PutInode(ino, file(ino)));
        changes.push(Change::PutEntry {
            dir: ROOT,
            hash,
            name,
            ino,
            kind: Kind::File,
        });
    }
    for index in (0..REMOVED_PER_BATCH).filter(|_| number > 0) {
        let ino = 2 + (number - 1) * FILES_PER_BATCH + index;
        let name = name_of(ino);
        let hash = volume.hash_name(&name);
        for extent in store.extents(ino)? {
            changes.push(Change::Free(extent.blocks));
            changes.push(Change::DelExtent(ino, extent.page));
        }
        changes.push(Change::DelEntry {
            dir: ROOT,
            hash,
            name,
        });
        changes.push(Change::DelInode(ino));
    }
    Ok(changes)
}

/// Commits the batches, with a checkpoint at the end, until something fails. Returns the number of acknowledged batches.
fn work(device: &Arc<SimDevice>) -> (u64, Option<Error>) {
    let mut done = 0;
    let result = (|| {
        let volume = open(device)?;
        volume.mark_dirty()?;
        let (stores, allocator) = jericho_metadata::stores::open(&volume, 8 << 20)?;
        for number in 0..BATCHES {
            stores[0].commit(&batch(&volume, &stores[0], &allocator, number)?)?;
            done += 1;
        }
        stores[0].checkpoint()
    })();
    (done, result.err())
}

#[test]
fn a_power_cut_at_any_moment_leaves_a_sound_volume_with_all_acknowledged_batches() {
    let made = Arc::new(SimDevice::new("sim", 24 << 20));
    let devices: Vec<Arc<dyn Device>> = vec![made.clone()];
    format_devices(&devices, &[], &FormatOptions::default()).unwrap();
    let mut cuts = 0;
    for nth in 1.. {
        let device = Arc::new(made.crash(0));
        device.set_plan(FaultPlan::cut_power_at(nth));
        let (acknowledged, error) = work(&device);
        let is_cut = error.is_some();
        cuts += u64::from(is_cut);
        for seed in 0..3 {
            let what = format!("power cut at operation {nth}, seed {seed}");
            let after = Arc::new(device.crash(seed));
            let view: Vec<Arc<dyn Device>> = vec![after.clone()];
            let report = check_devices(view, CheckOptions::default()).unwrap();
            assert!(report.is_sound(), "{what}: {:?}", report.findings);
            let volume = open(&after).unwrap();
            let (stores, _allocator) = jericho_metadata::stores::open(&volume, 1 << 20).unwrap();
            let files = stores[0].inode_count().unwrap() - 1;
            let batches = (0..=BATCHES).find(|batches| files_after(*batches) == files);
            let batches = batches.unwrap_or_else(|| panic!("{what}: found a part of a batch"));
            assert!(
                batches == acknowledged || batches == acknowledged + 1,
                "{what}: {acknowledged} batches were acknowledged, {batches} found"
            );
        }
        if !is_cut {
            break;
        }
    }
    assert!(cuts > 20, "only {cuts} operations");
}
