//! Reports of failed write-backs, on a simulated device whose data writes fail. The journal uses durable writes, which do not fail.

use std::sync::{Arc, mpsc};

use jericho_sim::{FaultPlan, Operation, SimDevice};

use super::*;
use crate::simulated::{LONG, create, device, mount, read, write};
use crate::write_mode::{WriteMode, WriteSync};

const PAGE: usize = PAGE_BYTES as usize;

struct Bed {
    device: Arc<SimDevice>,
    mounted: Arc<Mounted>,
}

impl Bed {
    fn new() -> Bed {
        let device = device();
        let mounted = mount(&device);
        Bed { device, mounted }
    }

    fn open(&self, handle: &Arc<Handle>) -> Arc<Handle> {
        self.mounted.open_file(handle.file.ino(), true).unwrap()
    }

    fn put(&self, handle: &Arc<Handle>, page: u64, byte: u8) {
        let written = write(
            &self.mounted,
            handle,
            page * PAGE_BYTES,
            &[byte; PAGE],
            WriteMode::PLAIN,
        );
        assert_eq!(written.recv_timeout(LONG).unwrap() as usize, PAGE);
    }

    /// Makes the next writes of data fail, or none.
    fn fail_writes(&self, fails: bool) {
        let mut plan = FaultPlan::default();
        if fails {
            plan = FaultPlan::fail_nth(Some(Operation::Write), 1, libc::EIO);
            plan.faults[0].is_lasting = true;
        }
        self.device.set_plan(plan);
    }

    /// Writes the file back, as the evictor does after a while. Returns whether that succeeded.
    fn write_back(&self, handle: &Arc<Handle>) -> bool {
        let (tx, rx) = mpsc::channel();
        let slice = self.mounted.slice(handle.file.layout().home());
        let done = Box::new(move |result| tx.send(result).unwrap());
        slice.sync(&handle.file.object(), 0..u64::MAX, done);
        rx.recv_timeout(LONG).unwrap().is_ok()
    }

    /// Returns the errno of an fsync, or 0.
    fn fsync(&self, handle: &Arc<Handle>) -> i32 {
        let (tx, rx) = mpsc::channel();
        let done = Box::new(move |result| tx.send(result).unwrap());
        self.mounted.fsync(handle, false, done);
        let result: Result<()> = rx.recv_timeout(LONG).unwrap();
        result.err().map_or(0, |error| error.errno())
    }

    /// Returns the errno of an O_DSYNC write of one page, or 0.
    fn write_durable(&self, handle: &Arc<Handle>, page: u64) -> i32 {
        let mode = WriteMode {
            sync: WriteSync::Data,
            ..WriteMode::PLAIN
        };
        let (tx, rx) = mpsc::channel();
        let reply = move |result| tx.send(result).unwrap();
        let offset = page * PAGE_BYTES;
        self.mounted.write(handle, offset, &[7; PAGE], mode, reply);
        let result: Result<u32> = rx.recv_timeout(LONG).unwrap();
        result.err().map_or(0, |error| error.errno())
    }
}

#[test]
fn a_write_back_error_reaches_each_open_descriptor_once() {
    let bed = Bed::new();
    let writer = create(&bed.mounted, b"file");
    let [syncs, writes, never_asks] = [0; 3].map(|_| bed.open(&writer));
    bed.fail_writes(true);
    bed.put(&writer, 0, 1);
    assert!(!bed.write_back(&writer));
    bed.fail_writes(false);
    // The retry succeeds, and no descriptor has been told yet.
    assert!(bed.write_back(&writer));
    assert_eq!(bed.write_durable(&writes, 3), libc::EIO);
    assert_eq!(bed.write_durable(&writes, 3), 0);
    let later = bed.open(&writer);
    assert_eq!(bed.fsync(&later), 0, "opened after the report");
    for handle in [&syncs, &writer] {
        assert_eq!(bed.fsync(handle), libc::EIO);
        assert_eq!(bed.fsync(handle), 0);
    }
    assert_eq!(bed.fsync(&never_asks), libc::EIO, "no other took it");
    let found = read(&bed.mounted, &writer, (0, PAGE as u32), false);
    assert_eq!(found.recv_timeout(LONG).unwrap(), [1; PAGE]);
}

#[test]
fn an_error_that_no_descriptor_has_seen_waits_for_the_next_one() {
    let bed = Bed::new();
    let file = create(&bed.mounted, b"file");
    bed.fail_writes(true);
    bed.put(&file, 0, 1);
    assert!(!bed.write_back(&file));
    bed.fail_writes(false);
    assert!(bed.write_back(&file));
    let ino = file.file.ino();
    bed.mounted.close_file(&file);
    drop(file);
    // Makes all of the file's metadata durable, so that nothing but the error keeps the file in memory.
    bed.mounted.fs().sync_all().unwrap();
    let later = bed.mounted.open_file(ino, false).unwrap();
    assert_eq!(bed.fsync(&later), libc::EIO);
    assert_eq!(bed.fsync(&later), 0);
}

#[test]
fn a_failed_retry_of_a_page_is_no_new_error_and_the_failure_of_another_page_is() {
    let bed = Bed::new();
    let file = create(&bed.mounted, b"file");
    bed.fail_writes(true);
    bed.put(&file, 0, 1);
    // A sync alone would put the page into the journal.
    assert!(!bed.write_back(&file));
    assert_eq!(bed.fsync(&file), libc::EIO);
    assert!(!bed.write_back(&file), "a retry");
    bed.fail_writes(false);
    assert_eq!(bed.fsync(&file), 0);

    // Neighbours, so that one transfer has both pages.
    bed.put(&file, 1, 1);
    assert_eq!(bed.fsync(&file), 0);
    bed.fail_writes(true);
    bed.put(&file, 0, 2);
    assert!(!bed.write_back(&file));
    assert_eq!(bed.fsync(&file), libc::EIO);
    bed.put(&file, 1, 3);
    assert!(!bed.write_back(&file), "a retry, with another page");
    bed.fail_writes(false);
    assert_eq!(bed.fsync(&file), libc::EIO);
    assert_eq!(bed.fsync(&file), 0);
}

#[test]
fn a_syncfs_reports_a_write_back_error_once_and_leaves_it_to_the_descriptors() {
    let bed = Bed::new();
    let file = create(&bed.mounted, b"file");
    bed.fail_writes(true);
    bed.put(&file, 0, 1);
    assert!(!bed.write_back(&file));
    bed.fail_writes(false);
    // All data is on the device now: an unmount can go on.
    bed.mounted.sync().unwrap();
    assert_eq!(bed.mounted.syncfs().unwrap_err().errno(), libc::EIO);
    bed.mounted.syncfs().unwrap();
    assert_eq!(bed.fsync(&file), libc::EIO);
}
