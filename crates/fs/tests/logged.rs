//! Logged pages: syncs whose pages go into the journal with the metadata (docs/internals/logged-pages.md).

mod mount;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use jericho_cache::{PagePlace, PageRun};
use jericho_fs::File;
use jericho_fs::types::{Ino, ROOT, SetAttr};
use jericho_sim::{Effect, Fault, FaultPlan, Operation};
use jericho_volume::OpenMode;

use mount::{CALLER, Mount, PAGE, evict, pattern, write_back};

/// Returns where the pages of a file are.
fn places(file: &Arc<File>) -> Vec<PagePlace> {
    let mut runs = Vec::new();
    let pages = file.size().div_ceil(PAGE) as u32;
    file.object().resolve(0, pages, &mut runs).unwrap();
    pages_of(runs)
}

/// Returns the place of each page of runs.
fn pages_of(runs: Vec<PageRun>) -> Vec<PagePlace> {
    let page = |run: &PageRun, page: u64| match run.place.clone() {
        PagePlace::Device {
            device,
            offset_bytes,
        } => PagePlace::Device {
            device,
            offset_bytes: offset_bytes + page * PAGE,
        },
        place => place,
    };
    let pages = |run: PageRun| (0..u64::from(run.pages)).map(move |n| page(&run, n));
    runs.into_iter().flat_map(pages).collect()
}

/// Returns how many pages of a file are in memory and not in their blocks.
fn logged(file: &Arc<File>) -> usize {
    let is_logged = |place: &PagePlace| matches!(place, PagePlace::Memory(_));
    places(file).iter().filter(|place| is_logged(place)).count()
}

/// Creates a file with the bytes `pattern(1, 9000)`, all of whose pages are logged.
fn with_logged_pages(mount: &Mount, name: &str) -> Arc<File> {
    let file = mount.durable(name, 100);
    mount.write(&file, 0, &pattern(1, 9000));
    mount.fsync(&file);
    assert_eq!(logged(&file), 3);
    file
}

/// Syncs a file by the slice's evictor, which writes pages into their blocks.
fn sync_in_place(mount: &Mount, file: &Arc<File>) {
    let (sender, receiver) = channel();
    let done = Box::new(move |result| sender.send(result).unwrap());
    mount.fs().fsync(file, true, done);
    receiver.recv().unwrap().unwrap();
}

/// Passes on the operations of the mount's device, with the threads that call it.
fn watch(mount: &Mount) -> Receiver<(Operation, std::thread::ThreadId)> {
    let (sender, operations) = channel();
    mount.device.set_before(move |operation| {
        let _ = sender.send((operation, std::thread::current().id()));
    });
    operations
}

/// Syncs a directory in the calling thread.
fn fsync_dir(mount: &Mount, dir: Ino) {
    let (sender, receiver) = channel();
    let done = Box::new(move |result| sender.send(result).unwrap());
    mount.fs().fsync_dir_blocking(dir, done);
    receiver.try_recv().unwrap().unwrap();
}

#[test]
fn a_sync_of_a_directory_needs_the_device_only_after_an_operation_that_is_not_durable() {
    let mut mount = Mount::new(64 << 20);
    let dir = mount.fs().mkdir(ROOT, b"dir", 0o755, CALLER).unwrap().ino;
    let file = mount.durable("journal", 100);
    let operations = watch(&mount);
    let flushes = |mount: &Mount, dir| {
        fsync_dir(mount, dir);
        let seen = operations.try_iter().map(|(operation, _)| operation);
        seen.collect::<Vec<_>>()
    };
    // The sync of the file made its name durable. Its contents are no business of the directory.
    mount.write(&file, 0, &pattern(2, 3000));
    assert_eq!(flushes(&mount, ROOT), []);
    let set = SetAttr {
        perm: Some(0o600),
        ..SetAttr::default()
    };
    for round in 0..4 {
        let of_dir = round % 2 == 0;
        let name = format!("new{round}");
        match round {
            // An operation in another directory counts, too.
            0 | 1 => drop(mount.create(&name)),
            2 => drop(mount.fs().setattr(dir, set, CALLER).unwrap()),
            _ => drop(mount.fs().rename(ROOT, b"new1", dir, b"moved", 0)),
        }
        let dir = if of_dir { dir } else { ROOT };
        assert_eq!(flushes(&mount, dir), [Operation::DurableWrite], "{round}");
        assert_eq!(flushes(&mount, dir), [], "{round}");
    }
    drop(file);
    mount.power_cut(1);
    let fs = mount.fs();
    assert!(fs.lookup(dir, b"moved").is_ok() && fs.lookup(ROOT, b"new0").is_ok());
    assert_eq!(fs.getattr(dir).unwrap().perm, 0o600);
}

