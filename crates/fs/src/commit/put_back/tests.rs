use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;

use jericho_metadata::shard::{ShardId, ShardSet};
use jericho_sim::{DeviceSet, SimDevice};
use jericho_storage::Device;
use jericho_volume::{FormatOptions, OpenMode, Volume};

use super::PutShardsBack;
use crate::error::Error;
use crate::format::format_devices;
use crate::put_back::ReturnedDevice;
use crate::{Fs, FsOptions, PutBackError};

/// Mounts a volume with three slices on devices of their own. The second and the third device are missing.
fn with_two_missing() -> (DeviceSet, Arc<Fs>) {
    let names = ["one", "two", "three"];
    let set = DeviceSet::new(names.map(|name| SimDevice::new(name, 64 << 20)));
    let options = FormatOptions {
        slices: Some(3),
        has_stores: Some(true),
        ..FormatOptions::default()
    };
    format_devices(&set.as_devices(), &names.map(PathBuf::from), &options).unwrap();
    let devices = set.with_missing(&[1, 2]);
    let volume = Volume::open_from_devices(devices, OpenMode::WRITE).unwrap();
    let options = FsOptions {
        store_cache_bytes: 16 << 20,
        read_only: false,
        inode_cache: 50,
        commit_interval_ms: 3_600_000,
    };
    let fs = Fs::open(Arc::new(volume), Vec::new(), options).unwrap();
    (set, fs)
}

fn returned(set: &DeviceSet) -> Vec<ReturnedDevice> {
    let device = |index: usize| -> Arc<dyn Device> { set.devices()[index].clone() };
    [1, 2].map(|index| (index, device(index))).into()
}

fn shards(fs: &Fs) -> [ShardId; 2] {
    [1, 2].map(|slice| fs.core.shards.map().of_slice(slice))
}

#[test]
fn all_shards_of_devices_that_return_together_take_changes_or_none() {
    let (set, fs) = with_two_missing();
    let [first, second] = shards(&fs).map(|shard| &fs.core.shards.get(shard).commits);
    second.fail(Error::HalfDone);
    let refused = fs.put_back(&returned(&set)).unwrap_err();
    assert!(matches!(refused, PutBackError::NeedsMount(_)), "{refused}");
    assert!(first.failure().unwrap_err().is_missing());
    assert!(matches!(second.failure(), Err(Error::HalfDone)));
    for index in [1, 2] {
        assert!(fs.core.volume.devices()[index].is_absent(), "{index}");
    }
    fs.close().unwrap();
    // Without the failure, both return.
    let (set, fs) = with_two_missing();
    assert_eq!(fs.put_back(&returned(&set)).unwrap(), [1, 2]);
    for shard in shards(&fs) {
        fs.core.shards.get(shard).commits.failure().unwrap();
    }
    fs.close().unwrap();
}

#[test]
fn a_failure_that_arrives_while_shards_return_is_not_lost() {
    let (_set, fs) = with_two_missing();
    let [shard, _] = shards(&fs);
    let commits = &fs.core.shards.get(shard).commits;
    let (sender, receiver) = channel();
    std::thread::scope(|scope| {
        // After the check.
        let put_back = || {
            scope.spawn(|| {
                sender.send(()).unwrap();
                assert!(commits.end_changes(&Error::HalfDone));
            });
            receiver.recv().unwrap();
            true
        };
        let done = fs.core.put_shards_back(ShardSet::one(shard), put_back);
        assert_eq!(done, PutShardsBack::Done);
    });
    assert!(matches!(commits.failure(), Err(Error::HalfDone)));
    fs.close().unwrap();
}
