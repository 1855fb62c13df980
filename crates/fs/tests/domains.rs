//! Slices on devices of their own: what the failure or the absence of one device costs. Without checksums of the data and with them.

mod domain;
mod mount;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use jericho_fs::format::format_devices;
use jericho_fs::types::{Ino, ROOT};
use jericho_fs::{Error, File, PutBackError, Result};
use jericho_sim::{DeviceSet, FaultPlan, Operation, SimDevice};
use jericho_storage::{Cause, Device, IoError, Layer};
use jericho_volume::{FormatOptions, OpenMode, Volume};

use domain::*;
use mount::{CALLER, SLICES, pattern};

#[test]
fn a_device_that_fails_its_flushes_ends_the_changes_of_its_slices_only() {
    for checksums in [false, true] {
        let set = filled(checksums);
        let mounted = try_mount(set.as_devices()).unwrap();
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        let lost = mounted.create(y, "lost").unwrap();
        mounted.write(&lost, &pattern(7, BYTES)).unwrap();
        let mut plan = FaultPlan::fail_nth(Some(Operation::Flush), 1, EIO);
        plan.faults[0].is_lasting = true;
        set.devices()[1].set_plan(plan);
        fails_with(EIO, mounted.fsync(&lost));

        // The slice answers each change with the error. No later fsync reports success for the pages that it dropped.
        set.devices()[1].set_plan(FaultPlan::default());
        fails_with(EIO, mounted.fsync(&lost));
        fails_with(EIO, mounted.create(y, "new"));
        fails_with(EIO, mounted.write(&lost, b"more"));
        fails_with(EIO, mounted.fs.unlink(y, b"old"));
        fails_with(EIO, mounted.fs.rename(x, b"old", y, b"moved", 0));
        assert_eq!(mounted.contents(y, "old").unwrap(), pattern(1, BYTES));

        // The other slice goes on, with as many operations of its device as without a failure, and none of the failed one.
        let failed_operations = set.devices()[1].operations(None);
        for number in 0..20 {
            mounted.synced(x, &format!("f{number}"), number).unwrap();
        }
        let z = mounted.dir("z");
        let file = mounted.synced(z, "file", 9).unwrap();
        assert_eq!(
            file.layout().home(),
            0,
            "a new directory avoids the failed slice"
        );
        assert_eq!(set.devices()[1].operations(None), failed_operations);
        fails_with(EIO, mounted.fs.sync_all());
        fails_with(EIO, mounted.fs.close());
        drop(mounted);

        for seed in 0..4 {
            let later = set.crash(seed);
            assert_sound(&later);
            let mounted = try_mount(later.as_devices()).unwrap();
            let (x, y, z) = (mounted.dir("x"), mounted.dir("y"), mounted.dir("z"));
            for number in 0..20 {
                let found = mounted.contents(x, &format!("f{number}")).unwrap();
                assert_eq!(found, pattern(number, BYTES));
            }
            assert_eq!(mounted.contents(z, "file").unwrap(), pattern(9, BYTES));
            assert_eq!(mounted.contents(y, "old").unwrap(), pattern(1, BYTES));
            mounted.synced(y, "new", 5).unwrap();
            mounted.fs.close().unwrap();
        }
    }
}

#[test]
fn a_missing_device_costs_its_slices_only_and_comes_back_with_all_that_it_had() {
    for checksums in [false, true] {
        let set = filled(checksums);
        let devices = set.with_missing(&[1]);
        let before = set.devices()[1].digest();
        for round in 0..2 {
            let mounted = try_mount(devices.clone()).unwrap();
            let (x, y) = (mounted.dir("x"), ROOT);
            assert_eq!(mounted.contents(x, "old").unwrap(), pattern(0, BYTES));
            fails_with(ENODEV, mounted.fs.lookup(y, b"y"));
            fails_with(ENODEV, mounted.fs.rmdir(ROOT, b"y"));
            mounted.synced(x, &format!("new{round}"), round).unwrap();
            let made = mounted.dir(&format!("d{round}"));
            mounted.synced(made, "file", round).unwrap();
            let free = mounted.fs.statfs().unwrap().free;
            assert!(
                free < 64 * MIB / 4096,
                "no space of the missing device is free: {free}"
            );
            // The present slices are unmounted cleanly.
            mounted.fs.close().unwrap();
        }
        assert_eq!(set.devices()[1].digest(), before);

        assert_sound(&set);
        let mounted = try_mount(set.as_devices()).unwrap();
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        assert_eq!(mounted.contents(y, "old").unwrap(), pattern(1, BYTES));
        assert_eq!(mounted.contents(x, "new1").unwrap(), pattern(1, BYTES));
        mounted.synced(y, "again", 3).unwrap();
        mounted.fs.close().unwrap();
    }
}

#[test]
fn a_volume_without_the_device_of_its_root_is_refused() {
    for checksums in [false, true] {
        let set = filled(checksums);
        let devices: Vec<Arc<dyn Device>> =
            vec![set.devices()[0].clone(), set.devices()[1].clone()];
        let volume = Volume::open_from_devices(devices, OpenMode::READ).unwrap();
        let root_device = volume.slices()[0].device();
        assert_eq!(root_device, 0);
        // Slice 0 on the second device: the first one has the superblock only.
        let set = DeviceSet::new([
            SimDevice::new("one", 64 * MIB).on_node(1),
            SimDevice::new("two", 64 * MIB).on_node(0),
        ]);
        let options = FormatOptions {
            slices: Some(SLICES),
            nodes: vec![0, 1],
            has_stores: Some(true),
            checksums,
            ..FormatOptions::default()
        };
        let paths = ["one", "two"].map(PathBuf::from);
        format_devices(&set.as_devices(), &paths, &options).unwrap();
        let error = try_mount(set.with_missing(&[1])).err().unwrap();
        assert!(matches!(error, Error::Io(_)), "{error}");
        assert!(error.to_string().contains("two"), "{error}");
    }
}

