//! A device is added to a mounted volume, and the mount uses its slices at once.

mod mount;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jericho_cache::{Config, FRAMES_MIN, Intent, Slice};
use jericho_fs::add::add_device;
use jericho_fs::check::data::check_data;
use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Ino, Kind, ROOT};
use jericho_fs::{CacheError, Error, File, Fs, FsOptions, TakeError};
use jericho_sim::{DeviceSet, FaultPlan, SimDevice};
use jericho_storage::Device;
use jericho_volume::superblocks::read_copies;
use jericho_volume::{Added, FormatOptions, GrowRequest, OpenMode, Volume, VolumeError};

use mount::{CALLER, pattern, start_slices};

const MIB: u64 = 1 << 20;
const BYTES: usize = 5 * 4096 + 100;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// Makes a volume with `slices` slices, each on a device of its own, and three further devices. All have one power supply.
fn formatted(slices: u16, checksums: bool) -> DeviceSet {
    let names = ["one", "two", "three", "four", "five"];
    let count = usize::from(slices) + 3;
    let device = |name: &&str| SimDevice::new(name, 72 * MIB).without_fua();
    let set = DeviceSet::new(names[..count].iter().map(device));
    let options = FormatOptions {
        slices: Some(slices),
        has_stores: Some(slices > 1),
        checksums,
        ..FormatOptions::default()
    };
    let paths: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
    let devices = &set.as_devices()[..usize::from(slices)];
    format_devices(devices, &paths[..devices.len()], &options).unwrap();
    set
}

/// A mount with caches.
struct Mounted {
    volume: Arc<Volume>,
    fs: Arc<Fs>,
    slices: Mutex<Vec<Arc<Slice>>>,
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.slices.lock().unwrap().iter().for_each(|s| s.close());
    }
}

fn try_mount(devices: &[Arc<dyn Device>]) -> Result<Mounted, String> {
    let text = |error: &dyn std::error::Error| error.to_string();
    let volume = Volume::open_from_devices(devices.to_vec(), OpenMode::WRITE);
    let volume = Arc::new(volume.map_err(|error| text(&error))?);
    let slices = start_slices(&volume, Duration::from_secs(3600));
    let options = FsOptions {
        store_cache_bytes: 4 << 20,
        read_only: false,
        inode_cache: 1000,
        commit_interval_ms: 3_600_000,
    };
    let fs = Fs::open(volume.clone(), slices.clone(), options);
    Ok(Mounted {
        volume,
        fs: fs.map_err(|error| text(&error))?,
        slices: Mutex::new(slices),
    })
}

fn mount(devices: &[Arc<dyn Device>]) -> Mounted {
    try_mount(devices).unwrap()
}

fn caches(volume: &Volume, added: &Added) -> Vec<Arc<Slice>> {
    let start = |slice| {
        let config = Config {
            id: slice as u16,
            frames: FRAMES_MIN,
            kernel_node: None,
            cpus: Vec::new(),
            dirty_age: Duration::from_secs(3600),
        };
        Slice::start(&config, volume.device_list()).unwrap()
    };
    added.slices().map(start).collect()
}

impl Mounted {
    fn add(&self, device: &Arc<SimDevice>, slices: usize) -> Result<Added, String> {
        let (name, device) = (device.name(), device.clone());
        let added = add_device(&self.volume, device, Path::new(&*name), slices);
        added.map_err(|error| error.to_string())
    }

    fn take(&self, added: &Added) -> Result<(), TakeError> {
        let make = || Ok(caches(&self.volume, added));
        let show = |caches: &[Arc<Slice>]| self.slices.lock().unwrap().extend_from_slice(caches);
        self.fs.take(added, make, show)
    }

    fn add_and_take(&self, device: &Arc<SimDevice>, slices: usize) {
        let added = self.add(device, slices).unwrap();
        self.take(&added).unwrap();
    }

    fn cache_of(&self, file: &File) -> Arc<Slice> {
        let home = usize::from(file.layout().home());
        self.slices.lock().unwrap()[home].clone()
    }

    fn create(&self, dir: Ino, name: &str) -> Result<Arc<File>, Error> {
        let attr = (self.fs).mknod(dir, name.as_bytes(), Kind::File, 0o644, 0, CALLER)?;
        self.fs.open_file(attr.ino)
    }

