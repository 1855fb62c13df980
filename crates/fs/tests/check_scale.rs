//! A check takes time in proportion to the metadata, and little memory: the same volume with few and with many inodes.
//!
//! Time is counted in rows: how often a check reads each row of the metadata. Memory is the peak of a process that only checks.
//! `JERICHO_CHECK_FILES=1000000` sets the number of inodes of the large volume.

mod counting;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use counting::Counting;
use jericho_format::record::{INO_MARK_STEP, INODES_NAME};
use jericho_fs::check::{CheckOptions, Progress, check_devices_showing};
use jericho_fs::format::format;
use jericho_fs::types::{Ino, Kind, ROOT};
use jericho_metadata::store::{Change, Extent, InodeRecord};
use jericho_storage::{OpenOptions, open_device};
use jericho_volume::{Blocks, FormatOptions, OpenMode, Volume};

const FEW: u64 = 10_000;
/// Files of a directory.
const FILES: u64 = 1000;
/// Most times that a check reads a row, on average. It reads inodes and extents twice, and the other rows once.
const READS_MAX: u64 = 2;
/// Most memory that a check takes beside what it keeps of each inode: the program, and cached pages of the metadata store.
const FIXED_BYTES: u64 = 60 << 20;
/// Most memory for an inode.
const INODE_BYTES: u64 = 32;
/// Names the volume that a child process checks.
const CHILD: &str = "JERICHO_CHECK_VOLUME";

/// Returns the directory of an inode: the first of the thousand numbers in which it is. It is in the root.
fn directory_of(ino: Ino) -> Ino {
    ino - (ino - 2) % FILES
}

/// Returns the changes that make a directory, or a file with one block.
fn inode(volume: &Volume, ino: Ino, end: Ino) -> Vec<Change> {
    let name = format!("name-{ino}").into_bytes().into_boxed_slice();
    let own = directory_of(ino);
    let is_directory = own == ino;
    let (kind, parent) = match is_directory {
        true => (Kind::Directory, ROOT),
        false => (Kind::File, own),
    };
    let record = InodeRecord {
        kind,
        perm: 0o644,
        nlink: if is_directory { 2 } else { 1 },
        uid: 0,
        gid: 0,
        rdev: 0,
        generation: 0,
        size: match is_directory {
            true => (end - ino).min(FILES) - 1,
            false => 4096,
        },
        atime_ns: 0,
        mtime_ns: 0,
        ctime_ns: 0,
        btime_ns: 0,
        slice: Some(0),
        placement: None,
        threads: Default::default(),
        parent,
        blocks: u64::from(!is_directory),
        target: None,
    };
    let mut changes = vec![
        Change::PutInode(ino, record),
        Change::PutEntry {
            dir: parent,
            hash: volume.hash_name(&name),
            name,
            ino,
            kind,
        },
    ];
    if !is_directory {
        let blocks = Blocks {
            slice: 0,
            first: ino,
            count: 1,
        };
        let extent = Extent {
            page: 0,
            blocks,
            unwritten: false,
            summed: false,
        };
        changes.push(Change::PutExtent(ino, extent));
    }
    changes
}

/// Makes a sound volume with this many inodes beside the root.
fn make(path: &Path, inodes: u64, size_bytes: u64) {
    let options = FormatOptions {
        size_bytes: Some(size_bytes),
        slices: Some(1),
        ..FormatOptions::default()
    };
    format(&[path.to_owned()], &options).unwrap();
    let device = open_device(path, OpenOptions::default()).unwrap();
    let volume = Volume::open_from_devices(vec![device], OpenMode::WRITE).unwrap();
    let (stores, allocator) = jericho_metadata::stores::open(&volume, 64 << 20).unwrap();
    let store = &stores[0];
    let (mut next, end) = (2, 2 + inodes);
    while next < end {
        let to = end.min(next + 20_000);
        let mut changes: Vec<Change> = vec![
            Change::PutInoMark(0, end.next_multiple_of(INO_MARK_STEP)),
            Change::PutValue(INODES_NAME, to - 1),
        ];
        changes.extend((next..to).flat_map(|ino| inode(&volume, ino, end)));
        changes.extend(
            (next..to)
                .filter(|ino| directory_of(*ino) != *ino)
                .map(|ino| {
                    Change::Use(Blocks {
                        slice: 0,
                        first: ino,
                        count: 1,
                    })
                }),
        );
        store.commit(&changes).unwrap();
        next = to;
    }
    let mut root = store.inode(ROOT).unwrap().unwrap();
    root.size = inodes.div_ceil(FILES);
    root.nlink = 2 + root.size as u32;
    store.commit(&[Change::PutInode(ROOT, root)]).unwrap();
    store.close().unwrap();
    drop(allocator);
}

/// Checks the volume that the environment names, and prints the peak of this process's memory and the bytes read.
#[test]
fn child() {
    let Ok(path) = std::env::var(CHILD) else {
        return;
    };
    let device = Arc::new(Counting {
        device: open_device(Path::new(&path), OpenOptions::default()).unwrap(),
        read_bytes: AtomicU64::new(0),
    });
    let begin = Instant::now();
    let progress = Arc::new(Progress::default());
    let options = CheckOptions::default();
    let report = check_devices_showing(vec![device.clone()], options, &progress).unwrap();
    let ms = begin.elapsed().as_millis();
    assert!(report.is_sound(), "{:?}", report.findings.first());
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    let kib: u64 = peak.split_whitespace().nth(1).unwrap().parse().unwrap();
    let read = device.read_bytes.load(Ordering::Relaxed);
    assert_eq!(report.windows, 1);
    println!(
        "\nRESULT {kib} {} {read} {} {ms}",
        progress.rows(),
        report.metadata_bytes
    );
}

/// Checks the volume in a process of its own. Returns the peak of its memory in KiB, the rows and the bytes that it has read, the
/// bytes of metadata, and the time in milliseconds.
fn measured(path: &Path) -> [u64; 5] {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]);
    let output = command.env(CHILD, path).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find(|line| line.starts_with("RESULT"));
    let line = line.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)));
    let mut numbers = line.split(' ').skip(1).map(|n| n.parse().unwrap());
    std::array::from_fn(|_| numbers.next().unwrap())
}

#[test]
fn a_check_reads_each_row_at_most_twice_and_keeps_a_few_bytes_of_an_inode() {
    let many = std::env::var("JERICHO_CHECK_FILES").map_or(10 * FEW, |n| n.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volume");
    for inodes in [FEW, many] {
        make(&path, inodes, (inodes * 4096 * 3).max(64 << 20));
        let [kib, rows, read, metadata, ms] = measured(&path);
        std::fs::remove_file(&path).unwrap();
        println!(
            "{inodes} inodes: peak {kib} KiB, {rows} rows and {read} bytes read, {metadata} bytes of metadata, {ms} ms"
        );
        // An inode and an entry each, and an extent for each file.
        let stored = 3 * inodes - inodes.div_ceil(FILES);
        assert!(rows >= stored && rows <= READS_MAX * stored, "{rows} rows");
        let most_bytes = FIXED_BYTES + INODE_BYTES * inodes;
        assert!(kib << 10 <= most_bytes, "{kib} KiB for {inodes} inodes");
    }
}
