//! Small syncs: the calling thread writes a few dirty pages itself. Each test plays one interleaving with another thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use jericho_cache::{
    Config, Done, Error, FRAMES_MIN, Intent, Object, PagePlace, PageRun, Slice, SmallSync,
};
use jericho_shm::{Flags, Key};
use jericho_sim::{FaultPlan, Operation, SimDevice};
use jericho_storage::Device;

const PAGE: usize = 4096;
const DEVICE_BYTES: u64 = 4096 * PAGE as u64;
/// Longest time for something that happens at last.
const LONG: Duration = Duration::from_secs(60);

/// An object whose page n is at block n of the device.
struct Linear {
    id: u64,
    written: AtomicU64,
    /// Pages that were reported as durable.
    durable: AtomicU64,
    failed: AtomicU64,
}

impl Object for Linear {
    fn id(&self) -> u64 {
        self.id
    }
    fn slice_of(&self, _page: u64) -> u16 {
        0
    }
    fn resolve(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error> {
        self.allocate(first, count, out)
    }
    fn allocate(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error> {
        let place = PagePlace::Device {
            device: 0,
            offset_bytes: first * PAGE as u64,
        };
        out.push(PageRun {
            pages: count,
            place,
        });
        Ok(())
    }
    fn written(&self, _: u64, count: u32) {
        self.written.fetch_add(u64::from(count), Ordering::SeqCst);
    }
    fn written_durably(&self, _: u64, count: u32) {
        self.durable.fetch_add(u64::from(count), Ordering::SeqCst);
    }
    fn write_failed(&self, _: u64, _: u32, _: &Error) {
        self.failed.fetch_add(1, Ordering::SeqCst);
    }
}

/// A slice over a simulated device, with one object. Nothing is written back because of its age.
struct Bed {
    device: Arc<SimDevice>,
    slice: Arc<Slice>,
    linear: Arc<Linear>,
    object: Arc<dyn Object>,
}

impl Bed {
    fn new() -> Bed {
        Bed::on(SimDevice::new("sim", DEVICE_BYTES))
    }

    fn on(device: SimDevice) -> Bed {
        let device = Arc::new(device);
        let config = Config {
            id: 0,
            frames: FRAMES_MIN,
            kernel_node: None,
            cpus: vec![],
            dirty_age: Duration::from_secs(3600),
        };
        let devices: [Arc<dyn Device>; 1] = [device.clone()];
        let linear = Arc::new(Linear {
            id: 1,
            written: AtomicU64::new(0),
            durable: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        });
        Bed {
            device,
            slice: Slice::start(&config, &devices).unwrap(),
            object: linear.clone(),
            linear,
        }
    }

    /// Writes a whole page into the cache.
    fn write(&self, page: u64, byte: u8) {
        let (tx, rx) = mpsc::channel();
        (self.slice).get(&self.object, page, 1, Intent::Overwrite, move |grant| {
            let written = grant.map(|mut grant| grant.write(page, 0, &[byte; PAGE]).unwrap());
            tx.send(written).unwrap();
        });
        rx.recv_timeout(LONG).unwrap().unwrap();
    }

    fn sync_small(&self) -> Option<Result<(), Error>> {
        self.slice
            .sync_small(&self.object, &(0..u64::MAX), SmallSync::default())
    }

    fn sync_durably(&self) -> Result<(), Error> {
        let how = SmallSync {
            commits: false,
            durably: true,
        };
        let result = self.slice.sync_small(&self.object, &(0..u64::MAX), how);
        result.expect("a small sync")
    }

    fn sync(&self) -> Result<(), Error> {
        wait(|done| self.slice.sync(&self.object, 0..u64::MAX, done))
    }

    fn on_device(&self, page: u64) -> u8 {
        let mut bytes = [0; PAGE];
        (self.device)
            .read_at(page * PAGE as u64, &mut bytes)
            .unwrap();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a torn page");
        bytes[0]
    }

    fn writes(&self) -> u64 {
        self.device.operations(Some(Operation::Write))
    }

    fn flags(&self, page: u64) -> (bool, bool) {
        let found = self.slice.memory().lookup(Key::new(1, page)).unwrap();
        (
            found.state.has(Flags::DIRTY),
            found.state.has(Flags::WRITE_BACK),
        )
    }

    fn first_dirty(&self) -> Option<u64> {
        self.slice.first_dirty(1, 0)
    }

    /// Waits until the evictor has written all pages back, after an outage.
    fn await_clean(&self) {
        let begun = Instant::now();
        while self.first_dirty().is_some() {
            assert!(begun.elapsed() < LONG, "a page stays dirty");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn wait(ask: impl FnOnce(Done)) -> Result<(), Error> {
    let (tx, rx) = mpsc::channel();
    ask(Box::new(move |result| tx.send(result).unwrap()));
    rx.recv_timeout(LONG).expect("the slice did not answer")
}

#[test]
fn the_caller_writes_the_pages_itself_and_wakes_no_thread() {
    let bed = Bed::new();
    // This page stays dirty, so that the evictor has a timer and no page is the first dirty one.
    let other: Arc<dyn Object> = Arc::new(Linear {
        id: 2,
        written: AtomicU64::new(0),
        durable: AtomicU64::new(0),
        failed: AtomicU64::new(0),
    });
    wait(|done| bed.slice.touch(&other, 100..101, done)).unwrap();
    let (tx, rx) = mpsc::channel();
    bed.device
        .set_before(move |operation| tx.send((operation, std::thread::current().id())).unwrap());
    let before = bed.slice.counters();
    for round in 1..=3 {
        bed.write(5, round);
        bed.write(6, round);
        bed.sync_small().expect("a small sync").unwrap();
        let seen: Vec<_> = rx.try_iter().collect();
        assert_eq!(seen, [(Operation::Write, std::thread::current().id())]);
        assert_eq!((bed.on_device(5), bed.on_device(6)), (round, round));
        rx.try_iter().for_each(drop);
        assert_eq!(bed.first_dirty(), None);
    }
    let counters = bed.slice.counters().since(before);
    assert_eq!(counters.evictor_wakes, 0);
    assert_eq!((counters.small_syncs, counters.write_backs), (3, 3));
    assert_eq!(counters.written_back_bytes, 6 * PAGE as u64);
    assert_eq!(bed.linear.written.load(Ordering::SeqCst), 6);
    // With nothing dirty there is nothing to do.
    bed.sync_small().expect("a small sync").unwrap();
    assert_eq!(rx.try_iter().count(), 0);
    assert_eq!(bed.slice.usage().dirty, 1);
}

#[test]
fn a_sync_of_many_pages_or_of_many_runs_is_left_to_the_evictor() {
    let bed = Bed::new();
    for page in 0..17 {
        bed.write(page, 1);
    }
    assert!(bed.sync_small().is_none());
    bed.sync().unwrap();
    for page in 0..5 {
        bed.write(2 * page, 2);
    }
    assert!(bed.sync_small().is_none());
    let counters = bed.slice.counters();
    assert_eq!(counters.small_syncs, 0);
    // The limits are those of the range.
    let part = bed
        .slice
        .sync_small(&bed.object, &(0..7), SmallSync::default());
    part.expect("a small sync").unwrap();
    assert_eq!(bed.first_dirty(), Some(8));
    bed.sync().unwrap();
    assert_eq!(bed.first_dirty(), None);
    assert_eq!(bed.on_device(8), 2);
}

#[test]
fn a_page_that_changes_during_the_write_is_dirty_afterwards() {
    let bed = Bed::new();
    bed.write(0, 1);
    let (begun, go) = bed.device.block_next(Operation::Write);
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| bed.sync_small());
        begun.wait();
        bed.write(0, 2);
        assert_eq!(bed.flags(0), (true, true));
        go.send(()).unwrap();
        syncing.join().unwrap().expect("a small sync").unwrap();
    });
    assert_eq!((bed.on_device(0), bed.flags(0)), (1, (true, false)));
    assert_eq!(bed.first_dirty(), Some(0));
    bed.sync_small().expect("a small sync").unwrap();
    assert_eq!((bed.on_device(0), bed.flags(0)), (2, (false, false)));
    assert_eq!(bed.slice.usage().dirty, 0);
}

#[test]
fn a_sync_that_meets_a_small_sync_ends_after_it_and_carries_later_changes() {
    let bed = Bed::new();
    bed.write(0, 1);
    let (begun, go) = bed.device.block_next(Operation::Write);
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| bed.sync_small());
        begun.wait();
        let (tx, rx) = mpsc::channel();
        let told = |tx: &mpsc::Sender<_>, name: &'static str| -> Done {
            let tx = tx.clone();
            Box::new(move |result| tx.send((name, result.is_ok())).unwrap())
        };
        bed.slice.sync(&bed.object, 0..9, told(&tx, "one"));
        bed.slice.sync_all(told(&tx, "all"));
        bed.write(0, 2);
        bed.slice.sync(&bed.object, 0..9, told(&tx, "changed"));
        std::thread::sleep(Duration::from_millis(20));
        assert!(rx.try_recv().is_err(), "a sync did not wait");
        go.send(()).unwrap();
        syncing.join().unwrap().expect("a small sync").unwrap();
        let mut ended: Vec<_> = (0..3).map(|_| rx.recv_timeout(LONG).unwrap()).collect();
        ended.sort_unstable();
        assert_eq!(ended, [("all", true), ("changed", true), ("one", true)]);
    });
    assert_eq!((bed.on_device(0), bed.writes()), (2, 2));
}

