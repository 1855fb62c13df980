//! Volumes with checksums of the data (docs/internals/checksums.md).

mod mount;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use jericho_cache::PagePlace;
use jericho_fs::check::data::check_data;
use jericho_fs::check::{CheckOptions, Report, Severity, check_devices};
use jericho_fs::types::{Kind, ROOT};
use jericho_fs::{File, ScrubStatus};
use jericho_sim::{Effect, Fault, FaultPlan, Logged, Operation, SimDevice, Traffic};
use jericho_storage::Device;

use mount::{CALLER, Mount, PAGE, evict, overwrite, pattern, read, write_back};

const EIO: i32 = 5;
/// Modes of fallocate(2), both with FALLOC_FL_KEEP_SIZE.
const PUNCH: i32 = 3;
const ZERO: i32 = 0x11;

/// Returns the byte of the device where a page is.
fn place(file: &Arc<File>, page: u64) -> u64 {
    let mut runs = Vec::new();
    file.object().resolve(page, 1, &mut runs).unwrap();
    match runs[0].place {
        PagePlace::Device { offset_bytes, .. } => offset_bytes,
        ref place => panic!("page {page} is at {place:?}"),
    }
}

/// Returns whether a page is in its block.
fn is_in_place(file: &Arc<File>, page: u64) -> bool {
    let mut runs = Vec::new();
    file.object().resolve(page, 1, &mut runs).unwrap();
    matches!(runs[0].place, PagePlace::Device { .. })
}

/// Flips a bit of the device.
fn flip(mount: &Mount, offset_bytes: u64) {
    let start = offset_bytes / PAGE * PAGE;
    let mut block = vec![0; PAGE as usize];
    mount.device.read_at(start, &mut block).unwrap();
    block[(offset_bytes % PAGE) as usize] ^= 0x10;
    mount.device.write_at(start, &block).unwrap();
    mount.device.flush().unwrap();
}

fn checked_without_data(mount: &Mount) -> Report {
    check_devices(vec![mount.device.clone()], CheckOptions::default()).unwrap()
}

/// Checks a volume that is not mounted, with its data.
fn checked(mount: &Mount) -> Report {
    let mut report = checked_without_data(mount);
    check_data(
        &[mount.device.clone() as Arc<dyn Device>],
        &mut report,
        &Arc::default(),
    )
    .unwrap();
    report
}

fn checksum_errors(mount: &Mount) -> u64 {
    let slices = mount.slices.iter();
    slices.map(|slice| slice.counters().checksum_errors).sum()
}

fn bytes(seed: u64, pages: u64) -> Vec<u8> {
    pattern(seed, (pages * PAGE) as usize)
}

#[test]
fn a_read_of_a_damaged_block_fails_and_its_neighbours_can_be_read() {
    let mut mount = Mount::summed(64 << 20);
    let file = mount.durable("f", 8 * PAGE as usize);
    let at = place(&file, 3);
    drop(file);
    mount.remount();
    flip(&mount, at + 700);
    let file = mount.open("f");
    let error = read(&mount, &file, 0, 8).unwrap_err();
    assert_eq!(error.errno(), EIO);
    let text = error.to_string();
    let named = [
        format!("inode {}", file.ino()),
        format!("offset {}", 3 * PAGE),
        format!("sim at byte {at}"),
        "slice 0, block".to_owned(),
    ];
    named
        .iter()
        .for_each(|named| assert!(text.contains(named), "{text}"));
    assert_eq!(checksum_errors(&mount), 1);
    let whole = bytes(0, 8);
    for page in [0, 1, 2, 4, 5, 6, 7] {
        let own = &whole[(page * PAGE) as usize..][..PAGE as usize];
        assert_eq!(read(&mount, &file, page, 1).unwrap(), own, "page {page}");
    }
    // The neighbours came into the cache with the read that failed.
    let slice = &mount.slices[usize::from(file.layout().home())];
    assert_eq!(slice.resident_of(file.object_id(), 0..8).len(), 7);
    assert_eq!(read(&mount, &file, 3, 1).unwrap_err().errno(), EIO);
    // A part of the page cannot be changed, and all of it can.
    assert!(mount.try_write(&file, 3 * PAGE + 5, b"part").is_err());
    let new = bytes(9, 1);
    overwrite(&mount, &file, 3, &new);
    mount.fsync(&file);
    evict(&mount, &file);
    assert_eq!(read(&mount, &file, 3, 1).unwrap(), new);
}

