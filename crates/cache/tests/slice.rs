//! Tests of a slice over a file: many threads, a working set several times the cache, faults.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use jericho_cache::{Config, Error, FRAMES_MIN, Grant, Intent, Object, PagePlace, PageRun, Slice};
use jericho_shm::{Flags, Key, Writer};
use jericho_sim::{FaultPlan, Operation, SimDevice};
use jericho_storage::{Cause, Device, IoError, Layer};
use jericho_sys::doorbell::Doorbell;

const PAGE: usize = 4096;

/// An object whose page n is at block `base + n` once it was written, and has no place before.
struct Linear {
    id: u64,
    base: u64,
    written: Mutex<HashMap<u64, ()>>,
    failures: AtomicU64,
    inline: AtomicBool,
}

impl Linear {
    fn new(id: u64, base: u64) -> Arc<Linear> {
        Arc::new(Linear {
            id,
            base,
            written: Mutex::default(),
            failures: AtomicU64::new(0),
            inline: AtomicBool::new(true),
        })
    }

    fn place(&self, page: u64) -> PagePlace {
        PagePlace::Device {
            device: 0,
            offset_bytes: (self.base + page) * PAGE as u64,
        }
    }
}

impl Object for Linear {
    fn id(&self) -> u64 {
        self.id
    }
    fn slice_of(&self, _page: u64) -> u16 {
        0
    }
    fn may_write_inline(&self) -> bool {
        self.inline.load(Ordering::SeqCst)
    }
    fn resolve(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error> {
        let written = self.written.lock().unwrap();
        for page in first..first + u64::from(count) {
            let place = if written.contains_key(&page) {
                self.place(page)
            } else {
                PagePlace::Hole
            };
            out.push(PageRun { pages: 1, place });
        }
        Ok(())
    }
    fn allocate(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error> {
        out.push(PageRun {
            pages: count,
            place: self.place(first),
        });
        Ok(())
    }
    fn written(&self, first: u64, count: u32) {
        self.written
            .lock()
            .unwrap()
            .extend((first..first + u64::from(count)).map(|p| (p, ())));
    }
    fn write_failed(&self, _: u64, _: u32, _: &Error) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }
}

struct Bed {
    _dir: tempfile::TempDir,
    device: Arc<dyn Device>,
    slice: Arc<Slice>,
}

fn bed(frames: u32, pages: u64) -> Bed {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("device");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(pages * PAGE as u64)
        .unwrap();
    let device = jericho_storage::open_device(&path, Default::default()).unwrap();
    let slice = start(frames, &device);
    Bed {
        _dir: dir,
        device,
        slice,
    }
}

fn start(frames: u32, device: &Arc<dyn Device>) -> Arc<Slice> {
    start_with_age(frames, device, Duration::from_millis(50))
}

fn start_with_age(frames: u32, device: &Arc<dyn Device>, dirty_age: Duration) -> Arc<Slice> {
    let config = Config {
        id: 0,
        frames,
        kernel_node: None,
        cpus: vec![],
        dirty_age,
    };
    Slice::start(&config, std::slice::from_ref(device)).unwrap()
}

fn wait(ask: impl FnOnce(jericho_cache::Done)) -> Result<(), Error> {
    let (tx, rx) = mpsc::channel();
    ask(Box::new(move |result| tx.send(result).unwrap()));
    rx.recv_timeout(Duration::from_secs(60))
        .expect("the slice did not answer")
}

fn write(
    slice: &Slice,
    object: &Arc<dyn Object>,
    page: u64,
    offset: usize,
    data: &[u8],
) -> Result<(), Error> {
    let key = Key::new(object.id(), page);
    let (memory, writer) = (slice.memory(), Writer::daemon(1));
    if let Ok(written) = memory.write_if(key, offset, data, writer, slice.epoch(), || true) {
        if written.was_clean {
            slice.dirtied(object, page, 1);
        }
        return Ok(());
    }
    let (tx, rx) = mpsc::channel();
    let whole = data.len() == PAGE;
    let intent = if whole {
        Intent::Overwrite
    } else {
        Intent::Modify
    };
    let data = data.to_vec();
    slice.get(object, page, 1, intent, move |grant| {
        tx.send(grant.map(|mut g| g.write(page, offset, &data).unwrap()))
            .unwrap();
    });
    rx.recv_timeout(Duration::from_secs(60))
        .expect("the slice did not answer")
}

fn read(slice: &Slice, object: &Arc<dyn Object>, page: u64) -> Result<Vec<u8>, Error> {
    let mut out = vec![0; PAGE];
    if slice
        .memory()
        .read(Key::new(object.id(), page), 0, &mut out, slice.epoch())
        .is_ok()
    {
        return Ok(out);
    }
    let (tx, rx) = mpsc::channel();
    slice.get(object, page, 1, Intent::Read, move |grant| {
        let read = grant.map(|g| {
            g.read(page, 0, &mut out).unwrap();
            out
        });
        tx.send(read).unwrap();
    });
    rx.recv_timeout(Duration::from_secs(60))
        .expect("the slice did not answer")
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn a_working_set_many_times_the_cache_stays_correct() {
    let pages = u64::from(FRAMES_MIN) * 6;
    let bed = bed(FRAMES_MIN, pages * 4);
    let threads: Vec<_> = (0..4u64)
        .map(|t| {
            let slice = bed.slice.clone();
            std::thread::spawn(move || {
                let object: Arc<dyn Object> = Linear::new(t + 1, t * pages);
                let mut model: Vec<[u8; 2]> = vec![[0; 2]; pages as usize];
                let mut seed = 0x9E37_79B9 + t;
                for i in 0..20_000u64 {
                    let page = random(&mut seed) % pages;
                    let byte = i as u8;
                    match random(&mut seed) % 4 {
                        0 => {
                            write(&slice, &object, page, 0, &[byte; PAGE]).unwrap();
                            model[page as usize] = [byte; 2];
                        }
                        1 => {
                            write(&slice, &object, page, 2048, &[byte; 2048]).unwrap();
                            model[page as usize][1] = byte;
                        }
                        _ => check(&slice, &object, page, &model),
                    }
                    if i % 5000 == 4999 {
                        wait(|done| slice.sync(&object, 0..u64::MAX, done)).unwrap();
                    }
                }
                (0..pages).for_each(|page| check(&slice, &object, page, &model));
                (object, model)
            })
        })
        .collect();
    let results: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    wait(|done| bed.slice.sync_all(done)).unwrap();
    let counters = bed.slice.counters();
    assert!(
        counters.evictions > 0 && counters.written_back_bytes > 0,
        "{counters:?}"
    );
    assert_eq!(bed.slice.usage().dirty, 0);
    bed.slice.close();
    // A new slice reads the written bytes from the device.
    let again = start(FRAMES_MIN, &bed.device);
    for (object, model) in &results {
        (0..pages)
            .step_by(7)
            .for_each(|page| check(&again, object, page, model));
    }
}

fn check(slice: &Slice, object: &Arc<dyn Object>, page: u64, model: &[[u8; 2]]) {
    let got = read(slice, object, page).unwrap();
    let want = model[page as usize];
    assert!(
        got[..2048].iter().all(|b| *b == want[0]) && got[2048..].iter().all(|b| *b == want[1]),
        "object {} page {page}: want {want:?}, got {} {}",
        object.id(),
        got[0],
        got[2048],
    );
}

#[test]
fn invalidated_pages_are_gone_dirty_or_not() {
    let bed = bed(FRAMES_MIN, 4096);
    let linear = Linear::new(5, 0);
    let object: Arc<dyn Object> = linear.clone();
    // Fewer pages than the background limit. Only age may cause write-back meanwhile, and the test allows for that.
    for page in 0..90 {
        write(&bed.slice, &object, page, 0, &[7; PAGE]).unwrap();
    }
    wait(|done| bed.slice.sync(&object, 0..45, done)).unwrap();
    assert!(bed.slice.first_dirty(5, 0).is_none_or(|page| page >= 45));
    write(&bed.slice, &object, 10, 0, &[9; PAGE]).unwrap();
    wait(|done| bed.slice.invalidate(5, 20..u64::MAX, done)).unwrap();
    assert_eq!(bed.slice.resident_of(5, 0..u64::MAX).len(), 20);
    assert_eq!(bed.slice.first_dirty(5, 11), None);
    assert!(bed.slice.usage().dirty <= 1);
    assert_eq!(
        read(&bed.slice, &object, 30).unwrap()[0],
        7,
        "the page was written back"
    );
    // Page 60 may have been written back by age. Drops the object's place for it, as truncation does.
    linear.written.lock().unwrap().retain(|page, ()| *page < 45);
    wait(|done| bed.slice.invalidate(5, 20..u64::MAX, done)).unwrap();
    assert_eq!(read(&bed.slice, &object, 60).unwrap()[0], 0);
    assert_eq!(read(&bed.slice, &object, 10).unwrap()[0], 9);
}

/// Asks the slice for the first dirty page whenever the slice tells of a write-back.
struct Asks {
    pages: Arc<Linear>,
    slice: Arc<Slice>,
    /// The answers during `written`, and during `write_back_ended`.
    answers: Mutex<[Vec<Option<u64>>; 2]>,
}

impl Asks {
    fn ask(&self, call: usize) {
        let answer = self.slice.first_dirty(self.pages.id, 0);
        self.answers.lock().unwrap()[call].push(answer);
    }
}

impl Object for Asks {
    fn id(&self) -> u64 {
        self.pages.id()
    }
    fn slice_of(&self, page: u64) -> u16 {
        self.pages.slice_of(page)
    }
    fn resolve(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error> {
        self.pages.resolve(first, count, out)
    }
    fn allocate(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error> {
        self.pages.allocate(first, count, out)
    }
    fn written(&self, first: u64, count: u32) {
        self.ask(0);
        self.pages.written(first, count);
    }
    fn write_back_ended(&self) {
        self.ask(1);
    }
    fn write_failed(&self, first: u64, count: u32, error: &Error) {
        self.pages.write_failed(first, count, error);
    }
}

#[test]
fn a_page_counts_as_dirty_until_its_object_knows_of_the_write_and_no_longer_at_the_end() {
    let bed = bed(FRAMES_MIN, 64);
    let asks = Arc::new(Asks {
        pages: Linear::new(5, 0),
        slice: bed.slice.clone(),
        answers: Mutex::default(),
    });
    let object: Arc<dyn Object> = asks.clone();
    write(&bed.slice, &object, 3, 0, &[7; PAGE]).unwrap();
    wait(|done| bed.slice.sync(&object, 0..u64::MAX, done)).unwrap();
    assert_eq!(*asks.answers.lock().unwrap(), [[Some(3)], [None]]);
}

#[test]
fn overlapping_gets_of_all_kinds_end() {
    let bed = bed(FRAMES_MIN, 65536);
    let object: Arc<dyn Object> = Linear::new(1, 0);
    let (tx, rx) = mpsc::channel();
    let mut seed = 99;
    let mut ranges: Vec<(Range<u64>, Intent)> = vec![];
    for _ in 0..3000 {
        let first = random(&mut seed) % 4000;
        let count = 1 + random(&mut seed) % 256;
        let intent =
            [Intent::Read, Intent::Modify, Intent::Overwrite][(random(&mut seed) % 3) as usize];
        ranges.push((first..first + count, intent));
    }
    for (range, intent) in &ranges {
        let (tx, range, intent) = (tx.clone(), range.clone(), *intent);
        let count = (range.end - range.start) as u32;
        bed.slice
            .get(&object, range.start, count, intent, move |grant| {
                let sent = grant.map(|mut grant| {
                    if intent == Intent::Overwrite {
                        // A writer that gives up midway leaves only zeros behind.
                        range
                            .clone()
                            .take(100)
                            .for_each(|page| grant.write(page, 0, &[1; PAGE]).unwrap());
                    }
                });
                tx.send(sent).unwrap();
            });
        if random(&mut seed).is_multiple_of(64) {
            bed.slice.prefetch(&object, random(&mut seed) % 4000, 128);
        }
    }
    for _ in &ranges {
        rx.recv_timeout(Duration::from_secs(60))
            .expect("a Get did not end")
            .unwrap();
    }
    wait(|done| bed.slice.sync_all(done)).unwrap();
    for page in 0..4200 {
        let byte = read(&bed.slice, &object, page).unwrap()[17];
        assert!(byte <= 1);
    }
}

/// Returns an object with `pages` pages on the device and none in the cache. The bytes of each page are its number plus 1.
fn cold(bed: &Bed, id: u64, pages: u64) -> Arc<dyn Object> {
    let object: Arc<dyn Object> = Linear::new(id, 0);
    for page in 0..pages {
        write(&bed.slice, &object, page, 0, &[page as u8 + 1; PAGE]).unwrap();
    }
    wait(|done| bed.slice.sync(&object, 0..pages, done)).unwrap();
    wait(|done| bed.slice.invalidate(id, 0..pages, done)).unwrap();
    object
}

/// Gets a page. Sends its first byte and the thread that ran the callback.
fn ask(
    slice: &Slice,
    object: &Arc<dyn Object>,
    page: u64,
    tx: &mpsc::Sender<(u8, std::thread::ThreadId)>,
) {
    let tx = tx.clone();
    let got = move |grant: Result<Grant, Error>| {
        let mut byte = [0];
        grant.unwrap().read(page, 0, &mut byte).unwrap();
        tx.send((byte[0], std::thread::current().id())).unwrap();
    };
    slice.get(object, page, 1, Intent::Read, got);
}

/// An object of holes. Its owner waits for the test before it tells where pages are.
struct Slow {
    asked: Mutex<mpsc::Sender<()>>,
    answer: Mutex<mpsc::Receiver<()>>,
}

impl Object for Slow {
    fn id(&self) -> u64 {
        2
    }
    fn slice_of(&self, _page: u64) -> u16 {
        0
    }
    fn resolve(&self, _: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error> {
        self.asked.lock().unwrap().send(()).unwrap();
        self.answer.lock().unwrap().recv().unwrap();
        out.push(PageRun {
            pages: count,
            place: PagePlace::Hole,
        });
        Ok(())
    }
    fn allocate(&self, _: u64, _: u32, _: &mut Vec<PageRun>) -> Result<(), Error> {
        panic!("no page is written");
    }
    fn written(&self, _: u64, _: u32) {}
    fn write_failed(&self, _: u64, _: u32, _: &Error) {}
}

#[test]
fn a_get_that_lacks_frames_when_a_read_ahead_ends_wakes_the_evictor() {
    const FREE: u32 = 200;
    let bed = bed(FRAMES_MIN, 16);
    let clean: Arc<dyn Object> = Linear::new(1, 0);
    for page in 0..FRAMES_MIN - FREE {
        read(&bed.slice, &clean, page.into()).unwrap();
    }
    assert_eq!(bed.slice.usage().resident, u64::from(FRAMES_MIN - FREE));
    let ((asked, is_asked), (go, answer)) = (mpsc::channel(), mpsc::channel());
    let slow: Arc<dyn Object> = Arc::new(Slow {
        asked: Mutex::new(asked),
        answer: Mutex::new(answer),
    });
    std::thread::scope(|scope| {
        scope.spawn(|| bed.slice.prefetch(&slow, 0, 1));
        is_asked.recv_timeout(Duration::from_secs(60)).unwrap();
        // Waits for the page that the read-ahead fills, and then needs more frames than are free.
        let (sender, granted) = mpsc::channel();
        bed.slice
            .get(&slow, 0, 256, Intent::Overwrite, move |grant| {
                sender.send(grant.map(drop)).unwrap();
            });
        go.send(()).unwrap();
        let granted = granted.recv_timeout(Duration::from_secs(60));
        granted.expect("the Get was not granted").unwrap();
    });
}

#[test]
fn a_thread_with_a_reader_performs_its_own_reads_and_only_these() {
    const PAGES: u64 = 40;
    let bed = bed(FRAMES_MIN, PAGES);
    let object = cold(&bed, 7, PAGES);
    let doorbell = Doorbell::new().unwrap();
    let mut reader = bed.slice.reader(&doorbell).unwrap();
    let (tx, rx) = mpsc::channel();
    let own = std::thread::current().id();
    for page in 0..PAGES - 1 {
        ask(&bed.slice, &object, page, &tx);
    }
    assert!(!reader.is_idle());
    assert!(
        rx.try_recv().is_err(),
        "a read ended before the reader started it"
    );
    let mut seen = 0;
    while seen < PAGES - 1 {
        while !reader.poll() {
            // The completions also ring the doorbell.
            doorbell.sleep(Some(Duration::from_millis(10))).unwrap();
        }
        reader.run();
        for (byte, thread) in rx.try_iter() {
            assert!((1..PAGES as u8).contains(&byte));
            assert_eq!(thread, own);
            seen += 1;
        }
    }
    assert!(reader.is_idle());
    // The pipeline still serves threads without a reader.
    std::thread::scope(|scope| {
        scope.spawn(|| ask(&bed.slice, &object, PAGES - 1, &tx));
    });
    let (byte, thread) = rx.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(u64::from(byte), PAGES);
    assert_ne!(thread, own);
}

#[test]
fn a_reader_that_is_dropped_ends_its_reads_and_the_pipeline_takes_over() {
    let bed = bed(FRAMES_MIN, 8);
    let object = cold(&bed, 7, 8);
    let doorbell = Doorbell::new().unwrap();
    let reader = bed.slice.reader(&doorbell).unwrap();
    let (tx, rx) = mpsc::channel();
    ask(&bed.slice, &object, 0, &tx);
    // Clashes with the first Get: it waits for the same fill.
    std::thread::scope(|scope| {
        scope.spawn(|| ask(&bed.slice, &object, 0, &tx));
    });
    drop(reader);
    assert_eq!(
        rx.try_iter().map(|(byte, _)| byte).collect::<Vec<_>>(),
        [1, 1]
    );
    ask(&bed.slice, &object, 1, &tx);
    let (byte, thread) = rx.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(byte, 2);
    assert_ne!(thread, std::thread::current().id());
}

/// An object with a bug: it allocates no place for write-back.
struct Nowhere;

impl Object for Nowhere {
    fn id(&self) -> u64 {
        3
    }
    fn slice_of(&self, _page: u64) -> u16 {
        0
    }
    fn resolve(&self, _: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error> {
        let place = PagePlace::Hole;
        out.push(PageRun {
            pages: count,
            place,
        });
        Ok(())
    }
    fn allocate(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error> {
        self.resolve(first, count, out)
    }
    fn written(&self, _: u64, _: u32) {}
    fn write_failed(&self, _: u64, _: u32, _: &Error) {}
}

#[test]
fn an_evictor_that_panics_ends_the_process_with_its_name_and_cause() {
    let name = "an_evictor_that_panics_ends_the_process_with_its_name_and_cause";
    if std::env::var_os("JERICHO_TEST_CHILD").is_some() {
        let bed = bed(FRAMES_MIN, 8);
        let object: Arc<dyn Object> = Arc::new(Nowhere);
        write(&bed.slice, &object, 0, 0, &[1]).unwrap();
        // The evictor may drop or call this callback before it ends the process. The callback does nothing, so that only the
        // evictor ends the child.
        bed.slice.sync(&object, 0..1, Box::new(|_| {}));
        std::thread::sleep(Duration::from_secs(60));
        panic!("the process survived its evictor");
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env("JERICHO_TEST_CHILD", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stderr);
    let signal = std::os::unix::process::ExitStatusExt::signal(&child.status);
    assert_eq!(signal, Some(6), "not SIGABRT: {}: {said}", child.status);
    assert!(
        said.contains("the thread evictor-0 panicked: an object"),
        "{said}"
    );
}

#[test]
fn pages_of_an_object_that_forbids_inline_writes_are_never_open_to_them() {
    let bed = bed(FRAMES_MIN, 100);
    let slice = &bed.slice;
    let linear = Linear::new(1, 0);
    let object: Arc<dyn Object> = linear.clone();
    let backed = |page| {
        let found = slice.memory().lookup(Key::new(1, page)).expect("cached");
        found.state.has(Flags::BACKED)
    };
    // The daemon writes both pages while they are not cached: one while the object allows inline writes, one while it does not.
    for (allowed, page) in [(true, 0), (false, 1)] {
        linear.inline.store(allowed, Ordering::SeqCst);
        write(slice, &object, page, 0, &[1; PAGE]).unwrap();
        assert_eq!(backed(page), allowed, "a new page");
    }
    linear.inline.store(false, Ordering::SeqCst);
    assert!(slice.revoke_writes(&object));
    assert!(!backed(0));
    for page in 0..2 {
        write(slice, &object, page, 100, &[2; 50]).unwrap();
        assert!(!backed(page), "a page that the daemon wrote");
    }
    let grant = slice.try_get(&object, 0, 4, Intent::Overwrite).unwrap();
    grant.expect("no need to wait").offer();
    assert!((0..4).all(|page| !backed(page)), "offered pages");
    linear.inline.store(true, Ordering::SeqCst);
    for page in 0..2 {
        write(slice, &object, page, 100, &[3; 50]).unwrap();
        assert!(backed(page));
    }
}

#[test]
fn gets_wait_for_a_latch_without_a_thread() {
    let bed = bed(FRAMES_MIN, 100);
    let (slice, memory) = (&bed.slice, bed.slice.memory());
    let object: Arc<dyn Object> = Linear::new(1, 0);
    write(slice, &object, 0, 0, &[1; PAGE]).unwrap();
    let found = memory.lookup(Key::new(1, 0)).unwrap();
    let index = found.index;
    let entry = memory.entry(index);
    let latched = entry
        .try_latch(found.state, 7)
        .expect("the page is not latched");
    let (tx, rx) = mpsc::channel();
    // Runs in this thread, which must not block.
    for n in 0..3 {
        let (again, tx) = (slice.clone(), tx.clone());
        slice.get(&object, 0, 1, Intent::Read, move |grant| {
            let Err(held) = grant.unwrap().read(0, 0, &mut [0; PAGE]) else {
                // The slice takes a latch away after a second, in which this thread may not have run.
                let state = again.memory().entry(index).state();
                assert!(!state.has(Flags::LATCH), "read a latched page");
                return tx.send(n).unwrap();
            };
            again.when_unlatched(held, move || tx.send(n).unwrap());
        });
    }
    entry.unlatch(latched, Flags::DIRTY);
    let mut resumed: Vec<i32> = (0..3)
        .map(|_| rx.recv_timeout(Duration::from_secs(60)).expect("resumed"))
        .collect();
    resumed.sort_unstable();
    assert_eq!(resumed, [0, 1, 2]);
}

/// A device that is full at the first write of the first page, and slow at later writes of it.
struct Full {
    device: Arc<dyn Device>,
    tries: AtomicU64,
    trial: mpsc::SyncSender<()>,
    go_on: Mutex<mpsc::Receiver<()>>,
}

impl Layer for Full {
    fn below(&self) -> &dyn Device {
        &*self.device
    }
    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        if offset_bytes == 0 {
            if self.tries.fetch_add(1, Ordering::SeqCst) == 0 {
                return Err(IoError {
                    operation: "write",
                    device: self.name(),
                    offset_bytes,
                    length_bytes: buf.len() as u64,
                    cause: Cause::Errno(28), // ENOSPC
                });
            }
            let _ = self.trial.send(());
            let _ = self.go_on.lock().unwrap().recv();
        }
        self.device.write_at(offset_bytes, buf)
    }
}

#[test]
fn an_outage_lasts_while_the_failed_page_is_retried() {
    let bed = bed(FRAMES_MIN, 16);
    let ((trial, tried), (go_on, may_go_on)) = (mpsc::sync_channel(1), mpsc::channel());
    let device: Arc<dyn Device> = Arc::new(Full {
        device: bed.device.clone(),
        tries: AtomicU64::new(0),
        trial,
        go_on: Mutex::new(may_go_on),
    });
    let slice = start(FRAMES_MIN, &device);
    // Rebinds the sender, so that it is dropped before the slice. The slice waits for the trial, which the sender ends.
    let go_on = go_on;
    let (object, other): (Arc<dyn Object>, Arc<dyn Object>) =
        (Linear::new(3, 0), Linear::new(4, 8));
    write(&slice, &object, 0, 0, &[1; PAGE]).unwrap();
    tried
        .recv_timeout(Duration::from_secs(60))
        .expect("the page was not retried");
    assert!(
        slice.no_room().is_some(),
        "the outage ended before the trial"
    );
    // Lets the evictor run in between.
    for byte in 0..2 {
        write(&slice, &other, 0, 0, &[byte; PAGE]).unwrap();
        wait(|done| slice.sync(&other, 0..1, done)).unwrap();
    }
    assert!(
        slice.no_room().is_some(),
        "the outage ended during the trial"
    );
    go_on.send(()).unwrap();
    let begun = std::time::Instant::now();
    while slice.no_room().is_some() {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "the outage did not end"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    slice.close();
}

#[test]
fn an_outage_lasts_until_every_failed_page_was_retried() {
    let device = Arc::new(SimDevice::new("sim", 64 * PAGE as u64));
    let with_room = |blocks| FaultPlan {
        room_blocks: Some(blocks),
        ..FaultPlan::default()
    };
    device.set_plan(with_room(0));
    // Age causes no write-back here.
    let slice = start_with_age(
        FRAMES_MIN,
        &(device.clone() as Arc<dyn Device>),
        Duration::from_secs(3600),
    );
    let objects: [Arc<dyn Object>; 2] = [Linear::new(3, 0), Linear::new(4, 8)];
    for object in &objects {
        write(&slice, object, 0, 0, &[1; PAGE]).unwrap();
        let failed = wait(|done| slice.sync(object, 0..1, done)).unwrap_err();
        assert_eq!(failed.errno(), 28);
    }
    // There is room for one page, so the first trial succeeds.
    device.set_plan(with_room(1));
    let writes = Arc::new(AtomicU64::new(0));
    let counted = writes.clone();
    device.set_before(move |operation| {
        if operation == Operation::Write {
            counted.fetch_add(1, Ordering::SeqCst);
        }
    });
    let begun = std::time::Instant::now();
    let pause = || {
        assert!(begun.elapsed() < Duration::from_secs(60), "no progress");
        std::thread::sleep(Duration::from_millis(5));
    };
    while writes.load(Ordering::SeqCst) < 3 {
        assert!(
            slice.no_room().is_some(),
            "the outage ended before the retry of the other page"
        );
        pause();
    }
    assert!(
        slice.no_room().is_some(),
        "the outage ended although the other page failed"
    );
    device.set_plan(FaultPlan::default());
    while slice.no_room().is_some() {
        pause();
    }
    assert_eq!(
        slice.dirty_bytes(),
        0,
        "the outage ended while a page is dirty"
    );
    slice.close();
}

#[test]
fn a_frame_whose_latch_was_taken_away_is_not_reused_while_the_device_reads_it() {
    let bed = bed(FRAMES_MIN, 16);
    let ((trial, tried), (go_on, may_go_on)) = (mpsc::sync_channel(1), mpsc::channel());
    let device: Arc<dyn Device> = Arc::new(Full {
        device: bed.device.clone(),
        // The device has room: the first write is already a slow one.
        tries: AtomicU64::new(1),
        trial,
        go_on: Mutex::new(may_go_on),
    });
    let slice = start(FRAMES_MIN, &device);
    // Rebinds the sender, so that it is dropped before the slice. The slice waits for the device, which waits for the sender.
    let go_on = go_on;
    let memory = slice.memory();
    let (object, other): (Arc<dyn Object>, Arc<dyn Object>) =
        (Linear::new(3, 0), Linear::new(4, 8));
    let key = Key::new(3, 0);
    let frame_of = |key| memory.lookup(key).map(|found| found.state.frame());
    write(&slice, &object, 0, 0, &[1; PAGE]).unwrap();
    tried
        .recv_timeout(Duration::from_secs(60))
        .expect("the page was not written back");
    let left = frame_of(key).unwrap();
    // Latches the page in the name of an unknown client, while the device reads the page.
    let found = memory.lookup(key).unwrap();
    let latched = memory.entry(found.index).try_latch(found.state, 7);
    assert!(latched.is_some());
    let (tx, rx) = mpsc::channel();
    let again = slice.clone();
    slice.get(&object, 0, 1, Intent::Read, move |grant| {
        let held = grant.unwrap().read(0, 0, &mut [0; PAGE]).unwrap_err();
        again.when_unlatched(held, move || tx.send(()).unwrap());
    });
    rx.recv_timeout(Duration::from_secs(60)).expect("resumed");
    assert_ne!(frame_of(key), Some(left), "the page keeps its frame");
    // Reads enough pages to use each free frame several times.
    let is_used_again = || {
        (0..4 * u64::from(FRAMES_MIN)).any(|page| {
            read(&slice, &other, page).unwrap();
            frame_of(Key::new(4, page)) == Some(left)
        })
    };
    assert!(
        !is_used_again(),
        "the device would write another page's bytes"
    );
    drop(go_on);
    wait(|done| slice.sync(&object, 0..1, done)).unwrap();
    assert!(is_used_again(), "the frame stays unused");
    slice.close();
}
