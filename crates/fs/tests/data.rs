//! Guarantees for the contents of files, tested with real slices and simulated devices.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use jericho_cache::{Error as CacheError, Intent, Object, PageRun};
use jericho_fs::Error;
use jericho_fs::types::{ROOT, SliceId};
use jericho_fs::{File, Fs};
use jericho_sim::{FaultPlan, Operation, Random};
use jericho_storage::{Cause, Device, IoError};

mod mount;

use mount::{DIRTY_AGE, Mount, PAGE, commit, pattern, write_back};

/// Large enough that some truncation ends while a batch is made.
const SYNCS_BESIDE_TRUNCATIONS: u64 = 60;

#[test]
fn a_write_that_was_synced_survives_a_power_cut() {
    for seed in 0..8 {
        let mut mount = Mount::new(64 << 20);
        let (_, file) = mount.create("f");
        let data = pattern(seed, 300_000);
        mount.write(&file, 0, &data);
        mount.fsync(&file);
        mount.write(&file, 300_000, &pattern(seed + 1, 50_000));
        drop(file);
        mount.power_cut(seed);
        let file = mount.open("f");
        assert!(file.size() >= 300_000);
        assert_eq!(mount.read(&file)[..300_000], data[..]);
    }
}

#[test]
fn a_size_never_covers_data_that_did_not_reach_the_device() {
    for seed in 0..8 {
        let mut mount = Mount::new(64 << 20);
        let (_, file) = mount.create("f");
        mount.write(&file, 0, &pattern(0, 10_000));
        mount.commit();
        mount.write(&file, 10_000, &pattern(0, 10_000)[..5000]);
        mount.commit();
        drop(file);
        mount.power_cut(seed);
        assert_eq!(
            mount.open("f").size(),
            0,
            "the size became durable without the data"
        );
    }
}

/// Writes a page in the cache, on behalf of `object`: the slice tells it of the write-back.
fn write_page(mount: &Mount, object: &Arc<dyn Object>, page: u64, data: &[u8]) {
    let slice = &mount.slices[usize::from(object.slice_of(page))];
    let (sender, ready) = channel();
    slice.get(object, page, 1, Intent::Modify, move |pinned| {
        sender.send(pinned).unwrap();
    });
    let mut pinned = ready.recv().unwrap().unwrap();
    pinned.write(page, 0, data).unwrap();
}

/// Creates a file of 3 pages, a gap, and one more page. The first part of the gap has reserved space. The first write-back places
/// this space together with the pages before it.
fn with_a_gap(mount: &Mount) -> Arc<File> {
    let (_, file) = mount.create("f");
    // Reserves space ahead, as for a program that appends inline.
    mount.fs().begin_write(&file, 0, 50 * PAGE).unwrap();
    mount.write(&file, 0, &pattern(0, 3 * PAGE as usize));
    mount.write(&file, 80 * PAGE, &pattern(1, PAGE as usize));
    file
}

#[test]
fn a_gap_with_reserved_space_does_not_delay_durability_of_the_pages_after_it() {
    let mut mount = Mount::new(64 << 20);
    let file = with_a_gap(&mount);
    write_back(&mount, &file);
    mount.commit();
    drop(file);
    mount.power_cut(0);
    let file = mount.open("f");
    assert_eq!(file.size(), 81 * PAGE);
    let data = mount.read(&file);
    let (gap, end) = (3 * PAGE as usize, 80 * PAGE as usize);
    assert_eq!(data[..gap], pattern(0, 3 * PAGE as usize));
    assert!(data[gap..end].iter().all(|byte| *byte == 0));
    assert_eq!(data[end..], pattern(1, PAGE as usize));
}

#[test]
fn a_gap_with_reserved_space_is_a_hole() {
    let mount = Mount::new(64 << 20);
    let file = with_a_gap(&mount);
    for is_written_back in [false, true] {
        let seek = |at, data| mount.fs().seek(&file, at, data).unwrap();
        let found = [seek(0, false), seek(3 * PAGE, true), seek(80 * PAGE, false)];
        let expected = [3 * PAGE, 80 * PAGE, 81 * PAGE];
        assert_eq!(found, expected, "written back: {is_written_back}");
        write_back(&mount, &file);
    }
}

/// A file that is committed while its write-backs end: after it knows of the written pages, and while the cache still counts them.
struct CommitsAtTheEnd {
    file: Arc<dyn Object>,
    fs: Weak<Fs>,
}

impl Object for CommitsAtTheEnd {
    fn id(&self) -> u64 {
        self.file.id()
    }
    fn slice_of(&self, page: u64) -> u16 {
        self.file.slice_of(page)
    }
    fn resolve(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), CacheError> {
        self.file.resolve(first, count, out)
    }
    fn allocate(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), CacheError> {
        self.file.allocate(first, count, out)
    }
    fn written(&self, first: u64, count: u32) {
        self.file.written(first, count);
        commit(&self.fs.upgrade().unwrap());
    }
    fn write_back_ended(&self) {
        self.file.write_back_ended();
    }
    fn write_failed(&self, first: u64, count: u32, error: &CacheError) {
        self.file.write_failed(first, count, error);
    }
}

#[test]
fn a_commit_while_a_write_back_ends_does_not_leave_the_size_short() {
    let mut mount = Mount::new(64 << 20);
    let (_, file) = mount.create("f");
    let object: Arc<dyn Object> = Arc::new(CommitsAtTheEnd {
        file: file.object(),
        fs: Arc::downgrade(mount.fs()),
    });
    let data = pattern(4, PAGE as usize);
    mount.fs().begin_write(&file, 0, PAGE).unwrap();
    write_page(&mount, &object, 0, &data);
    mount.fs().end_write(&file, 0, PAGE);
    write_back(&mount, &file);
    mount.commit();
    drop((file, object));
    mount.power_cut(0);
    let file = mount.open("f");
    assert_eq!(file.size(), PAGE);
    assert!(mount.read(&file) == data);
}

