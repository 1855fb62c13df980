//! A volume on a simulated device, for tests.

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use jericho_format::PAGE_BYTES;
use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, Kind, ROOT};
use jericho_shm::{Call, HELD_MAX};
use jericho_sim::{FaultPlan, Operation, SimDevice};
use jericho_storage::Device;
use jericho_topology::Topology;
use jericho_volume::{FormatOptions, OpenMode, Volume};

use crate::{Asker, Handle, Mounted, OpenOptions, WriteMode};

/// Longest wait for an event that must happen.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    umask: 0o022,
};

/// Ioctls that ask for inline reads, and for inline writes.
pub(crate) const READ: Call = Call::Fast {
    write: false,
    thread: None,
};
pub(crate) const WRITE: Call = Call::Fast {
    write: true,
    thread: None,
};

/// Returns a user whose processes are served.
pub(crate) fn asker() -> Asker {
    Asker {
        uid: jericho_sys::process::effective_uid(),
        gid: 0,
        thread: 0,
    }
}

/// Waits for an event that must happen.
pub(crate) fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LONG, "{what}");
        std::thread::yield_now();
    }
}

/// Calls `case` again if it fails on a host so slow that a lock holder may have timed out. Gives up after a minute of such
/// failures.
pub(crate) fn in_time(mut case: impl FnMut()) {
    let begun = Instant::now();
    loop {
        let case_begun = Instant::now();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut case));
        match result {
            Ok(()) => return,
            Err(_) if case_begun.elapsed() > HELD_MAX / 2 && begun.elapsed() < LONG => {}
            Err(why) => std::panic::resume_unwind(why),
        }
    }
}

/// Returns a formatted device of 64 MiB with one slice.
pub(crate) fn device() -> Arc<SimDevice> {
    let device = Arc::new(SimDevice::new("sim", 64 << 20));
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    let options = FormatOptions {
        slices: Some(1),
        ..FormatOptions::default()
    };
    format_devices(&devices, &[PathBuf::from("sim")], &options).unwrap();
    device
}

/// Mounts the volume on a device, with 8 MiB of cache.
pub(crate) fn mount(device: &Arc<SimDevice>) -> Arc<Mounted> {
    mount_on(device, "virtual:1", 0)
}

/// Mounts the volume on a device, with 8 MiB of cache, of which up to `spill_bytes` are in spill ranges.
pub(crate) fn mount_on(device: &Arc<SimDevice>, topology: &str, spill_bytes: u64) -> Arc<Mounted> {
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    let volume = Volume::open_from_devices(devices, OpenMode::WRITE).unwrap();
    let options = OpenOptions {
        threads: Default::default(),
        with_parent: false,
        move_costs: Default::default(),
        fast_path: Default::default(),
        keeper: None,
        devices: vec![],
        force: false,
        volume: PathBuf::from("simulated"),
        read_only: false,
        cache_bytes: Some(8 << 20),
        spill_bytes,
        topology: Topology::from_spec(topology).unwrap(),
    };
    Mounted::open_volume(volume, &options).unwrap()
}

/// Creates a file in the root directory and opens it for writing.
pub(crate) fn create(mounted: &Arc<Mounted>, name: &[u8]) -> Arc<Handle> {
    let fs = mounted.fs();
    let attr = fs.mknod(ROOT, name, Kind::File, 0o644, 0, CALLER).unwrap();
    mounted.open_file(attr.ino, true).unwrap()
}

/// Reads `len` bytes at `at`.
pub(crate) fn read(
    mounted: &Arc<Mounted>,
    handle: &Arc<Handle>,
    (at, len): (u64, u32),
    fills_page_cache: bool,
) -> mpsc::Receiver<Vec<u8>> {
    let (tx, rx) = mpsc::channel();
    let reply = move |read: jericho_fs::Result<usize>, buffer: Vec<u8>| {
        let _ = tx.send(buffer[..read.unwrap()].to_vec());
    };
    mounted.read(handle, at, len, fills_page_cache, vec![], reply);
    rx
}

/// Writes `data` at `at`. The receiver gets the number of bytes written.
pub(crate) fn write(
    mounted: &Arc<Mounted>,
    handle: &Arc<Handle>,
    at: u64,
    data: &[u8],
    mode: WriteMode,
) -> mpsc::Receiver<u32> {
    let (tx, rx) = mpsc::channel();
    mounted.write(handle, at, data, mode, move |done| {
        let _ = tx.send(done.unwrap());
    });
    rx
}

/// Writes the file's pages back and evicts them from the cache.
pub(crate) fn evict(mounted: &Arc<Mounted>, handle: &Arc<Handle>) {
    let (tx, rx) = mpsc::channel();
    for slice in handle.file.layout().slices() {
        let (slice, synced, dropped) = (mounted.slice(slice), tx.clone(), tx.clone());
        slice.sync_all(Box::new(move |result| synced.send(result).unwrap()));
        rx.recv_timeout(LONG).unwrap().unwrap();
        slice.invalidate(
            handle.file.object_id(),
            0..u64::MAX,
            Box::new(move |r| dropped.send(r).unwrap()),
        );
        rx.recv_timeout(LONG).unwrap().unwrap();
    }
}

/// Makes all reads of a device fail with EIO from now on.
pub(crate) fn fail_reads(device: &SimDevice) {
    let mut plan = FaultPlan::fail_nth(Some(Operation::Read), 1, libc::EIO);
    plan.faults[0].is_lasting = true;
    device.set_plan(plan);
}

/// Reserves space for a file until the volume is full. Returns the number of bytes.
pub(crate) fn fill(mounted: &Arc<Mounted>, handle: &Arc<Handle>) -> u64 {
    let (mut at, mut len) = (0, 64 << 20);
    while len >= PAGE_BYTES {
        match mounted.try_fallocate(handle, 0, at, len) {
            Ok(()) => at += len,
            Err(_) => len /= 2,
        }
    }
    at
}
