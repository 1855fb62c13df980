//! A device is added to a volume: its slices can be used, and a power cut leaves the old volume or the new one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_fs::add::add_device;
use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, Ino, Kind, ROOT};
use jericho_fs::{Fs, FsOptions};
use jericho_sim::{DeviceSet, FaultPlan, SimDevice};
use jericho_storage::Device;
use jericho_volume::{AddError, FormatOptions, OpenMode, Volume, VolumeError};

const MIB: u64 = 1 << 20;
const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};

/// Makes a volume of two slices on two devices, and a third device, which holds `junk`. All have one power supply.
fn made(has_stores: bool, junk: u8) -> DeviceSet {
    made_with(has_stores, false, junk)
}

fn made_with(has_stores: bool, checksums: bool, junk: u8) -> DeviceSet {
    let device = |name| SimDevice::new(name, 80 * MIB);
    let set = DeviceSet::new([device("one"), device("two"), device("three")]);
    let options = FormatOptions {
        slices: Some(2),
        has_stores: Some(has_stores),
        checksums,
        ..FormatOptions::default()
    };
    let paths = ["one", "two"].map(PathBuf::from);
    format_devices(&set.as_devices()[..2], &paths, &options).unwrap();
    let third = &set.devices()[2];
    third.write_at(0, &vec![junk; 1 << 20]).unwrap();
    third.flush().unwrap();
    let fs = mount(&set.as_devices()[..2]).unwrap();
    fs.mkdir(ROOT, b"old", 0o755, CALLER).unwrap();
    fs.close().unwrap();
    set
}

fn open(devices: &[Arc<dyn Device>]) -> Volume {
    Volume::open_from_devices(devices.to_vec(), OpenMode::WRITE).unwrap()
}

/// Mounts without caches, so that files have names and no contents.
fn mount(devices: &[Arc<dyn Device>]) -> Result<Arc<Fs>, String> {
    let options = FsOptions {
        store_cache_bytes: 1 << 20,
        read_only: false,
        inode_cache: 100,
        commit_interval_ms: 3_600_000,
    };
    let volume = Volume::open_from_devices(devices.to_vec(), OpenMode::WRITE);
    let volume = volume.map_err(|error| error.to_string())?;
    Fs::open(Arc::new(volume), vec![], options).map_err(|error| error.to_string())
}

fn add(set: &DeviceSet, slices: usize) -> Result<(), AddError> {
    let devices = set.as_devices();
    let volume = open(&devices[..2]);
    add_device(&volume, devices[2].clone(), Path::new("three"), slices).map(drop)
}

/// Returns the devices that the volume has, of those in the set: a mount opens as many as the superblock of the first one names.
fn devices_of(set: &DeviceSet) -> Vec<Arc<dyn Device>> {
    let all = set.as_devices();
    let named = |count: usize| {
        let volume = Volume::open_from_devices(all[..count].to_vec(), OpenMode::READ);
        match volume {
            Ok(volume) => volume.superblocks().with(|s| s.devices.len()),
            // It names a device that is not among these.
            Err(VolumeError::DeviceMissing { index, .. }) => index + 1,
            Err(error) => panic!("{error}"),
        }
    };
    all[..named(2)].to_vec()
}

fn assert_sound(devices: &[Arc<dyn Device>], what: &str) {
    let report = check_devices(devices.to_vec(), CheckOptions::default()).unwrap();
    assert!(report.is_sound(), "{what}: {:?}", report.findings);
}

/// Returns the slice of an inode.
fn slice_of(ino: Ino) -> u64 {
    ino >> 40
}

/// Makes `count` directories in the root and a file in each. Returns the slices in which they are.
fn use_all(fs: &Fs, name: &str, count: usize) -> Vec<u64> {
    let make = |number| {
        let dir = format!("{name}{number}");
        let dir = fs.mkdir(ROOT, dir.as_bytes(), 0o755, CALLER).unwrap();
        let attr = fs.mknod(dir.ino, b"file", Kind::File, 0o644, 0, CALLER);
        let file = fs.open_file(attr.unwrap().ino).unwrap();
        fs.fallocate(&file, 0, 0, MIB).unwrap();
        slice_of(file.ino())
    };
    let slices = (0..count).map(make).collect();
    fs.commit().unwrap();
    slices
}

#[test]
fn a_volume_with_checksums_keeps_them_when_a_device_is_added() {
    let set = made_with(true, true, 7);
    add(&set, 1).unwrap();
    let devices = set.as_devices();
    assert!(open(&devices).has_checksums());
    let fs = mount(&devices).unwrap();
    assert!(use_all(&fs, "new", 6).contains(&2), "the added slice");
    fs.close().unwrap();
    assert_sound(&devices, "with checksums");
}

