//! Files with very many extents: batches take their changes in steps of a bounded size, and a crash between two steps shows nothing
//! that was not promised.

mod mount;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use jericho_fs::File;
use jericho_fs::check::data::check_data;
use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::types::{Kind, ROOT};
use jericho_sim::{Operation, PowerSupply};
use jericho_storage::Device;
use parking_lot::Mutex;

use mount::{CALLER, Mount, PAGE, evict, pattern, write_back};

const KEEP_SIZE: i32 = 1;
const PUNCH_HOLE: i32 = 2;
/// Enough for more than two batches on a small volume.
const EXTENTS: u64 = 250;
/// Bytes that a truncation keeps: a part of a page, so that it reads the page and changes it.
const KEPT_PART: u64 = 1000;
/// Bytes that a truncation keeps: a whole page, which is not changed then.
const KEPT: u64 = PAGE;

/// Gives every second page of a file space, from page `from` on, so that each of these pages is an extent.
fn preallocate(mount: &Mount, file: &Arc<File>, from: u64, extents: u64) {
    for page in from..from + extents {
        let fs = mount.fs();
        fs.fallocate(file, KEEP_SIZE, 2 * page * PAGE, PAGE)
            .unwrap();
    }
}

/// Writes every second page of a file, so that each of these pages is an extent. Returns the contents.
fn write_extents(mount: &Mount, file: &Arc<File>, seed: u64, extents: u64) -> Vec<u8> {
    let page_bytes = PAGE as usize;
    let mut contents = vec![0; (2 * extents as usize - 1) * page_bytes];
    for (at, page) in contents.chunks_mut(page_bytes).enumerate().step_by(2) {
        page.copy_from_slice(&pattern(seed + at as u64, page_bytes));
        mount.write(file, at as u64 * PAGE, page);
    }
    contents
}

/// Blocks these durable writes, as `block` does.
fn block_durable_writes<const N: usize>(
    mount: &Mount,
    numbers: [u64; N],
) -> [(Receiver<()>, Sender<()>); N] {
    block(mount, Operation::DurableWrite, numbers)
}

/// Blocks these operations of a kind, counted from now on. For each, the receiver reports that it has begun, and it continues when the
/// sender is dropped.
fn block<const N: usize>(
    mount: &Mount,
    kind: Operation,
    numbers: [u64; N],
) -> [(Receiver<()>, Sender<()>); N] {
    let mut stops = HashMap::new();
    let blocked = numbers.map(|number| {
        let ((begun, has_begun), (go, may_go)) = (channel(), channel::<()>());
        stops.insert(number, (begun, may_go));
        (has_begun, go)
    });
    let state = Mutex::new((0, stops));
    mount.device.set_before(move |operation| {
        let mut state = state.lock();
        state.0 += u64::from(operation == kind);
        let number = state.0;
        let stop = state.1.remove(&number);
        drop(state);
        if let Some((begun, may_go)) = stop {
            begun.send(()).unwrap();
            let _ = may_go.recv();
        }
    });
    blocked
}

/// Creates a file with many extents, makes it durable, and removes it. The removal is not durable.
fn with_removed_file(mount: &Mount) {
    let (_, file) = mount.create("many");
    preallocate(mount, &file, 0, 4 * EXTENTS);
    mount.fs().sync_all().unwrap();
    mount.remove("many", file);
}

#[test]
fn the_removal_of_a_hundred_thousand_extents_takes_many_short_batches() {
    let mut mount = Mount::new(2 << 30);
    let free = mount.free();
    let (_, file) = mount.create("many");
    preallocate(&mount, &file, 0, 100_000);
    mount.fs().sync_all().unwrap();
    let before = mount.device.traffic();
    mount.remove("many", file);
    mount.fs().commit().unwrap();
    let batches = (mount.device.traffic() - before).durable_writes;
    let (longest, _) = mount.fs().longest_batch_bytes();
    assert!(longest <= 1 << 20, "a batch of {longest} bytes");
    assert!(batches >= 10, "{batches} batches");
    assert_eq!(mount.free(), free);
    mount.remount();
    assert_eq!(mount.free(), free);
}

