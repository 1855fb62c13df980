//! Volumes whose data and metadata are full: nothing gets stuck, and the room comes back.
//!
//! `JERICHO_FULL_ROUNDS` and `JERICHO_FULL_MIB` set the number of rounds and the size of the volume.

use std::collections::HashMap;
use std::sync::Arc;

use jericho_fs::Result;
use jericho_fs::format::format_devices;
use jericho_fs::types::{Kind, ROOT};
use jericho_metadata::store::{Change, InodeRecord, Store};
use jericho_sim::SimDevice;
use jericho_storage::Device;
use jericho_volume::{FormatOptions, OpenMode, Volume};

mod mount;

use mount::{CALLER, Mount, PAGE};

const ENOSPC: i32 = 28;
/// Pages by which the metadata region may grow in all rounds: two of its parts. It never gets smaller.
const GROWTH_PAGES_MAX: u64 = 2 * 8 * 64;
/// Files that are created between two commits.
const FILES_PER_COMMIT: u64 = 200;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
}

/// Returns whether something was made, or that the volume is full.
#[track_caller]
fn is_made(result: Result<()>) -> bool {
    if let Err(error) = &result {
        assert_eq!(error.errno(), ENOSPC, "{error}");
    }
    result.is_ok()
}

/// Takes all blocks of a volume for a file. Returns their number.
fn fill_data(mount: &Mount) -> u64 {
    let (ino, file) = mount.create("data");
    let (mut pages, mut run) = (0, 1 << 20);
    while run > 0 {
        while is_made(mount.fs().fallocate(&file, 0, pages * PAGE, run * PAGE)) {
            pages += run;
        }
        run /= 2;
    }
    mount.fs().close_file(&file);
    mount.fs().forget(ino, 1);
    pages
}

/// Creates a file with an attribute of this length.
fn make(mount: &Mount, index: u64, xattr_bytes: usize) -> Result<()> {
    let fs = mount.fs();
    let name = format!("file-{index:08}");
    let attr = fs.mknod(ROOT, name.as_bytes(), Kind::File, 0o644, 0, CALLER)?;
    fs.forget(attr.ino, 1);
    match xattr_bytes {
        0 => Ok(()),
        bytes => fs.setxattr(attr.ino, b"user.long", &vec![7; bytes], 0),
    }
}

/// Creates files until the metadata are full. Returns their number.
fn fill_metadata(mount: &Mount, xattr_bytes: usize) -> u64 {
    let mut made = 0;
    while is_made(make(mount, made, xattr_bytes)) {
        made += 1;
        if made % FILES_PER_COMMIT == 0 {
            mount.commit();
        }
    }
    mount.commit();
    made
}

/// Removes everything in the root, in one batch if that is short enough.
fn remove_all(mount: &Mount) {
    let fs = mount.fs();
    let mut names = Vec::new();
    let is_dots = 2;
    let mut take = |entry: jericho_fs::types::DirEntry| {
        names.push(entry.name.to_vec());
        true
    };
    fs.readdir(ROOT, is_dots, &mut take).unwrap();
    for name in names {
        fs.unlink(ROOT, &name).unwrap();
    }
}

#[test]
fn a_volume_that_was_full_takes_as_much_after_all_is_removed() {
    let mut mount = Mount::new(setting("JERICHO_FULL_MIB", 64) << 20);
    let mut first: HashMap<usize, (u64, u64)> = HashMap::new();
    for round in 0..setting("JERICHO_FULL_ROUNDS", 100) {
        let xattr_bytes = match round % 50 {
            0 => 0,
            at if at % 10 == 2 => 3000,
            at if at % 2 == 0 => 20_000,
            _ => 60_000,
        };
        let pages = fill_data(&mount);
        let files = fill_metadata(&mount, xattr_bytes);
        // Half of the rounds are interrupted while the volume is full.
        match round % 4 {
            0 => mount.power_cut(round),
            1 => mount.remount(),
            _ => {}
        }
        remove_all(&mount);
        // Not a sync of the directory: it does not wait until all space is free.
        mount.fs().commit().unwrap();
        match round % 4 {
            2 => mount.power_cut(round),
            3 => mount.remount(),
            _ => {}
        }
        let (first_pages, first_files) = *first.entry(xattr_bytes).or_insert((pages, files));
        let what = format!("round {round}: {pages} pages, {files} files with {xattr_bytes} bytes");
        assert!(
            pages + GROWTH_PAGES_MAX >= first_pages,
            "{what}; {first_pages} pages before"
        );
        assert!(
            files * 100 >= first_files * 90,
            "{what}; {first_files} files before"
        );
    }
    mount.remount();
}

