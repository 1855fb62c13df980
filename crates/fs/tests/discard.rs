//! Freed blocks return to the device: which blocks, when, and the effects of a crash or a full volume.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use jericho_cache::{Intent, Slice};
use jericho_fs::Result;
use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Kind, ROOT};
use jericho_fs::{Done, File, Fs, FsOptions};
use jericho_sim::{Effect, Fault, FaultPlan, Operation, SimDevice};
use jericho_storage::Device;
use jericho_volume::{FormatOptions, OpenMode, Volume};

mod mount;

use mount::{CALLER, PAGE, SLICES, start_slices};

const MIB: u64 = 1 << 20;
const FOREVER: Duration = Duration::from_secs(60);
/// Commit interval with which the filesystem commits and discards only on request.
const NEVER_MS: u64 = 3_600_000;

fn formatted(bytes: u64) -> SimDevice {
    let device = Arc::new(SimDevice::new("sim", bytes).with_discards());
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    let options = FormatOptions {
        slices: Some(SLICES),
        ..FormatOptions::default()
    };
    format_devices(&devices, &[PathBuf::from("sim")], &options).unwrap();
    Arc::try_unwrap(device).unwrap_or_else(|device| device.crash(0))
}

struct Mount {
    fs: Arc<Fs>,
    slices: Vec<Arc<Slice>>,
}

impl Mount {
    fn of(device: Arc<dyn Device>, commit_interval_ms: u64) -> std::result::Result<Mount, String> {
        let volume =
            Volume::open_from_devices(vec![device], OpenMode::WRITE).map_err(|e| e.to_string())?;
        let slices = start_slices(&volume, Duration::from_secs(3600));
        let options = FsOptions {
            store_cache_bytes: 16 << 20,
            read_only: false,
            inode_cache: 100,
            commit_interval_ms,
        };
        match Fs::open(Arc::new(volume), slices.clone(), options) {
            Ok(fs) => Ok(Mount { fs, slices }),
            Err(error) => {
                slices.iter().for_each(|slice| slice.close());
                Err(error.to_string())
            }
        }
    }

    fn write(&self, file: &Arc<File>, data: &[u8]) -> Result<()> {
        let _writing = file.writing();
        self.fs.begin_write(file, 0, data.len() as u64)?;
        let slice = &self.slices[usize::from(file.layout().home())];
        for (page, bytes) in (0..).zip(data.chunks(PAGE as usize)) {
            let (sender, receiver) = channel();
            slice.get(&file.object(), page, 1, Intent::Modify, move |pinned| {
                sender.send(pinned).unwrap();
            });
            let mut pinned = receiver
                .recv()
                .unwrap()
                .map_err(jericho_fs::error::of_cache)?;
            pinned.write(page, 0, bytes).unwrap();
            drop(pinned);
            let at = page * PAGE;
            self.fs.end_write(file, at, bytes.len() as u64);
        }
        Ok(())
    }

    fn read(&self, name: &str) -> Option<Vec<u8>> {
        let attr = self.fs.lookup(ROOT, name.as_bytes()).ok()?;
        let file = self.fs.open_file(attr.ino).unwrap();
        let mut data = vec![0; file.size() as usize];
        let slice = &self.slices[usize::from(file.layout().home())];
        for (page, bytes) in (0..).zip(data.chunks_mut(PAGE as usize)) {
            let (sender, receiver) = channel();
            slice.get(&file.object(), page, 1, Intent::Read, move |pinned| {
                sender.send(pinned).unwrap();
            });
            let pinned = receiver.recv().unwrap().unwrap();
            pinned.read(page, 0, bytes).unwrap();
        }
        self.fs.close_file(&file);
        self.fs.forget(attr.ino, 1);
        Some(data)
    }