#[test]
fn a_truncation_of_a_hundred_thousand_extents_takes_many_short_batches() {
    let mut mount = Mount::new(2 << 30);
    let free = mount.free();
    let (_, file) = mount.create("many");
    preallocate(&mount, &file, 0, 100_000);
    mount.truncate(&file, 200_000 * PAGE);
    mount.fsync(&file);
    mount.truncate(&file, 0);
    mount.fsync(&file);
    let (longest, _) = mount.fs().longest_batch_bytes();
    assert!(longest <= 1 << 20, "a batch of {longest} bytes");
    assert_eq!(mount.free(), free);
    drop(file);
    mount.remount();
    assert_eq!(mount.free(), free);
}

#[test]
fn the_first_sync_and_the_removal_of_many_extents_with_checksums_take_many_short_batches() {
    let mut mount = Mount::summed(512 << 20);
    let free = mount.free();
    let (_, file) = mount.create("many");
    write_extents(&mount, &file, 1, 20_000);
    let durable_writes = || mount.device.traffic().durable_writes;
    let before = durable_writes();
    mount.fsync(&file);
    let synced = durable_writes() - before;
    mount.remove("many", file);
    let before = durable_writes();
    mount.fs().commit().unwrap();
    let removed = durable_writes() - before;
    let (longest, _) = mount.fs().longest_batch_bytes();
    assert!(longest <= 1 << 20, "a batch of {longest} bytes");
    assert!(synced >= 5 && removed >= 5, "{synced}, {removed} batches");
    assert_eq!(mount.free(), free);
    mount.remount();
    assert_eq!(mount.free(), free);
}

#[test]
fn names_are_created_and_synced_between_the_steps_of_a_removal() {
    let mut mount = Mount::new(64 << 20);
    let free = mount.free();
    with_removed_file(&mount);
    let [(begun, go)] = block_durable_writes(&mount, [2]);
    let create = |name: &str| {
        let fs = mount.fs();
        fs.mknod(ROOT, name.as_bytes(), Kind::Fifo, 0o644, 0, CALLER)
            .unwrap();
    };
    create("beside");
    // The first batch has the name, and a part of the removal.
    mount.commit();
    begun.recv().unwrap();
    assert!(mount.free() < free);
    create("between");
    drop(go);
    mount.commit();
    mount.fs().commit().unwrap();
    assert_eq!(mount.free(), free);
    mount.power_cut(1);
    for name in ["beside", "between"] {
        mount.fs().lookup(ROOT, name.as_bytes()).unwrap();
    }
    assert!(mount.fs().lookup(ROOT, b"many").is_err());
}

#[test]
fn an_fsync_of_a_file_does_not_wait_for_the_removal_of_another() {
    let mount = Mount::new(64 << 20);
    let free = mount.free();
    let (_, small) = mount.create("small");
    with_removed_file(&mount);
    let [(begun, go), (begun_later, go_later)] = block_durable_writes(&mount, [2, 4]);
    mount.commit();
    begun.recv().unwrap();
    // The second batch is sealed, so the third one has the file, and a part of the removal.
    mount.write(&small, 0, &pattern(1, PAGE as usize));
    let synced = mount.begin_fdatasync(&small);
    drop(go);
    synced.recv().unwrap().unwrap();
    begun_later.recv().unwrap();
    assert!(mount.free() < free);
    drop(go_later);
}

#[test]
fn removed_files_that_wait_for_their_batches_make_no_batch_longer() {
    let mount = Mount::new(512 << 20);
    let remove = |files: u64| {
        let create = |number: u64| {
            let (_, file) = mount.create(&number.to_string());
            preallocate(&mount, &file, 0, 10);
            file
        };
        let created: Vec<_> = (0..files).map(create).collect();
        mount.fs().sync_all().unwrap();
        let free = mount.free();
        for (number, file) in created.into_iter().enumerate() {
            mount.remove(&number.to_string(), file);
        }
        mount.fs().commit().unwrap();
        assert_eq!(mount.free() - free, files * 10);
        mount.fs().longest_batch_bytes().0
    };
    let (few, many) = (remove(800), remove(6000));
    assert!(
        many <= few * 3,
        "{many} bytes with many files, and {few} with few"
    );
}

