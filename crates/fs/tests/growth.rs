//! A volume that grows: its new space is used at once, and a power cut leaves the old or the new size.

use std::path::PathBuf;
use std::sync::Arc;

use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, Kind, ROOT};
use jericho_fs::{Error, File, Fs, FsOptions};
use jericho_sim::{FaultPlan, Operation, SimDevice};
use jericho_storage::Device;
use jericho_volume::{FormatOptions, GrowError, GrowRequest, OpenMode, Volume};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
const OLD_BYTES: u64 = 32 * MIB;
const NEW_BYTES: u64 = 56 * MIB;
/// Bytes of a file that fits only into the new space.
const NEW_FILE_BYTES: u64 = 20 * MIB;
const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};

fn devices(device: &Arc<SimDevice>) -> Vec<Arc<dyn Device>> {
    vec![device.clone()]
}

/// Opens the filesystem without caches, so that its files have space and no contents.
fn open(device: &Arc<SimDevice>) -> Result<Arc<Fs>, String> {
    let volume = Volume::open_from_devices(devices(device), OpenMode::WRITE);
    let options = FsOptions {
        store_cache_bytes: 1 << 20,
        read_only: false,
        inode_cache: 100,
        commit_interval_ms: 3_600_000,
    };
    let volume = volume.map_err(|error| error.to_string())?;
    Fs::open(Arc::new(volume), vec![], options).map_err(|error| error.to_string())
}

fn create(fs: &Fs, name: &str) -> Result<Arc<File>, Error> {
    let (name, kind) = (name.as_bytes(), Kind::File);
    let attr = fs.mknod(ROOT, name, kind, 0o644, 0, CALLER)?;
    fs.open_file(attr.ino)
}

/// Gives a file all free space after `from`. Returns the end.
fn fill(fs: &Fs, file: &Arc<File>, from: u64) -> u64 {
    let mut end = from;
    for pages in (0..16).rev().map(|shift| 1 << shift) {
        while fs.fallocate(file, 0, end, pages * PAGE).is_ok() {
            end += pages * PAGE;
        }
    }
    end
}

/// Makes a volume of two slices that has no free block.
fn full_volume() -> Arc<SimDevice> {
    let device = Arc::new(SimDevice::new("sim", OLD_BYTES));
    let options = FormatOptions {
        slices: Some(2),
        ..FormatOptions::default()
    };
    format_devices(&devices(&device), &[PathBuf::from("sim")], &options).unwrap();
    let fs = open(&device).unwrap();
    let file = create(&fs, "full").unwrap();
    assert!(fill(&fs, &file, 0) > 8 * MIB);
    drop(file);
    fs.close().unwrap();
    device
}

fn assert_sound(device: &Arc<SimDevice>, what: &str) {
    let report = check_devices(devices(device), CheckOptions::default()).unwrap();
    assert!(report.is_sound(), "{what}: {:?}", report.findings);
}

#[test]
fn a_full_volume_has_its_new_space_at_once_and_after_a_remount() {
    let device = full_volume();
    let fs = open(&device).unwrap();
    let before = fs.statfs().unwrap();
    let file = create(&fs, "new").unwrap();
    let full = fs.fallocate(&file, 0, 0, NEW_FILE_BYTES);
    assert_eq!(full.unwrap_err().errno(), 28);
    assert!(fs.grow(&GrowRequest::default()).unwrap().is_empty());

    device.enlarge(NEW_BYTES);
    let grown = fs.grow(&GrowRequest::default()).unwrap();
    assert_eq!(
        (grown[0].old_bytes, grown[0].new_bytes),
        (OLD_BYTES, NEW_BYTES)
    );
    let after = fs.statfs().unwrap();
    // The two slices get whole blocks of the new space each.
    let added = (NEW_BYTES - OLD_BYTES) / PAGE;
    assert!((after.blocks - before.blocks).abs_diff(added) <= 2);
    assert!(after.free >= before.free + added - 2);
    let end = fill(&fs, &file, 0);
    assert!(end >= NEW_FILE_BYTES);
    let slices: Vec<(u64, u64)> = (0..2).map(|slice| fs.space_of(slice)).collect();
    assert!(slices.iter().all(|(_, free)| *free == 0), "{slices:?}");
    drop(file);
    fs.close().unwrap();
    assert_sound(&device, "after the growth");

    let fs = open(&device).unwrap();
    assert_eq!(fs.statfs().unwrap().blocks, after.blocks);
    assert_eq!(fs.lookup(ROOT, b"new").unwrap().size, end);
    // The second growth continues the last region of one slice.
    device.enlarge(NEW_BYTES + OLD_BYTES);
    fs.grow(&GrowRequest::default()).unwrap();
    let file = create(&fs, "again").unwrap();
    assert!(fill(&fs, &file, 0) >= NEW_FILE_BYTES);
    drop(file);
    fs.close().unwrap();
    assert_sound(&device, "after the remount");
}

#[test]
fn a_volume_that_takes_no_changes_does_not_grow() {
    let device = full_volume();
    device.enlarge(NEW_BYTES);
    let mode = OpenMode::READ;
    let volume = Arc::new(Volume::open_from_devices(devices(&device), mode).unwrap());
    let refused = volume.grow(&GrowRequest::default());
    assert!(matches!(refused, Err(GrowError::ReadOnly)), "{refused:?}");

    let fs = open(&device).unwrap();
    device.set_plan(FaultPlan::cut_power_at(1));
    create(&fs, "lost").unwrap();
    fs.commit().unwrap_err();
    let refused = fs.grow(&GrowRequest::default());
    assert!(matches!(refused, Err(GrowError::Failed(_))), "{refused:?}");
}