/// A file whose write-backs stop before their pages are placed. Each write-back sends on `reached`, and then waits for a message
/// on `go_on`, or for the end of its sender.
struct Stops {
    file: Arc<dyn Object>,
    reached: Sender<()>,
    go_on: Mutex<Receiver<()>>,
}

impl Object for Stops {
    fn id(&self) -> u64 {
        self.file.id()
    }
    fn slice_of(&self, page: u64) -> u16 {
        self.file.slice_of(page)
    }
    fn resolve(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), CacheError> {
        self.file.resolve(first, count, out)
    }
    fn allocate(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), CacheError> {
        let _ = self.reached.send(());
        let _ = self.go_on.lock().unwrap().recv();
        self.file.allocate(first, count, out)
    }
    fn written(&self, first: u64, count: u32) {
        self.file.written(first, count);
    }
    fn write_back_ended(&self) {
        self.file.write_back_ended();
    }
    fn write_failed(&self, first: u64, count: u32, error: &CacheError) {
        self.file.write_failed(first, count, error);
    }
}

/// Runs `change` after the evictor has chosen all dirty pages of `file` for write-back and before it has placed them. `change`
/// must free blocks or reserved space of the file.
fn change_between_choice_and_place(
    mount: &Mount,
    file: &Arc<File>,
    data: &[u8],
    change: impl Fn() + Sync,
) {
    let (_, other) = mount.create("other");
    let ((reached, is_reached), (go, go_on)) = (channel(), channel());
    let stops: Arc<dyn Object> = Arc::new(Stops {
        file: other.object(),
        reached,
        go_on: Mutex::new(go_on),
    });
    assert_eq!(other.layout().home(), file.layout().home());
    mount.fs().begin_write(&other, 0, 2 * PAGE).unwrap();
    let dirty = |page| write_page(mount, &stops, page, &pattern(3, PAGE as usize));
    dirty(0);
    is_reached.recv().unwrap();
    // The evictor is blocked. When it continues, it takes all pages that have become old in one batch. The other file's page
    // comes first and blocks it again.
    dirty(1);
    mount.write(file, 0, data);
    std::thread::sleep(2 * DIRTY_AGE);
    go.send(()).unwrap();
    is_reached.recv().unwrap();
    let blocks = || mount.fs().getattr(file.ino()).unwrap().blocks;
    let before = blocks();
    std::thread::scope(|scope| {
        // `change` waits for the chosen pages.
        let change = scope.spawn(&change);
        while blocks() == before {
            assert!(
                !change.is_finished(),
                "the change ended without freeing blocks"
            );
            std::thread::yield_now();
        }
        drop(go);
        change.join().unwrap();
    });
}

#[test]
fn pages_chosen_for_write_back_before_a_truncation_do_not_come_back() {
    for overwritten in [false, true] {
        let mut mount = Mount::busy(64 << 20);
        let (ino, file) = mount.create("f");
        if overwritten {
            mount.write(&file, 0, &pattern(1, 20 * PAGE as usize));
            mount.fsync(&file);
        }
        let data = pattern(2, 20 * PAGE as usize);
        change_between_choice_and_place(&mount, &file, &data, || {
            mount.truncate(&file, 4 * PAGE + 100);
        });
        mount.fsync(&file);
        assert_eq!(mount.fs().blocks_by_slice(ino).unwrap(), [(0, 5)]);
        mount.truncate(&file, 20 * PAGE);
        let mut expected = data;
        expected[4 * PAGE as usize + 100..].fill(0);
        assert!(mount.read(&file) == expected, "overwritten: {overwritten}");
        drop(file);
        mount.remount();
        assert!(mount.read(&mount.open("f")) == expected, "after a remount");
    }
}

#[test]
fn pages_chosen_for_write_back_before_a_punch_do_not_come_back() {
    for overwritten in [false, true] {
        let mut mount = Mount::busy(64 << 20);
        let (ino, file) = mount.create("f");
        if overwritten {
            mount.write(&file, 0, &pattern(1, 20 * PAGE as usize));
            mount.fsync(&file);
        }
        let data = pattern(2, 20 * PAGE as usize);
        change_between_choice_and_place(&mount, &file, &data, || {
            mount.fs().fallocate(&file, 3, 4 * PAGE, 10 * PAGE).unwrap();
        });
        let mut expected = data;
        expected[4 * PAGE as usize..14 * PAGE as usize].fill(0);
        assert!(mount.read(&file) == expected, "overwritten: {overwritten}");
        mount.fsync(&file);
        assert_eq!(mount.fs().blocks_by_slice(ino).unwrap(), [(0, 10)]);
        drop(file);
        mount.remount();
        assert!(mount.read(&mount.open("f")) == expected, "after a remount");
    }
}

#[test]
fn a_page_written_back_during_a_truncation_ends_in_zeros() {
    let mount = Mount::new(64 << 20);
    let (_, file) = mount.create("f");
    mount.write(&file, 0, &pattern(1, PAGE as usize));
    // The truncation finds that the page is reserved, and asks the slice whether the page is dirty. The slice then calls this
    // callback, which writes the page back before the slice answers.
    let armed = Arc::new(AtomicBool::new(false));
    let (is_armed, object) = (armed.clone(), file.object());
    let slice = &mount.slices[usize::from(file.layout().home())];
    let asked = Arc::downgrade(slice);
    slice.set_report_drain(Box::new(move || {
        if is_armed.swap(false, Ordering::SeqCst) {
            let (sender, receiver) = channel();
            asked.upgrade().unwrap().sync(
                &object,
                0..u64::MAX,
                Box::new(move |result| sender.send(result).unwrap()),
            );
            receiver.recv().unwrap().unwrap();
        }
    }));
    armed.store(true, Ordering::SeqCst);
    mount.truncate(&file, 100);
    assert!(
        !armed.load(Ordering::SeqCst),
        "the truncation did not ask for dirty pages"
    );
    mount.truncate(&file, PAGE);
    let mut expected = pattern(1, PAGE as usize);
    expected[100..].fill(0);
    assert!(mount.read(&file) == expected);
}