#[test]
fn an_append_or_a_first_write_is_made_durable_with_one_write_by_the_thread_that_asks() {
    for seed in 0..4 {
        let mut mount = Mount::new(64 << 20);
        let file = mount.durable("f", 100);
        let mut bytes = mount.read(&file);
        let operations = watch(&mount);
        let own = std::thread::current().id();
        for round in 0..6 {
            let data = pattern(round, 3000);
            mount.write(&file, bytes.len() as u64, &data);
            bytes.extend(data);
            match round % 2 {
                0 => mount.fsync(&file),
                _ => mount.begin_fdatasync(&file).recv().unwrap().unwrap(),
            }
            let seen: Vec<_> = operations.try_iter().collect();
            assert_eq!(seen, [(Operation::DurableWrite, own)], "round {round}");
        }
        let (_, new) = mount.create("new");
        mount.write(&new, 0, &pattern(9, 10_000));
        mount.fsync(&new);
        let seen: Vec<_> = operations.try_iter().collect();
        assert_eq!(seen, [(Operation::DurableWrite, own)]);
        assert_eq!((logged(&file), logged(&new)), (5, 3));
        drop((file, new));
        mount.power_cut(seed);
        assert!(mount.read(&mount.open("f")) == bytes);
        assert!(mount.read(&mount.open("new")) == pattern(9, 10_000));
    }
}

#[test]
fn an_fsync_writes_little_whatever_others_have_in_memory() {
    let mount = Mount::new(64 << 20);
    for number in 0..500 {
        mount.create(&format!("f{number}"));
    }
    let file = mount.durable("f", 100);
    let (_, other) = mount.create("other");
    mount.write(&other, 0, &pattern(1, 60 * PAGE as usize));
    mount.commit();
    for round in 0..20 {
        let before = mount.device.traffic();
        mount.write(&file, file.size(), &pattern(round, 100));
        mount.fsync(&file);
        let after = mount.device.traffic();
        assert!(after.written_bytes - before.written_bytes <= 16 << 10);
    }
    let dirty: u64 = mount.slices.iter().map(|slice| slice.dirty_bytes()).sum();
    assert_eq!(dirty, 60 * PAGE, "nobody has written the other file");
}

#[test]
fn a_sync_of_many_pages_writes_them_into_their_blocks() {
    let mount = Mount::new(64 << 20);
    let file = mount.durable("f", 100);
    mount.write(&file, PAGE, &pattern(1, 17 * PAGE as usize));
    mount.fsync(&file);
    assert_eq!(logged(&file), 0);
}

#[test]
fn a_logged_page_is_read_from_memory_until_a_checkpoint_settles_it() {
    let mut mount = Mount::new(64 << 20);
    let file = with_logged_pages(&mount, "f");
    evict(&mount, &file);
    assert!(mount.read(&file) == pattern(1, 9000));
    mount.fs().checkpoint().unwrap();
    assert_eq!(logged(&file), 0);
    evict(&mount, &file);
    assert!(mount.read(&file) == pattern(1, 9000));
    drop(file);
    // The checkpoint has removed the images: a mount finds none.
    mount.power_cut(1);
    let file = mount.open("f");
    assert_eq!(logged(&file), 0);
    assert!(mount.read(&file) == pattern(1, 9000));
}

#[test]
fn pages_around_a_logged_one_are_read_together() {
    let mount = Mount::new(64 << 20);
    let file = mount.durable("f", 64 * PAGE as usize);
    let runs = || {
        let mut runs = Vec::new();
        file.object().resolve(0, 64, &mut runs).unwrap();
        runs.iter().map(|run| run.pages).collect::<Vec<_>>()
    };
    let before = runs();
    mount.write(&file, 20 * PAGE, &pattern(1, PAGE as usize));
    mount.fsync(&file);
    assert_eq!((before, runs()), (vec![64], vec![20, 1, 43]));
    evict(&mount, &file);
    assert!(mount.read(&file)[20 * PAGE as usize..][..PAGE as usize] == pattern(1, PAGE as usize));
}