#[test]
fn a_growth_whose_device_fails_leaves_a_sound_volume_and_can_be_repeated() {
    let made = full_volume();
    for (operation, nth) in [
        (Operation::Write, 1),
        (Operation::Write, 2),
        (Operation::Flush, 1),
        (Operation::Flush, 2),
    ] {
        let what = format!("{operation} {nth} fails");
        let device = Arc::new(made.crash(0));
        let fs = open(&device).unwrap();
        let before = fs.statfs().unwrap();
        device.enlarge(NEW_BYTES);
        device.set_plan(FaultPlan::fail_nth(Some(operation), nth, 5));
        let grown = fs.grow(&GrowRequest::default());
        // The second write brings the other copy of the superblock up to date, and the volume does not need it.
        assert_eq!(grown.is_ok(), nth == 2, "{what}: {grown:?}");
        let after = fs.statfs().unwrap();
        assert_eq!(after.blocks > before.blocks, nth == 2, "{what}");
        if operation == Operation::Flush {
            // A failed flush ends all changes.
            create(&fs, "lost").unwrap();
            fs.commit().unwrap_err();
            drop(fs);
            for seed in 0..4 {
                assert_sound(&Arc::new(device.crash(seed)), &what);
            }
            continue;
        }
        fs.grow(&GrowRequest::default()).unwrap();
        let file = create(&fs, "new").unwrap();
        assert!(fill(&fs, &file, 0) >= NEW_FILE_BYTES, "{what}");
        drop(file);
        fs.close().unwrap();
        assert_sound(&device, &what);
    }
}

/// What a mount had acknowledged when the power was cut.
#[derive(Default)]
struct Acknowledged {
    growth: bool,
    file: bool,
    close: bool,
}

/// Grows the volume and uses its new space, until something fails.
fn work(device: &Arc<SimDevice>, done: &mut Acknowledged) -> Result<(), String> {
    let fs = open(device)?;
    fs.grow(&GrowRequest::default())
        .map_err(|error| error.to_string())?;
    done.growth = true;
    let result = (|| {
        let file = create(&fs, "new")?;
        fs.fallocate(&file, 0, 0, NEW_FILE_BYTES)?;
        fs.commit()?;
        done.file = true;
        drop(file);
        fs.close()?;
        done.close = true;
        Ok::<_, Error>(())
    })();
    result.map_err(|error| error.to_string())
}

#[test]
fn a_power_cut_at_any_moment_of_a_growth_leaves_the_old_or_the_new_size() {
    let made = full_volume();
    let blocks_of = |volume: &Volume| volume.slices().iter().map(|slice| slice.blocks).sum();
    let capacity = |device: &Arc<SimDevice>| -> u64 {
        blocks_of(&Volume::open_from_devices(devices(device), OpenMode::WRITE).unwrap())
    };
    let old = capacity(&made);
    let (mut seen_old, mut seen_new, mut cuts) = (0, 0, 0);
    for nth in 1.. {
        let device = Arc::new(made.crash(0));
        device.enlarge(NEW_BYTES);
        device.set_plan(FaultPlan::cut_power_at(nth));
        let mut done = Acknowledged::default();
        let is_cut = work(&device, &mut done).is_err();
        assert_eq!(is_cut, !done.close);
        for seed in 0..3 {
            let what = format!("power cut at operation {nth}, seed {seed}");
            let after = Arc::new(device.crash(seed));
            assert_sound(&after, &what);
            let found = capacity(&after);
            let is_new = found > old;
            assert!(is_new || found == old, "{what}: {found} blocks");
            assert!(is_new || !done.growth, "{what}: the growth is lost");
            seen_old += u32::from(!is_new);
            seen_new += u32::from(is_new && !done.growth);

            // The interrupted growth can be repeated, before or after the recovery, and its space can be used.
            if seed == 0 {
                let volume = Volume::open_from_devices(devices(&after), OpenMode::WRITE).unwrap();
                volume.grow(&GrowRequest::default()).unwrap();
            }
            let fs = open(&after).unwrap();
            let file = fs.lookup(ROOT, b"new");
            assert!(file.is_ok() || !done.file, "{what}: the file is lost");
            fs.grow(&GrowRequest::default()).unwrap();
            let other = create(&fs, "other").unwrap();
            let end = fill(&fs, &other, 0);
            match file {
                // Without a sync, a part of the space may be durable, and a size that ends with it.
                Ok(attr) if !done.file => assert!(attr.size <= NEW_FILE_BYTES, "{what}"),
                Ok(attr) => assert_eq!(attr.size, NEW_FILE_BYTES, "{what}"),
                Err(_) => assert!(end >= NEW_FILE_BYTES, "{what}: {end} bytes were free"),
            }
            drop(other);
            fs.close().unwrap();
            assert_sound(&after, &what);
            assert!(capacity(&after) > old, "{what}");
        }
        cuts += 1;
        if !is_cut {
            break;
        }
    }
    assert!(cuts > 20, "only {cuts} operations");
    assert!(seen_old > 0 && seen_new > 0, "{seen_old} {seen_new}");
}