#[test]
fn an_fsync_makes_the_size_durable_despite_concurrent_punches_and_writes() {
    let mut mount = Mount::new(64 << 20);
    mount.remount();
    let (_, file) = mount.create("f");
    mount.commit();
    let data = pattern(0, 10 * PAGE as usize);
    mount.write(&file, 0, &data);
    let (reached, go_on) = mount.device.block_next(Operation::Write);
    let (sender, synced) = channel();
    let done = move |result| sender.send(result).unwrap();
    mount.fs().fsync(&file, false, Box::new(done));
    reached.wait();
    // Punches beyond the end of all data, and then writes in the middle.
    mount.fs().fallocate(&file, 3, 100 * PAGE, PAGE).unwrap();
    mount.write(&file, 2 * PAGE, &data[2 * PAGE as usize..][..100]);
    go_on.send(()).unwrap();
    synced.recv().unwrap().unwrap();
    drop(file);
    mount.power_cut(0);
    let file = mount.open("f");
    assert_eq!(file.size(), 10 * PAGE);
    assert_eq!(mount.read(&file), data);
}

#[test]
fn an_fsync_does_not_cover_bytes_written_after_a_concurrent_truncation() {
    let mut mount = Mount::new(64 << 20);
    mount.remount();
    let (_, file) = mount.create("f");
    mount.commit();
    let data = pattern(0, 10 * PAGE as usize);
    mount.write(&file, 0, &data);
    let (reached, go_on) = mount.device.block_next(Operation::Write);
    let (sender, synced) = channel();
    let done = move |result| sender.send(result).unwrap();
    mount.fs().fsync(&file, false, Box::new(done));
    reached.wait();
    std::thread::scope(|scope| {
        // The truncation waits for the pages in flight.
        let truncation = scope.spawn(|| mount.truncate(&file, 4 * PAGE));
        while file.size() > 4 * PAGE {
            std::thread::yield_now();
        }
        go_on.send(()).unwrap();
        truncation.join().unwrap();
    });
    synced.recv().unwrap().unwrap();
    // Makes the file as long as before. The new bytes are not written back.
    mount.write(&file, 4 * PAGE, &pattern(1, 6 * PAGE as usize));
    mount.commit();
    drop(file);
    mount.power_cut(0);
    let file = mount.open("f");
    assert_eq!(file.size(), 4 * PAGE);
    assert_eq!(mount.read(&file), data[..4 * PAGE as usize]);
}

#[test]
fn synced_pages_survive_a_power_cut_despite_concurrent_truncations() {
    let mut mount = Mount::new(64 << 20);
    mount.create("f");
    mount.commit();
    let bytes = pattern(3, PAGE as usize);
    for page in 0..SYNCS_BESIDE_TRUNCATIONS {
        let file = mount.open("f");
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for pages in (1000..1002).cycle() {
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    mount.truncate(&file, pages * PAGE);
                }
            });
            mount.write(&file, page * PAGE, &bytes);
            let (sender, synced) = channel();
            let done = move |result| sender.send(result).unwrap();
            mount.fs().fsync(&file, false, Box::new(done));
            let synced = synced.recv_timeout(Duration::from_secs(60));
            mount.device.cut_power();
            is_over.store(true, Ordering::Relaxed);
            synced.expect("an answer").unwrap();
        });
        drop(file);
        mount.power_cut(page);
        let read = mount.read(&mount.open("f"));
        let start = (page * PAGE) as usize;
        assert!(
            read[start..start + PAGE as usize] == bytes,
            "page {page} was synced and is lost"
        );
    }
}

#[test]
fn an_appended_file_is_a_prefix_after_a_power_cut_at_any_moment() {
    for seed in 0..10 {
        let mut mount = Mount::busy(64 << 20);
        let mut random = Random::new(seed);
        let (_, file) = mount.create("f");
        mount.commit();
        mount
            .device
            .set_plan(FaultPlan::cut_power_at(1 + random.below(600)));
        // Pages that are full do not change; the last page is written repeatedly.
        let data = pattern(seed, 8 << 20);
        let (mut written, mut synced) = (0, 0);
        while written < data.len() {
            let len = (1 + random.below(9000) as usize).min(data.len() - written);
            let part = &data[written..written + len];
            if mount.try_write(&file, written as u64, part).is_err() {
                break;
            }
            written += len;
            if random.below(20) == 0 {
                let (sender, receiver) = channel();
                let done = Box::new(move |result| sender.send(result).unwrap());
                match random.coin() {
                    true => mount.fs().fsync(&file, random.coin(), done),
                    false => mount.fs().fsync_blocking(&file, random.coin(), done),
                }
                if receiver.recv().unwrap().is_err() {
                    break;
                }
                synced = written;
            }
        }
        drop(file);
        mount.power_cut(seed);
        let found = mount.read(&mount.open("f"));
        assert!(
            synced <= found.len(),
            "seed {seed}: {synced} bytes were synced"
        );
        let same = found.iter().zip(&data).take_while(|(a, b)| a == b).count();
        assert_eq!(
            same,
            found.len(),
            "seed {seed}: position of the first wrong byte"
        );
    }
}

#[test]
fn bytes_removed_by_a_truncation_never_come_back() {
    for seed in 0..4 {
        let mut mount = Mount::new(64 << 20);
        let (_, file) = mount.create("f");
        mount.write(&file, 0, &pattern(7, 100_000));
        mount.fsync(&file);
        mount.truncate(&file, 10_001);
        mount.truncate(&file, 50_000);
        let mut expected = pattern(7, 10_001);
        expected.resize(50_000, 0);
        assert_eq!(mount.read(&file), expected);
        mount.fsync(&file);
        drop(file);
        mount.power_cut(seed);
        assert_eq!(mount.read(&mount.open("f")), expected);
    }
}