#[test]
fn an_unmount_leaves_no_page_in_the_journal_or_the_store() {
    let mut mount = Mount::new(64 << 20);
    let file = with_logged_pages(&mount, "f");
    drop(file);
    mount.remount();
    let file = mount.open("f");
    assert_eq!(logged(&file), 0);
    assert!(mount.read(&file) == pattern(1, 9000));
}

#[test]
fn a_recovery_does_not_undo_a_later_sync_in_place() {
    for seed in 0..8 {
        let mut mount = Mount::new(64 << 20);
        let file = with_logged_pages(&mount, "f");
        mount.write(&file, 0, &pattern(2, 5000));
        sync_in_place(&mount, &file);
        assert_eq!(logged(&file), 1);
        drop(file);
        mount.power_cut(seed);
        let found = mount.read(&mount.open("f"));
        assert!(found[..5000] == pattern(2, 5000) && found[5000..] == pattern(1, 9000)[5000..]);
    }
}

#[test]
fn a_recovery_does_not_undo_a_sync_that_came_between_a_settlement_and_its_batch() {
    for seed in 0..4 {
        let mut mount = Mount::new(64 << 20);
        let file = mount.durable("f", 100);
        mount.write(&file, 0, &pattern(1, 4096));
        mount.fsync(&file);
        assert_eq!(logged(&file), 1);
        // Stops the batch that removes the settled image.
        let (begun, go) = mount.device.block_next(Operation::DurableWrite);
        let fs = mount.fs().clone();
        let settles = std::thread::spawn(move || fs.checkpoint());
        begun.wait();
        assert_eq!(logged(&file), 0);
        mount.write(&file, 0, &pattern(2, 4096));
        let synced = match seed % 2 {
            0 => mount.begin_fdatasync(&file),
            _ => {
                write_back(&mount, &file);
                mount.begin_fdatasync(&file)
            }
        };
        let is_synced = synced.try_recv().is_ok();
        mount.device.cut_power();
        drop(go);
        let _ = settles.join().unwrap();
        drop(file);
        mount.power_cut(seed);
        let found = mount.read(&mount.open("f"));
        assert!(!is_synced || found == pattern(2, 4096), "seed {seed}");
        assert!(!is_synced, "the sync has not waited for the batch");
    }
}

#[test]
fn a_logged_page_that_was_written_in_place_and_not_synced_is_whole_after_a_power_cut() {
    for seed in 0..16 {
        let mut mount = Mount::new(64 << 20);
        let file = mount.durable("f", 100);
        mount.write(&file, 0, &pattern(1, 4096));
        mount.fsync(&file);
        mount.write(&file, 0, &pattern(2, 4096));
        write_back(&mount, &file);
        drop(file);
        // The write into the block is torn. The journal still has the page.
        mount.power_cut(seed);
        assert!(
            mount.read(&mount.open("f")) == pattern(1, 4096),
            "seed {seed}"
        );
    }
}

#[test]
fn a_recovery_does_not_write_a_removed_page_over_the_next_owner_of_its_block() {
    for seed in 0..4 {
        let mut mount = Mount::new(24 << 20);
        let file = with_logged_pages(&mount, "old");
        let old = blocks(&file);
        mount.remove("old", file);
        mount.commit();
        let files = reuse(&mount, &old);
        mount.power_cut(seed);
        assert_whole(&mount, &files);
    }
}

#[test]
fn an_image_of_a_free_block_is_gone_before_the_block_has_another_owner() {
    for seed in 0..4 {
        let mut mount = Mount::new(24 << 20);
        let file = with_logged_pages(&mount, "old");
        let old = blocks(&file);
        mount.remove("old", file);
        // The last batch before the power cut frees the blocks. The next one would remove the images.
        mount.commit();
        mount.power_cut(seed);
        let files = reuse(&mount, &old);
        mount.power_cut(seed);
        assert_whole(&mount, &files);
    }
}

/// Writes files in place until one of them has one of the blocks: at last the volume is full. Returns their contents.
fn reuse(mount: &Mount, old: &[PagePlace]) -> Vec<Vec<u8>> {
    let mut files: Vec<Vec<u8>> = Vec::new();
    let mut pages = 20;
    loop {
        let name = format!("new{}", files.len());
        let (_, file) = mount.create(&name);
        let bytes = pattern(files.len() as u64, pages * PAGE as usize);
        if mount.try_write(&file, 0, &bytes).is_err() {
            mount.remove(&name, file);
            mount.commit();
            assert!(pages > 1, "the volume is full, and no file has the blocks");
            pages = 1;
            continue;
        }
        sync_in_place(mount, &file);
        files.push(bytes);
        if places(&file).iter().any(|place| old.contains(place)) {
            return files;
        }
    }
}

