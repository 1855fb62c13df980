//! Queues to devices that perform transfers by themselves, beside devices with descriptors.

mod support;

use std::os::fd::BorrowedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jericho_storage::{
    Asynchronous, BLOCK_BYTES, Completion, Device, Devices, Direction, Finish, IoError, Layer,
    Transfer, absent_device, gather, open_queue, open_signalling_queue, scatter,
};
use jericho_sys::doorbell::Doorbell;
use jericho_sys::poller::Poller;
use support::{BLOCK, bytes_of, file_device, memory, pattern, segment};

const BLOCKS: u64 = 64;
/// Longer than any step takes.
const LONG: Duration = Duration::from_secs(60);

type Begun = (Transfer, Arc<dyn Finish>);

/// A device that gives its transfers to the test.
struct Handed {
    begun: Mutex<Sender<Begun>>,
}

impl Handed {
    fn pair() -> (Arc<dyn Device>, Receiver<Begun>) {
        let (sender, receiver) = channel();
        let device = Handed {
            begun: Mutex::new(sender),
        };
        (Arc::new(device), receiver)
    }
}

impl Device for Handed {
    fn name(&self) -> Arc<str> {
        "handed".into()
    }
    fn size_bytes(&self) -> u64 {
        BLOCKS * BLOCK_BYTES
    }
    fn home_node(&self) -> Option<u32> {
        None
    }
    fn read_at(&self, _: u64, _: &mut [u8]) -> Result<(), IoError> {
        unreachable!("a blocking call")
    }
    fn write_at(&self, _: u64, _: &[u8]) -> Result<(), IoError> {
        unreachable!("a blocking call")
    }
    fn flush(&self) -> Result<(), IoError> {
        unreachable!("a blocking call")
    }
    fn discard(&self, _: u64, _: u64) -> Result<(), IoError> {
        unreachable!("a blocking call")
    }
    fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn asynchronous(&self) -> Option<&dyn Asynchronous> {
        Some(self)
    }
    fn describe(&self) -> String {
        "handed".into()
    }
}

impl Asynchronous for Handed {
    fn begin(&self, transfer: Transfer, end: Arc<dyn Finish>) {
        self.begun.lock().unwrap().send((transfer, end)).unwrap();
    }
}

fn ended((transfer, end): Begun) {
    end.finish(Completion {
        tag: transfer.tag,
        result: Ok(()),
    });
}

fn transfer(
    tag: u64,
    device: u16,
    direction: Direction,
    segments: Vec<jericho_storage::Segment>,
) -> Transfer {
    Transfer {
        tag,
        device,
        direction,
        offset_bytes: 8 * BLOCK_BYTES,
        segments,
    }
}

#[test]
fn both_kinds_of_devices_share_a_queue_with_io_uring() {
    let directory = tempfile::tempdir().unwrap();
    let file = file_device(directory.path(), BLOCKS as usize);
    let (handed, begun) = Handed::pair();
    let devices = Devices::from(&[Arc::clone(&handed), file]);
    let mapping = memory(16);
    let data = pattern(3, 2);
    let mut queue = open_queue(&devices, &[], 4).unwrap();
    if !queue.describe().contains("io_uring of depth") {
        return eprintln!("SKIPPED: io_uring: {}", queue.describe());
    }
    // Device 2 is appended later.
    let (late, late_begun) = Handed::pair();
    devices.push(late);
    mapping.copy_in(0, &data);
    let scattered = || vec![segment(&mapping, 1, 1), segment(&mapping, 0, 1)];
    for (tag, device) in [(0, 1), (1, 0), (2, 2)] {
        queue.submit(transfer(tag, device, Direction::Write, scattered()));
    }
    // The transfer of the file ends alone.
    let mut completions = Vec::new();
    while completions.is_empty() {
        queue.wait(&mut completions, Some(LONG));
    }
    assert_eq!((completions.len(), completions[0].tag), (1, 0));
    assert_eq!(queue.in_flight(), 2);
    let (first, second) = (begun.recv().unwrap(), late_begun.recv().unwrap());
    let mut bytes = vec![0; 2 * BLOCK];
    gather(&first.0.segments, 0, &mut bytes);
    assert!(bytes == [&data[BLOCK..], &data[..BLOCK]].concat());
    // Another thread ends them while the owner sleeps.
    let thread = std::thread::spawn(move || {
        ended(second);
        ended(first);
    });
    while queue.in_flight() > 0 {
        queue.wait(&mut completions, Some(LONG));
    }
    thread.join().unwrap();
    let mut tags: Vec<u64> = completions.iter().map(|c| c.tag).collect();
    tags.sort_unstable();
    assert_eq!(tags, [0, 1, 2]);
    assert!(completions.iter().all(|c| c.result.is_ok()));
    // A read that the device ends before `begin` returns, as a missing device does.
    let missing = absent_device("missing", BLOCKS * BLOCK_BYTES);
    let mut queue = open_queue(&[missing], &[], 4).unwrap();
    assert!(queue.describe().contains("io_uring"));
    queue.submit(transfer(
        7,
        0,
        Direction::Read,
        vec![segment(&mapping, 4, 1)],
    ));
    completions.clear();
    queue.wait(&mut completions, Some(Duration::ZERO));
    let error = completions[0].result.as_ref().unwrap_err();
    assert_eq!((completions[0].tag, error.errno()), (7, 19));
}