#[test]
fn after_a_crash_a_slice_waits_for_the_missing_one_that_its_last_operation_changed_too() {
    for checksums in [false, true] {
        let set = filled(checksums);
        let mounted = try_mount(set.as_devices()).unwrap();
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        mounted.fs.rename(x, b"old", y, b"moved", 0).unwrap();
        mounted.fs.commit().unwrap();
        let crashed = set.crash(1);
        drop(mounted);
        let mounted = try_mount(crashed.with_missing(&[1])).unwrap();
        let x = mounted.dir("x");
        // Its part of the rename is shown, and it takes no changes.
        fails_with(2, mounted.fs.lookup(x, b"old"));
        fails_with(ENODEV, mounted.create(x, "new"));
        drop(mounted);
        let mounted = try_mount(crashed.as_devices()).unwrap();
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        fails_with(2, mounted.fs.lookup(x, b"old"));
        assert_eq!(mounted.contents(y, "moved").unwrap(), pattern(0, BYTES));
        mounted.synced(x, "new", 1).unwrap();
        mounted.fs.close().unwrap();
        drop(mounted);
        assert_sound(&crashed);
    }
}

/// A device that performs its transfers by itself, as one of another host does.
struct Remote(Arc<dyn Device>);

impl Layer for Remote {
    fn below(&self) -> &dyn Device {
        &*self.0
    }
    fn asynchronous(&self) -> Option<&dyn jericho_storage::Asynchronous> {
        Some(self)
    }
}

impl jericho_storage::Asynchronous for Remote {
    fn begin(&self, _: jericho_storage::Transfer, _: Arc<dyn jericho_storage::Finish>) {
        unreachable!("queues over simulated devices have threads");
    }
}

/// Leaves in slice 1 an image that is newer than its block, a file without a name, and last an operation that also changed slice 0. Returns the
/// devices after a power cut.
fn crashed_after_a_linked_operation(checksums: bool) -> DeviceSet {
    let set = filled(checksums);
    let mounted = try_mount(set.as_devices()).unwrap();
    let (x, y) = (mounted.dir("x"), mounted.dir("y"));
    let gone = mounted.create(y, "gone").unwrap();
    mounted.write(&gone, &pattern(6, BYTES)).unwrap();
    mounted.fsync(&gone).unwrap();
    mounted.fs.unlink(y, b"gone").unwrap();
    let logged = mounted.create(y, "logged").unwrap();
    for seed in [8, 9] {
        mounted.write(&logged, &pattern(seed, BYTES)).unwrap();
        mounted.fsync(&logged).unwrap();
    }
    mounted.fs.rename(x, b"old", y, b"moved", 0).unwrap();
    mounted.fs.commit().unwrap();
    mounted.synced(x, "later", 2).unwrap();
    set.crash(1)
}

#[test]
fn a_missing_device_that_comes_back_to_a_mounted_volume_has_all_that_it_had() {
    for checksums in [false, true] {
        let crashed = crashed_after_a_linked_operation(checksums);
        let mounted = try_mount(crashed.with_missing(&[1])).unwrap();
        fails_with(ENODEV, mounted.fs.lookup(ROOT, b"y"));
        let x = mounted.dir("x");
        mounted.synced(x, "while", 4).unwrap();
        let device: Arc<dyn Device> = Arc::new(Remote(crashed.devices()[1].clone()));
        assert_eq!(mounted.fs.put_back(&[(1, device.clone())]).unwrap(), [1]);
        mounted.fs.put_back(&[(1, device.clone())]).unwrap_err();
        let y = mounted.dir("y");
        for (name, seed) in [("old", 1), ("moved", 0), ("logged", 9)] {
            assert_eq!(
                mounted.contents(y, name).unwrap(),
                pattern(seed, BYTES),
                "{name}"
            );
        }
        fails_with(2, mounted.fs.lookup(y, b"gone"));
        mounted.synced(y, "after", 5).unwrap();
        mounted.fs.rename(x, b"while", y, b"back", 0).unwrap();
        mounted.fs.commit().unwrap();
        let again = crashed.crash(2);
        drop(mounted);
        assert_sound(&again);
        let mounted = try_mount(again.as_devices()).unwrap();
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        let files = [
            ("old", 1),
            ("moved", 0),
            ("logged", 9),
            ("after", 5),
            ("back", 4),
        ];
        for (name, seed) in files {
            assert_eq!(
                mounted.contents(y, name).unwrap(),
                pattern(seed, BYTES),
                "{name}"
            );
        }
        assert_eq!(mounted.contents(x, "later").unwrap(), pattern(2, BYTES));
        mounted.fs.close().unwrap();
        drop(mounted);
        assert_sound(&again);
    }
}