#[test]
fn a_full_volume_takes_many_removals_in_one_batch() {
    let mut mount = Mount::new(setting("JERICHO_FULL_MIB", 64) << 20);
    fill_data(&mount);
    let files = fill_metadata(&mount, 0);
    assert!(files > 10_000, "{files} files");
    remove_all(&mount);
    mount.fs().sync_all().unwrap();
    mount.remount();
    assert_eq!(
        mount.fs().statfs().unwrap().files_free,
        mount.fs().statfs().unwrap().files - 1
    );
}

/// Creates files until there are `most`, or until there is no room. Returns their number.
fn fill_store(store: &Store, inode: &InodeRecord, from: u64, most: u64) -> u64 {
    let mut made = from;
    while made < most {
        let files = 500;
        let check = || store.check_room(files, files as usize * 320);
        if check().is_err() && (!store.make_room(|| Ok(())).unwrap() || check().is_err()) {
            break;
        }
        let put = |ino| [Change::PutInode(ino, inode.clone()), entry(ino)];
        let batch: Vec<Change> = (made + 2..made + 2 + files).flat_map(put).collect();
        store.commit(&batch).unwrap();
        made += files;
    }
    made
}

/// Returns the parts of an entry of the root.
fn key(ino: u64) -> (u64, Box<[u8]>) {
    let hash = ino.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1;
    (hash, format!("file-{ino:08}").into_bytes().into())
}

fn entry(ino: u64) -> Change {
    let (hash, name) = key(ino);
    Change::PutEntry {
        dir: ROOT,
        hash,
        name,
        ino,
        kind: Kind::File,
    }
}

fn removal(ino: u64) -> [Change; 2] {
    let (hash, name) = key(ino);
    let entry = Change::DelEntry {
        dir: ROOT,
        hash,
        name,
    };
    [Change::DelInode(ino), entry]
}

#[test]
fn a_hundred_thousand_rows_removed_in_one_batch_find_room_in_a_full_metadata_region() {
    const FILES: u64 = 100_000;
    let device = Arc::new(SimDevice::new("sim", 1 << 30));
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    format_devices(&devices, &[], &FormatOptions::default()).unwrap();
    let open = |device: Arc<SimDevice>| {
        let volume = Volume::open_from_devices(vec![device], OpenMode::WRITE).unwrap();
        jericho_metadata::stores::open(&volume, 64 << 20).unwrap()
    };
    let (stores, allocator) = open(device.clone());
    let store = &stores[0];
    let mut inode = store.inode(ROOT).unwrap().unwrap();
    (inode.kind, inode.nlink) = (Kind::File, 1);
    let made = fill_store(store, &inode, 0, FILES);
    assert_eq!(made, FILES);
    // Data takes the rest of the space, so that the region cannot grow.
    allocator.reserve(allocator.available()).unwrap();
    let made = fill_store(store, &inode, made, u64::MAX);
    let chunks = store.region().unwrap().chunks();
    // Every second file: redb copies each page of the tables, and frees none.
    let removals: Vec<Change> = (2..2 + FILES).step_by(2).flat_map(removal).collect();
    assert_eq!(removals.len() as u64, FILES);
    store.commit(&removals).unwrap();
    let left = 1 + made - FILES / 2;
    assert_eq!(store.inode_count().unwrap(), left);
    store.close().unwrap();
    assert_eq!(store.region().unwrap().chunks(), chunks, "the region grew");
    drop((stores, allocator));
    let (stores, _allocator) = open(device);
    assert_eq!(stores[0].inode_count().unwrap(), left);
}

#[test]
fn symbolic_links_with_long_targets_are_committed_before_a_batch_is_long() {
    let mount = Mount::new(16 << 30);
    let target = vec![b'x'; 4000];
    for number in 0..10_000 {
        let name = format!("link-{number}");
        let fs = mount.fs();
        let attr = fs.symlink(ROOT, name.as_bytes(), &target, CALLER);
        fs.forget(attr.unwrap().ino, 1);
    }
    let (longest, journal) = mount.fs().longest_batch_bytes();
    assert!(
        longest > 0 && longest <= journal / 8,
        "{longest} of {journal}"
    );
}
