use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use jericho_cache::{Config, FRAMES_MIN, Intent};
use jericho_format::sums::{self, Sum};
use jericho_metadata::store::tables::Table;
use jericho_metadata::store::{Change, Extent};
use jericho_metadata::testing::{MemoryDevice, formatted, formatted_with, open_first, opened};
use jericho_volume::{Blocks, FormatOptions};

use super::*;
use crate::check::{CheckOptions, check_devices};
use crate::core::CURSED;

const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};

fn open(device: &Arc<MemoryDevice>) -> Arc<Fs> {
    let options = FsOptions {
        store_cache_bytes: 64 << 20,
        read_only: false,
        inode_cache: 50,
        commit_interval_ms: 3_600_000,
    };
    Fs::open(Arc::new(opened(device)), Vec::new(), options).unwrap()
}

fn sync(fs: &Fs) -> Result<()> {
    let (sender, receiver) = channel();
    fs.fsync_dir(ROOT, Box::new(move |result| sender.send(result).unwrap()));
    receiver.recv().unwrap()
}

#[test]
fn after_a_panic_inside_an_operation_nothing_becomes_durable_until_the_next_mount() {
    let device = formatted(64, 1);
    let fs = open(&device);
    fs.mkdir(ROOT, b"before", 0o755, CALLER).unwrap();
    sync(&fs).unwrap();
    fs.mkdir(ROOT, b"lost", 0o755, CALLER).unwrap();
    let make = || fs.mkdir(ROOT, CURSED, 0o755, CALLER);
    let panic = catch_unwind(AssertUnwindSafe(make)).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"a planned panic"));
    // Each later change and each sync fails. Existing data can still be read.
    for error in [
        fs.mkdir(ROOT, b"later", 0o755, CALLER).unwrap_err(),
        fs.rename(ROOT, b"before", ROOT, b"later", 0).unwrap_err(),
        sync(&fs).unwrap_err(),
        fs.close().unwrap_err(),
    ] {
        assert_eq!(error.to_string(), "a panic interrupted an operation");
    }
    drop(fs);
    let fs = open(&device);
    let found = |name: &[u8]| fs.lookup(ROOT, name).map(|attr| attr.kind).ok();
    assert_eq!(found(b"before"), Some(Kind::Directory));
    assert_eq!(found(b"lost"), None);
    assert_eq!(found(CURSED), None);
    fs.mkdir(ROOT, b"later", 0o755, CALLER).unwrap();
    fs.close().unwrap();
    drop(fs);
    let report = check_devices(vec![device], CheckOptions::default()).unwrap();
    assert!(report.is_sound(), "{:#?}", report.findings);
}

#[test]
fn a_volume_in_which_damage_was_found_is_not_marked_clean_and_keeps_new_changes() {
    let device = formatted(64, 1);
    let fs = open(&device);
    let made = fs.mkdir(ROOT, b"bad", 0o755, CALLER).unwrap().ino;
    fs.close().unwrap();
    drop(fs);
    let volume = opened(&device);
    let (store, _) = open_first(&volume, 64 << 20);
    let key = jericho_format::record::ino_key(made).to_vec();
    store
        .put_raw_rows(vec![(Table::Inodes, key, Some(vec![0xff; 10]))])
        .unwrap();
    store.close().unwrap();
    drop((store, volume));

    let fs = open(&device);
    fs.mkdir(ROOT, b"new", 0o755, CALLER).unwrap();
    sync(&fs).unwrap();
    let found = fs.lookup(ROOT, b"bad").unwrap_err();
    assert!(matches!(found, Error::Damaged(_)), "{found}");
    let closed = fs.close().unwrap_err();
    assert_eq!(closed.to_string(), found.to_string());
    drop(fs);
    assert!(opened(&device).is_dirty(), "the next mount must recover");
    let fs = open(&device);
    assert_eq!(fs.lookup(ROOT, b"new").unwrap().kind, Kind::Directory);
    // Without a use of the damaged inode, nothing is known of it.
    fs.close().unwrap();
}