    /// Creates a durable file.
    fn put(&self, name: &str, data: &[u8]) -> Result<()> {
        let (name, kind) = (name.as_bytes(), Kind::File);
        let attr = self.fs.mknod(ROOT, name, kind, 0o644, 0, CALLER)?;
        let file = self.fs.open_file(attr.ino)?;
        let result = self
            .write(&file, data)
            .and_then(|()| wait(|done| self.fs.fsync(&file, false, done)));
        self.fs.close_file(&file);
        drop(file);
        self.fs.forget(attr.ino, 1);
        result
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.fs.unlink(ROOT, name.as_bytes())
    }

    fn commit(&self) -> Result<()> {
        wait(|done| self.fs.fsync_dir(ROOT, done))
    }

    fn free(&self) -> u64 {
        self.fs.statfs().unwrap().free
    }

    fn close(self) {
        self.fs.close().unwrap();
        self.down();
    }

    fn down(self) {
        drop(self.fs);
        self.slices.iter().for_each(|slice| slice.close());
    }
}

fn wait(start: impl FnOnce(Done)) -> Result<()> {
    let (sender, receiver) = channel();
    start(Box::new(move |result| sender.send(result).unwrap()));
    receiver.recv().unwrap()
}

fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    let byte = |i: u64| (i.wrapping_mul(31) ^ (i >> 12) ^ seed.wrapping_mul(0x9E37)) as u8;
    (0..bytes).map(byte).collect()
}

fn assert_sound(device: &Arc<SimDevice>) {
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    let report = check_devices(devices, CheckOptions::default()).unwrap();
    assert!(report.is_sound(), "{:#?}", report.findings);
}

