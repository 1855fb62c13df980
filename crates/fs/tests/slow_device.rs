//! A device that does not answer delays nothing that does not need it: hits, and the files of a slice on another device. If each slice has a
//! metadata store, this includes all syncs of the other slice.
//!
//! The test closes a gate in front of all operations of the second device, and opens it at the end. What must not wait runs in a thread
//! of its own, so that a test fails instead of hanging.

mod mount;

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use jericho_cache::{Intent, Slice};
use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Done, Ino, Kind, ROOT};
use jericho_fs::{File, Fs, FsOptions, Result};
use jericho_sim::{Operation, SimDevice};
use jericho_storage::Device;
use jericho_volume::{FormatOptions, OpenMode, Volume};

use mount::{CALLER, start_slices};

const PAGE: usize = 4096;
/// Time after which a thread that should not wait counts as waiting.
const STUCK: Duration = Duration::from_secs(60);

/// A gate in front of a device.
#[derive(Default)]
struct Gate {
    /// The operations that wait, if it is closed.
    closed_to: Mutex<Vec<Operation>>,
    opened: Condvar,
}

impl Gate {
    /// Puts an open gate in front of all operations of a device. The receiver reports each operation that waits.
    fn before(device: &SimDevice) -> (Arc<Gate>, Receiver<()>) {
        let gate = Arc::new(Gate::default());
        let (sender, waits) = channel();
        let (passed, sender) = (gate.clone(), Mutex::new(sender));
        device.set_before(move |operation| passed.pass(operation, &sender));
        (gate, waits)
    }

    fn pass(&self, operation: Operation, waits: &Mutex<Sender<()>>) {
        let mut closed_to = self.closed_to.lock().unwrap();
        if closed_to.contains(&operation) {
            let _ = waits.lock().unwrap().send(());
        }
        while closed_to.contains(&operation) {
            closed_to = self.opened.wait(closed_to).unwrap();
        }
    }

    fn close(&self) {
        use Operation::{Discard, DurableWrite, Flush, Read, Write};
        self.close_to(&[Read, Write, Flush, Discard, DurableWrite]);
    }

    fn close_to(&self, operations: &[Operation]) {
        *self.closed_to.lock().unwrap() = operations.to_vec();
    }

    fn open(&self) {
        self.closed_to.lock().unwrap().clear();
        self.opened.notify_all();
    }
}

/// A mounted volume of two slices, each on a device of its own.
struct Bed {
    /// Each slice has a metadata store. Otherwise the metadata is on the first device.
    has_stores: bool,
    devices: [Arc<SimDevice>; 2],
    gate: Arc<Gate>,
    waits: Receiver<()>,
    fs: Arc<Fs>,
    slices: Vec<Arc<Slice>>,
    /// A directory of each slice.
    dirs: [Ino; 2],
}

/// A handle of a volume for a thread.
#[derive(Clone)]
struct User {
    fs: Arc<Fs>,
    slices: Vec<Arc<Slice>>,
}

impl Bed {
    fn new(has_stores: bool) -> Bed {
        let devices = ["a", "b"].map(|name| Arc::new(SimDevice::new(name, 64 << 20)));
        let all: Vec<Arc<dyn Device>> = devices.iter().map(|d| d.clone() as _).collect();
        let options = FormatOptions {
            slices: Some(2),
            has_stores: Some(has_stores),
            ..FormatOptions::default()
        };
        let paths = [PathBuf::from("a"), PathBuf::from("b")];
        format_devices(&all, &paths, &options).unwrap();
        let volume = Volume::open_from_devices(all, OpenMode::WRITE).unwrap();
        let slices = start_slices(&volume, Duration::from_secs(3600));
        let options = FsOptions {
            store_cache_bytes: 64 << 20,
            read_only: false,
            inode_cache: 100,
            commit_interval_ms: 3_600_000,
        };
        let fs = Fs::open(Arc::new(volume), slices.clone(), options).unwrap();
        // Directories in the root take the slices in turn.
        let dirs =
            ["x", "y"].map(|name| fs.mkdir(ROOT, name.as_bytes(), 0o755, CALLER).unwrap().ino);
        let (gate, waits) = Gate::before(&devices[1]);
        Bed {
            has_stores,
            devices,
            gate,
            waits,
            fs,
            slices,
            dirs,
        }
    }