#[test]
fn a_small_sync_waits_for_another_one_and_carries_later_changes() {
    let bed = Bed::new();
    bed.write(0, 1);
    let (begun, go) = bed.device.block_next(Operation::Write);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| bed.sync_small());
        begun.wait();
        // Nothing is dirty, and the page is not on the device.
        let second = scope.spawn(|| bed.sync_small());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!second.is_finished(), "the page is in flight");
        bed.write(0, 2);
        bed.write(9, 2);
        let third = scope.spawn(|| bed.sync_small());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!third.is_finished(), "the page is in flight");
        go.send(()).unwrap();
        for sync in [first, second, third] {
            sync.join().unwrap().expect("a small sync").unwrap();
        }
    });
    assert_eq!((bed.on_device(0), bed.on_device(9)), (2, 2));
    assert_eq!((bed.first_dirty(), bed.writes()), (None, 3));
}

#[test]
fn a_small_sync_that_waits_for_a_failed_one_fails() {
    let bed = Bed::new();
    bed.write(0, 1);
    let (begun, go) = bed.device.block_next(Operation::Write);
    bed.device
        .set_plan(FaultPlan::fail_nth(Some(Operation::Write), 1, 5));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| bed.sync_small());
        begun.wait();
        let second = scope.spawn(|| bed.sync_small());
        std::thread::sleep(Duration::from_millis(20));
        drop(go);
        let failed = first.join().unwrap().expect("a small sync");
        assert_eq!(failed.unwrap_err().errno(), 5);
        // On a slow host it may come after the failure. It is then left to the evictor.
        let second = second.join().unwrap();
        assert!(second.is_none_or(|result| result.unwrap_err().errno() == 5));
    });
    bed.await_clean();
}