#[test]
fn an_append_that_was_lost_does_not_show_when_the_file_grows() {
    let mut mount = Mount::new(64 << 20);
    let (_, file) = mount.create("f");
    mount.write(&file, 0, &pattern(1, 1000));
    mount.fsync(&file);
    mount.write(&file, 1000, &pattern(2, 20_000));
    // The data is written back, but the metadata is not committed.
    let (sender, receiver) = channel();
    let done = Box::new(move |result| sender.send(result).unwrap());
    mount.slices[usize::from(file.layout().home())].sync(&file.object(), 0..1000, done);
    receiver.recv().unwrap().unwrap();
    mount.device.flush().unwrap();
    drop(file);
    mount.power_cut(1);
    let file = mount.open("f");
    assert_eq!(file.size(), 1000);
    mount.truncate(&file, 30_000);
    let mut expected = pattern(1, 1000);
    expected.resize(30_000, 0);
    assert_eq!(mount.read(&file), expected);
}

#[test]
fn removed_files_free_all_their_space() {
    let mut mount = Mount::new(64 << 20);
    mount.commit();
    let before = mount.free();
    let (ino, file) = mount.create("f");
    mount.write(&file, 0, &pattern(3, 1_000_000));
    mount.fsync(&file);
    mount.write(&file, 1_000_000, &pattern(3, 1_000_000));
    mount.fs().unlink(ROOT, b"f").unwrap();
    assert_eq!(
        mount.read(&file).len(),
        2_000_000,
        "an open file keeps its data"
    );
    mount.fs().close_file(&file);
    drop(file);
    mount.fs().forget(ino, 1);
    // The file is removed when a write-back of its last pages has ended.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    mount.commit();
    while mount.free() != before {
        let free = mount.free();
        assert!(
            std::time::Instant::now() < deadline,
            "{free} free, {before} before"
        );
        mount.commit();
    }
    mount.remount();
    assert_eq!(mount.free(), before);
}

#[test]
fn a_full_volume_fails_with_enospc_and_works_again_after_a_removal() {
    let mount = Mount::new(24 << 20);
    let (_, file) = mount.create("big");
    let chunk = pattern(4, 1 << 20);
    let mut written = 0;
    let error = loop {
        match mount.try_write(&file, written, &chunk) {
            Ok(()) => written += chunk.len() as u64,
            Err(error) => break error,
        }
        mount.fsync(&file);
    };
    assert_eq!(error.errno(), 28);
    let free = mount.free();
    mount.truncate(&file, 2 << 20);
    mount.commit();
    assert!(mount.free() > free);
    let (_, other) = mount.create("other");
    mount.write(&other, 0, &chunk);
    mount.fsync(&other);
    assert_eq!(mount.read(&other), chunk);
    assert_eq!(mount.read(&file)[..], pattern(4, 1 << 20).repeat(2)[..]);
}

#[test]
fn a_write_waits_for_space_on_the_volume_and_not_for_space_on_the_host() {
    let mount = Mount::new(64 << 20);
    let (_, file) = mount.create("f");
    // An open file without a name. Its space would be freed by the last close.
    let (_, open) = mount.create("open");
    mount.fs().unlink(ROOT, b"open").unwrap();
    let full_host = IoError {
        operation: "write",
        device: "sim".into(),
        offset_bytes: 0,
        length_bytes: PAGE,
        cause: Cause::Errno(28),
    };
    let mut attempts = 0;
    let attempt = || -> jericho_fs::Result<()> {
        attempts += 1;
        Err(full_host.clone().into())
    };
    let error = mount.fs().with_space(&file, attempt).unwrap_err();
    assert_eq!((error.errno(), attempts), (28, 1));

    attempts = 0;
    let attempt = || {
        attempts += 1;
        match attempts {
            1 => Err(Error::Errno(28)),
            _ => Ok(()),
        }
    };
    mount.fs().with_space(&file, attempt).unwrap();
    assert_eq!(attempts, 2);
    drop(open);
}

#[test]
fn holes_can_be_created_and_found_and_read_as_zeros() {
    let mut mount = Mount::new(64 << 20);
    let (_, file) = mount.create("f");
    let fs = mount.fs().clone();
    mount.write(&file, 0, &pattern(5, 100_000));
    fs.fallocate(&file, 3, 10_000, 40_000).unwrap();
    let mut expected = pattern(5, 100_000);
    expected[10_000..50_000].fill(0);
    assert_eq!(mount.read(&file), expected);
    assert_eq!(fs.seek(&file, 0, false).unwrap(), 12_288);
    assert_eq!(fs.seek(&file, 12_288, true).unwrap(), 49_152);
    assert_eq!(fs.seek(&file, 60_000, false).unwrap(), 100_000);
    fs.fallocate(&file, 0x10, 60_000, 60_000).unwrap();
    expected.resize(120_000, 0);
    expected[60_000..].fill(0);
    assert_eq!(mount.read(&file), expected);
    let blocks = fs.getattr(file.ino()).unwrap().blocks;
    assert_eq!(blocks, 8 * (30 - (49_152 - 12_288) / PAGE));
    // Preallocated space takes data, and reads as zeros elsewhere.
    fs.fallocate(&file, 0, 200_000, 50_000).unwrap();
    mount.write(&file, 220_000, b"middle");
    expected.resize(250_000, 0);
    expected[220_000..220_006].copy_from_slice(b"middle");
    assert_eq!(mount.read(&file), expected);
    mount.fsync(&file);
    drop((file, fs));
    mount.power_cut(3);
    assert_eq!(mount.read(&mount.open("f")), expected);
}

#[test]
fn a_range_without_space_for_its_holes_is_not_zeroed() {
    let mount = Mount::new(64 << 20);
    let (_, file) = mount.create("f");
    let data = pattern(5, 40_000);
    mount.write(&file, 0, &data);
    mount.fsync(&file);
    let error = mount.fs().fallocate(&file, 0x10, 0, 1 << 30).unwrap_err();
    assert_eq!(error.errno(), 28);
    assert_eq!(mount.read(&file), data);
    // The rest of the volume has less room than the holes need.
    let len = mount.free() / 2 * PAGE;
    mount.fs().fallocate(&file, 0x10, 0, len).unwrap();
    assert_eq!(file.size(), len);
    assert!(mount.read(&file)[..40_000].iter().all(|byte| *byte == 0));
}

