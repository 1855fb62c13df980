//! A host of a slice is away for so long that requests fail, and answers again: the slice takes changes again without a mount, and has everything
//! that a sync has reported. Without checksums of the data and with them.

mod domain;
mod mount;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use jericho_fs::types::{Ino, ROOT};
use jericho_fs::{File, Result, Resumed};
use jericho_sim::{DeviceSet, FaultPlan, Operation, SimDevice};
use jericho_storage::{Cause, Device, IoError, Layer};

use domain::*;
use mount::pattern;

/// What the host of a device does.
struct Host {
    is_away: AtomicBool,
    /// It goes away with the change of this number, counted from 1; 0: not by itself.
    goes_at: AtomicU64,
    changes: AtomicU64,
    /// The change with which it goes away reaches the device, and only its answer is lost.
    executes_last: AtomicBool,
    /// Reads count as changes.
    counts_reads: AtomicBool,
    /// A change that failed may still reach the device.
    has_abandoned: AtomicBool,
    /// The disk that it has instead of the device since it was away.
    other: Mutex<Option<Arc<dyn Device>>>,
    /// Before it goes away, it sends through the first and waits for the second.
    pause: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

impl Host {
    fn new() -> Arc<Host> {
        Arc::new(Host {
            is_away: AtomicBool::new(false),
            goes_at: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            executes_last: AtomicBool::new(false),
            counts_reads: AtomicBool::new(false),
            has_abandoned: AtomicBool::new(false),
            other: Mutex::default(),
            pause: Mutex::default(),
        })
    }

    /// Answers with another disk from now on.
    fn answers_with(&self, other: Arc<dyn Device>) {
        *self.other.lock().unwrap() = Some(other);
        self.answers();
    }

    /// Goes away with the `nth` change from now on.
    fn goes_at(&self, nth: u64, executes_last: bool) {
        self.executes_last.store(executes_last, Ordering::SeqCst);
        self.changes.store(0, Ordering::SeqCst);
        self.goes_at.store(nth, Ordering::SeqCst);
    }

    fn goes(&self) {
        self.is_away.store(true, Ordering::SeqCst);
    }

    fn is_away(&self) -> bool {
        self.is_away.load(Ordering::SeqCst)
    }

    fn answers(&self) {
        self.goes_at.store(0, Ordering::SeqCst);
        self.is_away.store(false, Ordering::SeqCst);
    }
}

/// A device of a host.
struct Far(Arc<dyn Device>, Arc<Host>);

impl Far {
    fn disk(&self) -> Arc<dyn Device> {
        let other = self.1.other.lock().unwrap();
        other.as_ref().unwrap_or(&self.0).clone()
    }

    fn unreachable(&self, operation: &'static str) -> IoError {
        IoError {
            operation,
            device: self.0.name(),
            offset_bytes: 0,
            length_bytes: 4096,
            cause: Cause::Unreachable,
        }
    }

    fn change(
        &self,
        operation: &'static str,
        change: impl FnOnce() -> std::result::Result<(), IoError>,
    ) -> std::result::Result<(), IoError> {
        let host = &self.1;
        if host.is_away() {
            return Err(self.unreachable(operation));
        }
        let number = host.changes.fetch_add(1, Ordering::SeqCst) + 1;
        if number == host.goes_at.load(Ordering::SeqCst) {
            if let Some((at, go)) = host.pause.lock().unwrap().take() {
                at.send(()).unwrap();
                go.recv().unwrap();
            }
            host.goes();
            if host.executes_last.load(Ordering::SeqCst) {
                change()?;
            }
            return Err(self.unreachable(operation));
        }
        change()
    }
}

impl Layer for Far {
    fn below(&self) -> &dyn Device {
        &*self.0
    }
    fn may_fall_silent(&self) -> bool {
        true
    }
    fn is_silent(&self) -> bool {
        self.1.is_away()
    }
    fn has_abandoned(&self) -> bool {
        self.1.has_abandoned.load(Ordering::SeqCst)
    }
    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> std::result::Result<(), IoError> {
        let mut read = || self.disk().read_at(offset_bytes, buf);
        match (self.1.is_away(), self.1.counts_reads.load(Ordering::SeqCst)) {
            (true, _) => Err(self.unreachable("read")),
            (false, true) => self.change("read", read),
            (false, false) => read(),
        }
    }
    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> std::result::Result<(), IoError> {
        self.change("write", || self.disk().write_at(offset_bytes, buf))
    }
    fn flush(&self) -> std::result::Result<(), IoError> {
        self.change("flush", || self.disk().flush())
    }
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> std::result::Result<(), IoError> {
        self.change("discard", || {
            self.disk().discard(offset_bytes, length_bytes)
        })
    }
}

/// Mounts with the last device on another host.
fn mount_far(set: &DeviceSet) -> (Mounted, Arc<Host>) {
    mount_far_with(set, 16 << 20)
}

/// Does the same with this memory for the metadata stores.
fn mount_far_with(set: &DeviceSet, store_cache_bytes: usize) -> (Mounted, Arc<Host>) {
    let mut devices = set.as_devices();
    let host = Host::new();
    let last = devices.pop().unwrap();
    devices.push(Arc::new(Far(last, host.clone())));
    let mounted = try_mount_with(devices, store_cache_bytes).unwrap();
    (mounted, host)
}

const NOTHING: Resumed = Resumed {
    slices: Vec::new(),
    is_waiting: false,
};

fn waiting() -> Resumed {
    Resumed {
        is_waiting: true,
        ..NOTHING
    }
}

fn back(slices: &[u16]) -> Resumed {
    Resumed {
        slices: slices.to_vec(),
        is_waiting: false,
    }
}

/// The names and contents that a sync has reported.
#[derive(Default)]
struct Reported(Vec<(Ino, String, u64)>);

impl Reported {
    /// Forgets a file that is about to change: a crash may leave it as it was, or changed.
    fn forget(&mut self, name: &str) {
        self.0.retain(|(_, other, _)| other != name);
    }