    fn user(&self) -> User {
        User {
            fs: self.fs.clone(),
            slices: self.slices.clone(),
        }
    }

    /// Creates a file in a slice, whose pages are written and clean.
    fn durable(&self, slice: usize, name: &str) -> Arc<File> {
        let user = self.user();
        let file = user.create(self.dirs[slice], name);
        assert_eq!(usize::from(file.layout().home()), slice);
        user.write(&file, b'1');
        user.sync(&file, false).unwrap();
        self.fs.checkpoint().unwrap();
        file
    }

    /// Drops the pages of a file from the cache.
    fn evict(&self, file: &Arc<File>) {
        let slice = &self.slices[usize::from(file.layout().home())];
        let (sender, receiver) = channel();
        let done = Box::new(move |_| sender.send(()).unwrap());
        slice.invalidate(file.object_id(), 0..u64::MAX, done);
        receiver.recv().unwrap();
    }

    /// Runs something that must not wait for the second device.
    #[track_caller]
    fn at_once<T: Send + 'static>(&self, act: impl FnOnce(User) -> T + Send + 'static) -> T {
        let user = self.user();
        let (sender, receiver) = channel();
        std::thread::spawn(move || sender.send(act(user)));
        receiver
            .recv_timeout(STUCK)
            .expect("it waits for a device that it does not need")
    }

    /// Uses a file of the first slice, names of both, and a cached page of the second slice. With `syncs`, the file is synced, too. If the
    /// first slice has a store of its own, commits new names and files of this slice.
    fn others_go_on(&self, first: &Arc<File>, cached: &Arc<File>, syncs: bool) {
        let (first, cached, dirs) = (first.clone(), cached.clone(), self.dirs);
        self.evict(&first);
        let commits = self.has_stores;
        let (missed, hit) = self.at_once(move |user| {
            let missed = user.read(&first);
            user.write(&first, b'2');
            // The overwrite of a durable page needs no metadata.
            if syncs || commits {
                user.sync(&first, true).unwrap();
            }
            if commits {
                for number in 0..5 {
                    let made = user.create(dirs[0], &format!("synced{number}"));
                    user.write(&made, b'3');
                    match number % 2 {
                        0 => user.sync(&made, false).unwrap(),
                        _ => user.begin_sync(&made, false).recv().unwrap().unwrap(),
                    }
                    user.sync_dir(dirs[0]).unwrap();
                }
            }
            for dir in dirs {
                let made = user.create(dir, "new");
                user.fs.close_file(&made);
                user.fs.unlink(dir, b"new").unwrap();
            }
            (missed, user.read(&cached))
        });
        assert_eq!((missed, hit), (b'1', b'1'));
    }

    /// Opens the gate. The volume is sound at its end.
    fn end(self) {
        self.gate.open();
        self.fs.close().unwrap();
        self.slices.iter().for_each(|slice| slice.close());
        let all = self.devices.iter().map(|d| d.clone() as _).collect();
        let report = check_devices(all, CheckOptions::default()).unwrap();
        assert!(report.is_sound(), "{:?}", report.findings);
    }
}

impl User {
    fn create(&self, dir: Ino, name: &str) -> Arc<File> {
        let made = self
            .fs
            .mknod(dir, name.as_bytes(), Kind::File, 0o644, 0, CALLER);
        self.fs.open_file(made.unwrap().ino).unwrap()
    }

    fn grant(
        &self,
        file: &Arc<File>,
        intent: Intent,
    ) -> Receiver<std::result::Result<jericho_cache::Grant, jericho_cache::Error>> {
        let slice = &self.slices[usize::from(file.layout().home())];
        let (sender, receiver) = channel();
        let answer = move |pages| {
            let _ = sender.send(pages);
        };
        slice.get(&file.object(), 0, 1, intent, answer);
        receiver
    }