#[test]
fn a_check_of_the_data_names_the_damaged_pages_and_writes_nothing() {
    let mut mount = Mount::summed(64 << 20);
    let fs = mount.fs();
    fs.mkdir(ROOT, b"dir", 0o755, CALLER).unwrap();
    let dir = fs.lookup(ROOT, b"dir").unwrap().ino;
    let attr = fs.mknod(dir, b"file", Kind::File, 0o644, 0, CALLER);
    let file = fs.open_file(attr.unwrap().ino).unwrap();
    mount.write(&file, 0, &bytes(1, 600));
    mount.fsync(&file);
    // An image, whose block has older contents.
    mount.write(&file, 20 * PAGE, &bytes(2, 1));
    mount.fsync(&file);
    let (ino, at) = (file.ino(), [3, 599].map(|page| place(&file, page)));
    drop(file);
    mount.down();
    let report = checked(&mount);
    assert!(report.is_sound(), "{:?}", report.findings);
    assert_eq!(report.read_bytes, Some(600 * PAGE));
    at.iter().for_each(|at| flip(&mount, at + 5));
    let before = mount.device.digest();
    let report = checked(&mount);
    let damage = report.findings.iter();
    let damage: Vec<_> = damage.filter(|f| f.severity == Severity::Damage).collect();
    assert_eq!((damage.len(), report.damaged_pages), (2, 2), "{damage:?}");
    for ((finding, page), at) in damage.iter().zip([3, 599]).zip(at) {
        let name = format!("/dir/file (inode {ino}), offset {}: ", page * PAGE);
        let place = format!("sim at byte {at})");
        assert!(finding.text.starts_with(&name), "{}", finding.text);
        assert!(finding.text.ends_with(&place), "{}", finding.text);
    }
    assert_eq!(mount.device.digest(), before);
}

#[test]
fn a_check_of_the_data_of_a_volume_without_checksums_finds_unreadable_blocks() {
    let mut mount = Mount::new(64 << 20);
    let file = mount.durable("f", 600 * PAGE as usize);
    let at = place(&file, 300);
    drop(file);
    mount.remount();
    mount.fs().close().unwrap();
    mount.down();
    flip(&mount, at);
    let report = checked(&mount);
    assert!(report.is_sound(), "{:?}", report.findings);
    assert_eq!(report.read_bytes, Some(600 * PAGE));
    // The read that has page 300, and the one of this page alone.
    let before = mount.device.log().len();
    checked(&mount);
    let log = mount.device.log();
    let mut reads = (log[before..].iter()).filter(|done| done.operation == Operation::Read);
    let has_page =
        |done: &Logged| (done.offset_bytes..done.offset_bytes + done.length_bytes).contains(&at);
    let first = 1 + reads.position(has_page).unwrap() as u64;
    let fail = |nth| Fault {
        operation: Some(Operation::Read),
        nth,
        is_lasting: false,
        effect: Effect::Errno(EIO),
    };
    mount.device.set_plan(FaultPlan {
        faults: [first, first + 1 + 44].map(fail).to_vec(),
        ..FaultPlan::default()
    });
    let report = checked(&mount);
    assert_eq!(report.damaged_pages, 1, "{:?}", report.findings);
    let text = &report.findings[0].text;
    assert!(
        text.contains("offset 1228800: the data cannot be read"),
        "{text}"
    );
}

#[test]
fn a_volume_without_checksums_returns_what_the_device_has() {
    let mut mount = Mount::new(64 << 20);
    let file = mount.durable("f", PAGE as usize);
    let at = place(&file, 0);
    drop(file);
    mount.remount();
    flip(&mount, at);
    let file = mount.open("f");
    assert!(read(&mount, &file, 0, 1).unwrap() != bytes(0, 1));
    assert_eq!(checksum_errors(&mount), 0);
}

