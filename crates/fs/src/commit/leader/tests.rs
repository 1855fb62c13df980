use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::ThreadId;

use jericho_sim::{FaultPlan, Operation, SimDevice};
use jericho_storage::Device;
use jericho_volume::{FormatOptions, OpenMode, Volume};

use super::*;
use crate::format::format_devices;
use crate::fs::Fs;
use crate::types::{Caller, FsOptions, ROOT};

const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};

struct Bed {
    device: Arc<SimDevice>,
    fs: Arc<Fs>,
}

/// What a callback says: its result, and the thread that ran it.
type Said = (Result<()>, ThreadId);

impl Bed {
    fn new() -> Bed {
        let device = Arc::new(SimDevice::new("sim", 64 << 20));
        let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
        let paths = [PathBuf::from("sim")];
        format_devices(&devices, &paths, &FormatOptions::default()).unwrap();
        let volume = Volume::open_from_devices(devices, OpenMode::WRITE).unwrap();
        let options = FsOptions {
            store_cache_bytes: 64 << 20,
            read_only: false,
            inode_cache: 50,
            commit_interval_ms: 3_600_000,
        };
        let fs = Fs::open(Arc::new(volume), Vec::new(), options).unwrap();
        let bed = Bed { device, fs };
        bed.change("first");
        let (tx, rx) = channel();
        bed.sync(&tx);
        assert!(rx.recv().unwrap().0.is_ok());
        bed.await_sleep();
        bed
    }

    fn core(&self) -> &Core {
        &self.fs.core
    }

    /// Returns the batches of the root directory's shard.
    fn commits(&self) -> &Commits {
        self.core().commits_of(ROOT)
    }

    fn change(&self, name: &str) {
        self.fs.mkdir(ROOT, name.as_bytes(), 0o755, CALLER).unwrap();
    }

    fn sync(&self, tx: &Sender<Said>) {
        let tx = tx.clone();
        let said = move |result| tx.send((result, std::thread::current().id())).unwrap();
        self.fs.fsync_dir_blocking(ROOT, Box::new(said));
    }

    /// Waits until the committer sleeps. Returns how often it has gone to sleep.
    fn await_sleep(&self) -> u64 {
        loop {
            let control = self.commits().control.lock();
            if control.asleep.is_some() {
                return control.sleeps;
            }
            drop(control);
            std::thread::yield_now();
        }
    }
}

/// Blocks the next durable write of the journal. `body` gets the channels that tell of it and let it go on.
fn with_blocked_commit(bed: &Bed, body: impl FnOnce(Receiver<()>, Sender<()>)) {
    let (begun, go) = bed.device.block_next(Operation::DurableWrite);
    body(begun, go);
}

#[test]
fn a_caller_that_commits_alone_wakes_no_thread() {
    let bed = Bed::new();
    let (tx, rx) = channel();
    // The first change after a commit sets the committer's deadline. It wakes the committer once: the later deadlines are not
    // before the instant at which the committer wakes.
    bed.change("wakes");
    bed.sync(&tx);
    rx.recv().unwrap().0.unwrap();
    let sleeps = bed.await_sleep();
    for n in 0..5 {
        bed.change(&n.to_string());
        let before = bed.device.traffic();
        bed.sync(&tx);
        let (result, thread) = rx.try_recv().expect("an answer before the call returns");
        result.unwrap();
        assert_eq!(thread, std::thread::current().id());
        let traffic = bed.device.traffic() - before;
        assert_eq!(
            [traffic.durable_writes, traffic.writes, traffic.flushes],
            [1, 0, 0]
        );
    }
    assert_eq!(bed.await_sleep(), sleeps);
}

#[test]
fn callers_that_come_during_a_commit_share_the_next_one() {
    let bed = Bed::new();
    bed.change("a");
    let before = bed.device.traffic();
    let (tx, rx) = channel();
    with_blocked_commit(&bed, |begun, go| {
        std::thread::scope(|scope| {
            let leader = scope.spawn(|| bed.sync(&tx));
            begun.recv().unwrap();
            for name in ["b", "c", "d"] {
                bed.change(name);
                bed.sync(&tx); // returns at once
            }
            assert!(rx.try_recv().is_err());
            let leads = leader.thread().id();
            drop(go);
            for _ in 0..4 {
                let (result, thread) = rx.recv().unwrap();
                result.unwrap();
                assert_eq!(thread, leads);
            }
        });
    });
    assert_eq!((bed.device.traffic() - before).durable_writes, 2);
}

