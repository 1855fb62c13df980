//! Volumes whose data and metadata are full: nothing gets stuck, and the room comes back.
//!
//! `JERICHO_FULL_ROUNDS` and `JERICHO_FULL_MIB` set the number of rounds and the size of the volume.

use std::collections::HashMap;

use jericho_fs::Result;
use jericho_fs::types::{Kind, ROOT};

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
        mount.commit();
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