#[test]
fn every_way_to_change_a_file_leaves_its_checksums_right() {
    let mut mount = Mount::summed(64 << 20);
    let file = mount.durable("f", 600 * PAGE as usize);
    let mut expected = bytes(0, 600);
    let mut change = |page: u64, data: Vec<u8>| {
        mount.write(&file, page * PAGE, &data);
        expected[(page * PAGE) as usize..][..data.len()].copy_from_slice(&data);
    };
    change(10, bytes(1, 300));
    write_back(&mount, &file);
    change(20, bytes(2, 2));
    mount.fsync(&file);
    change(20, bytes(3, 1));
    write_back(&mount, &file);
    change(250, pattern(4, 10_000));
    mount.fs().checkpoint().unwrap();
    let fs = mount.fs();
    let (start, len) = (30 * PAGE + 100, 40 * PAGE);
    fs.fallocate(&file, PUNCH, start, len).unwrap();
    expected[start as usize..][..len as usize].fill(0);
    mount.fsync(&file);
    let (start, len) = (300 * PAGE + 100, 40 * PAGE);
    fs.fallocate(&file, ZERO, start, len).unwrap();
    expected[start as usize..][..len as usize].fill(0);
    let mut change = |page: u64, data: Vec<u8>| {
        mount.write(&file, page * PAGE, &data);
        expected[(page * PAGE) as usize..][..data.len()].copy_from_slice(&data);
    };
    change(310, bytes(5, 20));
    change(40, bytes(6, 3));
    write_back(&mount, &file);
    mount.truncate(&file, 500 * PAGE + 7);
    expected.truncate(500 * PAGE as usize + 7);
    mount.truncate(&file, 520 * PAGE);
    expected.resize(520 * PAGE as usize, 0);
    evict_all(&mount, &file);
    assert!(mount.read(&file) == expected, "before the move");
    fs.move_to(file.ino(), 1).unwrap();
    evict_all(&mount, &file);
    assert!(mount.read(&file) == expected, "after the move");
    drop(file);
    mount.remount();
    assert!(mount.read(&mount.open("f")) == expected, "after a mount");
    let file = mount.open("f");
    mount.truncate(&file, 0);
    mount.fsync(&file);
    drop(file);
    mount.remount();
}

fn evict_all(mount: &Mount, file: &Arc<File>) {
    mount.fsync(file);
    evict(mount, file);
}

#[test]
fn an_overwrite_goes_to_new_blocks_and_a_sync_of_few_pages_into_the_journal() {
    let mount = Mount::summed(64 << 20);
    let file = mount.durable("f", 100 * PAGE as usize);
    let before: Vec<u64> = (0..100).map(|page| place(&file, page)).collect();
    mount.write(&file, 0, &bytes(1, 40));
    write_back(&mount, &file);
    assert!((0..40).all(|page| place(&file, page) != before[page as usize]));
    assert!((40..100).all(|page| place(&file, page) == before[page as usize]));
    mount.commit();
    let before = mount.device.traffic();
    mount.write(&file, 50 * PAGE, &bytes(2, 1));
    mount.begin_fdatasync(&file).recv().unwrap().unwrap();
    let now = mount.device.traffic() - before;
    let expected = Traffic {
        durable_writes: 1,
        ..Traffic::default()
    };
    let counted = Traffic {
        written_bytes: 0,
        read_bytes: 0,
        reads: 0,
        ..now
    };
    assert_eq!(counted, expected);
    assert!(!is_in_place(&file, 50), "logged");
    mount.fs().checkpoint().unwrap();
    assert!(is_in_place(&file, 50));
}