#[test]
fn a_range_is_zeroed_in_the_space_that_it_has() {
    let mut mount = Mount::new(24 << 20);
    let (_, file) = mount.create("f");
    let data = pattern(5, 1 << 20);
    let mut size = 0;
    while mount.try_write(&file, size, &data).is_ok() {
        size += data.len() as u64;
        mount.fsync(&file);
    }
    let (free, fs) = (mount.free(), mount.fs().clone());
    assert!(free * PAGE < size);
    // Some pages are only in the cache: overwritten or new ones.
    mount.write(&file, 3 * PAGE, &[7; 2 * PAGE as usize]);
    mount.write(&file, size, &[7; PAGE as usize]);
    fs.fallocate(&file, 0x10, 10, size - 10 + PAGE).unwrap();
    let mut expected = vec![0; (size + PAGE) as usize];
    expected[..10].copy_from_slice(&data[..10]);
    assert!(mount.read(&file) == expected);
    assert_eq!(mount.free(), free - 1);
    let blocks = fs.getattr(file.ino()).unwrap().blocks;
    assert_eq!(blocks, (size + PAGE) / 512);
    mount.write(&file, 5 * PAGE + 3, b"new");
    expected[5 * PAGE as usize + 3..][..3].copy_from_slice(b"new");
    mount.fsync(&file);
    drop((file, fs));
    mount.power_cut(3);
    assert!(mount.read(&mount.open("f")) == expected);
}

#[test]
fn a_moved_file_is_entirely_in_its_new_slice() {
    let mut mount = Mount::new(64 << 20);
    let (ino, file) = mount.create("f");
    let data = pattern(6, 3_000_000);
    mount.write(&file, 0, &data);
    mount.fs().fallocate(&file, 0, 3_000_000, 100_000).unwrap();
    let (old, _) = mount.fs().placement(ino).unwrap();
    let new: SliceId = 1 - old;
    let free = mount.free();
    mount.fs().move_to(ino, new).unwrap();
    assert_eq!(mount.fs().placement(ino).unwrap().0, new);
    let pages = 3_100_000u64.div_ceil(PAGE);
    assert_eq!(mount.fs().blocks_by_slice(ino).unwrap(), [(new, pages)]);
    assert_eq!(mount.read(&file)[..3_000_000], data[..]);
    mount.commit();
    assert_eq!(mount.free(), free);
    drop(file);
    mount.power_cut(9);
    let file = mount.open("f");
    assert_eq!(
        mount.fs().blocks_by_slice(file.ino()).unwrap(),
        [(new, pages)]
    );
    assert_eq!(mount.read(&file)[..3_000_000], data[..]);
}

#[test]
fn a_file_is_moved_with_pages_after_its_known_end() {
    let mut mount = Mount::new(64 << 20);
    let (ino, file) = mount.create("f");
    let data = pattern(7, 500_000);
    mount.write(&file, 0, &data[..100_000]);
    // Writes as a program does that reports its new size later.
    mount
        .write_pages(&file, 100_000, &data[100_000..], |_, _| {})
        .unwrap();
    let new: SliceId = 1 - file.layout().home();
    mount.fs().move_to(ino, new).unwrap();
    let pages = 500_000u64.div_ceil(PAGE);
    assert_eq!(mount.fs().blocks_by_slice(ino).unwrap(), [(new, pages)]);
    mount.fs().end_write(&file, 100_000, 400_000);
    mount.fsync(&file);
    drop(file);
    mount.power_cut(4);
    assert_eq!(mount.read(&mount.open("f")), data);
}

#[test]
fn reserved_space_follows_a_moved_file_and_is_freed() {
    let mount = Mount::new(64 << 20);
    let (ino, file) = mount.create("f");
    let free = mount.free();
    mount.fs().begin_write(&file, 0, 64 * PAGE).unwrap();
    // The first write-back places all of the reserved space.
    mount.write(&file, 0, &pattern(8, 2 * PAGE as usize));
    mount.fsync(&file);
    for new in [1 - file.layout().home(), file.layout().home()] {
        mount.fs().move_to(ino, new).unwrap();
        assert_eq!(mount.fs().blocks_by_slice(ino).unwrap(), [(new, 2)]);
    }
    mount.write(&file, 2 * PAGE, &pattern(9, PAGE as usize));
    mount.fsync(&file);
    mount.fs().release_reserved(&file, || false).unwrap();
    mount.commit();
    assert_eq!(free - mount.free(), 3);
}

#[test]
fn after_a_rename_over_a_file_only_a_truncation_of_contents_that_no_batch_has_commits() {
    let mount = Mount::new(64 << 20);
    let replace = |len: usize, is_synced: bool| {
        let (_, file) = mount.create("new");
        mount.fs().begin_write(&file, 0, 64 * PAGE).unwrap();
        mount.write(&file, 0, &pattern(8, len));
        if is_synced {
            mount.fsync(&file);
        }
        mount.fs().rename(ROOT, b"new", ROOT, b"f", 0).unwrap();
        (file, mount.device.traffic().durable_writes)
    };
    drop(mount.durable("f", 3));
    let commits = |before| mount.device.traffic().durable_writes - before;
    // The release of reserved space and a longer size commit nothing.
    let (file, before) = replace(PAGE as usize, false);
    mount.fs().release_reserved(&file, || false).unwrap();
    mount.truncate(&file, 5 * PAGE);
    assert_eq!((file.reserved_end_page(), commits(before)), (5, 0));
    // Nor does a shorter size, if the contents are durable.
    let (file, before) = replace(PAGE as usize, true);
    mount.truncate(&file, 10);
    assert_eq!(commits(before), 0);
    // If they are not, it commits first.
    let (file, before) = replace(PAGE as usize, false);
    mount.truncate(&file, 10);
    assert!(commits(before) > 0);
    let before = mount.device.traffic().durable_writes;
    mount.truncate(&file, 5);
    assert_eq!(commits(before), 0, "the batch of the name is durable");
}