    /// Fills the first page of a file.
    fn write(&self, file: &Arc<File>, byte: u8) {
        let _writing = file.writing();
        self.fs.begin_write(file, 0, PAGE as u64).unwrap();
        let mut pages = self.grant(file, Intent::Modify).recv().unwrap().unwrap();
        pages.write(0, 0, &[byte; PAGE]).unwrap();
        drop(pages);
        self.fs.end_write(file, 0, PAGE as u64);
    }

    /// Returns the first byte of a file.
    fn read(&self, file: &Arc<File>) -> u8 {
        let mut byte = [0];
        let pages = self.grant(file, Intent::Read).recv().unwrap().unwrap();
        pages.read(0, 0, &mut byte).unwrap();
        byte[0]
    }

    fn begin_sync(&self, file: &Arc<File>, datasync: bool) -> Receiver<Result<()>> {
        let (sender, receiver) = channel();
        let done: Done = Box::new(move |result| {
            let _ = sender.send(result);
        });
        self.fs.fsync(file, datasync, done);
        receiver
    }

    fn sync_dir(&self, dir: Ino) -> Result<()> {
        let (sender, receiver) = channel();
        let done: Done = Box::new(move |result| sender.send(result).unwrap());
        self.fs.fsync_dir_blocking(dir, done);
        receiver.recv().unwrap()
    }

    fn sync(&self, file: &Arc<File>, datasync: bool) -> Result<()> {
        let (sender, receiver) = channel();
        let done: Done = Box::new(move |result| sender.send(result).unwrap());
        self.fs.fsync_blocking(file, datasync, done);
        receiver.recv().unwrap()
    }
}

#[test]
fn a_read_that_is_not_answered_delays_neither_hits_nor_the_other_slice() {
    for has_stores in [false, true] {
        let bed = Bed::new(has_stores);
        let (first, cached) = (bed.durable(0, "first"), bed.durable(1, "cached"));
        let slow = bed.durable(1, "slow");
        bed.evict(&slow);
        bed.gate.close();
        let answer = bed.user().grant(&slow, Intent::Read);
        bed.waits.recv().unwrap();
        bed.others_go_on(&first, &cached, true);
        assert!(answer.try_recv().is_err(), "the gate is closed");
        bed.gate.open();
        answer.recv().unwrap().unwrap();
        bed.end();
    }
}

#[test]
fn a_write_back_that_is_not_answered_delays_neither_hits_nor_the_other_slice() {
    for has_stores in [false, true] {
        let bed = Bed::new(has_stores);
        let (first, cached) = (bed.durable(0, "first"), bed.durable(1, "cached"));
        let slow = bed.durable(1, "slow");
        bed.user().write(&slow, b'2');
        bed.gate.close();
        let synced = bed.user().begin_sync(&slow, true);
        bed.waits.recv().unwrap();
        bed.others_go_on(&first, &cached, true);
        let read = slow.clone();
        assert_eq!(
            bed.at_once(move |user| user.read(&read)),
            b'2',
            "a page that is being written is read"
        );
        assert!(synced.try_recv().is_err(), "the gate is closed");
        bed.gate.open();
        synced.recv().unwrap().unwrap();
        bed.end();
    }
}

#[test]
fn a_flush_that_is_not_answered_delays_neither_reads_nor_writes_nor_names() {
    for has_stores in [false, true] {
        let bed = Bed::new(has_stores);
        let (first, cached) = (bed.durable(0, "first"), bed.durable(1, "cached"));
        let slow = bed.durable(1, "slow");
        bed.user().write(&slow, b'2');
        bed.gate
            .close_to(&[Operation::Flush, Operation::DurableWrite]);
        let synced = bed.user().begin_sync(&slow, true);
        bed.waits.recv().unwrap();
        // A commit of a shard waits for the one before it, and this one waits for the flush. The other slice may have the same shard.
        bed.others_go_on(&first, &cached, false);
        let read = slow.clone();
        assert_eq!(bed.at_once(move |user| user.read(&read)), b'2');
        assert!(synced.try_recv().is_err(), "the gate is closed");
        bed.gate.open();
        synced.recv().unwrap().unwrap();
        bed.end();
    }
}