#[test]
fn an_fsync_waits_for_one_batch_however_many_files_are_removed_in_it() {
    let mount = Mount::new(64 << 20);
    let (_, small) = mount.create("small");
    let names: Vec<String> = (0..30).map(|number| format!("many{number}")).collect();
    let files = names.iter().map(|name| {
        let (_, file) = mount.create(name);
        preallocate(&mount, &file, 0, EXTENTS);
        file
    });
    let files: Vec<_> = files.collect();
    with_removed_file(&mount);
    let [(begun, go), (begun_later, go_later)] = block_durable_writes(&mount, [2, 4]);
    mount.commit();
    begun.recv().unwrap();
    // The second batch is sealed, so the third one has the removals of all files, and the changes of this one.
    for (name, file) in names.iter().zip(files) {
        mount.remove(name, file);
    }
    write_extents(&mount, &small, 1, 20);
    write_back(&mount, &small);
    let synced = mount.begin_fdatasync(&small);
    drop(go);
    let synced = synced.recv_timeout(Duration::from_secs(60));
    synced.expect("the fourth batch is not needed").unwrap();
    begun_later.recv().unwrap();
    drop(go_later);
}

#[test]
fn a_mount_does_not_wait_for_the_removal_of_a_file_with_very_many_extents() {
    let mut mount = Mount::new(2 << 30);
    let free = mount.free();
    let (_, file) = mount.create("many");
    preallocate(&mount, &file, 0, 100_000);
    mount.fs().sync_all().unwrap();
    let [(begun, go)] = block_durable_writes(&mount, [2]);
    mount.remove("many", file);
    mount.commit();
    begun.recv().unwrap();
    mount.device.cut_power();
    drop(go);
    mount.power_cut(1);
    assert!(
        mount.free() < free,
        "the mount has ended before the removal"
    );
    let (_, small) = mount.create("small");
    mount.write(&small, 0, &pattern(1, PAGE as usize));
    mount.fsync(&small);
    // It goes on in the next mount if this one ends early.
    drop(small);
    mount.remount();
    let deadline = Instant::now() + Duration::from_secs(60);
    while mount.free() < free - 1 {
        assert!(Instant::now() < deadline, "{} of {free}", mount.free());
        mount.fs().commit().unwrap();
    }
    assert_eq!(mount.free(), free - 1);
}

/// Puts the volume onto a device that records its changes, and mounts it.
fn record(mount: &mut Mount) -> Arc<PowerSupply> {
    mount.fs().close().unwrap();
    mount.down();
    let supply = PowerSupply::new();
    mount.device = Arc::new(mount.device.crash(0).on_supply(&supply));
    mount.device.record();
    mount.up();
    supply
}

/// Makes the file "name" durable, and records the changes from then on. Returns the contents, the record, and the number of the last change
/// before.
fn named_then_recorded(mount: &mut Mount) -> (Vec<u8>, Arc<PowerSupply>, u64) {
    let contents = mount.read(&mount.durable("name", 3 * PAGE as usize));
    let supply = record(mount);
    let from = supply.changes();
    (contents, supply, from)
}

/// Makes the file "many" durable, with many extents, and records the changes from then on. Returns the contents, and the number of the last
/// change before.
fn durable_then_recorded(mount: &mut Mount) -> (Vec<u8>, Arc<PowerSupply>, u64) {
    let (_, file) = mount.create("many");
    let contents = write_extents(mount, &file, 1, EXTENTS);
    mount.fsync(&file);
    drop(file);
    let supply = record(mount);
    let from = supply.changes();
    (contents, supply, from)
}

/// Cuts the power at each change between `from` and `to`, and passes the volume, which must be sound, to `look`.
fn cut_between(mount: &Mount, from: u64, to: u64, look: impl Fn(&Mount, &str)) {
    assert!(to > from + 2, "{} changes", to - from);
    for cut in from + 1..=to {
        let what = format!("power cut at change {cut} of {from} to {to}");
        let mut after = Mount {
            device: Arc::new(mount.device.crash_at(cut, cut)),
            second: None,
            busy: false,
            fs: None,
            slices: Vec::new(),
        };
        after.assert_sound();
        assert_data_sound(&after, &what);
        after.up();
        look(&after, &what);
        after.fs().close().unwrap();
        after.down();
        after.assert_sound();
        assert_data_sound(&after, &what);
    }
}

