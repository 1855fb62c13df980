//! Checksums of pages: what a slice passes to their object, and what it compares.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

use jericho_cache::{Config, Error, FRAMES_MIN, Intent, Object, PagePlace, PageRun, Slice};
use jericho_format::sums::checksum;
use jericho_shm::{Flags, Key};
use jericho_sim::{Operation, SimDevice};
use jericho_storage::Device;

const PAGE: usize = 4096;
/// Threads with which a simulated device is written.
const WRITERS: usize = 8;
/// Pages of one write transfer.
const TRANSFER: u64 = 256;

/// An object whose page n is at block n once it was written, or in memory.
struct Summed {
    device: Arc<SimDevice>,
    sums: Mutex<HashMap<u64, u32>>,
    /// Pages that had another checksum on the device when they were reported as written.
    wrong: Mutex<Vec<u64>>,
    image: Mutex<Option<Arc<[u8]>>>,
}

impl Object for Summed {
    fn id(&self) -> u64 {
        1
    }
    fn slice_of(&self, _page: u64) -> u16 {
        0
    }
    fn has_checksums(&self) -> bool {
        true
    }
    fn resolve(&self, _: u64, _: u32, _: &mut Vec<PageRun>) -> Result<(), Error> {
        panic!("the checksums are needed, too");
    }
    fn resolve_summed(
        &self,
        first: u64,
        count: u32,
        out: &mut Vec<PageRun>,
        sums: &mut Vec<Option<u32>>,
    ) -> Result<(), Error> {
        let image = self.image.lock().unwrap().clone();
        for page in first..first + u64::from(count) {
            let sum = self.sums.lock().unwrap().get(&page).copied();
            let place = match (&image, sum) {
                (Some(image), _) => PagePlace::Memory(image.clone()),
                (None, None) => PagePlace::Hole,
                (None, Some(_)) => place(page),
            };
            out.push(PageRun { pages: 1, place });
            sums.push(sum);
        }
        Ok(())
    }
    fn allocate(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error> {
        out.push(PageRun {
            pages: count,
            place: place(first),
        });
        Ok(())
    }
    fn written(&self, _: u64, _: u32) {
        panic!("the checksums are needed, too");
    }
    fn written_summed(&self, first: u64, new: &[u32]) {
        let mut block = vec![0; PAGE];
        for (page, sum) in (first..).zip(new) {
            let at = page * PAGE as u64;
            self.device.read_at(at, &mut block).unwrap();
            if checksum(&block) != *sum {
                self.wrong.lock().unwrap().push(page);
            }
            self.sums.lock().unwrap().insert(page, *sum);
        }
    }
    fn write_failed(&self, _: u64, _: u32, error: &Error) {
        panic!("{error}");
    }
}

fn place(page: u64) -> PagePlace {
    PagePlace::Device {
        device: 0,
        offset_bytes: page * PAGE as u64,
    }
}

struct Bed {
    device: Arc<SimDevice>,
    slice: Arc<Slice>,
    pages: Arc<Summed>,
    object: Arc<dyn Object>,
}

impl Bed {
    fn new(frames: u32) -> Bed {
        let device = Arc::new(SimDevice::new("sim", 64 << 20));
        let config = Config {
            id: 0,
            frames,
            kernel_node: None,
            cpus: vec![],
            dirty_age: Duration::from_secs(3600),
        };
        let devices: [Arc<dyn Device>; 1] = [device.clone()];
        let pages = Arc::new(Summed {
            device: device.clone(),
            sums: Mutex::default(),
            wrong: Mutex::default(),
            image: Mutex::default(),
        });
        Bed {
            slice: Slice::start(&config, &devices).unwrap(),
            object: pages.clone(),
            device,
            pages,
        }
    }

    fn fill(&self, pages: Range<u64>, byte: u8) {
        for page in pages {
            let (sender, receiver) = mpsc::channel();
            self.slice
                .get(&self.object, page, 1, Intent::Overwrite, move |pages| {
                    sender.send(pages).unwrap();
                });
            let mut grant = receiver.recv().unwrap().unwrap();
            grant.write(page, 0, &[byte; PAGE]).unwrap();
        }
    }

    /// Reads pages in one request, and returns the first byte of each.
    fn read(&self, first: u64, count: u32) -> Result<Vec<u8>, Error> {
        let (sender, receiver) = mpsc::channel();
        let answer = move |pages| sender.send(pages).unwrap();
        self.slice
            .get(&self.object, first, count, Intent::Read, answer);
        let grant = receiver.recv().unwrap()?;
        let mut bytes = vec![0; count as usize];
        for (page, byte) in (first..).zip(bytes.chunks_mut(1)) {
            grant.read(page, 0, byte).unwrap();
        }
        Ok(bytes)
    }

    fn wait(&self, start: impl FnOnce(&Slice, jericho_cache::Done)) {
        let (sender, receiver) = mpsc::channel();
        start(
            &self.slice,
            Box::new(move |result| sender.send(result).unwrap()),
        );
        receiver.recv().unwrap().unwrap();
    }

