//! Inode numbers over mounts: none is given out twice, and no mount reads the inodes to know which are in use.
//!
//! `JERICHO_MOUNT_FILES=10000000` sets the number of inodes of the large volume.

mod counting;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use counting::Counting;
use jericho_format::record::{INO_MARK_STEP, INODES_NAME, ino_of};
use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::format::{format, format_devices};
use jericho_fs::types::{Caller, Ino, Kind, ROOT};
use jericho_fs::{Fs, FsOptions};
use jericho_metadata::store::{Change, InodeRecord};
use jericho_sim::SimDevice;
use jericho_storage::{Device, OpenOptions, open_device};
use jericho_volume::{FormatOptions, OpenMode, Volume};

const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};
/// Most bytes that a mount after a crash reads: the largest journal, and a little.
const READ_BYTES_MAX: u64 = 65 << 20;
const FEW: u64 = 1000;
/// Files whose creation is only in the journal when the daemon is killed.
const LAST: u64 = 20;
/// Files of a volume of which all but `FEW` are only in the journal: two rows for each, about as many as a checkpoint waits for.
const MUCH: u64 = 17_000;
/// Bytes that a mount of many inodes may read more than a mount of few: redb's record of its free pages, and for each file in the
/// journal the leaf of its name and the branches above.
const MORE_BYTES_MAX: u64 = (1 << 20) + LAST * 3 * 4096;

fn options() -> FsOptions {
    FsOptions {
        store_cache_bytes: 64 << 20,
        read_only: false,
        inode_cache: 1000,
        commit_interval_ms: 3_600_000,
    }
}

fn open_file(path: &Path) -> Arc<dyn Device> {
    open_device(path, OpenOptions::default()).unwrap()
}

/// Returns the directory of an inode of a large volume: the first of the thousand numbers in which it is. It is in the root.
fn directory_of(ino: Ino) -> Ino {
    ino - (ino - 2) % 1000
}

fn name_of(ino: Ino) -> Vec<u8> {
    format!("name-{ino}").into_bytes()
}

/// Returns the changes that make an empty file, or its directory.
fn inode(volume: &Volume, ino: Ino) -> [Change; 2] {
    let name = name_of(ino).into_boxed_slice();
    let (kind, parent) = match directory_of(ino) {
        own if own == ino => (Kind::Directory, ROOT),
        parent => (Kind::File, parent),
    };
    let record = InodeRecord {
        kind,
        perm: 0o644,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        generation: 0,
        size: 0,
        atime_ns: 0,
        mtime_ns: 0,
        ctime_ns: 0,
        btime_ns: 0,
        slice: Some(0),
        placement: None,
        threads: Default::default(),
        parent,
        blocks: 0,
        target: None,
    };
    let entry = Change::PutEntry {
        dir: parent,
        hash: volume.hash_name(&name),
        name,
        ino,
        kind,
    };
    [Change::PutInode(ino, record), entry]
}

/// Makes a volume with this many files and directories, as a daemon leaves it that is killed: the last `in_journal` of them are only in the
/// journal.
fn killed_with(path: &Path, files: u64, in_journal: u64, size_bytes: u64) {
    let options = FormatOptions {
        size_bytes: Some(size_bytes),
        ..FormatOptions::default()
    };
    format(&[path.to_owned()], &options).unwrap();
    let volume = Volume::open_from_devices(vec![open_file(path)], OpenMode::WRITE).unwrap();
    volume.mark_dirty().unwrap();
    let (stores, allocator) = jericho_metadata::stores::open(&volume, 64 << 20).unwrap();
    let store = &stores[0];
    let (mut next, end) = (2, 2 + files);
    let commit = |from: u64, to: u64| {
        let mut changes = vec![
            Change::PutInoMark(0, end.next_multiple_of(INO_MARK_STEP)),
            Change::PutValue(INODES_NAME, to - 1),
        ];
        changes.extend((from..to).flat_map(|ino| inode(&volume, ino)));
        store.commit(&changes).unwrap();
    };
    let last = end - in_journal;
    while next < last {
        let to = last.min(next + 20_000);
        commit(next, to);
        next = to;
    }
    store.checkpoint().unwrap();
    while next < end {
        let to = end.min(next + (in_journal / 2).min(1000));
        commit(next, to);
        next = to;
    }
    // Nothing is closed, as after SIGKILL.
    std::mem::forget((stores, allocator));
}

/// Mounts the volume and returns the bytes that the mount has read.
fn read_by_mount(path: &Path, files: u64) -> u64 {
    let device = Arc::new(Counting {
        device: open_file(path),
        read_bytes: AtomicU64::new(0),
    });
    let begin = Instant::now();
    let volume = Volume::open_from_devices(vec![device.clone()], OpenMode::WRITE).unwrap();
    let fs = Fs::open(Arc::new(volume), Vec::new(), options()).unwrap();
    let read_bytes = device.read_bytes.load(Ordering::Relaxed);
    eprintln!(
        "{files} files: the mount took {:.3} s and read {read_bytes} bytes",
        begin.elapsed().as_secs_f64()
    );
    let stat = fs.statfs().unwrap();
    assert_eq!(stat.files - stat.files_free, 1 + files);
    for ino in [2, 1 + files / 2, 1 + files] {
        let dir = directory_of(ino);
        assert_eq!(fs.lookup(ROOT, &name_of(dir)).unwrap().ino, dir);
        if dir != ino {
            assert_eq!(fs.lookup(dir, &name_of(ino)).unwrap().ino, ino);
        }
    }
    let made = fs
        .mknod(ROOT, b"new", Kind::File, 0o644, 0, CALLER)
        .unwrap();
    assert_eq!(made.ino, (2 + files).next_multiple_of(INO_MARK_STEP));
    read_bytes
}