/// Fails if a block has other contents than its checksum says.
fn assert_data_sound(mount: &Mount, what: &str) {
    let devices: [Arc<dyn Device>; 1] = [mount.device.clone()];
    let mut report = check_devices(devices.to_vec(), CheckOptions::default()).unwrap();
    check_data(&devices, &mut report, &Arc::default()).unwrap();
    assert!(report.is_sound(), "{what}: {:?}", report.findings);
}

/// Returns the contents of a file that exists.
fn contents(mount: &Mount, name: &str) -> Option<Vec<u8>> {
    let attr = mount.fs().lookup(ROOT, name.as_bytes()).ok()?;
    let file = mount.fs().open_file(attr.ino).unwrap();
    Some(mount.read(&file))
}

/// Fails unless bytes begin in the same way as others.
#[track_caller]
fn assert_begins(what: &str, found: &[u8], expected: &[u8]) {
    let differs = found.iter().zip(expected).position(|(a, b)| a != b);
    let len = found.len();
    assert_eq!(differs, None, "{what}: a byte of {len} differs");
    assert!(found.len() <= expected.len(), "{what}: {}", found.len());
}

#[test]
fn a_power_cut_between_the_steps_of_a_removal_is_followed_by_the_rest_of_it() {
    for new in [Mount::new, Mount::summed] {
        let mut mount = new(24 << 20);
        let free = mount.free();
        let (data, supply, from) = durable_then_recorded(&mut mount);
        let file = mount.open("many");
        mount.remove("many", file);
        mount.commit();
        // Takes blocks that a step has freed.
        let (_, other) = mount.create("other");
        let new = pattern(9, 40 * PAGE as usize);
        mount.write(&other, 0, &new);
        mount.fsync(&other);
        mount.fs().commit().unwrap();
        cut_between(&mount, from, supply.changes(), |mount, what| {
            if let Some(found) = contents(mount, "many") {
                assert!(found == data, "{what}: the file has other contents");
                return;
            }
            let found = contents(mount, "other").unwrap_or_default();
            assert_begins(what, &found, &new);
            let used = found.len().div_ceil(PAGE as usize) as u64;
            let left = mount.free() + used;
            // Pages of the file that are on the device and beyond its size.
            assert!(
                left <= free && left + 40 >= free,
                "{what}: {left} of {free}"
            );
        });
    }
}

#[test]
fn a_power_cut_between_the_steps_of_a_truncation_shows_no_truncated_bytes() {
    for new in [Mount::new, Mount::summed] {
        let mut mount = new(24 << 20);
        let (old, supply, from) = durable_then_recorded(&mut mount);
        let file = mount.open("many");
        mount.truncate(&file, KEPT);
        mount.truncate(&file, old.len() as u64);
        let mut new = vec![0; old.len()];
        new[..KEPT as usize].copy_from_slice(&old[..KEPT as usize]);
        // In the range that was truncated.
        let again = pattern(7, PAGE as usize);
        mount.write(&file, 50 * PAGE, &again);
        new[50 * PAGE as usize..51 * PAGE as usize].copy_from_slice(&again);
        write_back(&mount, &file);
        mount.fsync(&file);
        cut_between(&mount, from, supply.changes(), |mount, what| {
            let found = contents(mount, "many").unwrap();
            if found != old {
                assert_begins(what, &found, &new);
            }
        });
    }
}

#[test]
fn a_power_cut_between_the_steps_of_an_fsync_shows_no_holes_in_what_was_written() {
    for new in [Mount::new, Mount::summed] {
        let mut mount = new(24 << 20);
        let supply = record(&mut mount);
        let from = supply.changes();
        let (_, file) = mount.create("many");
        let new = write_extents(&mount, &file, 1, EXTENTS);
        mount.fsync(&file);
        cut_between(&mount, from, supply.changes(), |mount, what| {
            let found = contents(mount, "many").unwrap_or_default();
            assert_begins(what, &found, &new);
        });
    }
}