#[test]
fn released_space_is_in_no_page_of_the_cache() {
    let mount = Mount::new(64 << 20);
    let (_, file) = mount.create("f");
    mount.fs().begin_write(&file, 0, 64 * PAGE).unwrap();
    mount.write(&file, 0, &pattern(8, PAGE as usize));
    mount.fsync(&file);
    let slice = &mount.slices[usize::from(file.layout().home())];
    // As for a client that appends.
    let (sender, receiver) = channel();
    slice.get(&file.object(), 1, 16, Intent::Read, move |pinned| {
        sender.send(pinned.map(drop)).unwrap();
    });
    receiver.recv().unwrap().unwrap();
    let resident = || slice.resident_of(file.object_id(), 1..64).len();
    assert_eq!(resident(), 16);
    mount.fs().release_reserved(&file, || false).unwrap();
    assert_eq!(resident(), 0);
}

#[test]
fn a_new_inline_writer_waits_until_reserved_space_is_released() {
    let mount = Mount::new(64 << 20);
    let (_, file) = mount.create("f");
    mount.fs().begin_write(&file, 0, 64 * PAGE).unwrap();
    mount.fs().release_reserved(&file, || true).unwrap();
    assert_eq!(file.reserved_end_page(), 64, "needed space was released");
    let (tx, rx) = std::sync::mpsc::channel();
    let release = mount.fs().release_reserved(&file, || {
        let (later, tx) = (file.clone(), tx.clone());
        file.after_writings(move || tx.send(later.reserved_end_page()).unwrap());
        false
    });
    release.unwrap();
    assert_eq!(rx.try_recv(), Ok(0));
}

#[test]
fn replacing_by_rename_leaves_the_old_or_the_new_contents() {
    for seed in 0..6 {
        let mut mount = Mount::new(64 << 20);
        let (_, old) = mount.create("f");
        mount.write(&old, 0, &pattern(1, 20_000));
        mount.fsync(&old);
        let (_, new) = mount.create("f.tmp");
        mount.write(&new, 0, &pattern(2, 30_000));
        mount.fs().rename(ROOT, b"f.tmp", ROOT, b"f", 0).unwrap();
        if seed % 2 == 0 {
            mount.commit();
        }
        drop((old, new));
        mount.power_cut(seed);
        let expected = if seed % 2 == 0 {
            pattern(2, 30_000)
        } else {
            pattern(1, 20_000)
        };
        assert_eq!(mount.read(&mount.open("f")), expected);
    }
}

#[test]
fn exchanging_names_leaves_the_old_or_the_new_contents_of_both() {
    for seed in 0..6 {
        let mut mount = Mount::new(64 << 20);
        let contents = [pattern(1, 20_000), pattern(2, 30_000)];
        for (name, data) in ["f", "g"].iter().zip(&contents) {
            let (_, file) = mount.create(name);
            mount.write(&file, 0, data);
        }
        mount.fs().rename(ROOT, b"f", ROOT, b"g", 2).unwrap();
        mount.commit();
        mount.power_cut(seed);
        assert_eq!(mount.read(&mount.open("f")), contents[1]);
        assert_eq!(mount.read(&mount.open("g")), contents[0]);
    }
}

#[test]
fn replaced_contents_of_a_truncated_file_are_written_back_at_the_close() {
    for seed in 0..4 {
        let mut mount = Mount::new(64 << 20);
        let (ino, old) = mount.create("f");
        mount.write(&old, 0, &pattern(1, 20_000));
        mount.fsync(&old);
        mount.fs().close_file(&old);
        drop(old);
        let new = mount.fs().open_file(ino).unwrap();
        mount.truncate(&new, 0);
        mount.write(&new, 0, &pattern(2, 30_000));
        mount.fs().writer_closes(&new);
        mount.fs().close_file(&new);
        drop(new);
        // No sync requests a write-back, and pages become old only after an hour.
        let deadline = Instant::now() + Duration::from_secs(60);
        while mount.slices.iter().any(|slice| slice.dirty_bytes() > 0) {
            assert!(
                Instant::now() < deadline,
                "the close did not start a write-back"
            );
            std::thread::yield_now();
        }
        mount.commit();
        mount.power_cut(seed);
        assert_eq!(mount.read(&mount.open("f")), pattern(2, 30_000));
    }
}

#[test]
fn contents_that_are_only_in_memory_do_not_become_zeros_within_the_old_size() {
    let mut mount = Mount::new(64 << 20);
    let (_, file) = mount.create("f");
    mount.write(&file, 0, &pattern(1, 30_000));
    mount.fsync(&file);
    mount.truncate(&file, 0);
    mount.write(&file, 0, &pattern(2, 20_000));
    mount.commit();
    drop(file);
    mount.power_cut(1);
    let found = mount.read(&mount.open("f"));
    assert!(pattern(2, 20_000).starts_with(&found), "{}", found.len());
}

#[test]
fn a_write_back_error_reaches_the_fsync() {
    let mount = Mount::new(64 << 20);
    let (_, file) = mount.create("f");
    mount.write(&file, 0, &pattern(1, 20_000));
    mount.device.cut_power();
    let (sender, receiver) = channel();
    mount.fs().fsync(
        &file,
        false,
        Box::new(move |result| sender.send(result).unwrap()),
    );
    assert_eq!(receiver.recv().unwrap().unwrap_err().errno(), 5);
}