#[test]
fn a_full_volume_takes_overwrites() {
    let mut mount = Mount::summed(24 << 20);
    let file = mount.durable("f", 300 * PAGE as usize);
    let filler = fill_up(&mount);
    let before: Vec<u64> = (0..300).map(|page| place(&file, page)).collect();
    mount.write(&file, 0, &bytes(1, 300));
    write_back(&mount, &file);
    assert!((0..300).all(|page| place(&file, page) == before[page as usize]));
    evict_all(&mount, &file);
    assert!(mount.read(&file) == bytes(1, 300));
    // The new contents have their checksums.
    drop(file);
    drop(filler);
    mount.remount();
    flip(&mount, before[200]);
    let file = mount.open("f");
    assert_eq!(read(&mount, &file, 200, 1).unwrap_err().errno(), EIO);
    assert_eq!(read(&mount, &file, 201, 1).unwrap().len(), PAGE as usize);
}

#[test]
fn an_image_that_a_recovery_finds_has_its_checksum() {
    let mut mount = Mount::summed(64 << 20);
    let file = mount.durable("f", PAGE as usize);
    mount.write(&file, 0, &bytes(1, 1));
    mount.fsync(&file);
    drop(file);
    mount.power_cut(0);
    let file = mount.open("f");
    assert!(!is_in_place(&file, 0));
    assert_eq!(read(&mount, &file, 0, 1).unwrap(), bytes(1, 1));
    mount.fs().checkpoint().unwrap();
    evict(&mount, &file);
    assert!(is_in_place(&file, 0));
    assert_eq!(read(&mount, &file, 0, 1).unwrap(), bytes(1, 1));
}

#[test]
fn an_image_is_settled_only_when_its_batch_is_durable() {
    let mount = Mount::summed(64 << 20);
    let file = mount.durable("f", PAGE as usize);
    let at = place(&file, 0);
    let device = mount.device.clone();
    let writes_there = || {
        let log = device.log();
        log.iter()
            .filter(|done| done.operation == Operation::Write && done.offset_bytes == at)
            .count()
    };
    let before = writes_there();
    mount.write(&file, 0, &bytes(1, 1));
    let (begun, go) = mount.device.block_next(Operation::DurableWrite);
    let (fs, file) = (mount.fs(), &file);
    let mount = &mount;
    std::thread::scope(move |scope| {
        scope.spawn(move || mount.fsync(file));
        begun.wait();
        let (ended, has_ended) = channel();
        scope.spawn(move || {
            fs.checkpoint().unwrap();
            // The test waits for it for a while only.
            let _ = ended.send(());
        });
        // Long enough for a settlement that does not wait. A slow machine makes the test weaker, never wrong.
        let _ = has_ended.recv_timeout(Duration::from_millis(100));
        assert_eq!(writes_there(), before);
        // A test that fails drops it.
        go.send(()).unwrap();
    });
    fs.checkpoint().unwrap();
    assert_eq!(writes_there(), before + 1);
}

#[test]
fn a_zeroed_page_is_not_overwritten_in_place_before_a_batch_has_the_zeros() {
    const ZERO_RANGE: i32 = 0x10;
    for seed in 0..8 {
        let mut mount = Mount::summed(64 << 20);
        let file = mount.durable("f", 4 * PAGE as usize);
        let old = mount.read(&file);
        mount
            .fs()
            .fallocate(&file, ZERO_RANGE, PAGE, 2 * PAGE)
            .unwrap();
        mount.write(&file, PAGE, &bytes(9, 2));
        write_back(&mount, &file);
        drop(file);
        mount.power_cut(seed);
        // The durable checksums are those of the old bytes. A read of others fails.
        let file = mount.open("f");
        assert!(mount.read(&file) == old, "seed {seed}");
    }
}

/// Leaves a few free blocks in a volume, and returns a file that has most of the others.
fn fill_up(mount: &Mount) -> Arc<File> {
    let (_, filler) = mount.create("filler");
    let rest = (mount.free() - 8) * PAGE;
    mount.fs().fallocate(&filler, 0, 0, rest).unwrap();
    mount.commit();
    assert_eq!(mount.free(), 8);
    filler
}

/// Returns the number of changes of a device so far.
fn changes(device: &SimDevice) -> u64 {
    let kinds = [
        Operation::Write,
        Operation::DurableWrite,
        Operation::Flush,
        Operation::Discard,
    ];
    let counts = kinds.map(|kind| device.operations(Some(kind)));
    counts.iter().sum()
}