#[test]
fn an_added_device_has_new_slices_with_its_space_that_directories_get_in_turn() {
    for slices in [1, 2] {
        let set = match slices {
            1 => made(true, 7),
            // Slices of 64 MiB each.
            _ => made(true, 7).with(2, SimDevice::new("three", 160 * MIB)),
        };
        let before = mount(&set.as_devices()[..2]).unwrap();
        let old = before.statfs().unwrap().blocks;
        before.close().unwrap();
        drop(before);
        add(&set, slices).unwrap();
        assert_sound(&set.as_devices(), "after the addition");
        let fs = mount(&set.as_devices()).unwrap();
        let added = fs.statfs().unwrap().blocks - old;
        let size = set.devices()[2].size_bytes() / 4096;
        assert!(added > size * 3 / 4 && added < size, "{added} of {size}");
        let mut found = use_all(&fs, "new", 2 * (2 + slices));
        found.sort_unstable();
        found.dedup();
        assert_eq!(found, (0..2 + slices as u64).collect::<Vec<_>>());
        fs.close().unwrap();
        drop(fs);
        assert_sound(&set.as_devices(), "after its use");
        let fs = mount(&set.as_devices()).unwrap();
        fs.lookup(ROOT, b"old").unwrap();
        let new = fs.lookup(ROOT, b"new0").unwrap();
        assert_eq!(fs.lookup(new.ino, b"file").unwrap().size, MIB);
        fs.close().unwrap();
    }
}

#[test]
fn a_change_without_the_new_device_counts_when_the_device_is_back() {
    let set = made(true, 7);
    add(&set, 1).unwrap();
    // The first superblock after the addition must be newer than all that the new device has got meanwhile.
    open(&set.with_missing(&[2])).mark_dirty().unwrap();
    assert!(open(&set.as_devices()).is_dirty());
}

#[test]
fn a_volume_of_one_slice_gets_a_second_one() {
    let device = |name| SimDevice::new(name, 80 * MIB);
    let set = DeviceSet::new([device("one"), device("two")]);
    let options = FormatOptions {
        slices: Some(1),
        ..FormatOptions::default()
    };
    let devices = set.as_devices();
    format_devices(&devices[..1], &[PathBuf::from("one")], &options).unwrap();
    let volume = open(&devices[..1]);
    add_device(&volume, devices[1].clone(), Path::new("two"), 1).unwrap();
    let fs = mount(&devices).unwrap();
    let slices = use_all(&fs, "d", 4);
    assert!(slices.contains(&0) && slices.contains(&1), "{slices:?}");
    fs.close().unwrap();
    drop(fs);
    assert_sound(&devices, "two slices");
}

#[test]
fn a_device_is_refused_if_the_volume_cannot_have_it_and_nothing_changes() {
    let shared = made(false, 7);
    let set = made(true, 7);
    let digests = |set: &DeviceSet| [0, 1, 2].map(|n: usize| set.devices()[n].digest());
    let before = (digests(&shared), digests(&set));
    let refused = add(&shared, 1);
    assert!(matches!(refused, Err(AddError::SharedStore)), "{refused:?}");
    let refused = add(&set, 2).unwrap_err();
    assert!(refused.to_string().contains("too small"), "{refused}");
    let refused = add(&set, 0).unwrap_err();
    assert!(
        matches!(refused, AddError::Volume(VolumeError::NoSlices)),
        "{refused}"
    );
    let devices = set.as_devices();
    let part = open(&set.with_missing(&[1])[..2]);
    let refused = add_device(&part, devices[2].clone(), Path::new("three"), 1).unwrap_err();
    assert!(refused.to_string().contains("two is missing"), "{refused}");
    let refused = add_device(
        &open(&devices[..2]),
        Arc::new(SimDevice::new("huge", 300 * 80 * MIB)),
        Path::new("huge"),
        255,
    );
    let refused = refused.unwrap_err();
    assert!(refused.to_string().contains("257 slices"), "{refused}");
    assert_eq!((digests(&shared), digests(&set)), before);
}