#[test]
fn an_overwrite_is_made_durable_by_the_thread_that_asks_with_one_durable_write() {
    let mut mount = Mount::new(64 << 20);
    let file = mount.durable("f", 8 * PAGE as usize);
    // The next batch is an hour away, and this change of the times is not needed.
    mount.write(&file, 0, &pattern(0, PAGE as usize));
    let (sender, operations) = channel();
    mount.device.set_before(move |operation| {
        sender
            .send((operation, std::thread::current().id()))
            .unwrap();
    });
    let own = std::thread::current().id();
    for round in 1..5 {
        let offset = 3 * PAGE + round;
        mount.write(&file, offset, &pattern(round, 100));
        let done = match round % 2 {
            0 => mount.begin_fdatasync(&file),
            _ => {
                let (sender, receiver) = channel();
                let done = Box::new(move |result| sender.send(result).unwrap());
                mount.fs().sync_range_blocking(&file, offset, 100, done);
                receiver
            }
        };
        done.try_recv().expect("already answered").unwrap();
        let wanted = match round {
            // Also page 0, which the range does not include.
            2 => vec![Operation::Write, Operation::Write, Operation::Flush],
            _ => vec![Operation::DurableWrite],
        };
        let seen: Vec<_> = operations.try_iter().collect();
        assert!(seen.iter().all(|(_, thread)| *thread == own), "{seen:?}");
        let seen: Vec<_> = seen.into_iter().map(|(operation, _)| operation).collect();
        assert_eq!(seen, wanted, "round {round}");
    }
    let expected = mount.read(&file);
    drop(file);
    mount.power_cut(3);
    assert!(mount.read(&mount.open("f")) == expected);
}

#[test]
fn an_overwrite_is_synced_by_one_durable_write_whatever_other_files_have_not_flushed() {
    let mut mount = Mount::new(64 << 20);
    let names = ["synced", "other"];
    let [file, other] = names.map(|name| mount.durable(name, PAGE as usize));
    let kinds = [Operation::Write, Operation::DurableWrite, Operation::Flush];
    let counts = |mount: &Mount| kinds.map(|kind| mount.device.operations(Some(kind)));
    // The first sync of a file that may have been in memory before flushes.
    for file in [&file, &other] {
        mount.write(file, 0, &pattern(1, 100));
        mount.begin_fdatasync(file).recv().unwrap().unwrap();
    }
    mount.write(&other, 0, &pattern(2, 100));
    write_back(&mount, &other);
    let before = counts(&mount);
    mount.write(&file, 0, &pattern(3, 100));
    mount.begin_fdatasync(&file).recv().unwrap().unwrap();
    let after = counts(&mount);
    assert_eq!([0, 1, 2].map(|n| after[n] - before[n]), [0, 1, 0]);
    // The evictor's write of the other file is not durable yet.
    mount.begin_fdatasync(&other).recv().unwrap().unwrap();
    assert_eq!(counts(&mount)[2], after[2] + 1);
    // A write of the evictor to the same file needs a flush, too.
    mount.write(&file, 0, &pattern(4, 100));
    write_back(&mount, &file);
    mount.write(&file, 200, &pattern(5, 100));
    mount.begin_fdatasync(&file).recv().unwrap().unwrap();
    assert_eq!(counts(&mount)[2], after[2] + 2);
    let expected = [&file, &other].map(|file| mount.read(file));
    drop((file, other));
    mount.power_cut(5);
    assert!(names.map(|name| mount.read(&mount.open(name))) == expected);
}

#[test]
fn a_clean_file_waits_for_a_flush_that_began_after_its_write_back() {
    let mount = Mount::new(64 << 20);
    let files = [
        mount.durable("a", PAGE as usize),
        mount.durable("b", PAGE as usize),
    ];
    let (begun, go) = mount.device.block_next(Operation::Flush);
    mount.write(&files[0], 0, &pattern(1, 100));
    write_back(&mount, &files[0]);
    let flushes = || mount.device.operations(Some(Operation::Flush));
    let before = flushes();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| mount.begin_fdatasync(&files[0]).recv().unwrap());
        begun.wait();
        // The page reaches the device after the flush has begun.
        mount.write(&files[1], 0, &pattern(2, 100));
        write_back(&mount, &files[1]);
        let home = usize::from(files[1].layout().home());
        assert_eq!(
            mount.slices[home].first_dirty(files[1].object_id(), 0),
            None
        );
        assert!(mount.device.volatile_changes() > 0);
        let second = mount.begin_fdatasync(&files[1]).recv().unwrap();
        // A flush counts when it is no longer blocked.
        assert_eq!(flushes(), before + 1, "no flush covered the page");
        assert_eq!(mount.device.volatile_changes(), 0);
        drop(go);
        second.unwrap();
        first.join().unwrap().unwrap();
    });
}

#[test]
fn a_failed_flush_in_the_thread_that_asks_ends_all_changes() {
    let mount = Mount::new(64 << 20);
    let file = mount.durable("f", PAGE as usize);
    mount.write(&file, 0, &pattern(1, 100));
    write_back(&mount, &file);
    mount
        .device
        .set_plan(FaultPlan::fail_nth(Some(Operation::Flush), 1, 5));
    for _ in 0..2 {
        mount
            .write_pages(&file, 0, &pattern(1, 100), |_, _| {})
            .ok();
        let failed = mount.begin_fdatasync(&file).recv().unwrap();
        assert_eq!(failed.unwrap_err().errno(), 5);
    }
    assert_eq!(mount.try_write(&file, 0, b"x").unwrap_err().errno(), 5);
    assert!(!mount.fs().may_recover());
}

#[test]
fn a_failed_write_in_the_thread_that_asks_is_reported_once_and_the_next_sync_succeeds() {
    let mut mount = Mount::new(64 << 20);
    let file = mount.durable("f", PAGE as usize);
    mount.write(&file, 0, &pattern(1, PAGE as usize));
    mount
        .device
        .set_plan(FaultPlan::fail_nth(Some(Operation::DurableWrite), 1, 5));
    let failed = mount.begin_fdatasync(&file).recv().unwrap();
    assert_eq!(failed.unwrap_err().errno(), 5);
    mount.begin_fdatasync(&file).recv().unwrap().unwrap();
    drop(file);
    mount.power_cut(1);
    assert!(mount.read(&mount.open("f")) == pattern(1, PAGE as usize));
}

#[test]
fn a_panic_in_the_thread_that_asks_ends_all_changes() {
    let mount = Mount::new(64 << 20);
    let file = mount.durable("f", PAGE as usize);
    mount.write(&file, 0, &pattern(1, 100));
    mount
        .device
        .set_plan(FaultPlan::panic_at(Some(Operation::DurableWrite), 1));
    std::thread::scope(|scope| {
        let panicked = scope.spawn(|| drop(mount.begin_fdatasync(&file))).join();
        assert!(panicked.is_err());
    });
    assert!(!mount.fs().may_recover());
}