    fn write(&self, file: &Arc<File>, data: &[u8]) -> Result<(), Error> {
        let _writing = file.writing();
        self.fs.begin_write(file, 0, data.len() as u64)?;
        let (sender, receiver) = channel();
        let pages = data.len().div_ceil(4096) as u32;
        let got = move |pinned| sender.send(pinned).unwrap();
        (self.cache_of(file)).get(&file.object(), 0, pages, Intent::Modify, got);
        let pinned = receiver.recv().unwrap();
        let mut pinned = pinned.map_err(jericho_fs::error::of_cache)?;
        for (page, bytes) in (0..).zip(data.chunks(4096)) {
            pinned.write(page, 0, bytes).unwrap();
        }
        drop(pinned);
        self.fs.end_write(file, 0, data.len() as u64);
        Ok(())
    }

    fn read(&self, file: &Arc<File>) -> Vec<u8> {
        let mut data = vec![0; file.size() as usize];
        for (page, bytes) in (0..).zip(data.chunks_mut(4096)) {
            let (sender, receiver) = channel();
            let got = move |pinned| sender.send(pinned).unwrap();
            (self.cache_of(file)).get(&file.object(), page, 1, Intent::Read, got);
            let pinned = receiver.recv().unwrap().unwrap();
            pinned.read(page, 0, bytes).unwrap();
        }
        data
    }

    fn fsync(&self, file: &Arc<File>) -> Result<(), Error> {
        let (sender, receiver) = channel();
        let done = Box::new(move |result| sender.send(result).unwrap());
        self.fs.fsync_blocking(file, false, done);
        receiver.recv().unwrap()
    }

    /// Makes a durable directory with a home in this slice.
    fn dir_in(&self, slice: u16, name: &str) -> Result<Ino, Error> {
        let ino = self.dir(name)?;
        self.fs.set_placement(ino, slice)?;
        self.fs.commit()?;
        Ok(ino)
    }

    fn dir(&self, name: &str) -> Result<Ino, Error> {
        let made = self.fs.mkdir(ROOT, name.as_bytes(), 0o755, CALLER);
        Ok(made?.ino)
    }

    /// Makes a durable file with contents.
    fn synced(&self, dir: Ino, name: &str, seed: u64) -> Result<Arc<File>, Error> {
        let file = self.create(dir, name)?;
        self.write(&file, &pattern(seed, BYTES))?;
        self.fsync(&file)?;
        Ok(file)
    }

    fn contents(&self, dir: Ino, name: &str) -> Vec<u8> {
        let attr = self.fs.lookup(dir, name.as_bytes()).unwrap();
        let file = self.fs.open_file(attr.ino).unwrap();
        self.read(&file)
    }

    fn lookup(&self, name: &str) -> Ino {
        self.fs.lookup(ROOT, name.as_bytes()).unwrap().ino
    }
}

fn assert_sound(devices: &[Arc<dyn Device>], what: &str) {
    let mut report = check_devices(devices.to_vec(), CheckOptions::default()).unwrap();
    check_data(devices, &mut report, &Arc::default()).unwrap();
    assert!(report.is_sound(), "{what}: {:#?}", report.findings);
}

/// Returns the devices that the volume has, of those in the set.
fn devices_of(set: &DeviceSet, old: usize) -> Vec<Arc<dyn Device>> {
    let all = set.as_devices();
    let volume = Volume::open_from_devices(all[..old].to_vec(), OpenMode::READ);
    let count = match volume {
        Ok(volume) => volume.superblocks().with(|s| s.devices.len()),
        Err(VolumeError::DeviceMissing { .. }) => old + 1,
        Err(error) => panic!("{error}"),
    };
    all[..count].to_vec()
}

/// Returns the slice that gave an inode its number.
fn slice_of(ino: Ino) -> u64 {
    ino >> 40
}