#[test]
fn a_power_cut_between_the_steps_of_a_hole_shows_old_bytes_or_zeros() {
    for new in [Mount::new, Mount::summed] {
        let mut mount = new(24 << 20);
        let (old, supply, from) = durable_then_recorded(&mut mount);
        let file = mount.open("many");
        let fs = mount.fs();
        fs.fallocate(&file, PUNCH_HOLE | KEEP_SIZE, 0, old.len() as u64)
            .unwrap();
        mount.fsync(&file);
        cut_between(&mount, from, supply.changes(), |mount, what| {
            let found = contents(mount, "many").unwrap();
            assert_eq!(found.len(), old.len(), "{what}");
            let pages = found.chunks(PAGE as usize).zip(old.chunks(PAGE as usize));
            for (page, (found, old)) in pages.enumerate() {
                let is_zero = found.iter().all(|byte| *byte == 0);
                assert!(is_zero || found == old, "{what}: page {page}");
            }
        });
    }
}

#[test]
fn a_power_cut_at_a_rename_shows_the_old_or_the_new_file_as_a_whole() {
    // More than a batch usually takes of a file, and more than it takes of one that replaces another.
    let kinds = [Mount::new, Mount::summed];
    let cases = kinds.map(|new| [EXTENTS / 2, EXTENTS].map(|extents| (new, extents)));
    for (new, extents) in cases.into_iter().flatten() {
        let mut mount = new(24 << 20);
        let (old, supply, from) = named_then_recorded(&mut mount);
        let (_, file) = mount.create("many");
        let new = write_extents(&mount, &file, 1, extents);
        mount.fs().rename(ROOT, b"many", ROOT, b"name", 0).unwrap();
        mount.commit();
        mount.fs().commit().unwrap();
        cut_between(&mount, from, supply.changes(), |mount, what| {
            let found = contents(mount, "name").unwrap();
            assert!(found == old || found == new, "{what}: {}", found.len());
        });
    }
}

#[test]
fn a_power_cut_after_a_rename_shows_what_the_file_had_then_whatever_was_written_since() {
    for new in [Mount::new, Mount::summed] {
        let mut mount = new(24 << 20);
        let (old, supply, from) = named_then_recorded(&mut mount);
        let (_, file) = mount.create("new");
        let last = 2 * EXTENTS * PAGE;
        let renamed = pattern(7, PAGE as usize);
        mount.write(&file, last, &renamed);
        mount.fs().rename(ROOT, b"new", ROOT, b"name", 0).unwrap();
        // In front of what the file has, and more than one batch takes.
        let later = write_extents(&mount, &file, 1, EXTENTS);
        mount.commit();
        mount.fs().commit().unwrap();
        cut_between(&mount, from, supply.changes(), |mount, what| {
            let found = contents(mount, "name").unwrap();
            if found == old {
                return;
            }
            let (before, end) = found.split_at(found.len().min(last as usize));
            assert!(end == renamed, "{what}: {} bytes", found.len());
            let pages = |bytes: &[u8]| {
                bytes
                    .chunks(PAGE as usize)
                    .map(<[u8]>::to_vec)
                    .collect::<Vec<_>>()
            };
            for (at, (page, later)) in pages(before).iter().zip(pages(&later)).enumerate() {
                let is_either = *page == later || page.iter().all(|byte| *byte == 0);
                assert!(is_either, "{what}: page {at}");
            }
        });
    }
}

#[test]
fn a_power_cut_after_a_rename_and_a_truncation_shows_no_truncated_bytes() {
    // On a volume with checksums the page with the new end gets another block, so it changes after the rename.
    let mut mount = Mount::summed(24 << 20);
    let renamed = mount.read(&mount.durable("new", 5 * PAGE as usize));
    let (old, supply, from) = named_then_recorded(&mut mount);
    let file = mount.open("new");
    mount.fs().rename(ROOT, b"new", ROOT, b"name", 0).unwrap();
    mount.truncate(&file, KEPT_PART);
    mount.truncate(&file, renamed.len() as u64);
    // More than one batch takes.
    for page in (10..10 + 4 * EXTENTS).step_by(2) {
        mount.write(&file, page * PAGE, &pattern(page, PAGE as usize));
    }
    write_back(&mount, &file);
    mount.commit();
    mount.fs().commit().unwrap();
    cut_between(&mount, from, supply.changes(), |mount, what| {
        let found = contents(mount, "name").unwrap();
        if found == old || found == renamed {
            return;
        }
        let kept = found.len().min(KEPT_PART as usize);
        assert!(found[..kept] == renamed[..kept], "{what}");
        let page = &found[kept..found.len().min(PAGE as usize)];
        assert!(
            page.iter().all(|byte| *byte == 0),
            "{what}: {}",
            found.len()
        );
    });
}