#[test]
fn an_invalidation_waits_for_a_small_sync() {
    let bed = Bed::new();
    bed.write(0, 1);
    let (begun, go) = bed.device.block_next(Operation::Write);
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| bed.sync_small());
        begun.wait();
        let (tx, rx) = mpsc::channel();
        let done = Box::new(move |result: Result<(), Error>| tx.send(result).unwrap());
        bed.slice.invalidate(1, 0..9, done);
        // The first visit of an invalidation is in this thread, so it has met the page.
        assert!(rx.try_recv().is_err(), "the device still writes the page");
        assert!(bed.slice.memory().lookup(Key::new(1, 0)).is_some());
        go.send(()).unwrap();
        syncing.join().unwrap().expect("a small sync").unwrap();
        rx.recv_timeout(LONG).unwrap().unwrap();
    });
    assert!(bed.slice.memory().lookup(Key::new(1, 0)).is_none());
    assert_eq!(bed.slice.usage().dirty, 0);
}

#[test]
fn a_latched_page_is_left_to_the_evictor() {
    let bed = Bed::new();
    bed.write(0, 1);
    bed.write(1, 1);
    let found = bed.slice.memory().lookup(Key::new(1, 1)).unwrap();
    let entry = bed.slice.memory().entry(found.index);
    let latched = entry.try_latch(found.state, 7).expect("free");
    // The first page is written. The caller then needs the evictor, which waits for the latch.
    assert!(bed.sync_small().is_none());
    assert_eq!((bed.flags(0), bed.on_device(0)), ((false, false), 1));
    assert_eq!((bed.first_dirty(), bed.writes()), (Some(1), 1));
    entry.unlatch(latched, Flags::DIRTY);
    bed.sync_small().expect("a small sync").unwrap();
    assert_eq!((bed.flags(1), bed.on_device(1)), ((false, false), 1));
}