/// Returns the number of bytes discarded since the device was created, and the largest piece.
fn discarded(device: &SimDevice) -> (u64, u64) {
    let log = device.log().into_iter();
    let lengths = log
        .filter(|op| op.operation == Operation::Discard && op.failure.is_none())
        .map(|op| op.length_bytes);
    lengths.fold((0, 0), |(sum, most), length| {
        (sum + length, most.max(length))
    })
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + FOREVER;
    while !is_so() {
        assert!(Instant::now() < deadline, "did not happen: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn only_removed_blocks_are_discarded_without_a_request() {
    let device = Arc::new(formatted(64 * MIB));
    let mount = Mount::of(device.clone(), 1).unwrap();
    let kept = pattern(1, 5 * MIB);
    mount.put("kept", &kept).unwrap();
    mount.put("gone", &pattern(2, 9 * MIB)).unwrap();
    mount.put("small", &pattern(3, 100_000)).unwrap();
    assert_eq!(discarded(&device).0, 0);
    mount.remove("gone").unwrap();
    mount.remove("small").unwrap();
    mount.commit().unwrap();
    // A part at the end of a container may be too short for a discard.
    wait_until("9 MiB are discarded", || discarded(&device).0 >= 8 * MIB);
    assert_eq!(mount.read("kept").unwrap(), kept);
    let free = mount.free();
    // The discarded space can be used again.
    mount.put("new", &pattern(4, 20 * MIB)).unwrap();
    assert_eq!(mount.read("new").unwrap(), pattern(4, 20 * MIB));
    assert_eq!(mount.free(), free - 20 * MIB / PAGE);
    let (bytes, most) = discarded(&device);
    assert!(bytes <= 10 * MIB && most <= 16 * MIB, "{bytes}, {most}");
    mount.close();
    assert_sound(&device);
}

#[test]
fn remaining_freed_blocks_are_discarded_at_the_end_of_the_mount() {
    let device = Arc::new(formatted(64 * MIB));
    let mount = Mount::of(device.clone(), NEVER_MS).unwrap();
    mount.put("gone", &pattern(2, 9 * MIB)).unwrap();
    mount.remove("gone").unwrap();
    mount.close();
    assert!(discarded(&device).0 >= 8 * MIB);
    assert_sound(&device);
}

#[test]
fn a_trim_discards_all_free_blocks_and_its_parts_add_up() {
    let device = Arc::new(formatted(64 * MIB));
    let mount = Mount::of(device.clone(), NEVER_MS).unwrap();
    let kept = pattern(1, 5 * MIB);
    mount.put("kept", &kept).unwrap();
    let trim = |range, run_least, until| mount.fs.trim(range, run_least, until).unwrap();
    let all = trim(0..u64::MAX, 0, None);
    assert_eq!((all.blocks, all.next), (mount.free(), None));
    assert_eq!(discarded(&device).0, mount.free() * PAGE);
    let (mut at, mut sum, mut parts) = (Some(0), 0, 0);
    while let Some(from) = at {
        let part = trim(from..u64::MAX, 1, Some(Instant::now()));
        assert!(part.next.is_none_or(|next| next > from));
        (at, sum, parts) = (part.next, sum + part.blocks, parts + 1);
    }
    assert!(sum == mount.free() && parts > 2, "{sum}, {parts}");
    // No run is that long, and no block is beyond the volume.
    assert_eq!(trim(0..u64::MAX, 1 << 40, None).blocks, 0);
    assert_eq!(trim(1 << 40..u64::MAX, 0, None).blocks, 0);
    let capacity = mount.fs.statfs().unwrap().blocks;
    let halves = [0..capacity / 3, capacity / 3..capacity].map(|half| trim(half, 0, None).blocks);
    assert_eq!(halves[0] + halves[1], mount.free());
    assert_eq!(mount.read("kept").unwrap(), kept);
    mount.close();
    assert_sound(&device);
}

#[test]
fn a_device_that_refuses_a_discard_is_not_tried_again_and_one_without_room_is() {
    for (errno, is_asked_again) in [(95, false), (5, false), (28, true)] {
        let device = Arc::new(formatted(64 * MIB));
        let mount = Mount::of(device.clone(), NEVER_MS).unwrap();
        mount.put("kept", &pattern(1, MIB)).unwrap();
        device.set_plan(FaultPlan {
            faults: vec![Fault {
                operation: Some(Operation::Discard),
                nth: 1,
                is_lasting: false,
                effect: Effect::Errno(errno),
            }],
            ..FaultPlan::default()
        });
        let trimmed = mount.fs.trim(0..u64::MAX, 0, None).unwrap();
        assert_eq!(trimmed.blocks > 0, is_asked_again, "errno {errno}");
        assert_eq!(
            device.operations(Some(Operation::Discard)) > 1,
            is_asked_again
        );
        let again = mount.fs.trim(0..u64::MAX, 0, None);
        match is_asked_again {
            true => assert_eq!(again.unwrap().blocks, mount.free()),
            false => assert_eq!(again.unwrap_err().errno(), 95),
        }
        mount.put("more", &pattern(2, MIB)).unwrap();
        mount.close();
        assert_sound(&device);
    }
}

/// Runs `take`, which uses nearly all free space for a new file, while a part of that space is being discarded.
fn take_all_while_a_discard_is_under_way(take: fn(&Mount, &Arc<File>, u64) -> Result<()>) {
    let device = Arc::new(formatted(64 * MIB));
    let (is_reached, go) = device.block_next(Operation::Discard);
    let mount = Mount::of(device.clone(), 1).unwrap();
    mount.put("gone", &pattern(1, 8 * MIB)).unwrap();
    // Takes the rest of the space, so that only the removed file's space is left.
    let mut number = 0;
    while mount.free() > 0 {
        let bytes = (mount.free() * PAGE).min(8 * MIB);
        match mount.put(&format!("full{number}"), &pattern(9, bytes)) {
            Ok(()) => number += 1,
            // The metadata took the space in the meantime.
            Err(error) => assert_eq!(error.errno(), 28),
        }
    }
    let attr = mount
        .fs
        .mknod(ROOT, b"new", Kind::File, 0o644, 0, CALLER)
        .unwrap();
    let file = mount.fs.open_file(attr.ino).unwrap();
    mount.remove("gone").unwrap();
    mount.commit().unwrap();
    is_reached.wait();
    // Blocks that are being discarded are free, but cannot be allocated now.
    let bytes = (mount.free() - 32) * PAGE;
    assert!(bytes >= 7 * MIB);
    std::thread::scope(|scope| {
        let (sender, ended) = channel();
        let (mount, file) = (&mount, &file);
        scope.spawn(move || sender.send(take(mount, file, bytes)).unwrap());
        match ended.recv_timeout(Duration::from_millis(300)) {
            Err(RecvTimeoutError::Timeout) => {}
            early => panic!("the write did not wait: {early:?}"),
        }
        drop(go);
        ended.recv_timeout(FOREVER).unwrap().unwrap();
    });
    mount.fs.close_file(&file);
    drop(file);
    mount.close();
    assert_sound(&device);
}

#[test]
fn a_write_that_needs_blocks_being_discarded_waits_and_does_not_fail() {
    take_all_while_a_discard_is_under_way(|mount, file, bytes| {
        let fs = &mount.fs;
        fs.with_space(file, || fs.begin_write(file, 0, bytes))
    });
}

#[test]
fn an_fallocate_that_needs_blocks_being_discarded_waits_and_does_not_fail() {
    take_all_while_a_discard_is_under_way(|mount, file, bytes| {
        let fs = &mount.fs;
        fs.with_space(file, || fs.fallocate(file, 0, 0, bytes))
    });
}

#[test]
fn the_end_of_the_mount_does_not_wait_for_a_move() {
    let device = Arc::new(formatted(64 * MIB));
    let mount = Mount::of(device.clone(), NEVER_MS).unwrap();
    mount.put("moved", &pattern(1, MIB)).unwrap();
    mount.put("gone", &pattern(2, 8 * MIB)).unwrap();
    let attr = mount.fs.lookup(ROOT, b"moved").unwrap();
    let file = mount.fs.open_file(attr.ino).unwrap();
    let (is_reached, go) = device.block_next(Operation::Read);
    std::thread::scope(|scope| {
        let fs = &mount.fs;
        let moving = scope.spawn(|| fs.move_to(attr.ino, SLICES - 1 - file.layout().home()));
        is_reached.wait();
        // There are blocks to discard, and the move prevents their discard.
        mount.remove("gone").unwrap();
        mount.commit().unwrap();
        let (sender, closed) = channel();
        scope.spawn(move || sender.send(fs.close()).unwrap());
        let result = closed.recv_timeout(FOREVER);
        drop(go);
        result
            .expect("the unmount must not wait for the move")
            .unwrap();
        // The move has no committer any more.
        assert!(moving.join().unwrap().is_err());
    });
    drop(file);
    mount.down();
    assert_sound(&device);
}

#[test]
fn a_trim_goes_on_while_a_file_is_moved() {
    let device = Arc::new(formatted(256 * MIB));
    let mount = Mount::of(device.clone(), NEVER_MS).unwrap();
    mount.put("moved", &pattern(1, 40 * MIB)).unwrap();
    let attr = mount.fs.lookup(ROOT, b"moved").unwrap();
    let file = mount.fs.open_file(attr.ino).unwrap();
    let home = file.layout().home();
    let reads = Arc::new(AtomicU64::new(0));
    let counted = reads.clone();
    device.set_before(move |operation| {
        if operation == Operation::Read {
            counted.fetch_add(1, Ordering::SeqCst);
        }
    });
    mount.fs.move_to(attr.ino, SLICES - 1 - home).unwrap();
    let late = reads.load(Ordering::SeqCst) * 3 / 4;

    let (is_reached, go) = device.block_next(Operation::Read);
    std::thread::scope(|scope| {
        let fs = &mount.fs;
        let moving = scope.spawn(|| fs.move_to(attr.ino, home));
        is_reached.wait();
        let (sender, trimmed) = channel();
        scope.spawn(move || {
            // The trim ends after one discard.
            let trim = fs.trim(0..u64::MAX, 0, Some(Instant::now()));
            sender.send(trim).unwrap();
        });
        let begun = Instant::now();
        while fs.discards_waiting() == 0 {
            assert!(
                begun.elapsed() < FOREVER,
                "the trim did not wait for the move"
            );
            std::thread::yield_now();
        }
        // Blocks the move once more, before its end.
        let ((reached, is_late), (end, may_end)) = (channel(), channel::<()>());
        let (count, stop) = (AtomicU64::new(0), Mutex::new(Some((reached, may_end))));
        device.set_before(move |operation| {
            if operation == Operation::Read && count.fetch_add(1, Ordering::SeqCst) >= late {
                let stop = stop.lock().unwrap().take();
                if let Some((reached, may_end)) = stop {
                    let _ = reached.send(());
                    let _ = may_end.recv();
                }
            }
        });
        drop(go);
        is_late.recv_timeout(FOREVER).expect("a later read");
        let trim = trimmed.recv_timeout(FOREVER);
        drop(end);
        assert!(
            trim.expect("the trim must not wait for the end of the move")
                .unwrap()
                .blocks
                > 0
        );
        moving.join().unwrap().unwrap();
    });
    assert_eq!(file.layout().home(), home);
    mount.fs.close_file(&file);
    drop(file);
    mount.close();
    assert_sound(&device);
}

/// The files of a test that discards all free space and cuts the power before each flush, in the thread that flushes.
#[derive(Default)]
struct Greedy {
    fs: Mutex<Weak<Fs>>,
    /// Numbers of the synced files, and of the files whose removal has begun.
    there: Mutex<Vec<u64>>,
    going: Mutex<Vec<u64>>,
    points: AtomicU64,
}

impl Greedy {
    /// Discards all free space. Cuts the power in a copy of the device, and lets the flush run on the original.
    fn discard_all_and_cut_power(&self, device: &SimDevice) {
        let Some(fs) = self.fs.lock().unwrap().upgrade() else {
            return;
        };
        let there = self.there.lock().unwrap().clone();
        fs.trim(0..u64::MAX, 0, None).unwrap();
        let point = self.points.fetch_add(1, Ordering::SeqCst);
        for seed in [point, point + 1000] {
            let after = Arc::new(device.crash(seed));
            assert_sound(&after);
            let mount = Mount::of(after, NEVER_MS).unwrap();
            let going = self.going.lock().unwrap();
            for number in there.iter().chain(&*going) {
                let found = mount.read(&number.to_string());
                let may_be_gone = found.is_none() && going.contains(number);
                assert!(
                    may_be_gone || found == Some(contents(*number)),
                    "power cut before flush {point}: file {number}"
                );
            }
            mount.close();
        }
    }
}

fn contents(number: u64) -> Vec<u8> {
    pattern(number, 40_000 + number * 10_000)
}

#[test]
fn a_power_cut_before_any_flush_after_a_discard_of_all_free_blocks_keeps_synced_files() {
    let (device, greedy) = (Arc::new(formatted(16 * MIB)), Arc::new(Greedy::default()));
    let (flushed, before) = (Arc::downgrade(&device), greedy.clone());
    device.set_before(move |operation| {
        if let (Operation::Flush | Operation::DurableWrite, Some(device)) =
            (operation, flushed.upgrade())
        {
            before.discard_all_and_cut_power(&device);
        }
    });
    let mount = Mount::of(device.clone(), NEVER_MS).unwrap();
    *greedy.fs.lock().unwrap() = Arc::downgrade(&mount.fs);
    for number in 0..12 {
        mount.put(&number.to_string(), &contents(number)).unwrap();
        greedy.there.lock().unwrap().push(number);
        if number % 2 == 1 {
            let old = greedy.there.lock().unwrap().remove(0);
            greedy.going.lock().unwrap().push(old);
            mount.remove(&old.to_string()).unwrap();
            if number % 4 == 1 {
                mount.commit().unwrap();
            }
        }
    }
    *greedy.fs.lock().unwrap() = Weak::new();
    mount.close();
    let points = greedy.points.load(Ordering::SeqCst);
    assert!(points >= 20, "{points} points");
    assert!(discarded(&device).0 > points * MIB);
    assert_sound(&device);
}