#[test]
fn a_scrub_passes_over_files_with_damaged_rows() {
    let options = FormatOptions {
        slices: Some(1),
        checksums: true,
        ..FormatOptions::default()
    };
    let device = formatted_with(64, &options);
    let volume = opened(&device);
    let (store, _) = open_first(&volume, 64 << 20);
    let extent = |ino, page, (first, count)| {
        let blocks = Blocks {
            slice: 0,
            first,
            count,
        };
        let (unwritten, summed) = (false, true);
        let extent = Extent {
            page,
            blocks,
            unwritten,
            summed,
        };
        Change::PutExtent(ino, extent)
    };
    let wrong_sum = sums::encode([(0, Sum::Of(1))].into_iter());
    let changes = [
        extent(20, u64::MAX, (10, 4)),
        extent(21, 0, (u64::MAX, 1)),
        extent(22, 0, (10, 1)),
        extent(23, 0, (11, 1)),
        Change::Sums(23, 0, wrong_sum.into()),
    ];
    store.commit(&changes).unwrap();
    let key = jericho_format::record::sums_key(22, 0).to_vec();
    let row = (Table::Sums, key, Some(vec![9]));
    store.put_raw_rows(vec![row]).unwrap();
    store.close().unwrap();
    drop((store, volume));

    let fs = open(&device);
    fs.set_scrub_rate(1 << 50);
    let status = || fs.scrub_status().unwrap();
    let begun = Instant::now();
    while status().last_ended_s.is_none() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", status());
        std::thread::yield_now();
    }
    assert_eq!(status().last_found, 1);
}

#[test]
fn a_file_is_made_written_synced_and_removed_while_all_locks_of_another_slice_are_held() {
    let device = formatted(140, 2);
    let volume = Arc::new(opened(&device));
    let caches = caches(&volume, 0..2);
    let fs = Fs::open(volume, caches.clone(), OPTIONS).unwrap();
    assert_shares_no_lock(&fs, &caches);
    fs.close().unwrap();
    caches.iter().for_each(|cache| cache.close());
}

#[test]
fn a_file_is_made_written_synced_and_removed_while_all_locks_of_an_added_slice_are_held() {
    let device = formatted(80, 1);
    let volume = Arc::new(opened(&device));
    let new = MemoryDevice::new("new", 80);
    let mut caches = caches(&volume, 0..1);
    let fs = Fs::open(volume.clone(), caches.clone(), OPTIONS).unwrap();
    let added = crate::add::add_device(&volume, new, std::path::Path::new("new"), 1).unwrap();
    let make = || Ok(self::caches(&volume, 1..2));
    let show = |made: &[Arc<Slice>]| caches.extend(made.iter().cloned());
    fs.take(&added, make, show).unwrap();
    assert_shares_no_lock(&fs, &caches);
    fs.close().unwrap();
    caches.iter().for_each(|cache| cache.close());
}

const OPTIONS: FsOptions = FsOptions {
    store_cache_bytes: 16 << 20,
    read_only: false,
    inode_cache: 50,
    commit_interval_ms: 3_600_000,
};

/// Starts the caches of slices of a volume.
fn caches(volume: &Volume, slices: std::ops::Range<SliceId>) -> Vec<Arc<Slice>> {
    let start = |id| {
        let config = Config {
            id,
            frames: FRAMES_MIN,
            kernel_node: None,
            cpus: Vec::new(),
            dirty_age: Duration::from_secs(3600),
        };
        Slice::start(&config, volume.device_list()).unwrap()
    };
    slices.map(start).collect()
}

/// Makes directories in the first two slices, and files in one of them while the locks of the other one are held and very many removed
/// files wait there.
fn assert_shares_no_lock(fs: &Arc<Fs>, caches: &[Arc<Slice>]) {
    for dir in [b"x", b"y"] {
        fs.mkdir(ROOT, dir, 0o755, CALLER).unwrap();
    }
    fs.commit().unwrap();
    // Holds the inodes, as the kernel does.
    let [dir, other] = [b"x", b"y"].map(|name| fs.lookup(ROOT, name).unwrap().ino);
    let core = &fs.core;
    let shards = [dir, other].map(|ino| core.shards.map().of_ino(ino));
    assert_ne!(shards[0], shards[1]);
    let slice = shards[1].index() as SliceId;
    let other = core.shards.get(shards[1]);
    other.commits.pretend_removals();
    // In the order in which threads take them.
    let (commits, inodes) = (other.commits.hold_all(), other.inodes.now());
    let files = (core.hosts.hold_all(shards[1]), core.leaving.hold_all(slice));
    let store = (other.checkpoints.hold_all(), other.store.hold_all());
    let space = core.allocator.hold_all(slice);
    let table = core.table.hold_all(shards[1]);
    let objects = core.objects.hold_all(shards[1]);

    let (sender, receiver) = channel();
    let maker = std::thread::spawn({
        let (fs, cache) = (fs.clone(), caches[shards[0].index()].clone());
        move || {
            for number in 0..100 {
                make_and_remove(&fs, &cache, dir, format!("f{number}").as_bytes());
            }
            sender.send(()).unwrap();
        }
    });
    let done = receiver.recv_timeout(Duration::from_secs(60));
    drop((table, objects, space, store, files, commits));
    done.expect("it waits for a lock of the other slice");
    maker.join().unwrap();
    assert_eq!(other.inodes.now(), inodes);
}