#[test]
fn a_write_of_the_evictor_in_flight_is_left_to_it() {
    let bed = Bed::new();
    bed.write(0, 1);
    let (begun, go) = bed.device.block_next(Operation::Write);
    let (tx, rx) = mpsc::channel();
    let done = Box::new(move |result: Result<(), Error>| tx.send(result).unwrap());
    bed.slice.sync(&bed.object, 0..9, done);
    begun.wait();
    // Also if the pages in flight are dirty again, or others are dirty.
    bed.write(0, 2);
    bed.write(1, 2);
    assert!(bed.sync_small().is_none());
    // Another range is none of its business.
    let other = bed
        .slice
        .sync_small(&bed.object, &(1..9), SmallSync::default());
    other.expect("a small sync").unwrap();
    assert_eq!(bed.on_device(1), 2);
    drop(go);
    rx.recv_timeout(LONG).unwrap().unwrap();
}

#[test]
fn a_small_sync_of_one_run_is_durable_without_a_flush_if_the_caller_asks_for_that() {
    let bed = Bed::new();
    let (tx, rx) = mpsc::channel();
    bed.device
        .set_before(move |operation| tx.send(operation).unwrap());
    let sync = |pages: &[u64], byte| {
        pages.iter().for_each(|page| bed.write(*page, byte));
        rx.try_iter().for_each(drop);
        bed.sync_durably().unwrap();
        let operations: Vec<_> = rx.try_iter().collect();
        for page in pages {
            assert_eq!(
                (bed.flags(*page), bed.on_device(*page)),
                ((false, false), byte)
            );
        }
        let count = |pages: &AtomicU64| pages.swap(0, Ordering::SeqCst);
        let (durable, written) = (&bed.linear.durable, &bed.linear.written);
        (operations, count(durable), count(written))
    };
    use Operation::{DurableWrite, Write};
    assert_eq!(sync(&[5, 6], 1), (vec![DurableWrite], 2, 0));
    assert_eq!(sync(&[5, 7], 2), (vec![Write, Write], 0, 2));
}

#[test]
fn a_page_whose_flush_has_failed_is_written_and_not_durable() {
    let bed = Bed::on(SimDevice::new("sim", DEVICE_BYTES).without_fua());
    bed.write(5, 1);
    (bed.device).set_plan(FaultPlan::fail_nth(Some(Operation::Flush), 1, 5));
    bed.sync_durably().unwrap();
    assert_eq!((bed.flags(5), bed.on_device(5)), ((false, false), 1));
    let pages = [&bed.linear.durable, &bed.linear.written, &bed.linear.failed];
    assert_eq!(pages.map(|pages| pages.load(Ordering::SeqCst)), [0, 1, 0]);
}

#[test]
fn a_durable_write_that_the_device_refuses_leaves_the_page_dirty() {
    let bed = Bed::new();
    bed.write(5, 1);
    (bed.device).set_plan(FaultPlan::fail_nth(Some(Operation::DurableWrite), 1, 28));
    assert_eq!(bed.sync_durably().unwrap_err().errno(), 28);
    assert_eq!(bed.linear.durable.load(Ordering::SeqCst), 0);
    // The evictor retries the page.
    bed.await_clean();
    assert_eq!(bed.on_device(5), 1);
}