#[test]
fn files_are_made_in_the_new_slices_at_once_and_are_there_after_a_remount_and_a_power_cut() {
    for (old, checksums) in [(1, false), (2, false), (2, true)] {
        let set = formatted(old, checksums);
        let devices = set.as_devices();
        let count = usize::from(old) + 1;
        let mounted = mount(&devices[..count - 1]);
        let before = mounted.fs.statfs().unwrap();
        mounted.add_and_take(&set.devices()[count - 1], 1);
        let after = mounted.fs.statfs().unwrap();
        assert!(after.blocks - before.blocks > 40 * MIB / 4096);
        assert!(after.free - before.free > 40 * MIB / 4096);
        // By the rule for directories in the root, and by an explicit home.
        let dirs: Vec<Ino> = (0..2 * count)
            .map(|n| mounted.dir(&format!("d{n}")).unwrap())
            .collect();
        let homes: Vec<u64> = (0u64..)
            .zip(&dirs)
            .map(|(n, dir)| slice_of(mounted.synced(*dir, "file", n).unwrap().ino()))
            .collect();
        let of_new = homes.iter().filter(|home| **home == old.into());
        assert_eq!(of_new.count(), 2, "{homes:?}");
        let explicit = mounted.dir_in(old, "explicit").unwrap();
        let file = mounted.synced(explicit, "file", 99).unwrap();
        assert_eq!(slice_of(file.ino()), old.into());
        drop(file);
        let assert_filled = |mounted: &Mounted, what: &str| {
            for number in 0..2 * count as u64 {
                let dir = mounted.lookup(&format!("d{number}"));
                let found = mounted.contents(dir, "file");
                assert!(found == pattern(number, BYTES), "{what}: file {number}");
            }
            let dir = mounted.lookup("explicit");
            assert!(mounted.contents(dir, "file") == pattern(99, BYTES));
        };
        assert_filled(&mounted, "at once");
        // Everything was synced.
        let after = set.crash(7);
        let again = mount(&after.as_devices()[..count]);
        assert_filled(&again, "after a power cut");
        again.fs.close().unwrap();
        drop(again);
        assert_sound(&after.as_devices()[..count], "after a power cut");

        mounted.fs.close().unwrap();
        drop(mounted);
        assert_sound(&devices[..count], "after the unmount");
        assert!(
            !Volume::open_from_devices(devices[..count].to_vec(), OpenMode::READ)
                .unwrap()
                .is_dirty()
        );
        let again = mount(&devices[..count]);
        assert_filled(&again, "after a remount");
        again.fs.close().unwrap();
    }
}

#[test]
fn threads_that_create_write_and_sync_go_on_during_two_additions_and_get_to_the_new_slices() {
    let set = formatted(2, false);
    let devices = set.as_devices();
    let mounted = mount(&devices[..2]);
    let (made, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    // Waits until the threads have made `more` further files.
    let wait = |more: u64| {
        let from = made.load(Ordering::Relaxed);
        while made.load(Ordering::Relaxed) < from + more {
            std::thread::yield_now();
        }
    };
    let homes: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let work = |thread: u64| {
            let (mounted, made, is_over) = (&mounted, &made, &is_over);
            move || {
                let mut homes = vec![];
                while !is_over.load(Ordering::Relaxed) {
                    let number = homes.len() as u64;
                    let dir = mounted.dir(&format!("d{thread}-{number}")).unwrap();
                    let file = mounted.synced(dir, "file", thread << 32 | number).unwrap();
                    homes.push(slice_of(file.ino()));
                    mounted.fs.close_file(&file);
                    made.fetch_add(1, Ordering::Relaxed);
                }
                homes
            }
        };
        let threads: Vec<_> = (0..3).map(|n| scope.spawn(work(n))).collect();
        wait(4);
        mounted.add_and_take(&set.devices()[2], 1);
        wait(20);
        mounted.add_and_take(&set.devices()[3], 1);
        wait(20);
        is_over.store(true, Ordering::Relaxed);
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let all: Vec<u64> = homes.concat();
    for slice in 0..4 {
        assert!(all.contains(&slice), "slice {slice}: {all:?}");
    }
    mounted.fs.close().unwrap();
    drop(mounted);
    assert_sound(&devices[..4], "after the additions");
    let mounted = mount(&devices[..4]);
    for (thread, homes) in (0u64..).zip(&homes) {
        for number in 0..homes.len() as u64 {
            let dir = mounted.lookup(&format!("d{thread}-{number}"));
            assert!(mounted.contents(dir, "file") == pattern(thread << 32 | number, BYTES));
        }
    }
    mounted.fs.close().unwrap();
}

/// What a run of `add_and_use` has made durable.
#[derive(Default)]
struct Durable {
    is_added: bool,
    has_file: bool,
    is_renamed: bool,
    is_closed: bool,
}

/// Adds the third device, makes a file in the new slice, and moves names between old and new slices.
fn add_and_use(set: &DeviceSet) -> Durable {
    let mut durable = Durable::default();
    let run = |durable: &mut Durable| -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let mounted = try_mount(&set.as_devices()[..2])?;
        let added = mounted.add(&set.devices()[2], 1)?;
        durable.is_added = true;
        mounted.take(&added).map_err(|error| error.to_string())?;
        let new = mounted.dir_in(2, "new").map_err(text)?;
        mounted.synced(new, "file", 3).map_err(text)?;
        durable.has_file = true;
        let old = mounted.lookup("old");
        let fs = &mounted.fs;
        fs.rename(new, b"file", old, b"moved", 0).map_err(text)?;
        let link = fs.lookup(old, b"file").map_err(text)?.ino;
        fs.link(link, new, b"link").map_err(text)?;
        fs.commit().map_err(text)?;
        durable.is_renamed = true;
        fs.close().map_err(text)?;
        durable.is_closed = true;
        Ok(())
    };
    let _ = run(&mut durable);
    durable
}

