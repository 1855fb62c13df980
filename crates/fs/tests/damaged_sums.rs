//! A damaged row of checksums costs the pages that it covers, and nothing else.

mod mount;

use std::sync::Arc;
use std::time::{Duration, Instant};

use jericho_cache::PagePlace;
use jericho_format::record::sums_key;
use jericho_fs::types::Ino;
use jericho_metadata::store::tables::Table;
use jericho_storage::Device;
use jericho_volume::{OpenMode, Volume};

use mount::{Mount, PAGE, evict, overwrite, pattern, read};

const EIO: i32 = 5;
/// Pages of the file: two whole rows and a part of a third one.
const PAGES: u64 = 600;

fn bytes(seed: u64, pages: u64) -> Vec<u8> {
    pattern(seed, (pages * PAGE) as usize)
}

/// Replaces a row of checksums by one that makes no sense. The volume is not mounted.
fn damage_row(mount: &Mount, ino: Ino, group: u64) {
    let devices: Vec<Arc<dyn Device>> = vec![mount.device.clone()];
    let volume = Volume::open_from_devices(devices, OpenMode::WRITE).unwrap();
    let (stores, allocator) = jericho_metadata::stores::open(&volume, 1 << 20).unwrap();
    let key = sums_key(ino, group).to_vec();
    let row = (Table::Sums, key, Some(vec![9]));
    stores[0].put_raw_rows(vec![row]).unwrap();
    stores[0].close().unwrap();
    drop((stores, allocator, volume));
}

/// A volume with a file of `PAGES` pages, `f`, and a damaged row of the pages 256 to 511.
fn damaged() -> Mount {
    let mut mount = Mount::summed(64 << 20);
    let ino = mount.durable("f", (PAGES * PAGE) as usize).ino();
    mount.fs().close().unwrap();
    mount.down();
    damage_row(&mount, ino, 1);
    mount.up();
    mount
}

#[test]
fn a_damaged_row_of_checksums_costs_its_pages_until_they_are_written() {
    let mount = damaged();
    let file = mount.open("f");
    let whole = bytes(0, PAGES);
    let is_right = |page: u64| {
        let own = &whole[(page * PAGE) as usize..][..PAGE as usize];
        read(&mount, &file, page, 1).unwrap() == own
    };
    assert!([0, 255, 512, 599].into_iter().all(is_right));
    let error = read(&mount, &file, 300, 1).unwrap_err();
    assert_eq!(error.errno(), EIO);
    let text = error.to_string();
    for part in [
        format!("inode {}", file.ino()),
        format!("offset {}", 300 * PAGE),
        "a row of checksums makes no sense".into(),
        "jericho check".into(),
    ] {
        assert!(text.contains(&part), "{part} is not in {text}");
    }
    // A part of a page cannot be changed, and a whole page can.
    assert!(mount.try_write(&file, 300 * PAGE + 5, b"part").is_err());
    let new = bytes(9, 1);
    overwrite(&mount, &file, 300, &new);
    mount.fsync(&file);
    evict(&mount, &file);
    assert_eq!(read(&mount, &file, 300, 1).unwrap(), new);
    for page in [256, 299, 301, 511] {
        let error = read(&mount, &file, page, 1).unwrap_err();
        assert_eq!(error.errno(), EIO, "page {page}: {error}");
    }
    assert!([0, 255, 512, 599].into_iter().all(is_right));
}

#[test]
fn all_changes_go_on_beside_a_damaged_row_of_checksums() {
    let mut mount = damaged();
    let file = mount.open("f");
    // A write of these pages, a truncation within them, growth, and other files.
    overwrite(&mount, &file, 400, &bytes(3, 1));
    mount.fsync(&file);
    mount.truncate(&file, 402 * PAGE);
    mount.commit();
    let other = mount.durable("g", 20 * PAGE as usize);
    drop(other);
    mount.truncate(&file, 500 * PAGE);
    overwrite(&mount, &file, 450, &bytes(4, 1));
    mount.fsync(&file);
    mount.fs().checkpoint().unwrap();
    drop(file);
    // No read has met the damage, so nothing is known of it.
    mount.fs().close().unwrap();
    mount.down();
    mount.up();
    let file = mount.open("f");
    assert_eq!(read(&mount, &file, 400, 1).unwrap(), bytes(3, 1));
    assert_eq!(read(&mount, &file, 450, 1).unwrap(), bytes(4, 1));
    assert_eq!(read(&mount, &file, 401, 1).unwrap_err().errno(), EIO);
    assert_eq!(read(&mount, &file, 410, 1).unwrap(), vec![0; PAGE as usize]);
    mount.remove("f", file);
    mount.commit();
    mount.remount();
}

#[test]
fn the_background_check_compares_the_pages_behind_a_damaged_row_of_checksums() {
    let mount = damaged();
    let file = mount.open("f");
    let mut runs = Vec::new();
    file.object().resolve(550, 1, &mut runs).unwrap();
    let PagePlace::Device { offset_bytes, .. } = runs[0].place else {
        panic!("page 550 is at {:?}", runs[0].place);
    };
    let zeros = vec![0; PAGE as usize];
    mount.device.write_at(offset_bytes, &zeros).unwrap();
    mount.fs().set_scrub_rate(1 << 50);
    let status = || mount.fs().scrub_status().unwrap();
    let begun = Instant::now();
    while status().last_ended_s.is_none() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", status());
        std::thread::yield_now();
    }
    assert_eq!(status().last_found, 1);
}