#[test]
fn a_failed_write_leaves_the_page_dirty_and_begins_an_outage() {
    let bed = Bed::new();
    let (tx, outages) = mpsc::channel();
    let tell = move |error: Option<&Error>| tx.send(error.map(Error::errno)).unwrap();
    bed.slice.set_on_outage(Box::new(tell));
    bed.write(0, 1);
    bed.write(2, 1);
    // The second of two runs fails.
    bed.device
        .set_plan(FaultPlan::fail_nth(Some(Operation::Write), 2, 28));
    let failed = bed.sync_small().expect("a small sync").unwrap_err();
    assert_eq!(failed.errno(), 28);
    assert_eq!(bed.linear.failed.load(Ordering::SeqCst), 1);
    assert_eq!((bed.flags(0), bed.on_device(0)), ((false, false), 1));
    assert_eq!(outages.recv_timeout(LONG).unwrap(), Some(28));
    // The evictor retries the page, and ends the outage.
    bed.await_clean();
    assert_eq!((bed.flags(2), bed.on_device(2)), ((false, false), 1));
    assert_eq!(bed.slice.usage().dirty, 0);
    assert_eq!(outages.recv_timeout(LONG).unwrap(), None);
    bed.write(2, 3);
    bed.sync_small().expect("a small sync").unwrap();
    assert_eq!(bed.on_device(2), 3);
}

#[test]
fn a_small_sync_during_an_outage_is_left_to_the_evictor() {
    let bed = Bed::new();
    bed.write(0, 1);
    let full = FaultPlan {
        room_blocks: Some(0),
        ..FaultPlan::default()
    };
    bed.device.set_plan(full);
    let failed = bed.sync_small().expect("a small sync").unwrap_err();
    assert_eq!(failed.errno(), 28);
    assert!(bed.sync_small().is_none());
    // It tries the page at once, and returns the error.
    assert_eq!(bed.sync().unwrap_err().errno(), 28);
    bed.device.set_plan(FaultPlan::default());
    bed.sync().unwrap();
    assert_eq!(bed.on_device(0), 1);
}

#[test]
fn a_caller_that_panics_leaves_no_page_marked() {
    let bed = Bed::new();
    bed.write(0, 1);
    bed.device
        .set_plan(FaultPlan::panic_at(Some(Operation::Write), 1));
    std::thread::scope(|scope| {
        let panicked = scope.spawn(|| bed.sync_small()).join();
        assert!(panicked.is_err());
    });
    assert_eq!(bed.linear.failed.load(Ordering::SeqCst), 1);
    bed.device.set_plan(FaultPlan::default());
    bed.await_clean();
    assert_eq!((bed.on_device(0), bed.slice.usage().dirty), (1, 0));
}

#[test]
fn a_slice_that_closes_waits_for_a_small_sync_and_for_those_that_joined_it() {
    let bed = Bed::new();
    bed.write(0, 1);
    let (begun, go) = bed.device.block_next(Operation::Write);
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| bed.sync_small());
        begun.wait();
        let (tx, joined) = mpsc::channel();
        let done = Box::new(move |result: Result<(), Error>| tx.send(result).unwrap());
        bed.slice.sync(&bed.object, 0..9, done);
        let (tx, closed) = mpsc::channel();
        let slice = bed.slice.clone();
        scope.spawn(move || {
            slice.close();
            tx.send(()).unwrap();
        });
        std::thread::sleep(Duration::from_millis(50));
        assert!(closed.try_recv().is_err(), "a write is in flight");
        go.send(()).unwrap();
        syncing.join().unwrap().expect("a small sync").unwrap();
        closed.recv_timeout(LONG).expect("the slice did not close");
        // Answered, not forgotten.
        assert!(joined.recv_timeout(LONG).unwrap().is_ok());
    });
    assert!(bed.sync_small().is_none());
    assert!(matches!(bed.sync(), Err(Error::Closed)));
}

#[test]
fn concurrent_syncs_of_all_kinds_lose_no_write() {
    const THREADS: u64 = 4;
    let bed = Bed::new();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let bed = &bed;
            scope.spawn(move || {
                for round in 0..300u64 {
                    let page = 2 * (thread + THREADS * (round % 3));
                    bed.write(page, round as u8);
                    match bed.sync_small() {
                        Some(result) => result.unwrap(),
                        None => bed.sync().unwrap(),
                    }
                    assert_eq!(bed.on_device(page), round as u8, "page {page}");
                    if round % 50 == 49 {
                        wait(|done| bed.slice.sync_all(done)).unwrap();
                        wait(|done| bed.slice.invalidate(1, page..page + 1, done)).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!((bed.first_dirty(), bed.slice.usage().dirty), (None, 0));
    let counters = bed.slice.counters();
    assert!(counters.small_syncs > 0, "{counters:?}");
}