fn with_an_old_file() -> DeviceSet {
    let set = formatted(2, false);
    let mounted = mount(&set.as_devices()[..2]);
    let dir = mounted.dir_in(1, "old").unwrap();
    mounted.synced(dir, "file", 1).unwrap();
    mounted.fs.close().unwrap();
    set
}

/// Checks what a mount finds after `add_and_use` was interrupted.
fn assert_has(mounted: &Mounted, durable: &Durable, what: &str) {
    let old = mounted.lookup("old");
    assert!(mounted.contents(old, "file") == pattern(1, BYTES), "{what}");
    let is_moved = mounted.fs.lookup(old, b"moved").is_ok();
    assert!(is_moved || !durable.is_renamed, "{what}");
    let new = mounted.fs.lookup(ROOT, b"new").ok();
    let has = |name: &[u8]| {
        new.as_ref()
            .is_some_and(|new| mounted.fs.lookup(new.ino, name).is_ok())
    };
    // The rename and the link were in one batch or the rename came first.
    assert!(is_moved || !has(b"link"), "{what}");
    if durable.has_file {
        let new = new.as_ref().unwrap().ino;
        let found = match is_moved {
            true => mounted.contents(old, "moved"),
            false => mounted.contents(new, "file"),
        };
        assert!(found == pattern(3, BYTES), "{what}");
        assert!(is_moved != has(b"file"), "{what}: it has one name");
    }
    if durable.is_renamed {
        assert!(mounted.contents(new.unwrap().ino, "link") == pattern(1, BYTES));
    }
}

#[test]
fn a_power_cut_at_any_moment_of_an_addition_and_of_the_first_files_keeps_what_was_synced() {
    let made = with_an_old_file();
    let (mut cuts, mut seen) = (0, [0; 4]);
    for nth in 1.. {
        let set = made.crash(0);
        let begun = set.supply().changes();
        set.supply().cut_at(nth);
        let durable = add_and_use(&set);
        let is_cut = set.supply().changes() - begun >= nth;
        assert!(is_cut || durable.is_closed, "it fails without a power cut");
        let what = format!("power cut at change {nth}");
        let after = set.crash(nth);
        let devices = devices_of(&after, 2);
        assert!(devices.len() == 3 || !durable.is_added, "{what}");
        let facts = [
            durable.is_added,
            durable.has_file,
            durable.is_renamed,
            durable.is_closed,
        ];
        let stage = facts.iter().filter(|fact| **fact).count();
        seen[stage.min(3)] += 1;
        assert_sound(&devices, &what);
        let mounted = mount(&devices);
        assert_has(&mounted, &durable, &what);
        mounted.fs.close().unwrap();
        drop(mounted);
        assert_sound(&devices, &what);
        cuts += 1;
        if !is_cut {
            break;
        }
    }
    assert!(
        cuts > 40 && seen.iter().all(|count| *count > 0),
        "{cuts} {seen:?}"
    );
}