    fn note(&mut self, dir: Ino, name: &str, seed: u64) {
        self.forget(name);
        self.0.push((dir, name.into(), seed));
    }

    fn check(&self, mounted: &Mounted) {
        for (dir, name, seed) in &self.0 {
            let found = mounted.contents(*dir, name).unwrap();
            assert_eq!(found, pattern(*seed, BYTES), "{name}");
        }
    }
}

/// Works in both slices until an operation fails. `last`: the file that was written last, and its name.
fn work(
    mounted: &Mounted,
    reported: &mut Reported,
    last: &mut Option<(Arc<File>, String)>,
) -> Result<()> {
    let (x, y) = (mounted.dir("x"), mounted.fs.lookup(ROOT, b"y")?.ino);
    for number in 0..3 {
        let name = format!("f{number}");
        let file = mounted.create(y, &name)?;
        *last = Some((file.clone(), name.clone()));
        mounted.write(&file, &pattern(number, BYTES))?;
        mounted.fsync(&file)?;
        reported.note(y, &name, number);
        reported.forget(&name);
        mounted.write(&file, &pattern(number + 10, BYTES))?;
        mounted.fsync(&file)?;
        reported.note(y, &name, number + 10);
    }
    // A long file, which is written back before its sync.
    let long = mounted.create(y, "long")?;
    mounted.write(&long, &pattern(30, 60 * 4096))?;
    mounted.fsync(&long)?;
    let both = mounted.synced(x, "both", 40)?;
    mounted.fs.rename(x, b"both", y, b"both", 0)?;
    mounted.fsync(&both)?;
    mounted.fs.commit()?;
    reported.note(y, "both", 40);
    mounted.fs.checkpoint()?;
    mounted.synced(y, "end", 50)?;
    reported.note(y, "end", 50);
    Ok(())
}

/// After a power cut the volume is sound and has everything that was reported.
fn check_after_crash(set: &DeviceSet, seed: u64, reported: &Reported) {
    let crashed = set.crash(seed);
    assert_sound(&crashed);
    let mounted = try_mount(crashed.as_devices()).unwrap();
    reported.check(&mounted);
    let moved = mounted.fs.lookup(reported_dir(&mounted, "x"), b"both");
    let there = mounted.fs.lookup(reported_dir(&mounted, "y"), b"both");
    assert!(
        moved.is_err() || there.is_err(),
        "a renamed file has two names"
    );
    mounted.fs.close().unwrap();
}

fn reported_dir(mounted: &Mounted, name: &str) -> Ino {
    mounted.fs.lookup(ROOT, name.as_bytes()).unwrap().ino
}

#[test]
fn a_slice_comes_back_after_its_host_was_away_from_any_change_on() {
    away_from_each(false, false);
}

#[test]
fn a_slice_comes_back_after_its_host_was_away_while_batches_went_past_the_journal() {
    away_from_each(false, true);
}

#[test]
fn a_slice_comes_back_after_its_host_was_away_from_any_read_on() {
    away_from_each(true, false);
}

/// Has the host go away with each change, or with each change or read, of some work. `passes`: each batch of its slice goes to redb past the journal.
fn away_from_each(counts_reads: bool, passes: bool) {
    let all = [(false, false), (true, true), (false, true), (true, false)];
    let some = if counts_reads || passes { 2 } else { 4 };
    for (checksums, executes_last) in all.into_iter().take(some) {
        let start = filled(checksums);
        for nth in 1.. {
            let set = start.crash(0);
            let (mounted, host) = mount_far_with(&set, 1 << 20);
            let (x, y) = (mounted.dir("x"), mounted.dir("y"));
            let mut reported = Reported::default();
            reported.note(y, "old", 1);
            let mut last = None;
            if passes {
                mounted.fs.pass_journal(1);
            }
            host.counts_reads.store(counts_reads, Ordering::SeqCst);
            host.goes_at(nth, executes_last);
            let worked = work(&mounted, &mut reported, &mut last);
            let was_away = host.is_away();
            if !was_away {
                host.answers();
            }
            if was_away {
                if let Err(error) = worked {
                    assert_eq!(error.errno(), EIO, "change {nth}: {error}");
                }
                // A power cut of all hosts while one is away.
                check_after_crash(&set, nth, &reported);
                let resumed = mounted.fs.resume();
                assert!(resumed.slices.is_empty(), "change {nth}: {resumed:?}");
                host.answers();
                // A slice on the other device is back, too, if an operation changed both.
                let resumed = mounted.fs.resume();
                assert!(!resumed.is_waiting, "change {nth}: {resumed:?}");
                assert_eq!(mounted.fs.resume(), NOTHING);
            }
            reported.check(&mounted);
            check_after_crash(&set, nth + 1, &reported);
            if let Some((last, name)) = &last {
                // An open file works.
                mounted.write(last, &pattern(60, BYTES)).unwrap();
                mounted.fsync(last).unwrap();
                assert_eq!(mounted.read(last).unwrap(), pattern(60, BYTES));
                reported.note(y, name, 60);
            }
            for (dir, name, seed) in [(x, "x again", 61), (y, "y again", 62)] {
                mounted.synced(dir, name, seed).unwrap();
                reported.note(dir, name, seed);
            }
            mounted.fs.rename(x, b"old", y, b"moved", 0).unwrap();
            mounted.fs.commit().unwrap();
            reported.note(y, "moved", 0);
            check_after_crash(&set, nth + 2, &reported);
            mounted.fs.close().unwrap();
            drop(mounted);
            assert_sound(&set);
            if !was_away {
                assert!(nth > 25, "{nth} changes");
                break;
            }
        }
    }
}

/// Creates a durable file in the far slice, and has its host go away while a sync waits for it. Returns when the slice is suspended.
fn suspended(mounted: &Mounted, host: &Host) -> Arc<File> {
    let y = mounted.dir("y");
    let open = mounted.synced(y, "open", 3).unwrap();
    mounted.write(&open, &pattern(4, BYTES)).unwrap();
    host.goes();
    // No commit before has this change, so the next one writes. The change fails if a background commit has failed meanwhile.
    if let Err(error) = mounted.change_mode(&open, 0o600) {
        assert_eq!(error.errno(), EIO, "{error}");
    }
    fails_with(EIO, mounted.fsync(&open));
    // If a write-back has failed before, the sync has failed in its data and has committed nothing. The failure of a commit suspends the slice.
    fails_with(EIO, mounted.sync_dir(y));
    fails_with(EIO, mounted.create(y, "new"));
    open
}

#[test]
fn a_slice_waits_until_its_host_answers_and_no_abandoned_change_is_left() {
    for checksums in [false, true] {
        let set = filled(checksums);
        let (mounted, host) = mount_far(&set);
        assert_eq!(mounted.fs.resume(), NOTHING);
        let open = suspended(&mounted, &host);
        assert_eq!(mounted.fs.resume(), waiting());
        host.has_abandoned.store(true, Ordering::SeqCst);
        host.answers();
        assert_eq!(mounted.fs.resume(), waiting());
        fails_with(EIO, mounted.fsync(&open));
        host.has_abandoned.store(false, Ordering::SeqCst);
        assert_eq!(mounted.fs.resume(), back(&[1]));
        mounted.fsync(&open).unwrap();
        let mut reported = Reported::default();
        reported.note(mounted.dir("y"), "open", 4);
        check_after_crash(&set, 1, &reported);
        mounted.fs.close().unwrap();
    }
}

#[test]
fn a_sync_that_fails_before_its_commit_suspends_nothing_and_the_next_commit_does() {
    /// More than a caller writes itself.
    const PAGES: usize = 20;
    for checksums in [false, true] {
        let set = filled(checksums);
        let (mounted, host) = mount_far(&set);
        let y = mounted.dir("y");
        let mut reported = Reported::default();
        let open = mounted.synced(y, "open", 3).unwrap();
        let long = mounted.synced(y, "long", 5).unwrap();
        mounted.write(&open, &pattern(4, BYTES)).unwrap();
        mounted.write(&long, &pattern(6, PAGES * 4096)).unwrap();
        host.goes();
        // The evictor fails to write the pages. From here on, the evictor also writes the few pages of the other file.
        fails_with(EIO, mounted.fsync(&long));
        fails_with(EIO, mounted.fsync(&open));
        assert_eq!(mounted.fs.resume(), NOTHING);
        // The slice takes changes in memory, until a commit fails.
        let new = mounted.create(y, "new").unwrap();
        fails_with(EIO, mounted.sync_dir(y));
        fails_with(EIO, mounted.fsync(&new));
        fails_with(EIO, mounted.create(y, "late"));
        assert_eq!(mounted.fs.resume(), waiting());
        host.answers();
        assert_eq!(mounted.fs.resume(), back(&[1]));
        for file in [&open, &long, &new] {
            mounted.fsync(file).unwrap();
        }
        reported.note(y, "open", 4);
        check_after_crash(&set, 1, &reported);
        let crashed = try_mount(set.crash(2).as_devices()).unwrap();
        let found = crashed.contents(y, "long").unwrap();
        assert_eq!(found, pattern(6, PAGES * 4096));
        assert!(crashed.contents(y, "new").unwrap().is_empty());
        crashed.fs.close().unwrap();
        mounted.fs.close().unwrap();
    }
}

#[test]
fn a_slice_comes_back_as_often_as_its_host_does() {
    let set = filled(false);
    let (mounted, host) = mount_far(&set);
    let mut reported = Reported::default();
    for round in 0..20 {
        let y = mounted.dir("y");
        let name = format!("file{round}");
        let file = mounted.create(y, &name).unwrap();
        mounted.write(&file, &pattern(round, BYTES)).unwrap();
        host.goes_at(1, round % 2 == 0);
        fails_with(EIO, mounted.fsync(&file));
        host.answers();
        assert_eq!(mounted.fs.resume(), back(&[1]));
        mounted.fsync(&file).unwrap();
        reported.note(y, &name, round);
        check_after_crash(&set, round, &reported);
    }
    mounted.fs.close().unwrap();
    drop(mounted);
    assert_sound(&set);
}

#[test]
fn a_host_that_goes_away_again_during_the_return_of_its_slice_comes_back_later() {
    for checksums in [false, true] {
        for executes_last in [false, true] {
            let start = filled(checksums);
            for nth in 1.. {
                let set = start.crash(0);
                let (mounted, host) = mount_far(&set);
                let (x, y) = (mounted.dir("x"), mounted.dir("y"));
                let mut reported = Reported::default();
                reported.note(y, "old", 1);
                mounted.fs.rename(x, b"old", y, b"moved", 0).unwrap();
                // The only write of the commit, which is in both journals or in one.
                host.goes_at(1, executes_last);
                fails_with(EIO, mounted.fs.commit());
                host.answers();
                host.goes_at(nth, executes_last);
                let first = mounted.fs.resume();
                if host.is_away() {
                    check_after_crash(&set, nth, &reported);
                    host.answers();
                    if first.is_waiting {
                        assert_eq!(mounted.fs.resume(), back(&[0, 1]), "change {nth}");
                    }
                }
                let is_over = !first.is_waiting;
                host.answers();
                check_after_crash(&set, nth + 1, &reported);
                for (dir, name, seed) in [(x, "x again", 61), (y, "y again", 62)] {
                    mounted.synced(dir, name, seed).unwrap();
                    reported.note(dir, name, seed);
                }
                // The rename was in the batches of both.
                reported.note(y, "moved", 0);
                check_after_crash(&set, nth + 2, &reported);
                mounted.fs.close().unwrap();
                drop(mounted);
                assert_sound(&set);
                if is_over {
                    assert!(nth > 5, "{nth} changes");
                    break;
                }
            }
        }
    }
}

#[test]
fn a_slice_whose_metadata_could_only_not_be_read_comes_back() {
    let set = filled(false);
    let (mounted, _) = mount_far(&set);
    let y = mounted.dir("y");
    let value = |number: usize| vec![number as u8; 60_000];
    // More than the stores keep in memory.
    for number in 0..60 {
        let file = mounted.create(y, &format!("f{number}")).unwrap();
        (mounted
            .fs
            .setxattr(file.ino(), b"user.a", &value(number), 0))
        .unwrap();
    }
    mounted.fs.close().unwrap();
    drop(mounted);
    let (mounted, host) = mount_far_with(&set, 1 << 20);
    let y = reported_dir(&mounted, "y");
    let read = |number: usize| {
        let file = mounted.fs.lookup(y, format!("f{number}").as_bytes())?;
        mounted.fs.getxattr(file.ino, b"user.a")
    };
    for number in 0..60 {
        assert_eq!(read(number).unwrap(), value(number));
    }
    let absences = mounted.fs.absences();
    host.goes();
    fails_with(EIO, (0..60).map(read).collect::<Result<Vec<_>>>());
    // The thread that calls `resume` learns of it.
    assert!(absences.wait());
    assert_eq!(mounted.fs.resume(), waiting());
    host.answers();
    fails_with(EIO, (0..60).map(read).collect::<Result<Vec<_>>>());
    assert_eq!(mounted.fs.resume(), back(&[1]));
    for number in 0..60 {
        assert_eq!(read(number).unwrap(), value(number));
    }
    mounted.synced(y, "new", 2).unwrap();
    mounted.fs.close().unwrap();
    assert!(!absences.wait(), "the thread ends");
}

/// Mounts for reading, with the last device on another host, and little memory for the metadata stores.
fn mount_far_for_reading(set: &DeviceSet) -> (Mounted, Arc<Host>) {
    let mut devices = set.as_devices();
    let host = Host::new();
    let last = devices.pop().unwrap();
    devices.push(Arc::new(Far(last, host.clone())));
    (try_mount_for_reading(devices, 1 << 20).unwrap(), host)
}

/// Returns a volume after a power cut. The last batches are only in the journals: one file more than `FILES`, and a file that another slice had.
fn cut_with_much_metadata(checksums: bool) -> DeviceSet {
    let set = filled(checksums);
    let mounted = try_mount(set.as_devices()).unwrap();
    let (x, y) = (mounted.dir("x"), mounted.dir("y"));
    for number in 0..FILES {
        let file = mounted.create(y, &format!("f{number}")).unwrap();
        let value = vec![number as u8; 60_000];
        let fs = &mounted.fs;
        fs.setxattr(file.ino(), b"user.a", &value, 0).unwrap();
    }
    mounted.fs.checkpoint().unwrap();
    mounted.synced(y, "logged", 9).unwrap();
    mounted.fs.rename(x, b"old", y, b"moved", 0).unwrap();
    mounted.fs.commit().unwrap();
    set.crash(1)
}

/// Has more extended attributes than the stores keep in memory.
const FILES: usize = 60;

fn read_all_values(mounted: &Mounted) -> Result<()> {
    let y = mounted.fs.lookup(ROOT, b"y")?.ino;
    for number in 0..FILES {
        let file = mounted.fs.lookup(y, format!("f{number}").as_bytes())?;
        let value = mounted.fs.getxattr(file.ino, b"user.a")?;
        assert_eq!(value, vec![number as u8; 60_000], "{number}");
    }
    Ok(())
}

#[test]
fn a_volume_that_is_mounted_for_reading_can_be_read_again_when_its_host_is_back() {
    for checksums in [false, true] {
        let set = cut_with_much_metadata(checksums);
        let before = set.devices().iter().map(|one| one.digest());
        let before: Vec<_> = before.collect();
        let (mounted, host) = mount_far_for_reading(&set);
        let absences = mounted.fs.absences();
        let y = reported_dir(&mounted, "y");
        for round in 0..3 {
            read_all_values(&mounted).unwrap();
            assert_eq!(mounted.fs.resume(), NOTHING);
            host.goes();
            fails_with(EIO, read_all_values(&mounted));
            assert!(absences.wait(), "the thread learns of it");
            assert_eq!(mounted.fs.resume(), waiting());
            // The other slice can be read.
            mounted.fs.lookup(ROOT, b"x").unwrap();
            host.answers();
            if round == 1 {
                // It goes away again with the first read.
                host.counts_reads.store(true, Ordering::SeqCst);
                host.goes_at(3, false);
                assert_eq!(mounted.fs.resume(), waiting());
                host.answers();
            }
            assert_eq!(mounted.fs.resume(), back(&[1]));
            read_all_values(&mounted).unwrap();
            for (name, seed) in [("old", 1), ("logged", 9), ("moved", 0)] {
                let contents = mounted.contents(y, name).unwrap();
                assert_eq!(contents, pattern(seed, BYTES), "{name}");
            }
        }
        fails_with(EROFS, mounted.create(y, "new"));
        mounted.fs.close().unwrap();
        assert!(!absences.wait(), "the thread ends");
        drop(mounted);
        let after = set.devices().iter().map(|one| one.digest());
        assert!(after.eq(before), "nothing was written");
    }
}

#[test]
fn a_volume_that_is_mounted_for_reading_keeps_its_view_or_waits_for_a_mount() {
    let set = cut_with_much_metadata(false);
    let changed = set.crash(2);
    let mounted = try_mount(changed.as_devices()).unwrap();
    mounted.synced(mounted.dir("y"), "later", 3).unwrap();
    mounted.fs.close().unwrap();
    drop(mounted);
    let blank = DeviceSet::new([SimDevice::new("two", 64 * MIB)]);
    for (other, found) in [
        (&changed, "was changed while its host was away"),
        (&blank, "holds no part of a volume"),
    ] {
        let (mounted, host) = mount_far_for_reading(&set);
        host.goes();
        fails_with(EIO, read_all_values(&mounted));
        host.answers_with(other.devices().last().unwrap().clone());
        assert_eq!(mounted.fs.resume(), NOTHING);
        let error = mounted.fs.failure_of(1).unwrap().to_string();
        assert!(error.contains(found), "{error}");
        assert!(read_all_values(&mounted).is_err());
        assert_eq!(mounted.fs.resume(), NOTHING);
        mounted.fs.lookup(ROOT, b"x").unwrap();
        fails_with(EIO, mounted.fs.close());
    }
}

#[test]
fn a_volume_that_is_mounted_for_reading_can_be_closed_while_its_host_is_away() {
    let set = cut_with_much_metadata(false);
    let (mounted, host) = mount_far_for_reading(&set);
    host.goes();
    fails_with(EIO, read_all_values(&mounted));
    assert_eq!(mounted.fs.resume(), waiting());
    // The stores report that they could not be read.
    fails_with(EIO, mounted.fs.close());
    host.answers();
    assert_eq!(mounted.fs.resume(), NOTHING);
}

#[test]
fn a_device_that_answers_with_an_error_does_not_come_back() {
    for is_away_first in [false, true] {
        let set = filled(false);
        let (mounted, host) = mount_far(&set);
        let y = mounted.dir("y");
        if is_away_first {
            suspended(&mounted, &host);
            host.answers();
        }
        let mut plan = FaultPlan::fail_nth(Some(Operation::Flush), 1, EIO);
        plan.faults[0].is_lasting = true;
        set.devices()[1].set_plan(plan);
        if !is_away_first {
            fails_with(EIO, mounted.synced(y, "lost", 7));
        }
        assert_eq!(mounted.fs.resume(), NOTHING);
        set.devices()[1].set_plan(FaultPlan::default());
        assert_eq!(mounted.fs.resume(), NOTHING);
        fails_with(EIO, mounted.create(y, "new"));
        let x = mounted.dir("x");
        mounted.synced(x, "beside", 1).unwrap();
        fails_with(EIO, mounted.fs.close());
    }
}

#[test]
fn a_file_of_another_slice_with_blocks_in_the_slice_keeps_its_changes() {
    for checksums in [false, true] {
        for removes in [false, true] {
            let set = filled(checksums);
            let (mounted, host) = mount_far(&set);
            let (x, y) = (mounted.dir("x"), mounted.dir("y"));
            let free = mounted.fs.statfs().unwrap().free;
            let far = mounted.synced(x, "far", 5).unwrap();
            mounted.fs.move_to(far.ino(), 1).unwrap();
            mounted.fsync(&far).unwrap();
            // More pages, whose blocks are on the far device and in no batch yet.
            mounted.write(&far, &pattern(6, 20 * 4096)).unwrap();
            drop(suspended(&mounted, &host));
            let mut reported = Reported::default();
            if removes {
                mounted.fs.unlink(x, b"far").unwrap();
                mounted.fs.close_file(&far);
                mounted.fs.forget(far.ino(), 1);
            } else {
                fails_with(EIO, mounted.fsync(&far));
            }
            // Several batches of its own slice do without its changes.
            for round in 0..3 {
                let name = format!("new{round}");
                mounted.synced(x, &name, round).unwrap();
                reported.note(x, &name, round);
            }
            host.answers();
            assert_eq!(mounted.fs.resume(), back(&[1]));
            if removes {
                drop(far);
                mounted.fs.sync_all().unwrap();
                check_after_crash(&set, 3, &reported);
                mounted.fs.unlink(y, b"open").unwrap();
                for round in 0..3 {
                    mounted
                        .fs
                        .unlink(x, format!("new{round}").as_bytes())
                        .unwrap();
                }
                mounted.fs.close().unwrap();
                drop(mounted);
                assert_sound(&set);
                let mounted = try_mount(set.as_devices()).unwrap();
                let left = mounted.fs.statfs().unwrap().free;
                assert!(left + 16 >= free, "{left} of {free} blocks are free");
                mounted.fs.close().unwrap();
                continue;
            }
            mounted.fsync(&far).unwrap();
            let crashed = set.crash(2);
            assert_sound(&crashed);
            let again = try_mount(crashed.as_devices()).unwrap();
            assert_eq!(again.contents(x, "far").unwrap(), pattern(6, 20 * 4096));
            reported.check(&again);
            again.fs.close().unwrap();
            drop(far);
            mounted.fs.close().unwrap();
            drop(mounted);
            assert_sound(&set);
        }
    }
}

#[test]
fn a_disk_that_is_not_the_one_of_the_volume_gets_no_write_when_its_host_is_back() {
    let blank = || DeviceSet::new([SimDevice::new("two", 64 * MIB)]);
    let others: [(&dyn Fn() -> DeviceSet, &str); 3] = [
        (&blank, "holds no part of a volume"),
        // The disk was formatted, or is that of another volume.
        (&|| filled(false), "belongs to another volume"),
        (
            &|| formatted_with(true, [64 * MIB, 64 * MIB]),
            "belongs to another volume",
        ),
    ];
    for (make, found) in others {
        for has_failed in [true, false] {
            let set = filled(false);
            let (mounted, host) = mount_far(&set);
            let (x, y) = (mounted.dir("x"), mounted.dir("y"));
            let mut reported = Reported::default();
            // Its pages are in their blocks from here on, where the evictor would write them again.
            let open = mounted.synced(y, "open", 3).unwrap();
            let dirty = mounted.synced(y, "dirty", 6).unwrap();
            mounted.fs.checkpoint().unwrap();
            mounted.write(&open, &pattern(4, BYTES)).unwrap();
            mounted.write(&dirty, &pattern(7, BYTES)).unwrap();
            host.goes();
            if has_failed {
                fails_with(EIO, mounted.fsync(&open));
            } else {
                // Only a flush has failed, so the slice keeps its store.
                fails_with(EIO, mounted.fs.sync_all());
            }
            let others = make();
            let other = others.devices().last().unwrap().clone();
            let before = (other.operations(Some(Operation::Write)), other.digest());
            host.answers_with(other.clone());
            // Another slice changes the superblock.
            mounted.volume.superblocks().update(&[], |_| {}).unwrap();
            assert_eq!(mounted.fs.resume(), NOTHING);
            let error = mounted.fs.failure_of(1).unwrap().to_string();
            assert!(error.contains("two") && error.contains(found), "{error}");
            assert!(error.contains("mount the volume again"), "{error}");
            mounted.volume.superblocks().update(&[], |_| {}).unwrap();
            // The other slice works.
            mounted.synced(x, "near", 5).unwrap();
            reported.note(x, "near", 5);
            fails_with(EIO, mounted.fsync(&open));
            fails_with(EIO, mounted.create(y, "new"));
            assert!(try_write_back(&mounted, 1).is_err());
            fails_with(EIO, mounted.fs.checkpoint());
            fails_with(EIO, mounted.fs.close());
            drop((open, dirty, mounted));
            let after = (other.operations(Some(Operation::Write)), other.digest());
            assert_eq!(after, before);
            check_after_crash(&set, 1, &reported);
        }
    }
}

#[test]
fn all_space_is_there_again_after_the_return() {
    let set = filled(false);
    let (mounted, host) = mount_far(&set);
    let y = mounted.dir("y");
    let space = |mounted: &Mounted| mounted.fs.statfs().unwrap().free;
    let before = space(&mounted);
    for _ in 0..3 {
        let open = suspended(&mounted, &host);
        host.answers();
        assert_eq!(mounted.fs.resume(), back(&[1]));
        mounted.fsync(&open).unwrap();
        mounted.fs.unlink(y, b"open").unwrap();
        mounted.fs.close_file(&open);
        mounted.fs.forget(open.ino(), 1);
        drop(open);
        mounted.fs.sync_all().unwrap();
    }
    assert_eq!(space(&mounted), before);
    mounted.fs.close().unwrap();
}

#[test]
fn a_volume_whose_slice_waits_for_its_host_can_be_closed() {
    let set = filled(false);
    let (mounted, host) = mount_far(&set);
    let mut reported = Reported::default();
    reported.note(mounted.dir("y"), "open", 3);
    mounted.synced(mounted.dir("x"), "near", 8).unwrap();
    reported.note(mounted.dir("x"), "near", 8);
    let open = mounted.synced(mounted.dir("y"), "open", 3).unwrap();
    mounted.create(mounted.dir("y"), "lost").unwrap();
    host.goes();
    fails_with(EIO, mounted.fsync(&open).and_then(|()| mounted.fs.commit()));
    fails_with(EIO, mounted.fs.close());
    host.answers();
    assert_eq!(mounted.fs.resume(), NOTHING);
    drop((open, mounted));
    check_after_crash(&set, 1, &reported);
}

#[test]
fn two_hosts_with_one_operation_come_back_together() {
    for checksums in [false, true] {
        for executes_last in [false, true] {
            let set = filled_three(checksums);
            let hosts = [Host::new(), Host::new()];
            let mut devices = set.as_devices();
            for (device, host) in devices[1..].iter_mut().zip(&hosts) {
                *device = Arc::new(Far(device.clone(), host.clone()));
            }
            let mounted = try_mount(devices).unwrap();
            let (x, y, z) = (mounted.dir("x"), mounted.dir("y"), mounted.dir("z"));
            mounted.fs.rename(y, b"old", z, b"moved", 0).unwrap();
            hosts.iter().for_each(|host| host.goes_at(1, executes_last));
            fails_with(EIO, mounted.fs.commit());
            hosts.iter().for_each(|host| host.goes());
            mounted.synced(x, "beside", 3).unwrap();
            assert_eq!(mounted.fs.resume(), waiting());
            hosts[0].answers();
            assert_eq!(mounted.fs.resume(), waiting());
            fails_with(EIO, mounted.create(y, "new"));
            hosts[1].answers();
            assert_eq!(mounted.fs.resume(), back(&[1, 2]));
            let mut reported = Reported::default();
            reported.note(x, "beside", 3);
            check_after_crash(&set, 1, &reported);
            mounted.fs.commit().unwrap();
            mounted.synced(y, "new", 4).unwrap();
            reported.note(y, "new", 4);
            reported.note(z, "moved", 1);
            check_after_crash(&set, 2, &reported);
            mounted.fs.close().unwrap();
            drop(mounted);
            assert_sound(&set);
        }
    }
}

#[test]
fn a_slice_whose_operation_also_changed_the_slice_of_an_absent_host_waits_for_the_host() {
    let set = filled(false);
    let (mounted, host) = mount_far(&set);
    let (x, y) = (mounted.dir("x"), mounted.dir("y"));
    let file = mounted.synced(y, "file", 2).unwrap();
    // Its pages are in their blocks from here on.
    mounted.fs.checkpoint().unwrap();
    mounted.fs.rename(x, b"old", y, b"moved", 0).unwrap();
    // The data is synced without a commit, and the flush fails: no batch is sealed.
    mounted.write(&file, &pattern(3, BYTES)).unwrap();
    host.goes_at(2, false);
    let (sender, receiver) = channel();
    let done = Box::new(move |result| sender.send(result).unwrap());
    mounted.fs.fsync_blocking(&file, true, done);
    fails_with(EIO, receiver.recv().unwrap());
    fails_with(EIO, mounted.create(y, "new"));
    mounted.create(x, "new").unwrap();
    fails_with(EIO, mounted.fs.commit());
    fails_with(EIO, mounted.create(x, "other"));
    for _ in 0..3 {
        assert_eq!(mounted.fs.resume(), waiting());
    }
    host.answers();
    assert_eq!(mounted.fs.resume(), back(&[0, 1]));
    mounted.fs.commit().unwrap();
    mounted.fsync(&file).unwrap();
    let mut reported = Reported::default();
    reported.note(y, "moved", 0);
    reported.note(y, "file", 3);
    check_after_crash(&set, 1, &reported);
    mounted.fs.close().unwrap();
}

#[test]
fn what_changes_while_the_host_is_away_is_not_taken_for_a_part_of_the_batch_that_reached_it() {
    for checksums in [false, true] {
        for executes_last in [false, true] {
            let set = filled(checksums);
            let (mounted, host) = mount_far(&set);
            let y = mounted.dir("y");
            let other = mounted.create(y, "other").unwrap();
            let file = mounted.create(y, "file").unwrap();
            mounted.fs.commit().unwrap();
            mounted.write(&other, &pattern(5, BYTES)).unwrap();
            mounted.write(&file, &pattern(6, BYTES)).unwrap();
            // The device has the batch.
            host.goes_at(1, executes_last);
            fails_with(EIO, mounted.fsync(&file));
            // The pages of the other file are written to the other device.
            fails_with(EIO, mounted.fs.sync_all());
            fails_with(EIO, mounted.fs.commit());
            host.answers();
            assert_eq!(mounted.fs.resume(), back(&[1]));
            mounted.fsync(&other).unwrap();
            mounted.fsync(&file).unwrap();
            let mut reported = Reported::default();
            reported.note(y, "other", 5);
            reported.note(y, "file", 6);
            check_after_crash(&set, 1, &reported);
            mounted.fs.close().unwrap();
        }
    }
}

/// Writes the dirty pages of a slice to its device, without a batch.
fn write_back(mounted: &Mounted, slice: usize) {
    try_write_back(mounted, slice).unwrap();
}

/// Does the same, and returns the error if it fails.
fn try_write_back(
    mounted: &Mounted,
    slice: usize,
) -> std::result::Result<(), jericho_cache::Error> {
    let (sender, receiver) = channel();
    mounted.slices[slice].sync_all(Box::new(move |result| sender.send(result).unwrap()));
    receiver.recv().unwrap()
}

#[test]
fn a_slice_whose_next_batch_needs_the_data_on_the_device_of_an_absent_host_waits_for_the_host() {
    for is_linked in [false, true] {
        let set = filled(false);
        let (mounted, host) = mount_far(&set);
        let (x, y) = (mounted.dir("x"), mounted.dir("y"));
        let near = mounted.synced(x, "near", 5).unwrap();
        // It has had blocks on the far device.
        for slice in [1, 0] {
            mounted.fs.move_to(near.ino(), slice).unwrap();
            mounted.fsync(&near).unwrap();
        }
        let far = mounted.synced(y, "far", 6).unwrap();
        mounted.fs.checkpoint().unwrap();
        if is_linked {
            mounted.fs.rename(x, b"old", y, b"moved", 0).unwrap();
            mounted.fs.commit().unwrap();
        }
        // Data that no flush has made durable.
        mounted.write(&far, &pattern(7, BYTES)).unwrap();
        write_back(&mounted, 1);
        mounted.write(&near, &pattern(8, BYTES)).unwrap();
        host.goes();
        fails_with(EIO, mounted.fsync(&near));
        // More often than a journal knows its earlier incarnations.
        for _ in 0..100 {
            assert_eq!(mounted.fs.resume(), waiting());
            fails_with(EIO, mounted.fs.commit());
        }
        host.answers();
        assert_eq!(mounted.fs.resume(), back(&[0, 1]));
        mounted.fsync(&near).unwrap();
        mounted.fsync(&far).unwrap();
        let mut reported = Reported::default();
        reported.note(x, "near", 8);
        reported.note(y, "far", 7);
        if is_linked {
            reported.note(y, "moved", 0);
        }
        check_after_crash(&set, 1, &reported);
        mounted.synced(y, "new", 9).unwrap();
        mounted.fs.close().unwrap();
        drop((near, far, mounted));
        assert_sound(&set);
    }
}

#[test]
fn batches_of_two_hosts_that_no_operation_has_linked_are_judged_one_by_one() {
    let set = filled_three(false);
    let hosts = [Host::new(), Host::new()];
    let mut devices = set.as_devices();
    for (device, host) in devices[1..].iter_mut().zip(&hosts) {
        *device = Arc::new(Far(device.clone(), host.clone()));
    }
    let mounted = try_mount(devices).unwrap();
    let (y, z) = (mounted.dir("y"), mounted.dir("z"));
    let first = mounted.create(y, "first").unwrap();
    let second = mounted.create(z, "second").unwrap();
    mounted.write(&first, &pattern(1, BYTES)).unwrap();
    mounted.write(&second, &pattern(2, BYTES)).unwrap();
    let (at, arrived) = channel();
    let pause = |(host, executes_last): (&Arc<Host>, bool)| {
        let (go, goes) = channel();
        *host.pause.lock().unwrap() = Some((at.clone(), goes));
        host.goes_at(1, executes_last);
        go
    };
    // One of the batches reaches its device.
    let gos: Vec<_> = hosts.iter().zip([true, false]).map(pause).collect();
    std::thread::scope(|scope| {
        let syncs = [&first, &second].map(|file| scope.spawn(|| mounted.fsync(file)));
        (0..2).for_each(|_| arrived.recv().unwrap());
        // The next batches are linked.
        mounted.fs.rename(y, b"old", z, b"moved", 0).unwrap();
        gos.iter().for_each(|go| go.send(()).unwrap());
        for sync in syncs {
            fails_with(EIO, sync.join().unwrap());
        }
    });
    assert_eq!(mounted.fs.resume(), waiting());
    hosts.iter().for_each(|host| host.answers());
    assert_eq!(mounted.fs.resume(), back(&[1, 2]));
    mounted.fsync(&first).unwrap();
    mounted.fsync(&second).unwrap();
    let mut reported = Reported::default();
    reported.note(y, "first", 1);
    reported.note(z, "second", 2);
    check_after_crash(&set, 1, &reported);
    mounted.fs.commit().unwrap();
    reported.note(z, "moved", 1);
    check_after_crash(&set, 2, &reported);
    mounted.fs.close().unwrap();
    drop((first, second, mounted));
    assert_sound(&set);
}

#[test]
fn many_files_that_wait_for_an_absent_host_do_not_hold_up_their_own_slice() {
    /// More than a batch of the least memory takes.
    const FILES: usize = 2100;
    let set = filled(false);
    let (mounted, host) = mount_far_with(&set, 1 << 20);
    let (x, y) = (mounted.dir("x"), mounted.dir("y"));
    let name = |number: usize| format!("n{number}");
    let mut files: Vec<_> = (0..FILES)
        .map(|number| {
            let file = mounted.create(x, &name(number)).unwrap();
            mounted.fs.move_to(file.ino(), 1).unwrap();
            mounted.write(&file, &[number as u8; 4096]).unwrap();
            file
        })
        .collect();
    mounted.fs.sync_all().unwrap();
    let contents = |number: usize| [(number + 1) as u8; 4096];
    for (number, file) in files.iter().enumerate() {
        mounted.write(file, &contents(number)).unwrap();
    }
    let open = suspended(&mounted, &host);
    for file in &files {
        mounted.fs.fallocate(file, 1, 4096, 4096).unwrap();
    }
    // Some are removed.
    for (number, file) in files.drain(..FILES / 4).enumerate() {
        mounted.fs.unlink(x, name(number).as_bytes()).unwrap();
        mounted.fs.close_file(&file);
        mounted.fs.forget(file.ino(), 1);
    }
    for round in 0..5 {
        fails_with(EIO, mounted.fs.commit());
        assert!(!mounted.fs.is_behind());
        mounted.synced(x, &format!("new{round}"), round).unwrap();
    }
    // A change of attributes goes into a batch, and a sync of the contents fails.
    let some = files[0].clone();
    mounted.change_mode(&some, 0o600).unwrap();
    fails_with(EIO, mounted.fsync(&some));
    fails_with(EIO, mounted.fs.commit());
    let crashed = try_mount(set.crash(1).as_devices()).unwrap();
    let found = crashed.fs.lookup(x, name(FILES / 4).as_bytes()).unwrap();
    assert_eq!(found.perm, 0o600);
    crashed.fs.close().unwrap();
    host.answers();
    assert_eq!(mounted.fs.resume(), back(&[1]));
    mounted.fs.sync_all().unwrap();
    mounted.fsync(&open).unwrap();
    let crashed = set.crash(2);
    assert_sound(&crashed);
    let again = try_mount(crashed.as_devices()).unwrap();
    for number in FILES / 4..FILES {
        let found = again.contents(x, &name(number)).unwrap();
        assert_eq!(found[..4096], contents(number), "{number}");
    }
    fails_with(2, again.fs.lookup(x, b"n0"));
    again.fs.close().unwrap();
    mounted.synced(y, "end", 1).unwrap();
    mounted.fs.close().unwrap();
    drop((files, some, open, mounted));
    assert_sound(&set);
}