#[test]
fn a_mount_after_a_kill_reads_as_much_of_few_inodes_as_of_many() {
    let many = std::env::var("JERICHO_MOUNT_FILES");
    let many: u64 = many.map_or(100_000, |files| files.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    // The journals have the same size then: the largest that there is.
    let size_bytes = ((4 << 30) + many * 1500).next_multiple_of(1 << 20);
    let read = [FEW, many].map(|files| {
        let path = dir.path().join(format!("volume-{files}"));
        killed_with(&path, files, LAST, size_bytes);
        let read_bytes = read_by_mount(&path, files);
        std::fs::remove_file(&path).unwrap();
        read_bytes
    });
    assert!(read[1] <= READ_BYTES_MAX, "{read:?} bytes");
    assert!(read[1] <= read[0] + MORE_BYTES_MAX, "{read:?} bytes");
}

#[test]
fn a_mount_after_a_kill_with_much_in_the_journal_reads_the_journal_and_a_little() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volume");
    killed_with(&path, MUCH, MUCH - FEW, 5 << 30);
    let read_bytes = read_by_mount(&path, MUCH);
    // It also reads the leaves that the files of the journal change.
    let bytes_max = READ_BYTES_MAX + MORE_BYTES_MAX;
    assert!(read_bytes <= bytes_max, "{read_bytes} bytes");
}

fn formatted() -> SimDevice {
    let device = Arc::new(SimDevice::new("sim", 256 << 20));
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    let options = FormatOptions {
        slices: Some(2),
        ..FormatOptions::default()
    };
    format_devices(&devices, &[PathBuf::from("sim")], &options).unwrap();
    device.crash(0)
}

fn open(device: &Arc<SimDevice>) -> Arc<Fs> {
    let volume = Volume::open_from_devices(vec![device.clone()], OpenMode::WRITE).unwrap();
    Fs::open(Arc::new(volume), Vec::new(), options()).unwrap()
}

fn create(fs: &Fs, dir: Ino, name: &str) -> Ino {
    let made = fs.mknod(dir, name.as_bytes(), Kind::File, 0o644, 0, CALLER);
    let ino = made.unwrap().ino;
    fs.forget(ino, 1);
    ino
}

#[test]
fn the_number_of_a_file_that_was_durable_is_never_given_out_again() {
    let mut device = Arc::new(formatted());
    let mut durable = HashSet::new();
    for round in 0..12u64 {
        let fs = open(&device);
        // The second directory of the root, and what is in it, is of slice 1.
        let dirs = ["x", "y"].map(|name| match fs.lookup(ROOT, name.as_bytes()) {
            Ok(found) => found.ino,
            Err(_) => fs.mkdir(ROOT, name.as_bytes(), 0o755, CALLER).unwrap().ino,
        });
        let mut made = Vec::new();
        for dir in dirs {
            for n in 0..20 {
                let ino = create(&fs, dir, &format!("{n}"));
                assert!(!durable.contains(&ino), "inode {ino}, round {round}");
                made.push(ino);
            }
        }
        fs.commit().unwrap();
        durable.extend(made);
        for dir in dirs {
            (0..20).for_each(|n| fs.unlink(dir, format!("{n}").as_bytes()).unwrap());
        }
        // In some rounds the removals are durable, and new files are not, or the volume is unmounted.
        if round % 4 != 0 {
            fs.commit().unwrap();
        }
        if round % 4 == 2 {
            fs.close().unwrap();
        } else {
            for dir in dirs {
                let ino = create(&fs, dir, "late");
                assert!(!durable.contains(&ino), "inode {ino}, round {round}");
            }
        }
        let crashed = Arc::new(device.crash(round));
        drop(fs);
        device = crashed;
        let report = check_devices(vec![device.clone()], CheckOptions::default()).unwrap();
        assert!(report.is_sound(), "round {round}: {:?}", report.findings);
        if round % 4 == 0 {
            // The removals may have been lost.
            let fs = open(&device);
            for (dir, n) in dirs
                .into_iter()
                .flat_map(|dir| (0..20).map(move |n| (dir, n)))
            {
                let _ = fs.unlink(dir, format!("{n}").as_bytes());
            }
            fs.close().unwrap();
        }
    }
    let of_second = durable.iter().filter(|ino| **ino > ino_of(1, 0)).count();
    assert_eq!(of_second, durable.len() / 2);
}

#[test]
fn a_number_beyond_the_first_mark_is_not_given_out_again_after_a_power_cut() {
    let device = Arc::new(formatted());
    let fs = open(&device);
    let mut last = 0;
    while last < INO_MARK_STEP + 3 {
        last = create(&fs, ROOT, "again");
        fs.unlink(ROOT, b"again").unwrap();
        if last.is_multiple_of(4096) {
            fs.commit().unwrap();
        }
    }
    let kept = create(&fs, ROOT, "kept");
    fs.commit().unwrap();
    let device = Arc::new(device.crash(1));
    drop(fs);
    let fs = open(&device);
    assert_eq!(fs.lookup(ROOT, b"kept").unwrap().ino, kept);
    assert_eq!(create(&fs, ROOT, "next"), 2 * INO_MARK_STEP);
}