#[test]
fn a_power_cut_while_a_full_volume_takes_overwrites_leaves_no_wrong_checksum() {
    let mut mount = Mount::summed(24 << 20);
    let file = mount.durable("f", 30 * PAGE as usize);
    drop(fill_up(&mount));
    drop(file);
    mount.remount();
    let first = changes(&mount.device);
    mount.device.record();
    let file = mount.open("f");
    mount.write(&file, 0, &bytes(1, 30));
    write_back(&mount, &file);
    mount.write(&file, 5 * PAGE, &bytes(2, 20));
    evict_all(&mount, &file);
    let last = changes(&mount.device);
    assert!(last > first);
    let versions = [bytes(0, 30), bytes(1, 30), {
        let mut last = bytes(1, 30);
        last[5 * PAGE as usize..25 * PAGE as usize].copy_from_slice(&bytes(2, 20));
        last
    }];
    drop(file);
    let recorded = mount.device.clone();
    mount.fs().close().unwrap();
    mount.down();
    for cut in first + 1..=last + 1 {
        for seed in 0..2 {
            mount.device = Arc::new(recorded.crash_at(cut, seed));
            mount.assert_sound();
            mount.up();
            let file = mount.open("f");
            for page in 0..30 {
                let found = read(&mount, &file, page, 1);
                let found = found.unwrap_or_else(|error| panic!("cut {cut}:{seed}: {error}"));
                let own = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
                // A bare page may be a mixture of versions, if its write was interrupted.
                let sectors = own.step_by(512).zip(found.chunks(512));
                for (at, sector) in sectors {
                    let is_known = versions.iter().any(|bytes| bytes[at..at + 512] == *sector);
                    assert!(is_known, "cut {cut}:{seed}: page {page}");
                }
            }
            drop(file);
            mount.down();
        }
    }
}

fn scrubbed_bytes(mount: &Mount) -> u64 {
    let slices = mount.slices.iter();
    slices.map(|slice| slice.counters().scrubbed_bytes).sum()
}

/// Waits for what another thread does.
fn await_that(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::yield_now();
    }
}

/// Bytes a second that no device reaches.
const FAST: u64 = 1 << 50;

#[test]
fn a_scrub_finds_a_damaged_block_whose_page_is_cached() {
    let mount = Mount::summed(64 << 20);
    let file = mount.durable("f", 600 * PAGE as usize);
    flip(&mount, place(&file, 400));
    mount.fs().set_scrub_rate(FAST);
    await_that("all is read", || scrubbed_bytes(&mount) >= 600 * PAGE);
    await_that("it is found", || checksum_errors(&mount) == 1);
    assert!(mount.read(&file) == bytes(0, 600), "the cache is right");
    assert_eq!(scrubbed_bytes(&mount), 600 * PAGE);
    await_that("the pass ends", || !scrub_status(&mount).is_in_pass);
    let status = scrub_status(&mount);
    assert!(status.last_ended_s.is_some_and(|ended_s| ended_s > 0));
    assert_eq!((status.last_found, status.found), (1, 0));
    assert_eq!(status.bytes_per_s, FAST);
    // The next mount knows it, too.
    drop(file);
    let mut mount = mount;
    mount.remount();
    let known = scrub_status(&mount);
    assert_eq!(
        (known.last_ended_s, known.last_found),
        (status.last_ended_s, 1)
    );
    assert!(!known.is_in_pass);
}

fn scrub_status(mount: &Mount) -> ScrubStatus {
    let fs = mount.fs();
    fs.scrub_status().unwrap()
}

#[test]
fn a_volume_without_checksums_is_not_read_in_the_background() {
    let mount = Mount::new(64 << 20);
    assert_eq!(mount.fs().scrub_status(), None);
}