    fn sync(&self) {
        self.wait(|slice, done| slice.sync(&self.object, 0..u64::MAX, done));
    }

    fn evict(&self) {
        self.wait(|slice, done| slice.invalidate(1, 0..u64::MAX, done));
    }

    fn checksum_errors(&self) -> u64 {
        self.slice.counters().checksum_errors
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.slice.close();
    }
}

/// Stops writes of a device until it is opened.
#[derive(Default)]
struct Gate {
    /// Number of writes that wait, and whether the gate is open.
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.0 += 1;
        self.changed.notify_all();
        let opened = self.changed.wait_while(state, |(_, is_open)| !*is_open);
        drop(opened.unwrap());
    }

    fn wait_for(&self, writes: usize) {
        let state = self.state.lock().unwrap();
        let waiting = self
            .changed
            .wait_while(state, |(waiting, _)| *waiting < writes);
        drop(waiting.unwrap());
    }

    fn open(&self) {
        self.state.lock().unwrap().1 = true;
        self.changed.notify_all();
    }
}

#[test]
fn pages_that_change_during_their_write_back_have_the_checksum_of_what_was_written() {
    // More transfers than threads that write, and than copies.
    let transfers = 20;
    let bed = Bed::new(FRAMES_MIN.max(transfers as u32 * TRANSFER as u32 * 4));
    let pages = 0..transfers * TRANSFER;
    bed.fill(pages.clone(), 1);
    let gate = Arc::new(Gate::default());
    let at_device = gate.clone();
    bed.device.set_before(move |operation| {
        if operation == Operation::Write {
            at_device.pass();
        }
    });
    let (sender, receiver) = mpsc::channel();
    let done = Box::new(move |result| sender.send(result).unwrap());
    bed.slice.sync(&bed.object, pages.clone(), done);
    gate.wait_for(WRITERS);
    bed.fill(pages.clone(), 2);
    gate.open();
    receiver.recv().unwrap().unwrap();
    bed.sync();
    assert_eq!(*bed.pages.wrong.lock().unwrap(), []);
    bed.evict();
    assert_eq!(bed.read(transfers * TRANSFER - 1, 1).unwrap(), [2]);
}

#[test]
fn only_pages_with_wrong_checksums_are_dropped_after_a_read() {
    let bed = Bed::new(FRAMES_MIN);
    bed.fill(0..10, 7);
    bed.sync();
    bed.evict();
    bed.device.write_at(5 * PAGE as u64, &[8; PAGE]).unwrap();
    // Read-ahead tells no caller, and leaves no page that is wrong.
    bed.slice.prefetch(&bed.object, 0, 10);
    assert_eq!(bed.read(0, 5).unwrap(), [7; 5]);
    assert_eq!(bed.read(6, 4).unwrap(), [7; 4]);
    assert_eq!(bed.read(3, 4).unwrap_err().errno(), 5);
    assert!(bed.slice.resident_of(1, 5..6).is_empty());
    assert!(bed.checksum_errors() >= 2);
    let before = bed.slice.counters().read_bytes;
    assert_eq!(bed.read(6, 4).unwrap(), [7; 4]);
    assert_eq!(bed.slice.counters().read_bytes, before, "they are cached");
}

#[test]
fn bytes_from_memory_are_compared_too() {
    let bed = Bed::new(FRAMES_MIN);
    bed.pages
        .sums
        .lock()
        .unwrap()
        .insert(3, checksum(&[1; PAGE]));
    *bed.pages.image.lock().unwrap() = Some(vec![1; PAGE].into());
    assert_eq!(bed.read(3, 1).unwrap(), [1]);
    bed.evict();
    *bed.pages.image.lock().unwrap() = Some(vec![2; PAGE].into());
    assert_eq!(bed.read(3, 1).unwrap_err().errno(), 5);
    assert_eq!(bed.checksum_errors(), 1);
}

#[test]
fn a_client_that_makes_a_page_valid_during_its_read_stops_no_thread() {
    let bed = Bed::new(FRAMES_MIN);
    bed.fill(0..1, 7);
    bed.sync();
    bed.evict();
    let gate = Arc::new(Gate::default());
    let at_device = gate.clone();
    bed.device.set_before(move |operation| {
        if operation == Operation::Read {
            at_device.pass();
        }
    });
    let (sender, receiver) = mpsc::channel();
    let answer = move |pages: Result<_, Error>| sender.send(pages.map(drop)).unwrap();
    bed.slice.get(&bed.object, 0, 1, Intent::Read, answer);
    gate.wait_for(1);
    let memory = bed.slice.memory();
    let found = memory.lookup(Key::new(1, 0)).unwrap();
    memory.entry(found.index).publish(Flags::NONE);
    // This read takes the page for valid, and takes it back.
    bed.read(0, 1).unwrap();
    gate.open();
    let read = receiver.recv_timeout(Duration::from_secs(60));
    read.expect("the thread that reads goes on").unwrap();
    assert_eq!(bed.read(0, 1).unwrap(), [7]);
}