#[test]
fn a_power_cut_while_a_missing_device_comes_back_leaves_all_that_was_synced() {
    let crashed = crashed_after_a_linked_operation(false);
    // Each change that the return makes to the device is the last one in one of the rounds.
    for nth in 1.. {
        let set = crashed.crash(3);
        let mounted = try_mount(set.with_missing(&[1])).unwrap();
        let device: Arc<dyn Device> = Arc::new(Remote(set.devices()[1].clone()));
        let mut plan = FaultPlan::fail_nth(None, nth, EIO);
        plan.faults[0].is_lasting = true;
        set.devices()[1].set_plan(plan);
        let is_over = mounted.fs.put_back(&[(1, device.clone())]).is_ok();
        // The other slice goes on in any case.
        let x = mounted.dir("x");
        mounted.synced(x, "beside", 7).unwrap();
        let after = set.crash(nth);
        drop(mounted);
        assert_sound(&after);
        let mounted = try_mount(after.as_devices()).unwrap();
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        for (name, seed) in [("old", 1), ("moved", 0), ("logged", 9)] {
            assert_eq!(
                mounted.contents(y, name).unwrap(),
                pattern(seed, BYTES),
                "{name}"
            );
        }
        assert_eq!(mounted.contents(x, "beside").unwrap(), pattern(7, BYTES));
        mounted.fs.close().unwrap();
        drop(mounted);
        if is_over {
            return;
        }
    }
}

#[test]
fn a_slice_whose_operation_another_one_waits_for_comes_back_with_the_next_mount() {
    let set = filled(false);
    let mounted = try_mount(set.as_devices()).unwrap();
    let (x, y) = (mounted.dir("x"), mounted.dir("y"));
    mounted.fs.rename(x, b"old", y, b"moved", 0).unwrap();
    mounted.fs.commit().unwrap();
    let crashed = set.crash(1);
    drop(mounted);
    let mounted = try_mount(crashed.with_missing(&[1])).unwrap();
    let device: Arc<dyn Device> = Arc::new(Remote(crashed.devices()[1].clone()));
    let why = mounted.fs.put_back(&[(1, device.clone())]).unwrap_err();
    assert!(why.to_string().contains("next mount"), "{why}");
    fails_with(ENODEV, mounted.fs.lookup(ROOT, b"y"));
    drop((mounted, device));
    let mounted = try_mount(crashed.as_devices()).unwrap();
    let y = mounted.dir("y");
    assert_eq!(mounted.contents(y, "moved").unwrap(), pattern(0, BYTES));
    mounted.fs.close().unwrap();
    drop(mounted);
    assert_sound(&crashed);
}

#[test]
fn a_device_that_fails_once_while_it_comes_back_comes_back_later() {
    let crashed = crashed_after_a_linked_operation(false);
    let mut later = 0;
    for nth in 1.. {
        let set = crashed.crash(3);
        let mounted = try_mount(set.with_missing(&[1])).unwrap();
        let device: Arc<dyn Device> = Arc::new(Remote(set.devices()[1].clone()));
        set.devices()[1].set_plan(FaultPlan::fail_nth(Some(Operation::Read), nth, EIO));
        let first = mounted.fs.put_back(&[(1, device.clone())]);
        set.devices()[1].set_plan(FaultPlan::default());
        match first {
            Err(PutBackError::Failed(_)) => {
                later += 1;
                assert_eq!(mounted.fs.put_back(&[(1, device)]).unwrap(), [1]);
            }
            // The images of logged pages were in memory in part.
            Err(PutBackError::NeedsMount(_)) => continue,
            Err(why) => panic!("{why}"),
            Ok(_) => {}
        }
        let is_over = first.is_ok();
        let y = mounted.dir("y");
        for (name, seed) in [("old", 1), ("moved", 0), ("logged", 9)] {
            let contents = mounted.contents(y, name).unwrap();
            assert_eq!(contents, pattern(seed, BYTES), "{name}");
        }
        mounted.synced(y, "after", 5).unwrap();
        mounted.fs.close().unwrap();
        drop(mounted);
        assert_sound(&set);
        if is_over {
            break;
        }
    }
    assert!(later > 2, "{later} failures were early");
}

#[test]
fn two_missing_devices_with_one_last_operation_come_back_together() {
    for checksums in [false, true] {
        let set = filled_three(checksums);
        let mounted = try_mount(set.as_devices()).unwrap();
        let (y, z) = (mounted.dir("y"), mounted.dir("z"));
        mounted.fs.rename(y, b"old", z, b"moved", 0).unwrap();
        mounted.fs.commit().unwrap();
        let crashed = set.crash(1);
        drop(mounted);
        let mounted = try_mount(crashed.with_missing(&[1, 2])).unwrap();
        let came = [1, 2].map(|index| {
            let device: Arc<dyn Device> = Arc::new(Remote(crashed.devices()[index].clone()));
            (index, device)
        });
        for one in &came {
            let why = mounted.fs.put_back(std::slice::from_ref(one)).unwrap_err();
            assert!(matches!(why, PutBackError::Waits(_)), "{why}");
        }
        assert_eq!(mounted.fs.put_back(&came).unwrap(), [1, 2]);
        let (y, z) = (mounted.dir("y"), mounted.dir("z"));
        fails_with(2, mounted.fs.lookup(y, b"old"));
        assert_eq!(mounted.contents(z, "moved").unwrap(), pattern(1, BYTES));
        mounted.synced(y, "after", 5).unwrap();
        mounted.fs.close().unwrap();
        drop(mounted);
        assert_sound(&crashed);
    }
}

/// A device whose flushes wait while it is silent.
struct Silent(Arc<dyn Device>, Arc<AtomicBool>);