/// Makes a file, writes and syncs it in the ways that need a commit and that need none, syncs its directory, and removes it.
fn make_and_remove(fs: &Fs, cache: &Arc<Slice>, dir: Ino, name: &[u8]) {
    let synced = || {
        let (sender, receiver) = channel();
        let done: Done = Box::new(move |result| sender.send(result).unwrap());
        (done, receiver)
    };
    let ino = fs.mknod(dir, name, Kind::File, 0o644, 0, CALLER);
    let ino = ino.unwrap().ino;
    let file = fs.open_file(ino).unwrap();
    for round in 0..3 {
        let (sender, receiver) = channel();
        let writing = file.writing();
        fs.begin_write(&file, 0, 4096).unwrap();
        let answer = move |pages| sender.send(pages).unwrap();
        cache.get(&file.object(), 0, 1, Intent::Overwrite, answer);
        let mut pages = receiver.recv().unwrap().unwrap();
        pages.write(0, 0, &[round; 4096]).unwrap();
        drop((pages, writing));
        fs.end_write(&file, 0, 4096);
        let (done, receiver) = synced();
        match round {
            // The evictor and the committer do it.
            0 => fs.fsync(&file, false, done),
            // This thread does it, with a commit, or without one.
            _ => fs.fsync_blocking(&file, round == 2, done),
        }
        receiver.recv().unwrap().unwrap();
    }
    let (done, receiver) = synced();
    fs.fsync_dir_blocking(dir, done);
    receiver.recv().unwrap().unwrap();
    fs.unlink(dir, name).unwrap();
    fs.close_file(&file);
    fs.forget(ino, 1);
    drop(file);
    let (done, receiver) = synced();
    fs.fsync_dir_blocking(dir, done);
    receiver.recv().unwrap().unwrap();
}

#[test]
fn creations_without_a_sync_take_a_bounded_number_of_changes_and_rows_in_memory() {
    /// The largest batch with the least memory.
    const CHANGES_MAX: usize = 4 * 32_768 / 64;
    const BYTES_MAX: u64 = (32 << 20) / 64;
    /// Changes of one creation.
    const CREATION: usize = 4;
    let device = formatted(256, 1);
    let options = FsOptions {
        store_cache_bytes: 1 << 20,
        read_only: false,
        inode_cache: 50,
        commit_interval_ms: 3_600_000,
    };
    let fs = Fs::open(Arc::new(opened(&device)), Vec::new(), options).unwrap();
    let shard = fs.core.shards.of_ino(ROOT);
    let (mut rows_max, mut changes_max) = (0, 0);
    for number in 0..20_000 {
        let name = format!("file-{number}");
        let attr = fs.mknod(ROOT, name.as_bytes(), Kind::Fifo, 0o644, 0, CALLER);
        fs.forget(attr.unwrap().ino, 1);
        let (rows, bytes) = shard.store.rows_in_memory();
        assert!(bytes <= BYTES_MAX, "{bytes} bytes after {number} files");
        rows_max = rows_max.max(rows);
        changes_max = changes_max.max(shard.commits.changes());
    }
    // The store's memory takes a batch of any size if it is empty. Some rows of a batch, such as the mark of inode numbers, are no changes.
    assert!(
        rows_max > 0 && rows_max <= CHANGES_MAX + CREATION,
        "{rows_max} rows"
    );
    assert!(
        changes_max <= CHANGES_MAX + CREATION,
        "{changes_max} changes"
    );
    fs.close().unwrap();
}