#[test]
fn if_the_new_device_fails_the_mount_goes_on_with_the_others() {
    let made = with_an_old_file();
    let (mut failures, mut unused) = (0, 0);
    for nth in 1.. {
        let set = made.crash(0);
        let mounted = mount(&set.as_devices()[..2]);
        set.devices()[2].set_plan(FaultPlan::fail_nth(None, nth, EIO));
        let added = mounted.add(&set.devices()[2], 1);
        let taken = added.as_ref().ok().map(|added| mounted.take(added));
        let has_failed = set.devices()[2].operations(None) >= nth;
        let what = format!("failure of operation {nth}: {added:?}");
        if let Some(Err(error)) = &taken {
            unused += 1;
            assert!(error.to_string().contains("three"), "{what}: {error}");
        }
        // Whatever has failed, files are made in the old slices, and the volume is synced and closed.
        let before = mounted.lookup("old");
        mounted.synced(before, "after", 5).unwrap();
        let dirs = (0..6).map(|n| mounted.dir(&format!("d{n}")));
        let used: Vec<Ino> = dirs.map_while(Result::ok).collect();
        if !matches!(taken, Some(Ok(()))) {
            assert!(
                used.len() == 6 && used.iter().all(|dir| slice_of(*dir) < 2),
                "{what}"
            );
            mounted.fs.close().unwrap();
        } else {
            let _ = mounted.fs.close();
        }
        drop(mounted);
        let after = set.crash(0);
        let devices = devices_of(&after, 2);
        assert!(devices.len() == 3 || added.is_err(), "{what}");
        assert_sound(&devices, &what);
        let mounted = mount(&devices);
        let old = mounted.lookup("old");
        assert!(
            mounted.contents(old, "after") == pattern(5, BYTES),
            "{what}"
        );
        if devices.len() == 3 {
            let dir = mounted.dir_in(2, "then").unwrap();
            assert_eq!(slice_of(mounted.synced(dir, "file", 6).unwrap().ino()), 2);
        }
        mounted.fs.close().unwrap();
        if !has_failed {
            break;
        }
        failures += 1;
    }
    assert!(failures > 20 && unused > 0, "{failures} {unused}");
}

#[test]
fn a_mount_without_memory_for_the_caches_goes_on_and_the_next_one_uses_the_slices() {
    let set = formatted(2, false);
    let mounted = mount(&set.as_devices()[..2]);
    let added = mounted.add(&set.devices()[2], 1).unwrap();
    let make = || Err(CacheError::from("no memory"));
    let refused = mounted.fs.take(&added, make, |_| panic!("it has failed"));
    let refused = refused.unwrap_err().to_string();
    assert_eq!(refused, "no memory");
    // A later device waits, too, because the numbers of slices have no gaps.
    let added = mounted.add(&set.devices()[3], 1).unwrap();
    let refused = mounted.take(&added).unwrap_err();
    assert!(matches!(refused, TakeError::Earlier), "{refused}");
    let dirs: Vec<u64> = (0..6)
        .map(|n| slice_of(mounted.dir(&format!("d{n}")).unwrap()))
        .collect();
    assert!(dirs.iter().all(|slice| *slice < 2), "{dirs:?}");
    let explicit = mounted.dir_in(2, "explicit").unwrap_err();
    assert_eq!(explicit.errno(), 22);
    mounted.fs.close().unwrap();
    drop(mounted);
    let devices = &set.as_devices()[..4];
    assert_sound(devices, "after the unmount");
    let mounted = mount(devices);
    let dir = mounted.dir_in(3, "then").unwrap();
    assert_eq!(slice_of(mounted.synced(dir, "file", 6).unwrap().ino()), 3);
    mounted.fs.close().unwrap();
}