impl Layer for Silent {
    fn below(&self) -> &dyn Device {
        &*self.0
    }
    fn is_silent(&self) -> bool {
        self.1.load(Ordering::Acquire)
    }
    fn flush(&self) -> std::result::Result<(), IoError> {
        while Layer::is_silent(self) {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.0.flush()
    }
}

#[test]
fn a_slice_is_not_kept_waiting_while_another_comes_back_and_a_third_is_silent() {
    let set = filled_three(false);
    let is_silent = Arc::new(AtomicBool::new(false));
    let mut devices = set.with_missing(&[1]);
    devices[2] = Arc::new(Silent(devices[2].clone(), is_silent.clone()));
    let mounted = try_mount(devices).unwrap();
    let (x, z) = (mounted.dir("x"), mounted.dir("z"));
    let stuck = mounted.create(z, "stuck").unwrap();
    mounted.fsync(&stuck).unwrap();
    mounted.write(&stuck, &pattern(3, BYTES)).unwrap();
    std::thread::scope(|scope| {
        is_silent.store(true, Ordering::Release);
        let syncs = scope.spawn(|| mounted.fsync(&stuck));
        std::thread::sleep(Duration::from_millis(200));
        let device: Arc<dyn Device> = Arc::new(Remote(set.devices()[1].clone()));
        let returns = scope.spawn(|| mounted.fs.put_back(&[(1, device)]));
        let begun = Instant::now();
        let mut rounds = 0;
        while begun.elapsed() < Duration::from_secs(3) {
            mounted.synced(x, &format!("beside{rounds}"), 7).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            rounds += 1;
        }
        let has_waited = !syncs.is_finished();
        is_silent.store(false, Ordering::Release);
        assert!(has_waited, "the sync needs the silent device");
        syncs.join().unwrap().unwrap();
        assert_eq!(returns.join().unwrap().unwrap(), [1]);
    });
    let y = mounted.dir("y");
    assert_eq!(mounted.contents(y, "old").unwrap(), pattern(1, BYTES));
    mounted.fs.close().unwrap();
    drop(mounted);
    assert_sound(&set);
}

#[test]
fn batches_of_many_operations_in_two_slices_fit_into_small_journals() {
    for checksums in [false, true] {
        let set = formatted_with(checksums, [24 * MIB, 24 * MIB]);
        let mounted = try_mount(set.as_devices()).unwrap();
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        // Together they are several times as long as the journals, which have 1 to 2 MiB. No call asks for a commit.
        let value = [7; 8000];
        for number in 0..600 {
            let name = format!("f{number}");
            let (from, to) = if number % 2 == 0 { (x, y) } else { (y, x) };
            let file = mounted.create(from, &name).unwrap();
            let (fs, name) = (&mounted.fs, name.as_bytes());
            fs.setxattr(file.ino(), b"user.long", &value, 0).unwrap();
            fs.rename(from, name, to, name, 0).unwrap();
            fs.close_file(&file);
        }
        mounted.fs.commit().unwrap();
        let later = set.crash(1);
        drop(mounted);
        assert_sound(&later);
        let mounted = try_mount(later.as_devices()).unwrap();
        let dirs = [mounted.dir("y"), mounted.dir("x")];
        for number in 0..600 {
            let name = format!("f{number}");
            mounted
                .fs
                .lookup(dirs[number % 2], name.as_bytes())
                .unwrap();
        }
        mounted.fs.close().unwrap();
    }
}

/// Fails flushes of the second device for ever, and has a sync find that. The file is too long for the journal, so the device has data
/// that is not durable.
fn fail_second(set: &DeviceSet, mounted: &Mounted) {
    let y = mounted.dir("y");
    let lost = mounted.create(y, "lost").unwrap();
    mounted.write(&lost, &pattern(7, 60 * 4096)).unwrap();
    let mut plan = FaultPlan::fail_nth(Some(Operation::Flush), 1, EIO);
    plan.faults[0].is_lasting = true;
    set.devices()[1].set_plan(plan);
    fails_with(EIO, mounted.fsync(&lost));
}

#[test]
fn a_removed_file_with_blocks_in_a_failed_slice_does_not_end_the_commits_of_its_own_slice() {
    for checksums in [false, true] {
        let set = filled(checksums);
        let mounted = try_mount(set.as_devices()).unwrap();
        let x = mounted.dir("x");
        let far = mounted.synced(x, "far", 3).unwrap();
        mounted.fs.move_to(far.ino(), 1).unwrap();
        fail_second(&set, &mounted);
        mounted.fs.unlink(x, b"far").unwrap();
        mounted.fs.close_file(&far);
        mounted.fs.forget(far.ino(), 1);
        drop(far);
        for round in 0..3 {
            let synced = mounted.synced(x, &format!("new{round}"), round);
            assert!(synced.is_ok(), "{round}: {:?}", synced.err());
        }
    }
}

#[test]
fn half_of_an_operation_does_not_count_when_the_device_with_it_comes_back_later() {
    for checksums in [false, true] {
        let set = filled(checksums);
        let mounted = try_mount(set.as_devices()).unwrap();
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        mounted.fs.commit().unwrap();
        mounted.fs.rename(y, b"old", x, b"moved", 0).unwrap();
        let mut plan = FaultPlan::fail_nth(Some(Operation::Write), 1, EIO);
        plan.faults[0].is_lasting = true;
        set.devices()[0].set_plan(plan);
        fails_with(EIO, mounted.fs.commit());
        let crashed = set.crash(1);
        drop(mounted);

        // Before any other mount, the rename has not happened.
        let at_once = crashed.crash(2);
        let mounted = try_mount(at_once.as_devices()).unwrap();
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        assert_eq!(mounted.contents(y, "old").unwrap(), pattern(1, BYTES));
        fails_with(2, mounted.fs.lookup(x, b"moved"));
        drop(mounted);

        // The second device is missing for one mount, in which the first one takes changes.
        let mounted = try_mount(crashed.with_missing(&[1])).unwrap();
        let x = mounted.dir("x");
        for number in 0..5 {
            mounted.synced(x, &format!("f{number}"), number).unwrap();
        }
        mounted.fs.close().unwrap();
        drop(mounted);

        let mounted = try_mount(crashed.as_devices()).unwrap();
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        let new = mounted.fs.lookup(x, b"moved").is_ok();
        let old = mounted.fs.lookup(y, b"old").is_ok();
        assert!(old || new, "the file has no name any more");
    }
}

#[test]
fn an_orphan_beside_a_slice_that_waits_for_a_missing_one_does_not_refuse_the_mount() {
    for checksums in [false, true] {
        let set = filled_three(checksums);
        let mounted = try_mount(set.as_devices()).unwrap();
        let (x, y, z) = (mounted.dir("x"), mounted.dir("y"), mounted.dir("z"));
        let open = mounted.synced(x, "open", 4).unwrap();
        mounted.fs.unlink(x, b"open").unwrap();
        mounted.fs.commit().unwrap();
        mounted.fs.rename(y, b"old", z, b"moved", 0).unwrap();
        mounted.fs.commit().unwrap();
        let crashed = set.crash(1);
        drop(open);
        drop(mounted);
        let mounted = try_mount(crashed.with_missing(&[2])).unwrap();
        let x = mounted.dir("x");
        mounted.synced(x, "new", 3).unwrap();
    }
}

#[test]
fn no_file_gets_blocks_of_a_slice_that_waits_for_a_missing_one() {
    for checksums in [false, true] {
        let set = filled_three(checksums);
        let mounted = try_mount(set.as_devices()).unwrap();
        let (y, z) = (mounted.dir("y"), mounted.dir("z"));
        mounted.fs.rename(y, b"old", z, b"moved", 0).unwrap();
        mounted.fs.commit().unwrap();
        let crashed = set.crash(1);
        drop(mounted);
        let mounted = try_mount(crashed.with_missing(&[2])).unwrap();
        let x = mounted.dir("x");
        let space = mounted.fs.statfs().unwrap();
        // Fills the only slice that takes changes.
        let mut number = 0;
        let piece = 64 * 4096;
        let full = loop {
            let file = mounted.create(x, &format!("f{number}")).unwrap();
            match mounted.write(&file, &pattern(number, piece)) {
                Ok(()) => {}
                Err(error) => break error,
            }
            if let Err(error) = mounted.fsync(&file) {
                break error;
            }
            number += 1;
            assert!(number * (piece as u64) < 200 * MIB);
        };
        assert_eq!(full.errno(), 28, "{full} (free at first: {})", space.free);
    }
}

#[test]
fn a_change_of_the_mode_of_a_file_with_data_on_a_failed_device_does_not_end_the_changes_of_its_slice()
 {
    for checksums in [false, true] {
        let set = filled(checksums);
        let mounted = try_mount(set.as_devices()).unwrap();
        let x = mounted.dir("x");
        let far = mounted.synced(x, "far", 3).unwrap();
        mounted.fs.move_to(far.ino(), 1).unwrap();
        fail_second(&set, &mounted);
        let mode = jericho_fs::types::SetAttr {
            perm: Some(0o600),
            ..Default::default()
        };
        mounted.fs.setattr(far.ino(), mode, CALLER).unwrap();
        for round in 0..3 {
            let synced = mounted.synced(x, &format!("new{round}"), round);
            assert!(synced.is_ok(), "{round}: {:?}", synced.err());
        }
    }
}

#[test]
fn an_orphan_with_blocks_on_a_missing_device_does_not_refuse_the_mount() {
    for checksums in [false, true] {
        let set = filled(checksums);
        let mounted = try_mount(set.as_devices()).unwrap();
        let x = mounted.dir("x");
        let far = mounted.synced(x, "far", 3).unwrap();
        mounted.fs.move_to(far.ino(), 1).unwrap();
        mounted.fs.unlink(x, b"far").unwrap();
        mounted.fs.commit().unwrap();
        mounted.synced(x, "more", 1).unwrap();
        let crashed = set.crash(1);
        drop((far, mounted));
        let mounted = try_mount(crashed.with_missing(&[1])).unwrap();
        let x = mounted.dir("x");
        mounted.synced(x, "new", 3).unwrap();
        mounted.synced(x, "newer", 3).unwrap();
    }
}

/// Overwrites a page of a file and syncs it, and again as soon as that is durable, `left` times in all. Sends for each sync whether the
/// device of the file was flushed between the write and the answer.
fn sync_again(
    mounted: Arc<Mounted>,
    device: Arc<SimDevice>,
    file: Arc<File>,
    left: usize,
    answers: Sender<bool>,
) {
    mounted.write(&file, &pattern(left as u64, 100)).unwrap();
    let flushes = device.operations(Some(Operation::Flush));
    let fs = mounted.fs.clone();
    let synced = file.clone();
    let done = Box::new(move |result: Result<()>| {
        result.unwrap();
        let is_flushed = device.operations(Some(Operation::Flush)) > flushes;
        answers.send(is_flushed).unwrap();
        if left > 1 {
            sync_again(mounted, device, file, left - 1, answers);
        }
    });
    fs.fsync_blocking(&synced, true, done);
}

#[test]
fn a_sync_that_another_thread_hands_to_the_committer_is_flushed_on_its_own_device() {
    for checksums in [false, true] {
        let set = formatted(checksums);
        let mounted = Arc::new(try_mount(set.as_devices()).unwrap());
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        // Its inode is in the first slice, its pages would go to the second one, and it has none.
        let empty = mounted.create(x, "empty").unwrap();
        mounted.fs.move_to(empty.ino(), 1).unwrap();
        assert_eq!((empty.ino() >> 40, empty.layout().home()), (0, 1));
        let (near, far) = (mounted.synced(x, "near", 1), mounted.synced(y, "far", 2));
        let (near, far) = (near.unwrap(), far.unwrap());
        assert_eq!((near.layout().home(), far.layout().home()), (0, 1));
        mounted.fs.checkpoint().unwrap();
        mounted.fs.commit().unwrap();

        // The first device has data that is not durable, so the sync of the empty file flushes it. Another thread syncs meanwhile.
        mounted.write(&near, &pattern(4, 100)).unwrap();
        let (sender, receiver) = channel();
        let written = Box::new(move |result| sender.send(result).unwrap());
        mounted.slices[0].sync(&near.object(), 0..1, written);
        receiver.recv().unwrap().unwrap();
        let (answers, answered) = channel();
        let has_begun = AtomicBool::new(false);
        let (of_far, again) = (set.devices()[1].clone(), mounted.clone());
        set.devices()[0].set_before(move |operation| {
            if operation == Operation::Flush && !has_begun.swap(true, Ordering::SeqCst) {
                let (mounted, device) = (again.clone(), of_far.clone());
                sync_again(mounted, device, far.clone(), 40, answers.clone());
            }
        });
        let (sender, receiver) = channel();
        let done = Box::new(move |result| sender.send(result).unwrap());
        mounted.fs.fsync_blocking(&empty, true, done);
        receiver.recv().unwrap().unwrap();
        for round in 0..40 {
            assert!(
                answered.recv().unwrap(),
                "sync {round} returned without a flush"
            );
        }
        set.devices()[0].set_before(|_| {});
        mounted.fs.close().unwrap();
    }
}

#[test]
fn replacing_by_rename_leaves_the_old_or_the_new_contents_also_of_a_file_that_was_moved() {
    for checksums in [false, true] {
        let set = filled(checksums);
        let mounted = try_mount(set.as_devices()).unwrap();
        let x = mounted.dir("x");
        let file = mounted.create(x, "new").unwrap();
        mounted.fs.move_to(file.ino(), 1).unwrap();
        mounted.write(&file, &pattern(8, BYTES)).unwrap();
        mounted.fs.rename(x, b"new", x, b"old", 0).unwrap();
        // Commits the first slice's batch for another file.
        mounted.synced(x, "other", 9).unwrap();
        let early = set.crash(1);
        mounted.sync_dir(x).unwrap();
        let late = set.crash(1);
        drop(mounted);
        let mut found = vec![];
        for crashed in [early, late] {
            assert_sound(&crashed);
            let mounted = try_mount(crashed.as_devices()).unwrap();
            let x = mounted.dir("x");
            let contents = mounted.contents(x, "old").unwrap();
            let is_whole = contents == pattern(0, BYTES) || contents == pattern(8, BYTES);
            found.push((is_whole, contents.len()));
        }
        // After a sync of another file, and after one of the directory.
        assert!(found.iter().all(|(is_whole, _)| *is_whole), "{found:?}");
    }
}

#[test]
fn a_truncation_ends_after_the_device_of_a_replacing_file_has_failed() {
    let set = filled(false);
    let mounted = try_mount(set.as_devices()).unwrap();
    let fs = &mounted.fs;
    let x = mounted.dir("x");
    let room = mounted.synced(x, "room", 3).unwrap();
    // Fills the first slice, but for what `room` has.
    let filler = mounted.synced(x, "filler", 4).unwrap();
    let mut at = BYTES as u64;
    while fs.blocks_by_slice(filler.ino()).unwrap().len() == 1 {
        fs.fallocate(&filler, 1, at, 1 << 16).unwrap();
        at += 1 << 16;
    }
    fs.unlink(x, b"room").unwrap();
    fs.close_file(&room);
    fs.forget(room.ino(), 1);
    drop(room);
    fs.commit().unwrap();
    let file = mounted.create(x, "new").unwrap();
    mounted.write(&file, &pattern(8, BYTES)).unwrap();
    fs.rename(x, b"new", x, b"old", 0).unwrap();
    // The first slice has no block for what comes now.
    mounted.write(&file, &pattern(9, 2 * BYTES)).unwrap();
    let (sender, receiver) = channel();
    let done = Box::new(move |result| sender.send(result).unwrap());
    mounted.slices[0].sync(&file.object(), 0..u64::MAX, done);
    receiver.recv().unwrap().unwrap();
    assert_eq!(fs.blocks_by_slice(file.ino()).unwrap().len(), 2);
    fail_second(&set, &mounted);
    // The batch with the name.
    mounted.fsync(&mounted.create(x, "other").unwrap()).unwrap();
    let (sender, receiver) = channel();
    let (truncated, ino) = (fs.clone(), file.ino());
    std::thread::spawn(move || {
        let size = jericho_fs::types::SetAttr {
            size: Some(0),
            ..Default::default()
        };
        sender.send(truncated.setattr(ino, size, CALLER)).unwrap();
    });
    let answer = receiver.recv_timeout(Duration::from_secs(60));
    assert!(answer.is_ok(), "the truncation does not end");
}

/// Returns how many chunks of metadata the store of a slice has.
fn chunks_of(mounted: &Mounted, slice: u16) -> usize {
    (mounted.volume.superblocks())
        .with(|s| s.chunks.iter().filter(|c| c.slice.get() == slice).count())
}

/// Makes durable files with long attributes in a directory until the store of its slice has taken chunks from the slice. Returns how many.
fn fill_store(mounted: &Mounted, dir: Ino, slice: u16) -> u64 {
    let before = chunks_of(mounted, slice);
    let value = [7; 60_000];
    for number in 0.. {
        let file = mounted.synced(dir, &format!("f{number}"), number).unwrap();
        mounted
            .fs
            .setxattr(file.ino(), b"user.long", &value, 0)
            .unwrap();
        mounted.fsync(&file).unwrap();
        mounted.fs.close_file(&file);
        mounted.fs.forget(file.ino(), 1);
        if chunks_of(mounted, slice) > before {
            return number + 1;
        }
        assert!(number < 2000, "the store does not grow");
    }
    0
}

#[test]
fn a_store_that_grew_while_the_other_device_missed_it_has_everything_after_a_mount_without_its_own()
{
    let paths = ["one", "two"].map(PathBuf::from);
    for seed in 0..3 {
        let set = DeviceSet::new([
            SimDevice::new("one", 96 * MIB).without_fua(),
            SimDevice::new("two", 96 * MIB).without_fua(),
        ]);
        let options = FormatOptions {
            slices: Some(SLICES),
            has_stores: Some(true),
            ..FormatOptions::default()
        };
        format_devices(&set.as_devices(), &paths, &options).unwrap();
        let mounted = try_mount(set.as_devices()).unwrap();
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        mounted.synced(x, "old", 1).unwrap();
        mounted.fs.close().unwrap();
        drop(mounted);
        let mounted = try_mount(set.as_devices()).unwrap();
        // The first device takes no superblock from here on. Nothing else is written to it.
        let mut plan = FaultPlan::fail_nth(Some(Operation::Write), 1, EIO);
        plan.faults[0].is_lasting = true;
        set.devices()[0].set_plan(plan);
        let files = fill_store(&mounted, y, 1);
        let number = |mounted: &Mounted| {
            let superblocks = mounted.volume.superblocks();
            superblocks.with(|s| s.head.sequence.get())
        };
        let last = number(&mounted);
        let crashed = set.crash(seed);
        drop(mounted);

        // The first device overtakes the number of the superblock that the second one has.
        let devices = crashed.with_missing(&[1]);
        let mut rounds = 0;
        let mut reached = 0;
        while reached <= last {
            let mounted = try_mount(devices.clone()).unwrap();
            let x = mounted.dir("x");
            let name = format!("new{rounds}");
            mounted.synced(x, &name, rounds).unwrap();
            mounted.fs.close().unwrap();
            reached = number(&mounted);
            rounds += 1;
        }
        assert_sound(&crashed);
        let mounted = try_mount(crashed.as_devices()).unwrap();
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        for number in 0..files {
            let name = format!("f{number}");
            assert_eq!(
                mounted.contents(y, &name).unwrap(),
                pattern(number, BYTES),
                "{name}"
            );
        }
        for round in 0..rounds {
            let name = format!("new{round}");
            assert_eq!(
                mounted.contents(x, &name).unwrap(),
                pattern(round, BYTES),
                "{name}"
            );
        }
        mounted.synced(y, "new", 3).unwrap();
        mounted.fs.close().unwrap();
        drop(mounted);
        assert_sound(&crashed);
    }
}

/// A device one of whose flushes fails, and whose later flushes succeed: a kernel reports lost writes once.
struct ForgetsFailure {
    device: Arc<SimDevice>,
    fails_next: AtomicBool,
}

impl ForgetsFailure {
    fn fail(&self) -> std::result::Result<(), IoError> {
        match self.fails_next.swap(false, Ordering::SeqCst) {
            true => Err(IoError {
                operation: "flush",
                device: self.name(),
                offset_bytes: 0,
                length_bytes: 0,
                cause: Cause::Errno(EIO),
            }),
            false => Ok(()),
        }
    }
}

impl Layer for ForgetsFailure {
    fn below(&self) -> &dyn Device {
        &*self.device
    }
    fn flush(&self) -> std::result::Result<(), IoError> {
        self.fail()?;
        self.device.flush()
    }
}

#[test]
fn after_a_failed_flush_each_sync_of_the_slice_fails_also_if_the_device_flushes_again() {
    let set = filled(false);
    let second = Arc::new(ForgetsFailure {
        device: set.devices()[1].clone(),
        fails_next: AtomicBool::new(false),
    });
    let mounted = try_mount(vec![set.devices()[0].clone(), second.clone()]).unwrap();
    let (x, y) = (mounted.dir("x"), mounted.dir("y"));
    // Too long for the journal, so its pages need a flush.
    let lost = mounted.create(y, "lost").unwrap();
    let other = mounted.create(y, "other").unwrap();
    mounted.write(&other, &pattern(6, BYTES)).unwrap();
    mounted.write(&lost, &pattern(7, 60 * 4096)).unwrap();
    second.fails_next.store(true, Ordering::SeqCst);
    fails_with(EIO, mounted.fsync(&lost));
    assert!(!second.fails_next.load(Ordering::SeqCst));
    for _ in 0..2 {
        fails_with(EIO, mounted.fsync(&lost));
        fails_with(EIO, mounted.fsync(&other));
        fails_with(EIO, mounted.fs.sync_all());
    }
    mounted.synced(x, "new", 1).unwrap();
    drop((lost, other, mounted));
    let mounted = try_mount(set.as_devices()).unwrap();
    let y = mounted.dir("y");
    mounted.synced(y, "again", 2).unwrap();
    mounted.fs.close().unwrap();
}

#[test]
fn a_failed_flush_ends_the_changes_of_a_slice_whose_batch_describes_data_on_the_device() {
    let set = filled(false);
    let mounted = try_mount(set.as_devices()).unwrap();
    let (x, y) = (mounted.dir("x"), mounted.dir("y"));
    // Its inode is in the first slice, and its pages go to the second one.
    let far = mounted.create(x, "far").unwrap();
    mounted.fs.move_to(far.ino(), 1).unwrap();
    mounted.write(&far, &pattern(7, 60 * 4096)).unwrap();
    let mut plan = FaultPlan::fail_nth(Some(Operation::Flush), 1, EIO);
    plan.faults[0].is_lasting = true;
    set.devices()[1].set_plan(plan);
    fails_with(EIO, mounted.fsync(&far));
    set.devices()[1].set_plan(FaultPlan::default());
    for dir in [x, y] {
        fails_with(EIO, mounted.create(dir, "new"));
    }
    fails_with(EIO, mounted.fsync(&far));
    drop((far, mounted));
    // The batch is there neither in whole nor in part.
    let later = set.crash(1);
    assert_sound(&later);
    let mounted = try_mount(later.as_devices()).unwrap();
    let x = mounted.dir("x");
    let size = |name: &str| mounted.fs.lookup(x, name.as_bytes()).map(|attr| attr.size);
    assert_eq!(size("far").unwrap_or(0), 0);
    mounted.synced(x, "new", 3).unwrap();
    mounted.fs.close().unwrap();
}

#[test]
fn a_sync_does_not_fail_with_the_device_of_another_sync_that_is_served_with_it() {
    let set = filled(false);
    let mounted = try_mount(set.as_devices()).unwrap();
    let x = mounted.dir("x");
    let (first, near) = (mounted.synced(x, "first", 1), mounted.synced(x, "near", 2));
    let (first, near) = (first.unwrap(), near.unwrap());
    // Its inode is in the first slice, and its pages are in the second one.
    let far = mounted.synced(x, "far", 3).unwrap();
    mounted.fs.move_to(far.ino(), 1).unwrap();
    mounted.fs.sync_all().unwrap();
    mounted.fs.checkpoint().unwrap();
    let mut plan = FaultPlan::fail_nth(Some(Operation::Flush), 1, EIO);
    plan.faults[0].is_lasting = true;
    set.devices()[1].set_plan(plan);

    let begin = |file: &Arc<File>| {
        mounted.write(file, &pattern(5, 100)).unwrap();
        let (written, answered) = (channel(), channel());
        let done = Box::new(move |result| written.0.send(result).unwrap());
        mounted.slices[usize::from(file.layout().home())].sync(&file.object(), 0..1, done);
        written.1.recv().unwrap().unwrap();
        let done = Box::new(move |result| answered.0.send(result).unwrap());
        mounted.fs.fsync(file, true, done);
        answered.1
    };
    // The committer flushes for the first file until the others wait, too.
    let (has_begun, go) = set.devices()[0].block_next(Operation::Flush);
    let of_first = begin(&first);
    has_begun.wait();
    let (of_far, of_near) = (begin(&far), begin(&near));
    // A thread of the slice passes them to the committer.
    let deadline = Instant::now() + Duration::from_secs(60);
    while mounted.fs.waiting_syncs() < 2 {
        assert!(Instant::now() < deadline, "the syncs do not wait");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(go);
    of_first.recv().unwrap().unwrap();
    fails_with(EIO, of_far.recv().unwrap());
    of_near.recv().unwrap().unwrap();
    mounted.synced(x, "new", 4).unwrap();
}

#[test]
fn a_journal_that_finds_no_space_on_the_host_ends_the_changes_of_its_slice_and_of_linked_ones() {
    for is_linked in [false, true] {
        let set = filled(false);
        let mounted = try_mount(set.as_devices()).unwrap();
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        let mut plan = FaultPlan::fail_nth(Some(Operation::Write), 1, ENOSPC);
        plan.faults[0].is_lasting = true;
        set.devices()[1].set_plan(plan);
        match is_linked {
            true => mounted.fs.rename(x, b"old", y, b"moved", 0).unwrap(),
            false => drop(mounted.create(y, "new").unwrap()),
        }
        fails_with(ENOSPC, mounted.fs.commit());
        // A part of the batch may be on the device, so a later one must not follow it.
        set.devices()[1].set_plan(FaultPlan::default());
        let ended = [(y, true), (x, is_linked)];
        for dir in ended
            .into_iter()
            .filter_map(|(dir, has)| has.then_some(dir))
        {
            let error = mounted.create(dir, "later").err().unwrap();
            assert!(error.to_string().contains("write of"), "{error}");
            assert_eq!(error.errno(), ENOSPC);
        }
        if !is_linked {
            mounted.synced(x, "later", 1).unwrap();
        }
        let error = mounted.fs.close().unwrap_err();
        assert!(error.to_string().contains("write of"), "{error}");
        drop(mounted);
        let later = set.crash(1);
        assert_sound(&later);
        let mounted = try_mount(later.as_devices()).unwrap();
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        assert_eq!(mounted.contents(x, "old").unwrap(), pattern(0, BYTES));
        mounted.synced(y, "later", 2).unwrap();
        mounted.fs.close().unwrap();
    }
}
