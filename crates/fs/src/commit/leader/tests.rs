use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::ThreadId;

use jericho_sim::{Begun, FaultPlan, Operation, SimDevice};
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
fn with_blocked_commit(bed: &Bed, body: impl FnOnce(Begun, Sender<()>)) {
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
            begun.wait();
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
            begun.wait();
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
            begun.wait();
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
        Waiter::for_all(Box::new(done))
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
            begun.wait();
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

/// Two shards, on devices of their own.
mod two_shards {
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use jericho_sim::{DeviceSet, SimDevice};
    use jericho_volume::{FormatOptions, OpenMode, Volume};

    use super::CALLER;
    use crate::check::{CheckOptions, check_devices};
    use crate::error::Result;
    use crate::format::format_devices;
    use crate::fs::Fs;
    use crate::types::{FsOptions, Ino, Kind, ROOT, SetAttr};
    use jericho_metadata::errno::ENOSPC;
    use jericho_metadata::store::region::Region;
    use jericho_metadata::store::{Change, Supply};

    fn formatted() -> DeviceSet {
        let names = ["one", "two"];
        let set = DeviceSet::new(names.map(|name| SimDevice::new(name, 64 << 20)));
        let options = FormatOptions {
            slices: Some(2),
            has_stores: Some(true),
            ..FormatOptions::default()
        };
        format_devices(&set.as_devices(), &names.map(PathBuf::from), &options).unwrap();
        set
    }

    fn mount(set: &DeviceSet) -> Arc<Fs> {
        let volume = Volume::open_from_devices(set.as_devices(), OpenMode::WRITE).unwrap();
        let options = FsOptions {
            store_cache_bytes: 64 << 20,
            read_only: false,
            inode_cache: 50,
            commit_interval_ms: 3_600_000,
        };
        Fs::open(Arc::new(volume), Vec::new(), options).unwrap()
    }

    fn dir(fs: &Fs, name: &[u8], slice: u64) -> Ino {
        let ino = fs.mkdir(ROOT, name, 0o755, CALLER).unwrap().ino;
        assert_eq!(ino >> 40, slice);
        ino
    }

    /// A store without room.
    struct Full(Arc<AtomicBool>);

    impl Supply for Full {
        fn before_commit(&self, _: &[Change]) -> Result<()> {
            match self.0.load(Ordering::Relaxed) {
                true => Err(ENOSPC),
                false => Ok(()),
            }
        }
        fn has_enough(&self, _: &Region, _: u64, _: u64) -> bool {
            true
        }
        fn refill(&self, _: &Region, _: u64) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_shard_does_not_commit_alone_what_another_shard_without_room_has_given_it() {
        let set = formatted();
        let fs = mount(&set);
        let core = &fs.core;
        let x = dir(&fs, b"x", 0);
        let ino = fs.mknod(x, b"f", Kind::File, 0o644, 0, CALLER).unwrap().ino;
        let file = fs.open_file(ino).unwrap();
        fs.move_to(ino, 1).unwrap();
        fs.fallocate(&file, 0, 0, 1 << 20).unwrap();
        fs.commit().unwrap();
        assert_eq!(fs.blocks_by_slice(ino).unwrap(), [(1, 256)]);
        let is_full = Arc::new(AtomicBool::new(true));
        let mut shards = core.shards.map().all().iter();
        let (first, second) = (shards.next().unwrap(), shards.next().unwrap());
        let store = &core.shards.get(first).store;
        store.set_supply(Arc::new(Full(is_full)));
        let empty = SetAttr {
            size: Some(0),
            ..SetAttr::default()
        };
        fs.setattr(ino, empty, CALLER).unwrap();
        assert!(fs.core.commit_shard_now(first).is_err());
        // The second shard has the change of the bitmap, and not the extents.
        let _ = fs.core.commit_shard_now(second);
        let cut = set.crash(1);
        let options = CheckOptions {
            repair: false,
            force: false,
        };
        let report = check_devices(cut.as_devices(), options).unwrap();
        assert!(report.is_sound(), "{:#?}", report.findings);
    }

    #[test]
    fn removals_make_room_when_two_shards_of_one_operation_are_full() {
        removals_make_room(&[0, 1], true);
    }

    #[test]
    fn removals_make_room_when_one_of_two_shards_of_an_operation_is_full() {
        removals_make_room(&[1], false);
    }

    /// A directory, a name in it, its inode and the file.
    type Large = (Ino, String, Ino, Arc<crate::inode::File>);

    /// Files take all blocks, and names the metadata regions of the `full` shards. Returns the files, and the directories and names.
    fn fill(fs: &Fs, dirs: [Ino; 2], full: &[usize]) -> (Vec<Large>, Vec<(usize, String)>) {
        let mut large = vec![];
        for (number, bytes) in [64 << 20, 16 << 20, 4 << 20, 1 << 20, 1 << 16, 4096]
            .into_iter()
            .enumerate()
        {
            for of in 0..40 {
                let name = format!("large{number}-{of}");
                let ino = fs.mknod(dirs[of % 2], name.as_bytes(), Kind::File, 0o644, 0, CALLER);
                let Ok(attr) = ino else { break };
                let file = fs.open_file(attr.ino).unwrap();
                let filled = fs.fallocate(&file, 0, 0, bytes);
                large.push((dirs[of % 2], name, attr.ino, file));
                if filled.is_err() {
                    break;
                }
            }
        }
        fs.commit().unwrap();
        let mut made = vec![];
        for at in full.iter().copied() {
            let dir = dirs[at];
            for number in 0.. {
                assert!(number < 1_000_000);
                let name = format!(
                    "a file with a rather long name so that the region is full soon {number:0>100}"
                );
                let attr = fs.mknod(dir, name.as_bytes(), Kind::File, 0o644, 0, CALLER);
                match attr {
                    Ok(attr) => {
                        fs.forget(attr.ino, 1);
                        made.push((at, name));
                    }
                    Err(error) => {
                        assert_eq!(error.errno(), 28);
                        break;
                    }
                }
                if number % 500 == 0 && fs.commit().is_err() {
                    break;
                }
            }
            let _ = fs.commit();
        }
        (large, made)
    }

    /// Fills these shards, removes a directory that is in both shards, then all files.
    fn removals_make_room(full: &[usize], commits_first: bool) {
        let set = formatted();
        let fs = mount(&set);
        let dirs = [dir(&fs, b"x", 0), dir(&fs, b"y", 1)];
        dir(&fs, b"x2", 0);
        // Empty, with its inode in the second shard and its entry in the first.
        dir(&fs, b"y2", 1);
        let (large, made) = fill(&fs, dirs, full);
        fs.rmdir(ROOT, b"y2").unwrap();
        if commits_first {
            let _ = fs.commit();
        }
        for (at, name) in &made {
            fs.unlink(dirs[*at], name.as_bytes()).unwrap();
        }
        if commits_first {
            let _ = fs.commit();
        }
        for (dir, name, ino, file) in large {
            fs.unlink(dir, name.as_bytes()).unwrap();
            fs.close_file(&file);
            fs.forget(ino, 1);
        }
        let mut result = Ok(());
        for _ in 0..5 {
            result = fs.commit();
        }
        result.unwrap();
    }

    #[test]
    fn a_creation_that_finds_no_room_in_another_shard_does_not_lose_the_mark_of_its_numbers() {
        let set = formatted();
        let fs = mount(&set);
        let dirs = [dir(&fs, b"x", 0), dir(&fs, b"y", 1)];
        let (large, made) = fill(&fs, dirs, &[1]);
        fs.commit().unwrap();
        let large: Vec<_> = large.into_iter().map(|one| (one.0, one.1)).collect();
        fs.close().unwrap();
        drop(fs);

        let fs = mount(&set);
        // Takes the room that is left, without a new inode.
        let of_second = made.iter().filter(|(at, _)| *at == 1);
        let refused = of_second.map(|(_, name)| {
            let ino = fs.lookup(dirs[1], name.as_bytes()).unwrap().ino;
            let set = fs.setxattr(ino, b"user.long", &[7; 900], 0);
            fs.forget(ino, 1);
            set
        });
        assert_eq!(refused.filter_map(Result::err).next().unwrap().errno(), 28);
        // The next directories in the root, one for each slice. That of the second slice finds no room.
        let tried: Vec<_> = (0..2)
            .map(|n| {
                fs.mkdir(ROOT, format!("d{n}").as_bytes(), 0o755, CALLER)
                    .map(|a| a.ino >> 40)
            })
            .collect();

        assert!(
            tried.iter().any(|one| one.is_err()),
            "the second slice has room"
        );
        for (dir, name) in large {
            fs.unlink(dir, name.as_bytes()).unwrap();
        }
        for some in made.chunks(50).take(40) {
            for (at, name) in some {
                fs.unlink(dirs[*at], name.as_bytes()).unwrap();
            }
            fs.commit().unwrap();
        }
        let mut numbers = vec![];
        for n in 0..3 {
            let name = format!("new{n}");
            let made = fs
                .mknod(dirs[1], name.as_bytes(), Kind::File, 0o644, 0, CALLER)
                .unwrap();
            numbers.push(made.ino);
        }
        fs.commit().unwrap();
        let cut = set.crash(1);
        drop(fs);
        let fs = mount(&cut);
        for n in 0..3 {
            let name = format!("later{n}");
            let made = fs
                .mknod(dirs[1], name.as_bytes(), Kind::File, 0o644, 0, CALLER)
                .unwrap();
            assert!(
                !numbers.contains(&made.ino),
                "the number {} has two inodes",
                made.ino
            );
        }
    }

    #[test]
    fn a_file_with_blocks_in_another_slice_that_replaced_one_by_rename_is_never_empty() {
        let set = formatted();
        let fs = mount(&set);
        let x = dir(&fs, b"x", 0);
        let make = |name: &[u8], slice| {
            let ino = fs.mknod(x, name, Kind::File, 0o644, 0, CALLER).unwrap().ino;
            let file = fs.open_file(ino).unwrap();
            fs.move_to(ino, slice).unwrap();
            file
        };
        let old = make(b"f", 0);
        fs.fallocate(&old, 0, 0, 4096).unwrap();
        fs.commit().unwrap();
        let new = make(b"new", 1);
        fs.commit().unwrap();
        set.record();
        let from = set.supply().changes();
        fs.fallocate(&new, 0, 0, 8192).unwrap();
        fs.rename(x, b"new", x, b"f", 0).unwrap();
        fs.commit().unwrap();
        let to = set.supply().changes();
        for cut in from..=to {
            let found = mount(&set.crash_at(cut, 1));
            let size = found.lookup(x, b"f").unwrap().size;
            assert!(
                [4096, 8192].contains(&size),
                "{cut} of {from}..={to}: size {size}"
            );
        }
    }
}