#[test]
fn contents_agree_with_a_model_while_write_back_and_commits_go_on() {
    for seed in 0..6 {
        let mut mount = Mount::busy(64 << 20);
        let mut random = Random::new(seed);
        let (_, mut file) = mount.create("f");
        let mut model: Vec<u8> = Vec::new();
        for step in 0..60 {
            let at = random.below(5 << 20);
            let longest = if random.coin() { 9000 } else { 400_000 };
            let len = 1 + random.below(longest);
            let (from, to) = (at as usize, (at + len) as usize);
            let zero = |model: &mut Vec<u8>| {
                let end = to.min(model.len());
                model[from.min(end)..end].fill(0);
            };
            let fs = mount.fs().clone();
            match random.below(12) {
                0..=4 => {
                    let data = pattern(step, len as usize);
                    mount.write(&file, at, &data);
                    model.resize(model.len().max(to), 0);
                    model[from..to].copy_from_slice(&data);
                }
                5 => {
                    mount.truncate(&file, at);
                    model.resize(from, 0);
                }
                6 => {
                    fs.fallocate(&file, 3, at, len).unwrap();
                    zero(&mut model);
                }
                7 => {
                    fs.fallocate(&file, 0x10, at, len).unwrap();
                    zero(&mut model);
                    model.resize(model.len().max(to), 0);
                }
                8 => {
                    fs.fallocate(&file, 0, at, len).unwrap();
                    model.resize(model.len().max(to), 0);
                }
                9 => fs.move_to(file.ino(), random.below(2) as SliceId).unwrap(),
                10 => mount.fsync(&file),
                _ => {
                    drop((file, fs));
                    mount.remount();
                    file = mount.open("f");
                }
            }
            assert_eq!(file.size(), model.len() as u64, "seed {seed}, step {step}");
            if step % 6 != 5 {
                continue;
            }
            let found = mount.read(&file);
            let wrong = found.iter().zip(&model).position(|(a, b)| a != b);
            assert_eq!(
                wrong, None,
                "seed {seed}, step {step}: position of the first wrong byte"
            );
        }
        drop(file);
        mount.remount();
        assert!(
            mount.read(&mount.open("f")) == model,
            "seed {seed}, at the end"
        );
    }
}

#[test]
fn the_migration_setting_is_inherited_by_new_inodes_and_survives_a_remount() {
    use jericho_format::threads::ThreadPolicy::{Always, Never};
    let mut mount = Mount::new(64 << 20);
    let fs = mount.fs().clone();
    let of = |fs: &jericho_fs::Fs, ino| {
        let threads = fs.threads(ino).unwrap();
        (threads.policy(), threads.is_set_here())
    };
    let (before, file) = mount.create("before");
    assert_eq!(of(&fs, before), (None, false));
    fs.set_threads(ROOT, Some(Never)).unwrap();
    assert_eq!(of(&fs, ROOT), (Some(Never), true));
    assert_eq!(
        of(&fs, before),
        (None, false),
        "existing inodes keep their setting"
    );
    let (after, _) = mount.create("after");
    assert_eq!(of(&fs, after), (Some(Never), false));

    fs.set_threads(before, Some(Always)).unwrap();
    assert_eq!(
        file.threads().policy(),
        Some(Always),
        "an open file gets the new setting"
    );
    fs.set_threads(after, Some(Always)).unwrap();
    fs.set_threads(after, None).unwrap();
    assert_eq!(of(&fs, after), (Some(Never), false));
    drop((fs, file));
    mount.commit();
    mount.power_cut(5);
    let fs = mount.fs();
    assert_eq!(of(fs, ROOT), (Some(Never), true));
    assert_eq!(of(fs, before), (Some(Always), true));
    assert_eq!(of(fs, after), (Some(Never), false));
    fs.set_threads(ROOT, None).unwrap();
    assert_eq!(of(fs, ROOT), (None, false));
}

#[test]
fn a_wait_for_writers_covers_the_current_ones_and_no_others() {
    let mut mount = Mount::new(64 << 20);
    let (_, file) = mount.create("file");
    let calls = Arc::new(Mutex::new(vec![]));
    let wait = |name: &'static str| {
        let calls = calls.clone();
        file.after_writings(move || calls.lock().unwrap().push(name));
    };
    let first = file.writing();
    wait("for the first");
    let second = file.writing();
    wait("for both");
    let third = file.writing();
    assert!(calls.lock().unwrap().is_empty());
    drop(second);
    assert!(calls.lock().unwrap().is_empty());
    drop(first);
    assert_eq!(*calls.lock().unwrap(), ["for the first", "for both"]);
    drop(third);
    wait("for nobody");
    assert_eq!(calls.lock().unwrap().len(), 3);
    drop(file);
    mount.down();
}

#[test]
fn pages_whose_write_back_failed_are_on_the_device_after_the_next_sync_that_succeeds() {
    // Few pages go into the journal, and many into their blocks.
    for pages in [3, 60] {
        let mut mount = Mount::new(64 << 20);
        let file = mount.durable("f", pages * PAGE as usize);
        let data = pattern(5, pages * PAGE as usize);
        mount.write(&file, 0, &data);
        mount
            .device
            .set_plan(FaultPlan::fail_nth(Some(Operation::Write), 1, 5));
        let (sender, receiver) = channel();
        let slice = &mount.slices[usize::from(file.layout().home())];
        let done = Box::new(move |result| sender.send(result).unwrap());
        slice.sync(&file.object(), 0..u64::MAX, done);
        receiver.recv().unwrap().unwrap_err();
        mount.device.set_plan(FaultPlan::default());
        mount.fsync(&file);
        drop(file);
        mount.power_cut(pages as u64);
        assert!(mount.read(&mount.open("f")) == data, "{pages} pages");
    }
}
