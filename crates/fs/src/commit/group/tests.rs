use std::path::PathBuf;
use std::sync::Arc;

use jericho_metadata::errno::EIO;
use jericho_sim::{DeviceSet, SimDevice};
use jericho_storage::{Cause, IoError};
use jericho_volume::{FormatOptions, OpenMode, Volume};

use super::*;
use crate::format::format_devices;
use crate::types::{Caller, Kind, ROOT};
use crate::{Fs, FsOptions};

const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};

/// Mounts a volume with two slices that have a store each, and returns a directory of each.
fn with_two_slices() -> (DeviceSet, Arc<Fs>, [Ino; 2]) {
    let names = ["one", "two"];
    let set = DeviceSet::new(names.map(|name| SimDevice::new(name, 64 << 20)));
    let options = FormatOptions {
        slices: Some(2),
        has_stores: Some(true),
        ..FormatOptions::default()
    };
    format_devices(&set.as_devices(), &names.map(PathBuf::from), &options).unwrap();
    let volume = Volume::open_from_devices(set.as_devices(), OpenMode::WRITE).unwrap();
    let options = FsOptions {
        store_cache_bytes: 16 << 20,
        read_only: false,
        inode_cache: 50,
        commit_interval_ms: 3_600_000,
    };
    let fs = Fs::open(Arc::new(volume), Vec::new(), options).unwrap();
    let dirs = ["x", "y"].map(|name| fs.mkdir(ROOT, name.as_bytes(), 0o755, CALLER).unwrap().ino);
    fs.mknod(dirs[0], b"file", Kind::File, 0o644, 0, CALLER)
        .unwrap();
    fs.commit().unwrap();
    (set, fs, dirs)
}

fn shards(fs: &Fs) -> [ShardId; 2] {
    [0, 1].map(|slice| fs.core.shards.map().of_slice(slice))
}

fn unreachable() -> Error {
    Error::Io(IoError {
        operation: "write",
        device: "two".into(),
        offset_bytes: 0,
        length_bytes: 4096,
        cause: Cause::Unreachable,
    })
}

#[test]
fn a_group_with_a_full_store_and_one_whose_host_is_away_is_suspended_and_not_ended() {
    let (_set, fs, [x, y]) = with_two_slices();
    let core = &fs.core;
    fs.rename(x, b"file", y, b"file", 0).unwrap();
    let set: ShardSet = shards(&fs).into_iter().collect();
    let group = Group::lock(core, set);
    // Only full: nothing ends.
    assert_eq!(group.could_not_append(ENOSPC).errno(), ENOSPC.errno());
    for shard in core.shards.of_set(set) {
        shard.commits.failure().unwrap();
    }
    let far = &core.shards.get(shards(&fs)[1]).store;
    far.fail(unreachable());
    assert!(group.could_not_append(ENOSPC).is_unreachable());
    for shard in core.shards.of_set(set) {
        assert!(shard.commits.suspension().is_some());
        assert!(!shard.commits.has_ended());
    }
    // Any other error takes the place of the suspension.
    far.fail(EIO);
    assert_eq!(group.could_not_append(ENOSPC).errno(), EIO.errno());
    for shard in core.shards.of_set(set) {
        assert!(shard.commits.has_ended());
    }
    drop(group);
    fs.close().unwrap_err();
}

#[test]
fn an_operation_that_finds_a_suspended_shard_in_its_gates_links_nothing() {
    let (_set, fs, [x, y]) = with_two_slices();
    let [near, far] = shards(&fs).map(|shard| &fs.core.shards.get(shard).commits);
    std::thread::scope(|scope| {
        // As a thread that seals a batch.
        let gate = far.gate.write();
        let rename = scope.spawn(|| fs.rename(x, b"file", y, b"file", 0));
        // It has asked both for failures when it has the first gate.
        while near.gate.try_write().is_some() {
            std::thread::yield_now();
        }
        far.fail(unreachable());
        drop(gate);
        assert!(rename.join().unwrap().unwrap_err().is_unreachable());
    });
    for commits in [near, far] {
        assert_eq!(commits.batch.lock().links, ShardSet::default());
    }
    // The other shard works by itself.
    fs.mknod(x, b"beside", Kind::File, 0o644, 0, CALLER)
        .unwrap();
    let near = shards(&fs)[0];
    fs.core.commit_shard_now(near).unwrap();
    fs.core.shards.get(near).commits.failure().unwrap();
}