#[test]
fn a_leader_that_panics_fails_those_that_wait_and_ends_all_changes() {
    let bed = Bed::new();
    bed.change("a");
    let (tx, rx) = channel();
    with_blocked_commit(&bed, |begun, go| {
        bed.device
            .set_plan(FaultPlan::panic_at(Some(Operation::DurableWrite), 1));
        std::thread::scope(|scope| {
            let leader = scope.spawn(|| bed.sync(&tx));
            begun.recv().unwrap();
            bed.sync(&tx);
            drop(go);
            assert!(leader.join().is_err());
        });
    });
    let half_done = |said: Said| matches!(said.0, Err(Error::HalfDone));
    assert!(half_done(rx.recv().unwrap()));
    assert!(half_done(rx.recv().unwrap()));
    bed.sync(&tx);
    assert!(half_done(rx.recv().unwrap()));
    bed.fs.close().unwrap_err();
}

#[test]
fn a_callback_that_panics_does_not_keep_the_others_waiting() {
    let bed = Bed::new();
    bed.change("a");
    let (tx, rx) = channel();
    with_blocked_commit(&bed, |begun, go| {
        std::thread::scope(|scope| {
            let leader = scope.spawn(|| bed.sync(&tx));
            begun.recv().unwrap();
            bed.sync(&tx);
            let panics = |_| panic!("a planned panic");
            bed.fs.fsync_dir_blocking(ROOT, Box::new(panics));
            bed.sync(&tx);
            drop(go);
            assert!(leader.join().is_err());
        });
    });
    for _ in 0..3 {
        rx.recv().unwrap().0.unwrap();
    }
    bed.change("b");
    bed.sync(&tx);
    rx.recv().unwrap().0.unwrap();
}

#[test]
fn the_committer_serves_those_that_are_left_after_many_rounds() {
    /// Leaves another waiter from each callback, without leading.
    fn leave(core: Arc<Core>, left: usize, tx: Sender<ThreadId>) -> Waiter {
        let done = move |result: Result<()>| {
            result.unwrap();
            tx.send(std::thread::current().id()).unwrap();
            if left > 0 {
                let next = leave(core.clone(), left - 1, tx);
                assert!(core.commits_of(ROOT).leave(next).is_ok());
            }
        };
        Waiter {
            inode: None,
            commit: true,
            data: ShardSet::default(),
            done: Box::new(done),
        }
    }
    let bed = Bed::new();
    let (tx, rx) = channel();
    let shard = bed.core().shards.map().of_ino(ROOT);
    lead(
        bed.core(),
        shard,
        leave(bed.fs.core.clone(), ROUNDS_MAX, tx),
    );
    let threads: Vec<ThreadId> = rx.iter().collect();
    let own = |id: &&ThreadId| **id == std::thread::current().id();
    assert_eq!(threads.len(), ROUNDS_MAX + 1);
    assert_eq!(threads.iter().filter(own).count(), ROUNDS_MAX);
}

#[test]
fn a_close_beside_a_leader_waits_for_it_and_answers_those_that_come_later() {
    let bed = Bed::new();
    bed.change("a");
    let (tx, rx) = channel();
    with_blocked_commit(&bed, |begun, go| {
        std::thread::scope(|scope| {
            scope.spawn(|| bed.sync(&tx));
            begun.recv().unwrap();
            bed.commits().stop();
            let ends = scope.spawn(|| drop(catch_unwind(AssertUnwindSafe(|| bed.fs.close()))));
            bed.sync(&tx);
            assert_eq!(rx.recv().unwrap().0.unwrap_err().errno(), ESHUTDOWN.errno());
            assert!(!ends.is_finished());
            drop(go);
            rx.recv().unwrap().0.unwrap();
        });
    });
}