fn assert_whole(mount: &Mount, files: &[Vec<u8>]) {
    for (number, bytes) in files.iter().enumerate() {
        let name = format!("new{number}");
        assert!(mount.read(&mount.open(&name)) == *bytes, "{name}");
    }
}

/// Returns the blocks of a file's pages, also of those that are logged.
fn blocks(file: &Arc<File>) -> Vec<PagePlace> {
    let mut runs = Vec::new();
    let pages = file.size().div_ceil(PAGE) as u32;
    file.object().allocate(0, pages, &mut runs).unwrap();
    pages_of(runs)
}

#[test]
fn a_device_that_refuses_a_settlement_loses_nothing() {
    for seed in 0..4 {
        let mut mount = Mount::new(64 << 20);
        let file = with_logged_pages(&mount, "f");
        let plan = FaultPlan::fail_nth(Some(Operation::Write), 1, 5);
        mount.device.set_plan(plan);
        // The first write of the checkpoint is that of the settlement. The image goes to the store.
        mount.fs().checkpoint().unwrap();
        assert_eq!(logged(&file), 3);
        if seed % 2 == 0 {
            mount.fs().checkpoint().unwrap();
            assert_eq!(logged(&file), 0);
        }
        drop(file);
        mount.power_cut(seed);
        let file = mount.open("f");
        assert_eq!(logged(&file), if seed % 2 == 0 { 0 } else { 3 });
        assert!(mount.read(&file) == pattern(1, 9000));
    }
}

#[test]
fn a_volume_that_is_mounted_for_reading_shows_logged_pages() {
    let mut mount = Mount::new(64 << 20);
    let file = with_logged_pages(&mount, "f");
    drop(file);
    mount.device.cut_power();
    mount.down();
    mount.device = Arc::new(mount.device.crash(1));
    let operations = watch(&mount);
    mount.up_with(OpenMode::READ);
    let file = mount.open("f");
    assert_eq!(logged(&file), 3);
    assert!(mount.read(&file) == pattern(1, 9000));
    drop(file);
    mount.fs().close().unwrap();
    mount.down();
    let seen: Vec<_> = operations.try_iter().map(|seen| seen.0).collect();
    assert!(seen.iter().all(|seen| *seen == Operation::Read), "{seen:?}");
}

#[test]
fn zeroed_pages_keep_no_place_among_the_logged_ones() {
    let mut mount = Mount::new(64 << 20);
    let file = mount.durable("f", 100);
    mount.write(&file, 0, &pattern(1, 12_288));
    mount.fsync(&file);
    mount.write(&file, 0, &pattern(2, 12_288));
    // FALLOC_FL_ZERO_RANGE
    mount.fs().fallocate(&file, 0x10, 0, 12_288).unwrap();
    mount.fsync(&file);
    mount.fs().checkpoint().unwrap();
    assert_eq!(logged(&file), 0);
    assert!(mount.read(&file) == vec![0; 12_288]);
    drop(file);
    mount.power_cut(1);
    assert!(mount.read(&mount.open("f")) == vec![0; 12_288]);
}

#[test]
fn images_that_a_device_refuses_are_not_tried_again_with_every_batch() {
    let mount = Mount::new(64 << 20);
    let file = mount.durable("f", 100);
    let operations = watch(&mount);
    let fault = Fault {
        operation: Some(Operation::Write),
        nth: 1,
        is_lasting: true,
        effect: Effect::Errno(5),
    };
    mount.device.set_plan(FaultPlan {
        faults: vec![fault],
        ..FaultPlan::default()
    });
    // The syncs log more than half of the pages that this journal permits, and not so many that a sync writes in place.
    for page in (0..96).step_by(16) {
        mount.write(&file, page * PAGE, &pattern(page, 16 * PAGE as usize));
        mount.fsync(&file);
    }
    let is_write = |seen: &(Operation, _)| seen.0 == Operation::Write;
    operations.iter().find(is_write).unwrap();
    for number in 0..50 {
        mount.create(&format!("new{number}"));
        mount.commit();
    }
    let writes = operations
        .try_iter()
        .filter(|seen| seen.0 == Operation::Write);
    let writes = writes.count();
    assert!(writes < 10, "{writes} writes");
}