#[test]
fn whichever_operation_of_the_new_device_fails_the_volume_is_as_before() {
    const EIO: i32 = 5;
    let made = made(true, 7);
    let mut failures = 0;
    for nth in 1.. {
        let set = made.crash(0);
        let digests = || [0, 1].map(|n: usize| set.devices()[n].digest());
        let before = digests();
        set.devices()[2].set_plan(FaultPlan::fail_nth(None, nth, EIO));
        let Err(error) = add(&set, 1) else {
            break;
        };
        failures += 1;
        assert!(error.to_string().contains("three"), "{nth}: {error}");
        assert!(digests() == before, "{nth}: the volume changed");
        // A device that failed a flush fails the later ones, so it begins again.
        let again = set.crash(0);
        assert_sound(&again.as_devices()[..2], "after the failure");
        add(&again, 1).unwrap();
        assert_eq!(devices_of(&again).len(), 3);
    }
    assert!(failures > 20, "only {failures} failures");
}

/// Whether the volume is mounted while the device is added.
#[derive(Clone, Copy, PartialEq)]
enum While {
    Closed,
    Mounted,
}

/// Adds the third device. In a mounted volume, makes durable directories before and after.
fn add_while(set: &DeviceSet, state: While) -> Result<(), String> {
    if state == While::Closed {
        return add(set, 1).map_err(|error| error.to_string());
    }
    let devices = set.as_devices();
    let volume = Arc::new(open(&devices[..2]));
    let options = FsOptions {
        store_cache_bytes: 1 << 20,
        read_only: false,
        inode_cache: 100,
        commit_interval_ms: 3_600_000,
    };
    let fs = Fs::open(volume.clone(), vec![], options).map_err(|error| error.to_string())?;
    let make = |name: &[u8]| {
        let made = fs.mkdir(ROOT, name, 0o755, CALLER);
        made.and_then(|_| fs.commit())
            .map_err(|error| error.to_string())
    };
    make(b"before")?;
    let added = add_device(&volume, devices[2].clone(), Path::new("three"), 1);
    let made = make(b"after");
    // The mount has the slices that it had.
    let slices = use_some(&fs);
    assert!(slices.iter().all(|slice| *slice < 2), "{slices:?}");
    added.map_err(|error| error.to_string())?;
    made?;
    fs.close().map_err(|error| error.to_string())
}

/// Makes directories in the root, as long as that is possible. Returns their slices.
fn use_some(fs: &Fs) -> Vec<u64> {
    let make = |number| {
        let name = format!("some{number}");
        fs.mkdir(ROOT, name.as_bytes(), 0o755, CALLER).ok()
    };
    let made = (0..4).map_while(make);
    made.map(|attr| slice_of(attr.ino)).collect()
}

#[test]
fn a_power_cut_at_any_moment_of_an_addition_leaves_the_old_or_the_new_volume() {
    cut_additions(While::Closed);
}

#[test]
fn a_power_cut_at_any_moment_of_an_addition_to_a_mounted_volume_keeps_what_was_synced() {
    cut_additions(While::Mounted);
}

fn cut_additions(state: While) {
    let (mut seen_old, mut seen_new, mut cuts) = (0, 0, 0);
    let made = made(true, 7);
    for nth in 1.. {
        let set = made.crash(0);
        let begun = set.supply().changes();
        set.supply().cut_at(nth);
        let failed = add_while(&set, state).err();
        // The last writes bring the older copies of the superblock up to date, and the addition does not need them.
        let is_cut = set.supply().changes() - begun >= nth;
        let seeds = if state == While::Closed { 3 } else { 1 };
        for seed in 0..seeds {
            let what = format!("power cut at operation {nth}, seed {seed}");
            let after = set.crash(seed);
            let devices = devices_of(&after);
            let is_new = devices.len() == 3;
            assert!(is_new || failed.is_some(), "{what}: the addition is lost");
            seen_old += u32::from(!is_new);
            seen_new += u32::from(is_new && failed.is_some());
            assert_sound(&devices, &what);
            // The volume works, and the interrupted addition can be repeated.
            let fs = mount(&devices).unwrap();
            fs.lookup(ROOT, b"old").unwrap();
            if failed.is_none() && state == While::Mounted {
                fs.lookup(ROOT, b"before").unwrap();
                fs.lookup(ROOT, b"after").unwrap();
            }
            use_all(&fs, "a", 3);
            fs.close().unwrap();
            drop(fs);
            if !is_new {
                add(&after, 1).unwrap();
            }
            let fs = mount(&after.as_devices()).unwrap();
            assert!(use_all(&fs, "b", 3).contains(&2), "{what}");
            fs.close().unwrap();
            drop(fs);
            assert_sound(&after.as_devices(), &what);
        }
        cuts += 1;
        if !is_cut {
            break;
        }
    }
    assert!(cuts > 20, "only {cuts} operations");
    assert!(seen_old > 0 && seen_new > 0, "{seen_old} {seen_new}");
}
