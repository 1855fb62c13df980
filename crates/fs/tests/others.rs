//! A sync pays for its own file: it writes as much on a volume with many files and dirty pages as on an empty one.

mod mount;

use std::sync::Arc;

use jericho_fs::File;
use jericho_fs::types::{Kind, ROOT};
use jericho_sim::Traffic;

use mount::{CALLER, Mount, PAGE, pattern};

const DEVICE_BYTES: u64 = 512 << 20;
/// Most bytes that a sync of a page may write if no other thread changes anything.
const ALONE_BYTES_MAX: u64 = 16 << 10;
const FILES: usize = 20_000;
/// Dirty pages of other files: below the tenth of the cache at which the evictor begins to write back.
const DIRTY_PAGES: usize = 90;

/// Creates files, as threads that do not sync.
fn create_files(mount: &Mount, prefix: &str, count: usize) {
    for number in 0..count {
        let name = format!("{prefix}{number}");
        let made = mount
            .fs()
            .mknod(ROOT, name.as_bytes(), Kind::File, 0o644, 0, CALLER);
        mount.fs().forget(made.unwrap().ino, 1);
    }
}

/// Returns what the device does during an operation.
fn traffic_of(mount: &Mount, operation: impl FnOnce()) -> Traffic {
    let before = mount.device.traffic();
    operation();
    mount.device.traffic() - before
}

fn synced_overwrite(mount: &Mount, file: &Arc<File>) -> Traffic {
    traffic_of(mount, || {
        mount.write(file, 0, &pattern(2, PAGE as usize));
        mount.begin_fdatasync(file).recv().unwrap().unwrap();
    })
}

fn synced_append(mount: &Mount, file: &Arc<File>) -> Traffic {
    traffic_of(mount, || {
        mount.write(file, file.size(), &pattern(3, PAGE as usize));
        mount.fsync(file);
    })
}

/// Returns the traffic of syncs: of overwrites, and of appends.
fn traffic_of_syncs(mount: &Mount) -> Vec<Traffic> {
    let file = mount.durable("own", 4 * PAGE as usize);
    let overwrites = (0..4)
        .map(|_| synced_overwrite(mount, &file))
        .collect::<Vec<_>>();
    let appends = (0..4).map(|_| synced_append(mount, &file));
    overwrites.into_iter().chain(appends).collect()
}

#[test]
fn a_sync_writes_no_more_beside_many_files_and_dirty_pages_than_on_an_empty_volume() {
    let empty = Mount::new(DEVICE_BYTES);
    let alone = traffic_of_syncs(&empty);

    let full = Mount::new(DEVICE_BYTES);
    create_files(&full, "other", FILES);
    full.fs().checkpoint().unwrap();
    let (_, dirty) = full.create("dirty");
    full.write(&dirty, 0, &pattern(1, DIRTY_PAGES * PAGE as usize));
    full.commit();
    let beside = traffic_of_syncs(&full);
    assert_eq!(beside, alone);
    for traffic in beside {
        assert!(traffic.written_bytes <= ALONE_BYTES_MAX, "{traffic:?}");
        assert_eq!(traffic.writes + traffic.durable_writes, 1, "{traffic:?}");
        assert!(
            traffic.durable_writes + traffic.flushes == 1 && traffic.reads == 0,
            "{traffic:?}"
        );
    }
    let still_dirty = full.slices[0].usage().dirty;
    assert_eq!(
        still_dirty, DIRTY_PAGES as u64,
        "the pages of the other file"
    );
}

#[test]
fn a_sync_while_others_create_files_writes_their_open_batch_and_no_more() {
    let mount = Mount::new(DEVICE_BYTES);
    let file = mount.durable("own", 4 * PAGE as usize);
    let alone = synced_append(&mount, &file);
    // Fewer than those that have a batch committed without a sync.
    for files in [20, 200] {
        create_files(&mount, &format!("beside{files}-"), files);
        let beside = synced_append(&mount, &file);
        assert_eq!(
            (beside.writes, beside.durable_writes, beside.flushes),
            (alone.writes, alone.durable_writes, alone.flushes),
        );
        let each = (beside.written_bytes - alone.written_bytes) / files as u64;
        assert!((100..1000).contains(&each), "{each} bytes for each file");
        let overwrite = synced_overwrite(&mount, &file);
        assert!(overwrite.written_bytes <= PAGE, "{overwrite:?}");
    }
}