/// Truncates a file to `KEPT_PART` bytes, in a thread of its own. Calls `meanwhile` while the truncation reads the page with the new end from the
/// device, and then lets it end.
fn during_a_truncation(mount: &Mount, file: &Arc<File>, meanwhile: impl FnOnce()) {
    write_back(mount, file);
    evict(mount, file);
    let [(begun, go)] = block(mount, Operation::Read, [1]);
    std::thread::scope(|scope| {
        scope.spawn(|| mount.truncate(file, KEPT_PART));
        begun.recv().unwrap();
        meanwhile();
        drop(go);
    });
}

/// Makes a new file beside the file "name", and calls `act`, which renames it over "name" and truncates it. Fails unless the name has the old file
/// after each power cut, or the new one: as it was renamed, or truncated.
fn assert_replaced(act: impl Fn(&Mount, &Arc<File>)) {
    for new in [Mount::new, Mount::summed] {
        let mut mount = new(24 << 20);
        let (old, supply, from) = named_then_recorded(&mut mount);
        let (_, file) = mount.create("new");
        let new = pattern(7, 20 * PAGE as usize);
        mount.write(&file, 0, &new);
        act(&mount, &file);
        mount.fs().commit().unwrap();
        cut_between(&mount, from, supply.changes(), |mount, what| {
            let found = contents(mount, "name").unwrap();
            let is_any = [&old[..], &new, &new[..KEPT_PART as usize]].contains(&&found[..]);
            assert!(is_any, "{what}: {} bytes", found.len());
        });
    }
}

#[test]
fn a_power_cut_during_a_truncation_after_a_rename_shows_the_old_or_the_new_file() {
    assert_replaced(|mount, file| {
        mount.fs().rename(ROOT, b"new", ROOT, b"name", 0).unwrap();
        // If the truncation did not commit the name first, this batch would have it.
        during_a_truncation(mount, file, || drop(mount.durable("other", 1)));
    });
}

#[test]
fn a_power_cut_after_a_rename_during_a_truncation_shows_the_old_or_the_new_file() {
    assert_replaced(|mount, file| {
        let (done, is_done) = channel();
        let rename = || {
            mount.fs().rename(ROOT, b"new", ROOT, b"name", 0).unwrap();
            // The batch of the other file has the name, too.
            mount.durable("other", 1);
            done.send(()).unwrap();
        };
        std::thread::scope(|scope| {
            during_a_truncation(mount, file, || {
                scope.spawn(rename);
                // Without the wait, the rename ends before the truncation.
                _ = is_done.recv_timeout(Duration::from_millis(200));
            });
        });
    });
}

/// Fills the volume with one file, in runs. Returns the pages that it took.
fn fill(mount: &Mount, file: &Arc<File>) -> u64 {
    let (mut pages, mut run) = (0, 1 << 20);
    while run > 0 {
        let take = || {
            let at = (1 << 24) + pages;
            mount.fs().fallocate(file, KEEP_SIZE, at * PAGE, run * PAGE)
        };
        match mount.fs().with_space(file, take) {
            Ok(()) => pages += run,
            Err(error) => {
                assert_eq!(error.errno(), 28, "{error}");
                run /= 2;
            }
        }
    }
    pages
}

#[test]
fn a_full_volume_takes_as_much_again_at_once_after_many_extents_were_removed_or_truncated() {
    for is_truncation in [false, true] {
        let mut mount = Mount::new(64 << 20);
        let (_, many) = mount.create("many");
        preallocate(&mount, &many, 0, 2000);
        mount.truncate(&many, 4000 * PAGE);
        let (_, filler) = mount.create("filler");
        fill(&mount, &filler);
        mount.fs().sync_all().unwrap();
        assert!(mount.free() < 2000);
        match is_truncation {
            true => drop(mount.truncate(&many, 0)),
            false => mount.remove("many", many),
        }
        let (_, next) = mount.create("next");
        let pages = fill(&mount, &next);
        assert!(pages >= 2000, "truncation: {is_truncation}: {pages}");
        drop((next, filler));
        mount.remount();
    }
}