/// A device that has come back. Ends all transfers at once, and tells the test how many began together.
struct Returned(Arc<dyn Device>, Mutex<Sender<usize>>);

impl Layer for Returned {
    fn below(&self) -> &dyn Device {
        &*self.0
    }
    fn asynchronous(&self) -> Option<&dyn Asynchronous> {
        Some(self)
    }
}

impl Asynchronous for Returned {
    fn begin(&self, _: Transfer, _: Arc<dyn Finish>) {
        unreachable!("a single transfer");
    }
    fn begin_all(&self, transfers: Vec<Transfer>, end: Arc<dyn Finish>) {
        self.1.lock().unwrap().send(transfers.len()).unwrap();
        for transfer in transfers {
            ended((transfer, Arc::clone(&end)));
        }
    }
}

#[test]
fn a_device_that_has_come_back_gets_transfers_together() {
    let directory = tempfile::tempdir().unwrap();
    let file = file_device(directory.path(), BLOCKS as usize);
    let missing = absent_device("missing", BLOCKS * BLOCK_BYTES);
    let mut queue = match open_queue(&[Arc::clone(&missing)], &[], 4) {
        Ok(queue) if queue.describe().contains("io_uring of depth") => queue,
        _ => return eprintln!("SKIPPED: io_uring"),
    };
    assert!(
        !missing.put_back(Arc::clone(&file)),
        "its queues do not know a device with a descriptor"
    );
    assert!(missing.is_absent());
    let (began, begun) = channel();
    let returned = Arc::new(Returned(file, Mutex::new(began)));
    assert!(missing.put_back(returned.clone()));
    assert!(!missing.put_back(returned), "it has come back already");
    assert!(!missing.is_absent());
    let mapping = memory(2);
    for tag in 0..2 {
        let segments = vec![segment(&mapping, tag, 1)];
        queue.submit(transfer(tag as u64, 0, Direction::Read, segments));
    }
    let mut completions = Vec::new();
    while completions.len() < 2 {
        queue.wait(&mut completions, Some(LONG));
    }
    assert!(completions.iter().all(|one| one.result.is_ok()));
    assert_eq!(begun.recv(), Ok(2));
}

#[test]
fn the_end_of_a_transfer_wakes_a_thread_that_sleeps_elsewhere() {
    let (handed, begun) = Handed::pair();
    let doorbell = Doorbell::new().unwrap();
    let devices = Devices::from(&[handed]);
    let mut queue = match open_signalling_queue(&devices, 4, &doorbell) {
        Ok(queue) => queue,
        Err(error) => return eprintln!("SKIPPED: {error}"),
    };
    let mapping = memory(1);
    queue.submit(transfer(
        0,
        0,
        Direction::Read,
        vec![segment(&mapping, 0, 1)],
    ));
    // Starts the transfer.
    queue.wait(&mut Vec::new(), Some(Duration::ZERO));
    let thread = std::thread::spawn(move || {
        let begun = begun.recv().unwrap();
        scatter(&begun.0.segments, 0, &pattern(5, 1));
        ended(begun);
    });
    // The owner sleeps in a ring or a poller that watches the doorbell's descriptor.
    let poller = Poller::new().unwrap();
    poller.add(&doorbell, 9).unwrap();
    let mut ready = Vec::new();
    poller.wait(&mut ready, Some(LONG)).unwrap();
    assert_eq!(ready, [9], "the sleep did not end");
    let mut completions = Vec::new();
    queue.wait(&mut completions, Some(Duration::ZERO));
    assert_eq!(completions.len(), 1);
    thread.join().unwrap();
    assert!(bytes_of(&mapping, 0, 1) == pattern(5, 1));
}

#[test]
fn a_queue_waits_for_the_transfers_of_a_device_at_its_end() {
    let (handed, begun) = Handed::pair();
    let mapping = memory(1);
    let mut queue = open_queue(&[handed], &[], 4).unwrap();
    queue.submit(transfer(
        0,
        0,
        Direction::Read,
        vec![segment(&mapping, 0, 1)],
    ));
    // Starts the transfer.
    queue.wait(&mut Vec::new(), Some(Duration::ZERO));
    let (dropped, has_dropped) = channel();
    let thread = std::thread::spawn(move || {
        drop(queue);
        dropped.send(()).unwrap();
    });
    let transfer = begun.recv().unwrap();
    assert!(has_dropped.recv_timeout(Duration::from_millis(50)).is_err());
    ended(transfer);
    has_dropped.recv_timeout(LONG).unwrap();
    thread.join().unwrap();
}