#[test]
fn a_scrub_keeps_its_rate_and_goes_on_after_a_mount() {
    let mut mount = Mount::summed(64 << 20);
    let file = mount.durable("f", 600 * PAGE as usize);
    drop(file);
    // The first megabyte needs no pause, and the next one a month.
    mount.fs().set_scrub_rate(1);
    await_that("a megabyte is read", || scrubbed_bytes(&mount) >= 1 << 20);
    mount.remount();
    assert_eq!(scrubbed_bytes(&mount), 0);
    mount.fs().set_scrub_rate(FAST);
    let rest = 600 * PAGE - (1 << 20);
    await_that("the rest is read", || scrubbed_bytes(&mount) >= rest);
    // The pass has ended: a further mount begins none for a week.
    mount.remount();
    mount.fs().set_scrub_rate(FAST);
    assert_eq!(scrubbed_bytes(&mount), 0);
    mount.fs().begin_scrub();
    await_that("all is read again", || scrubbed_bytes(&mount) >= 600 * PAGE);
    assert_eq!(checksum_errors(&mount), 0);
}

#[test]
fn a_scrub_finds_nothing_wrong_in_files_that_change_meanwhile() {
    let mount = Mount::summed(64 << 20);
    let file = mount.durable("f", 64 * PAGE as usize);
    mount.fs().set_scrub_rate(FAST);
    for round in 0..200 {
        mount.fs().begin_scrub();
        let first = round * 7 % 40;
        mount.write(&file, first * PAGE, &bytes(round, 20));
        write_back(&mount, &file);
        mount.write(&file, first * PAGE, &bytes(round + 1, 3));
        mount.fsync(&file);
        if round % 16 == 0 {
            mount.fs().checkpoint().unwrap();
        }
    }
    assert!(scrubbed_bytes(&mount) > 64 * PAGE);
    assert_eq!(checksum_errors(&mount), 0);
}

#[test]
fn a_scrub_reads_a_file_of_very_many_extents_to_its_end() {
    let mount = Mount::summed(64 << 20);
    let pages = 2600;
    let (_, file) = mount.create("f");
    mount.write(&file, 0, &bytes(0, pages));
    write_back(&mount, &file);
    // Every other page is without data: a hole, or unwritten.
    for page in (0..pages).step_by(2) {
        let mode = [PUNCH, ZERO][usize::from(page % 4 == 0)];
        let fs = mount.fs();
        fs.fallocate(&file, mode, page * PAGE, PAGE).unwrap();
    }
    mount.fsync(&file);
    evict(&mount, &file);
    flip(&mount, place(&file, pages - 1));
    mount.fs().set_scrub_rate(FAST);
    await_that("the pass ends", || {
        scrub_status(&mount).last_ended_s.is_some()
    });
    assert_eq!(scrub_status(&mount).last_found, 1);
    assert_eq!(scrubbed_bytes(&mount), pages / 2 * PAGE);
}

/// Returns what an append of a page and its fsync, and an overwrite of a page and its fdatasync, write to the device, without
/// checkpoints.
fn costs(mount: &Mount) -> [Traffic; 2] {
    let file = mount.durable("f", 40 * PAGE as usize);
    let cost = |page: u64, sync: &dyn Fn()| {
        let before = mount.device.traffic();
        mount.write(&file, page * PAGE, &bytes(1, 1));
        sync();
        Traffic {
            reads: 0,
            read_bytes: 0,
            ..mount.device.traffic() - before
        }
    };
    [
        cost(40, &|| mount.fsync(&file)),
        cost(7, &|| mount.begin_fdatasync(&file).recv().unwrap().unwrap()),
    ]
}

#[test]
fn small_syncs_are_one_durable_write_with_checksums_too() {
    let [plain, summed] = [Mount::new(64 << 20), Mount::summed(64 << 20)].map(|m| costs(&m));
    let one_write = |written_bytes| Traffic {
        durable_writes: 1,
        written_bytes,
        ..Traffic::default()
    };
    // Header and rows in one block or two, and the page.
    assert_eq!(plain, [one_write(2 * PAGE), one_write(PAGE)]);
    assert_eq!(summed, [one_write(2 * PAGE), one_write(2 * PAGE)]);
}
