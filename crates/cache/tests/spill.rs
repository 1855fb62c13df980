//! Spill ranges of a slice: pages keep their bytes while ranges get and lose their memory.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use jericho_cache::replacement::Residents;
use jericho_cache::{Config, Error, FRAMES_MIN, Grant, Intent, Object, PagePlace, PageRun, Slice};
use jericho_shm::{Flags, Found, Key, Miss, SPILL_FRAMES, Writer};
use jericho_storage::Device;

const PAGE: usize = 4096;
/// Bytes of an entry of the page table.
const ENTRY_BYTES: usize = 16;
const LONG: Duration = Duration::from_secs(60);
/// Pages that fill the frames at home and a part of a range, without eviction.
const MANY: u64 = FRAMES_MIN as u64 + 200;

/// An object whose page n is at block `base + n` once it was written, and has no place before.
struct Linear {
    id: u64,
    base: u64,
    written: Mutex<HashSet<u64>>,
}

impl Object for Linear {
    fn id(&self) -> u64 {
        self.id
    }
    fn slice_of(&self, _page: u64) -> u16 {
        0
    }
    fn may_write_inline(&self) -> bool {
        true
    }
    fn resolve(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error> {
        let written = self.written.lock().unwrap();
        for page in first..first + u64::from(count) {
            let place = match written.contains(&page) {
                true => self.place(page),
                false => PagePlace::Hole,
            };
            out.push(PageRun { pages: 1, place });
        }
        Ok(())
    }
    fn allocate(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error> {
        let place = self.place(first);
        out.push(PageRun {
            pages: count,
            place,
        });
        Ok(())
    }
    fn written(&self, first: u64, count: u32) {
        let pages = first..first + u64::from(count);
        self.written.lock().unwrap().extend(pages);
    }
    fn write_failed(&self, _: u64, _: u32, error: &Error) {
        panic!("a write failed: {error}");
    }
}

impl Linear {
    fn object(id: u64, base: u64) -> Arc<dyn Object> {
        Arc::new(Linear {
            id,
            base,
            written: Mutex::default(),
        })
    }

    fn place(&self, page: u64) -> PagePlace {
        PagePlace::Device {
            device: 0,
            offset_bytes: (self.base + page) * PAGE as u64,
        }
    }
}

struct Bed {
    _dir: tempfile::TempDir,
    device: Arc<dyn Device>,
    slice: Arc<Slice>,
    object: Arc<dyn Object>,
}

/// Starts a slice with the smallest number of frames at home and two ranges, over a device of `pages` pages.
fn bed(pages: u64) -> Bed {
    bed_with(pages, 2)
}

/// Starts the same with this number of ranges.
fn bed_with(pages: u64, ranges: u32) -> Bed {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("device");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(pages * PAGE as u64).unwrap();
    let device = jericho_storage::open_device(&path, Default::default()).unwrap();
    Bed {
        _dir: dir,
        slice: start(&device, ranges),
        device,
        object: Linear::object(1, 0),
    }
}

fn start(device: &Arc<dyn Device>, ranges: u32) -> Arc<Slice> {
    let config = Config {
        id: 0,
        frames: FRAMES_MIN,
        kernel_node: Some(0),
        cpus: vec![],
        dirty_age: Duration::from_secs(3600),
    };
    let devices = std::slice::from_ref(device);
    Slice::start_spilling(&config, ranges * SPILL_FRAMES, devices).unwrap()
}

/// Starts the same, and fills all frames at home and a part of the first range.
fn filled() -> Bed {
    let bed = bed(4 * MANY);
    bed.take(0, 0);
    bed.fill(MANY);
    bed
}

impl Bed {
    fn get(&self, page: u64) -> Grant {
        let (tx, rx) = mpsc::channel();
        let done = move |grant: Result<Grant, Error>| tx.send(grant).unwrap_or(());
        self.slice.get(&self.object, page, 1, Intent::Read, done);
        rx.recv_timeout(LONG).expect("an answer").expect("a page")
    }

    /// Gives a range memory. `node`: the node whose CPUs are local to it.
    fn take(&self, range: u32, node: u16) -> bool {
        self.slice.take_range(range, Some(0), node).unwrap()
    }

    /// Has the slice give ranges back until `left` of their frames still have memory. Returns the ranges that have lost all memory.
    fn give_back_to(&self, ranges: &[u32], left: u32) -> Vec<u32> {
        let (begun, mut gone) = (Instant::now(), vec![]);
        loop {
            gone.extend(self.slice.give_back(ranges, Duration::from_millis(20)));
            let now: u32 = (0..2).map(|range| self.slice.frames_left(range)).sum();
            if now <= left {
                assert_eq!(now, left);
                return gone;
            }
            assert!(begun.elapsed() < LONG, "{now} pages are left");
        }
    }

    /// Brings pages into the cache.
    fn fill(&self, pages: u64) {
        (0..pages).for_each(|page| drop(self.get(page)));
    }

    fn found(&self, page: u64) -> Option<Found> {
        self.slice.memory().lookup(Key::new(1, page))
    }

    /// Returns a page whose frame is in a range.
    fn spilled(&self) -> u64 {
        let is_spilled = |page: &u64| {
            let found = self.found(*page);
            found.is_some_and(|found| self.slice.memory().is_spilled(found.state.frame()))
        };
        (0..MANY).find(is_spilled).expect("a page in a range")
    }

    /// Returns how many pages of the ranges have memory. (The kernel unmaps those that were parts of a huge page, so page tables do not tell.)
    fn present(&self) -> u64 {
        let allocated = self.slice.memory().allocated_frames();
        allocated.expect("a size") - u64::from(FRAMES_MIN)
    }
}

fn write_inline(slice: &Slice, object: &Arc<dyn Object>, page: u64, data: &[u8]) -> bool {
    let (key, writer) = (Key::new(object.id(), page), Writer::daemon(1));
    match (slice.memory()).write_if(key, 0, data, writer, slice.epoch(), || true) {
        Ok(written) => {
            if written.was_clean {
                slice.dirtied(object, page, 1);
            }
            true
        }
        Err(_) => false,
    }
}

#[test]
fn a_range_brings_frames_and_takes_them_along() {
    let bed = bed(4 * MANY);
    let usage = || {
        let usage = bed.slice.usage();
        (usage.frames, usage.spilled)
    };
    let home = u64::from(FRAMES_MIN);
    assert_eq!((usage(), bed.present()), ((home, 0), 0));
    assert!(bed.take(0, 3));
    let all = home + u64::from(SPILL_FRAMES);
    assert_eq!((usage(), bed.present()), ((all, all - home), 512));
    bed.fill(MANY);
    assert!(
        (0..MANY).all(|page| bed.found(page).is_some()),
        "no eviction"
    );
    assert_eq!(bed.slice.memory().node_of_range(0), Some(3));
    assert_eq!(bed.slice.give_back(&[0], LONG), [0]);
    assert_eq!((usage(), bed.present()), ((home, 0), 0));
    assert_eq!(bed.slice.memory().node_of_range(0), None);
    let counters = bed.slice.counters();
    assert_eq!(
        (counters.spill_taken, counters.spill_given_back),
        (512, 512)
    );
    // A late reader leaves a page of zeros there.
    let mut byte = [1];
    let memory = bed.slice.memory();
    memory.copy_out(FRAMES_MIN + 7, 0, &mut byte).unwrap();
    assert_eq!((byte, bed.present()), ([0], 1));
    assert!(bed.slice.release_strays().unwrap());
    assert!(!bed.slice.release_strays().unwrap());
    assert_eq!(bed.present(), 0);
    assert!(bed.take(0, 3), "and again");
    // A program that locks its memory allocates all frames. Those in use stay.
    let locked = FRAMES_MIN + SPILL_FRAMES..FRAMES_MIN + 2 * SPILL_FRAMES;
    for frame in locked {
        memory.copy_out(frame, 0, &mut byte).unwrap();
    }
    assert_eq!(bed.present(), 1024);
    assert!(bed.slice.release_strays().unwrap());
    assert_eq!(bed.present(), 512);
    let refused = bed.slice.take_range(1, Some(1000), 3);
    assert!(refused.is_err(), "no such node");
    assert_eq!(usage().0, all);
}

#[test]
fn a_dirty_page_moves_without_write_back_and_a_reader_always_finds_it() {
    let bed = filled();
    let page = bed.spilled();
    let (key, data) = (Key::new(1, page), [7; PAGE]);
    // The page has no space reserved, so the daemon writes it.
    drop({
        let mut grant = bed.get(page);
        grant.write(page, 0, &data).unwrap();
        grant
    });
    // An unused frame for it: all frames at home are full.
    bed.take(1, 0);
    assert_eq!(bed.slice.give_back(&[0], LONG), [0]);
    let state = bed.found(page).expect("it is dirty").state;
    assert!(
        state.has(Flags::DIRTY) && !state.has(Flags::LATCH),
        "{state:?}"
    );
    assert_ne!(
        bed.slice.memory().geometry().range_of(state.frame()),
        Some(0)
    );
    let mut out = [0; PAGE];
    assert_eq!(bed.slice.memory().read(key, 0, &mut out, 0), Ok(()));
    assert_eq!(out, data);
    let counters = bed.slice.counters();
    assert_eq!(counters.written_back_bytes, 0);
    assert!(counters.spill_moved > 0, "{counters:?}");
}

#[test]
fn a_page_in_use_keeps_its_frame_and_the_rest_of_the_range_goes() {
    let bed = filled();
    let page = bed.spilled();
    let grant = bed.get(page);
    assert!(bed.give_back_to(&[0], 1).is_empty());
    let frame = bed.found(page).expect("it is pinned").state.frame();
    assert_eq!(bed.slice.memory().geometry().range_of(frame), Some(0));
    assert_eq!(bed.present(), 1);
    let mut out = [1; PAGE];
    grant.read(page, 0, &mut out).unwrap();
    assert_eq!(out, [0; PAGE]);
    // No frame of the range is used for another page.
    bed.fill(MANY);
    assert_eq!(bed.present(), 1);
    drop(grant);
    assert_eq!(bed.slice.give_back(&[0], LONG), [0]);
    assert_eq!(bed.present(), 0);
}

#[test]
fn frames_count_as_left_until_their_memory_is_freed() {
    // The table is so large that one call does not search all of it.
    let bed = bed_with(4 * MANY, 100);
    bed.take(0, 0);
    bed.fill(MANY);
    for _ in 0..3 {
        assert!(bed.slice.give_back(&[0], Duration::ZERO).is_empty());
        assert_eq!(u64::from(bed.slice.frames_left(0)), bed.present());
    }
    assert_eq!(bed.slice.give_back(&[], LONG), [0]);
    assert_eq!((bed.slice.frames_left(0), bed.present()), (0, 0));
}

#[test]
fn a_range_leaves_while_others_begin_to_leave_all_the_time() {
    const RANGES: u32 = 200;
    // One call searches 65536 entries, a third of the table.
    const CALLS: u32 = 3;
    let bed = bed_with(4 * MANY, RANGES);
    let entries = bed.slice.memory().geometry().entries();
    assert_eq!(entries.div_ceil(1 << 16), CALLS);
    bed.take(0, 0);
    // Fewer pages than one visit takes.
    bed.fill(u64::from(FRAMES_MIN) + 20);
    let grant = bed.get(bed.spilled());
    let mut next = 0;
    let mut leave = |calls| {
        let mut gone = vec![];
        for _ in 0..calls {
            gone.extend(bed.slice.give_back(&[next], Duration::ZERO));
            next += 1;
            bed.take(next, 0);
        }
        gone.contains(&0)
    };
    assert!(!leave(2 * CALLS), "a page is in use");
    assert_eq!(bed.slice.frames_left(0), 1, "the rest has gone");
    drop(grant);
    assert!(leave(2 * CALLS), "the page is visited again");
}

#[test]
fn a_range_without_pages_goes_at_once_beside_one_with_a_page_in_use() {
    let bed = filled();
    bed.take(1, 0);
    let grant = bed.get(bed.spilled());
    assert_eq!(bed.give_back_to(&[0, 1], 1), [1]);
    assert_eq!((bed.present(), bed.slice.frames_left(0)), (1, 1));
    // A later call goes on, also without the range's number.
    drop(grant);
    assert_eq!(bed.slice.give_back(&[], LONG), [0]);
    assert_eq!((bed.present(), bed.slice.frames_left(0)), (0, 0));
}

#[test]
fn memory_that_programs_allocate_in_a_leaving_range_is_freed_before_its_last_page_leaves() {
    let bed = filled();
    let page = bed.spilled();
    let mut grant = bed.get(page);
    grant.write(page, 0, &[7; PAGE]).unwrap();
    assert!(bed.give_back_to(&[0], 1).is_empty());
    assert_eq!(bed.present(), 1);
    assert!(!bed.slice.release_strays().unwrap());
    // A program that locks its memory allocates the whole range.
    let memory = bed.slice.memory();
    for frame in memory.geometry().spill_range(0) {
        memory.copy_out(frame, 0, &mut [1]).unwrap();
    }
    assert_eq!(bed.present(), u64::from(SPILL_FRAMES));
    // No page leaves in this call.
    assert!(bed.slice.give_back(&[], Duration::ZERO).is_empty());
    assert!(bed.slice.release_strays().unwrap());
    assert_eq!(bed.present(), 1);
    assert!(!bed.slice.release_strays().unwrap());
    let mut out = [1; PAGE];
    grant.read(page, 0, &mut out).unwrap();
    assert_eq!(out, [7; PAGE]);
    drop(grant);
    assert_eq!(bed.slice.give_back(&[], LONG), [0]);
    assert_eq!(bed.present(), 0);
}

#[test]
fn pages_in_use_do_not_keep_others_from_a_visit() {
    let bed = filled();
    let memory = bed.slice.memory();
    let mut in_range: Vec<(u32, u64)> = (0..MANY)
        .filter_map(|page| {
            let found = bed.found(page)?;
            memory
                .is_spilled(found.state.frame())
                .then_some((found.index, page))
        })
        .collect();
    // The search finds these pages first, more than one visit under the lock takes.
    in_range.sort_unstable();
    let (in_use, unused) = in_range.split_at(64);
    assert!(unused.len() > 100, "{}", unused.len());
    let grants: Vec<Grant> = in_use.iter().map(|(_, page)| bed.get(*page)).collect();
    // Each call has the time for one visit only, as with many slices.
    for _ in 0..in_range.len() {
        assert!(bed.slice.give_back(&[0], Duration::ZERO).is_empty());
    }
    assert_eq!(bed.slice.frames_left(0), in_use.len() as u32);
    drop(grants);
    assert_eq!(bed.slice.give_back(&[], LONG), [0]);
    assert_eq!(bed.present(), 0);
}

#[test]
fn a_page_whose_key_a_client_has_zeroed_does_not_keep_its_range() {
    let bed = filled();
    let found = bed.found(bed.spilled()).unwrap();
    let table = &bed.slice.memory().segments()[0];
    table.copy_in(found.index as usize * ENTRY_BYTES, &[0; 16]);
    assert_eq!(bed.slice.memory().entry(found.index).key(), None);
    assert_eq!(bed.slice.give_back(&[0], LONG), [0]);
    assert_eq!(bed.present(), 0);
    bed.fill(MANY);
}

#[test]
fn dirty_pages_take_no_frame_that_reads_need() {
    const PAGES: u64 = FRAMES_MIN as u64 + 2 * SPILL_FRAMES as u64 - 200;
    let bed = bed(8 * MANY);
    bed.take(0, 0);
    bed.take(1, 0);
    bed.fill(PAGES);
    // A client has written all pages at once, and no report of them has come.
    let memory = bed.slice.memory();
    for page in 0..PAGES {
        let found = bed.found(page).unwrap();
        let dirty = Flags::DIRTY.with(Flags::BACKED);
        assert!(
            memory
                .entry(found.index)
                .try_mark(found.state, dirty, Flags::NONE)
        );
    }
    let free = || {
        let usage = bed.slice.usage();
        usage.frames - usage.resident
    };
    assert_eq!(free(), 200);
    // Half of the 128 frames below which the evictor begins stay free: 136 pages have left.
    assert!(bed.give_back_to(&[0], SPILL_FRAMES - 136).is_empty());
    assert!((60..=64).contains(&free()), "{}", free());
}

#[test]
fn a_client_that_keeps_a_latch_keeps_one_page_until_it_is_gone() {
    const CLIENT: u16 = 7;
    let bed = bed(4 * MANY);
    bed.slice.set_on_broken(Box::new(|owner| owner == CLIENT));
    bed.take(0, 0);
    bed.fill(MANY);
    let page = bed.spilled();
    let found = bed.found(page).unwrap();
    let memory = bed.slice.memory();
    let latched = memory.entry(found.index).try_latch(found.state, CLIENT);
    let latched = latched.expect("no writer");
    assert!(bed.give_back_to(&[0], 1).is_empty());
    assert_eq!(bed.present(), 1);
    let begun = Instant::now();
    while bed.found(page).unwrap().state.has(Flags::LATCH) {
        assert!(begun.elapsed() < LONG, "the latch is never taken away");
        bed.slice.give_back(&[0], Duration::from_millis(50));
    }
    // The client may still copy into its frame.
    assert!(bed.give_back_to(&[0], 1).is_empty());
    assert_eq!(bed.present(), 1);
    let moved = bed.found(page).unwrap().state;
    assert_ne!(moved.frame(), latched.frame());
    memory.copy_in(latched.frame(), 0, &[9; PAGE]).unwrap();
    let mut out = [1; PAGE];
    let read = memory.read(Key::new(1, page), 0, &mut out, 0);
    assert_eq!((read, out), (Ok(()), [0; PAGE]));
    bed.slice.owner_gone(CLIENT, &[], &|_| None);
    assert_eq!(bed.slice.give_back(&[0], LONG), [0]);
    assert_eq!(bed.present(), 0);
}

#[test]
fn a_page_in_a_range_counts_as_older_than_it_is() {
    let bed = filled();
    let memory = bed.slice.memory();
    let last_use = |page| Residents::last_use(memory, bed.found(page).unwrap().index);
    let (spilled, at_home) = (bed.spilled(), 0);
    for page in [spilled, at_home] {
        memory.set_last_use(bed.found(page).unwrap().index, 1);
    }
    assert_eq!((last_use(at_home), last_use(spilled)), (1, u8::MAX));
}

#[test]
fn a_slice_that_needs_frames_says_so_once() {
    let bed = bed(8 * MANY);
    let (tx, rx) = mpsc::channel();
    bed.slice
        .set_on_shortage(Box::new(move || tx.send(()).unwrap_or(())));
    assert!(!bed.slice.take_wish());
    bed.fill(2 * MANY);
    rx.recv_timeout(LONG).expect("the observer is called");
    assert!(rx.try_recv().is_err(), "once until the wish is taken");
    assert!(bed.slice.take_wish());
    bed.fill(4 * MANY);
    rx.recv_timeout(LONG).expect("the observer is called again");
}

/// One thread's object and what it must contain.
struct Worker {
    slice: Arc<Slice>,
    object: Arc<dyn Object>,
    model: Vec<u8>,
    seed: u64,
}

impl Worker {
    fn random(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed
    }

    fn step(&mut self) {
        let page = self.random() % self.model.len() as u64;
        match self.random().is_multiple_of(3) {
            true => self.write(page),
            false => self.check(page),
        }
    }

    fn write(&mut self, page: u64) {
        let byte = self.random() as u8;
        self.model[page as usize] = byte;
        let data = [byte; PAGE];
        if write_inline(&self.slice, &self.object, page, &data) {
            return;
        }
        let (tx, rx) = mpsc::channel();
        let done = move |grant: Result<Grant, Error>| {
            // A latch is free again soon. The page is being moved, or taken.
            let written = grant.map(|mut grant| grant.write(page, 0, &data).is_ok());
            tx.send(written).unwrap_or(());
        };
        (self.slice).get(&self.object, page, 1, Intent::Overwrite, done);
        if !rx.recv_timeout(LONG).expect("an answer").expect("a page") {
            self.write(page);
        }
    }

    fn check(&self, page: u64) {
        let (slice, key) = (&self.slice, Key::new(self.object.id(), page));
        let mut out = [0; PAGE];
        let begun = Instant::now();
        while let Err(miss) = slice.memory().read(key, 0, &mut out, slice.epoch()) {
            assert!(begun.elapsed() < LONG, "page {page}: {miss:?}");
            if miss == Miss::Absent {
                let (tx, rx) = mpsc::channel();
                let done = move |grant: Result<Grant, Error>| tx.send(grant.is_ok()).unwrap_or(());
                slice.get(&self.object, page, 1, Intent::Read, done);
                assert!(rx.recv_timeout(LONG).expect("an answer"), "page {page}");
            }
        }
        let byte = self.model[page as usize];
        assert!(
            out.iter().all(|b| *b == byte),
            "page {page}: {byte}, not {out:?}"
        );
    }
}

/// Steps of each thread. `JERICHO_SPILL_STEPS` sets more.
fn steps() -> u64 {
    let steps = std::env::var("JERICHO_SPILL_STEPS").ok();
    steps.map_or(30_000, |steps| steps.parse().expect("a number"))
}

#[test]
fn pages_keep_their_bytes_while_ranges_come_and_go() {
    // Three objects, together twice as large as all frames.
    let pages = u64::from(2 * (FRAMES_MIN + 2 * SPILL_FRAMES) / 3);
    let bed = bed(4 * pages);
    let workers = (0..3).map(|n| Worker {
        slice: bed.slice.clone(),
        object: Linear::object(n + 1, n * pages),
        model: vec![0; pages as usize],
        seed: 0x9E37_79B9 + n,
    });
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let workers: Vec<Worker> = std::thread::scope(|scope| {
        let threads: Vec<_> = workers
            .map(|mut worker| {
                scope.spawn(move || {
                    (0..steps()).for_each(|_| worker.step());
                    worker
                })
            })
            .collect();
        let (bed, stop, rounds) = (&bed, &stop, &rounds);
        let spiller = scope.spawn(move || {
            let mut has = [false; 2];
            while !stop.load(Ordering::Relaxed) || has.contains(&true) {
                let round = rounds.fetch_add(1, Ordering::Relaxed);
                let range = (round % 2) as u32;
                match &mut has[range as usize] {
                    has @ false => *has = bed.take(range, 0),
                    true => {
                        // Also those of earlier rounds.
                        let gone = bed.slice.give_back(&[range], Duration::from_millis(20));
                        gone.into_iter().for_each(|gone| has[gone as usize] = false);
                    }
                }
                bed.slice.release_strays().unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let workers = threads.into_iter().map(|t| t.join().expect("a worker"));
        let workers = workers.collect();
        stop.store(true, Ordering::Relaxed);
        spiller.join().expect("the spiller");
        workers
    });
    let counters = bed.slice.counters();
    assert!(counters.spill_given_back >= 10 * 512, "{counters:?}");
    assert!(
        counters.spill_moved > 0 && counters.evictions > 0,
        "{counters:?}"
    );
    assert_eq!(bed.present(), 0);
    let check_all = |worker: &Worker| (0..pages).for_each(|page| worker.check(page));
    workers.iter().for_each(check_all);
    let (tx, rx) = mpsc::channel();
    bed.slice
        .sync_all(Box::new(move |result| tx.send(result).unwrap_or(())));
    rx.recv_timeout(LONG).expect("an answer").expect("a sync");
    bed.slice.close();
    // A new slice reads the bytes from the device.
    let slice = start(&bed.device, 2);
    for worker in workers {
        let slice = slice.clone();
        check_all(&Worker { slice, ..worker });
    }
}