#[test]
fn writes_of_old_files_on_a_full_volume_go_on_in_the_new_slice_and_it_grows() {
    let set = formatted(2, false);
    let devices = set.as_devices();
    let mounted = mount(&devices[..2]);
    let old = mounted.dir_in(0, "old").unwrap();
    let file = mounted.create(old, "full").unwrap();
    let fill = |file: &Arc<File>, from: u64| {
        let mut end = from;
        for pages in (0..16).rev().map(|shift| 1 << shift) {
            while mounted.fs.fallocate(file, 0, end, pages * 4096).is_ok() {
                end += pages * 4096;
            }
        }
        end
    };
    let end = fill(&file, 0);
    let written = mounted.create(old, "written").unwrap();
    let refused = mounted.write(&written, &pattern(4, BYTES)).unwrap_err();
    assert_eq!(refused.errno(), ENOSPC);

    mounted.add_and_take(&set.devices()[2], 1);
    // Its inode and its cache are in slice 0, and its blocks on the new device.
    mounted.write(&written, &pattern(4, BYTES)).unwrap();
    mounted.fsync(&written).unwrap();
    assert_eq!(written.layout().home(), 0);
    let places = mounted.fs.blocks_by_slice(written.ino()).unwrap();
    assert_eq!(places, [(2, 6)]);
    // Reads come from the new device, through the queue of the old slice.
    let (sender, receiver) = channel();
    let done = Box::new(move |result| sender.send(result).unwrap());
    (mounted.cache_of(&written)).invalidate(written.object_id(), 0..10, done);
    receiver.recv().unwrap().unwrap();
    assert!(mounted.read(&written) == pattern(4, BYTES));
    let more = fill(&file, end);
    assert!(more - end > 30 * MIB, "{} bytes", more - end);

    set.devices()[2].enlarge(104 * MIB);
    let grown = mounted.fs.grow(&GrowRequest::default()).unwrap();
    assert_eq!(grown.len(), 1);
    assert!(fill(&file, more) - more > 20 * MIB);
    mounted.fs.close().unwrap();
    drop((written, file, mounted));
    assert_sound(&devices[..3], "after the unmount");
    let mounted = mount(&devices[..3]);
    let old = mounted.lookup("old");
    assert!(mounted.contents(old, "written") == pattern(4, BYTES));
    mounted.fs.close().unwrap();
}

#[test]
fn a_sync_of_an_old_file_with_blocks_on_the_new_device_flushes_that_device() {
    let set = formatted(1, false);
    let mounted = mount(&set.as_devices()[..1]);
    mounted.add_and_take(&set.devices()[1], 1);
    let file = mounted.create(ROOT, "file").unwrap();
    mounted.fs.move_to(file.ino(), 1).unwrap();
    assert_eq!((slice_of(file.ino()), file.layout().home()), (0, 1));
    mounted.write(&file, &pattern(8, BYTES)).unwrap();
    mounted.fsync(&file).unwrap();
    // The pages are in their blocks, and are overwritten there. So the sync needs no commit, and only a flush of the new device.
    mounted.fs.checkpoint().unwrap();
    for seed in 9..17 {
        mounted.write(&file, &pattern(seed, BYTES)).unwrap();
        let (sender, receiver) = channel();
        let done = Box::new(move |result| sender.send(result).unwrap());
        mounted.fs.fsync_blocking(&file, true, done);
        receiver.recv().unwrap().unwrap();
        let after = set.crash(seed);
        assert_sound(&after.as_devices()[..2], "after the power cut");
        let again = mount(&after.as_devices()[..2]);
        assert!(again.contents(ROOT, "file") == pattern(seed, BYTES));
        again.fs.close().unwrap();
    }
    mounted.fs.close().unwrap();
}

#[test]
fn changes_of_the_superblock_reach_the_new_device() {
    let set = formatted(2, false);
    let mounted = mount(&set.as_devices()[..2]);
    mounted.add_and_take(&set.devices()[2], 1);
    let superblocks = mounted.volume.superblocks();
    superblocks.update(&[2], |_| {}).unwrap();
    let copies = read_copies(&*set.devices()[2]).unwrap();
    let newest = copies.iter().flatten().map(|s| s.head.sequence.get());
    let now = superblocks.with(|s| s.head.sequence.get());
    assert_eq!(newest.max(), Some(now));
    mounted.fs.close().unwrap();
}

#[test]
fn an_unmount_takes_no_slices_into_use() {
    let set = formatted(2, false);
    let mounted = mount(&set.as_devices()[..2]);
    let added = mounted.add(&set.devices()[2], 1).unwrap();
    mounted.fs.close().unwrap();
    let refused = mounted.take(&added).unwrap_err();
    assert!(matches!(refused, TakeError::Closing), "{refused}");
    drop(mounted);
    assert_sound(&set.as_devices()[..3], "after the unmount");
}
