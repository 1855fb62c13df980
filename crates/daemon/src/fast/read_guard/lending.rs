//! Clients that lend the locks of a half-done write, and reads that begin before a file has an inline writer.

use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use jericho_format::PAGE_BYTES;
use jericho_shm::{Area, Flags, HELD_MAX, Key, Slot};
use jericho_sim::FaultPlan;
use jericho_sys::files;

use super::*;
use crate::fast::Waited;
use crate::fast::client_table::Client;
use crate::fast::grants::tests::Bed;
use crate::handle::Handle;
use crate::simulated::{self, LONG, WRITE, asker, in_time};
use crate::write_mode::WriteMode;

const PAGE: usize = PAGE_BYTES as usize;
const PAGES: usize = 16;
/// An owner number that no client has.
const STOPPED: u16 = 700;

fn write(bed: &Bed, handle: &Arc<Handle>, at: usize, data: &[u8]) -> Receiver<u32> {
    simulated::write(&bed.mounted, handle, at as u64, data, WriteMode::PLAIN)
}

fn read(bed: &Bed, handle: &Arc<Handle>) -> Receiver<Vec<u8>> {
    let bytes = (0, (PAGES * PAGE) as u32);
    simulated::read(&bed.mounted, handle, bytes, false)
}

fn put(bed: &Bed, handle: &Handle, page: usize, byte: u8) {
    let slice = bed.mounted.fast.volume.slice(0);
    let key = Key::new(handle.file.object_id(), page as u64);
    let written = (slice.memory()).write_own(key, 0, &[byte; PAGE], OWNER_DAEMON, slice.epoch());
    written.expect("the page is there");
}

fn all() -> Segments {
    Segments::of(0, (PAGES * PAGE) as u64)
}

/// A client that has written half of its data, over all pages, and keeps its locks.
struct Lender {
    bed: Bed,
    owner: u16,
    area: Arc<Area>,
    block: u32,
}

impl Lender {
    fn new() -> Lender {
        let bed = Bed::new();
        let written = write(&bed, &bed.handle, 0, &[1; PAGES * PAGE]);
        assert_eq!(written.recv_timeout(LONG), Ok((PAGES * PAGE) as u32));
        let fast = &bed.mounted.fast;
        let owner = fast.clients.lock().free_owner().unwrap();
        let area = Arc::new(Area::create("test", owner).unwrap());
        fast.rings.add(owner, area.clone());
        let (block, _) = area.take_block(1, |_| false);
        let client = Client::for_test(1, area.clone(), 0, true);
        fast.clients.lock().by_owner.insert(owner, client);
        Lender {
            bed,
            owner,
            area,
            block,
        }
    }

    fn slot(&self) -> &Slot {
        self.bed.mounted.fast.slot(&self.bed.file)
    }

    /// Writes the first half of the data, and lends the locks as of `since`.
    fn begin(&self, since: u64) {
        let extend = self.slot().extend_lock().lock(self.owner).unwrap();
        let held = self.slot().lock_range(all(), self.owner).unwrap();
        for page in 0..PAGES / 2 {
            put(&self.bed, &self.bed.handle, page, 2);
        }
        let lent = self.area.lent(self.block);
        lent.lend(self.bed.file.slot, &held, Some(extend), since);
    }

    fn end(&self) {
        self.area.lent(self.block).take_back(self.slot());
    }

    fn has_all(&self) -> bool {
        self.slot().has_range_of(all(), self.owner) && self.slot().is_extended_by(self.owner)
    }
}

#[test]
fn other_writes_proceed_beside_a_half_done_one_and_reads_wait_for_its_end() {
    in_time(|| {
        let lender = Lender::new();
        let bed = &lender.bed;
        lender.begin(files::coarse_realtime_ns());
        let seen = read(bed, &bed.handle);
        // One write lies within the range, and one extends the file.
        for (at, len) in [(PAGE, 2 * PAGE), ((PAGES - 1) * PAGE, PAGE + 100)] {
            let written = write(bed, &bed.handle, at, &vec![7; len]);
            assert_eq!(written.recv_timeout(LONG), Ok(len as u32));
            assert!(lender.has_all(), "the lender has its locks again");
        }
        let ino = bed.handle.file.ino();
        bed.mounted.fast.resize(ino, None, || Ok(())).unwrap();
        assert!(lender.has_all());
        assert!(seen.try_recv().is_err(), "half of a write was read");
        // The lender's own request, in two parts as the kernel may split it.
        for at in [0, PAGES / 2 * PAGE] {
            let written = write(bed, &bed.handle, at, &[3; PAGES / 2 * PAGE]);
            assert_eq!(written.recv_timeout(LONG), Ok((PAGES / 2 * PAGE) as u32));
            assert!(seen.try_recv().is_err(), "half of a write was read");
        }
        lender.end();
        assert_eq!(seen.recv_timeout(LONG).unwrap(), [3; PAGES * PAGE]);
        assert!(lender.slot().range_counts(all()).is_some());
    });
}

#[test]
fn a_fallocate_that_zeroes_both_parts_of_a_half_done_write_counts_for_its_lender() {
    in_time(|| {
        let lender = Lender::new();
        lender.begin(files::coarse_realtime_ns());
        let bed = &lender.bed;
        let lent = lender.area.lent(lender.block);
        let may_write_rest = || lent.was_borrowed_at_most(lender.slot(), 0, 0);
        let len = (PAGES * PAGE) as u64;
        let keep_size = libc::FALLOC_FL_KEEP_SIZE;
        let fallocate = |mode| bed.mounted.try_fallocate(&bed.handle, mode, 0, len);
        fallocate(keep_size).unwrap();
        assert!(may_write_rest(), "no byte changed");
        fallocate(libc::FALLOC_FL_PUNCH_HOLE | keep_size).unwrap();
        assert!(!may_write_rest(), "the first part is gone");
        assert!(lender.has_all());
        lender.end();
    });
}

#[test]
fn a_lender_that_has_stopped_loses_its_locks_as_any_other_holder_does() {
    // A malicious client stores a time that never grows old.
    for since in [
        files::coarse_realtime_ns() - HELD_MAX.as_nanos() as u64,
        u64::MAX,
    ] {
        let lender = Lender::new();
        let bed = &lender.bed;
        lender.begin(since);
        let written = write(bed, &bed.handle, PAGE, &[7; PAGES * PAGE]);
        assert_eq!(written.recv_timeout(LONG), Ok((PAGES * PAGE) as u32));
        assert!(!lender.slot().has_range_of(all(), lender.owner));
        assert!(!lender.slot().is_extended_by(lender.owner));
        lender.end();
        assert!(lender.slot().range_counts(all()).is_some());
    }
}

#[test]
fn a_lender_that_has_ended_its_loan_or_died_gets_nothing_back() {
    for dies in [false, true] {
        in_time(|| {
            let lender = Lender::new();
            let fast = &lender.bed.mounted.fast;
            lender.begin(files::coarse_realtime_ns());
            assert!(!fast.hold_extend(&lender.bed.file), "borrowed");
            let taken = fast.lock_range(&lender.bed.file, all());
            match dies {
                true => drop(fast.clients.lock().by_owner.remove(&lender.owner)),
                false => lender.end(),
            }
            fast.unlock_range(&lender.bed.file, &taken);
            fast.give_back_extend(&lender.bed.file);
            assert!(lender.slot().range_counts(all()).is_some());
            assert!(lender.slot().extend_lock().is_held_by(0));
        });
    }
}

#[test]
fn a_read_that_began_before_the_first_inline_writer_sees_no_half_of_its_write() {
    const LATCHED: usize = 8;
    in_time(|| {
        let bed = Bed::new();
        let handle = bed.plain_named(b"late");
        let written = write(&bed, &handle, 0, &[1; PAGES * PAGE]);
        assert_eq!(written.recv_timeout(LONG), Ok((PAGES * PAGE) as u32));
        let memory = bed.mounted.fast.volume.slice(0).memory();
        let found = memory.lookup(Key::new(handle.file.object_id(), LATCHED as u64));
        let found = found.expect("just written");
        let entry = memory.entry(found.index);
        let latched = entry.try_latch(found.state, STOPPED);
        let latched = latched.expect("no other writer");
        // This read copies the first pages, and waits for the latch.
        let seen = read(&bed, &handle);
        let (tx, rx) = channel();
        (bed.mounted).call(&handle, WRITE, asker(), move |answer| {
            tx.send(answer.status).unwrap();
        });
        assert_eq!(rx.recv_timeout(LONG), Ok(0));
        let file = bed.mounted.fast.written_file(handle.file.ino());
        let file = file.expect("the file has a writer");
        // This is a complete inline write.
        let slot = bed.mounted.fast.slot(&file);
        let held = slot.lock_range(all(), 7).unwrap();
        (0..LATCHED).for_each(|page| put(&bed, &handle, page, 2));
        entry.unlatch(latched, Flags::DIRTY).expect("in time");
        (LATCHED..PAGES).for_each(|page| put(&bed, &handle, page, 2));
        slot.unlock_range(&held);
        drop(file);
        let seen = seen.recv_timeout(LONG).unwrap();
        bed.mounted.close_file(&handle);
        assert_eq!(seen, [2; PAGES * PAGE]);
    });
}

/// Waits for words of the lender's file. The receiver gets whether the read has locked out all writers.
fn wait_alone(lender: &Lender, segments: Segments) -> Receiver<bool> {
    let (tx, rx) = channel();
    let ino = lender.bed.handle.file.ino();
    let mounted = &lender.bed.mounted;
    (mounted.loan_waits).wait_alone(&mounted.fast, ino, segments, move |waited| {
        let is_alone = matches!(waited, Waited::Alone(_));
        drop(waited);
        let _ = tx.send(is_alone);
    });
    rx
}

#[test]
fn waiting_reads_end_at_once_when_the_volume_closes() {
    in_time(|| {
        let lender = Lender::new();
        lender.begin(files::coarse_realtime_ns());
        let waits = wait_alone(&lender, all());
        lender.bed.mounted.loan_waits.close();
        assert_eq!(waits.recv_timeout(LONG), Ok(false));
        assert_eq!(wait_alone(&lender, all()).try_recv(), Ok(false));
        assert!(lender.has_all(), "the lender has lost its words");
    });
}

#[test]
fn a_read_that_waits_for_a_lent_word_holds_no_other_word() {
    in_time(|| {
        let lender = Lender::new();
        let slot = lender.slot();
        let first = Segments::of(0, 1 << 16);
        let keeps = || slot.has_range_of(first, OWNER_DAEMON);
        let second = Segments::of(1 << 16, 1 << 16);
        let held = slot.lock_range(second, lender.owner).unwrap();
        let reader = wait_alone(&lender, Segments::of(0, 1 << 17));
        simulated::wait_until("the reader takes the free words", keeps);
        let since = files::coarse_realtime_ns();
        (lender.area.lent(lender.block)).lend(lender.bed.file.slot, &held, None, since);
        let begun = Instant::now();
        while keeps() {
            assert!(
                begun.elapsed() < HELD_MAX / 2,
                "the reader keeps the first word"
            );
            std::thread::yield_now();
        }
        for _ in 0..10 {
            assert!(
                !keeps(),
                "the reader takes the first word while the second is lent"
            );
            std::thread::sleep(HELD_MAX / 100);
        }
        assert!(reader.try_recv().is_err());
        lender.end();
        assert_eq!(reader.recv_timeout(LONG), Ok(true));
        assert!(
            slot.range_counts(all()).is_some(),
            "the reader gives the words back"
        );
    });
}

#[test]
fn waiting_reads_of_one_file_do_not_delay_those_of_another() {
    in_time(|| {
        let lender = Lender::new();
        lender.begin(files::coarse_realtime_ns());
        let waits: Vec<_> = (0..8).map(|_| wait_alone(&lender, all())).collect();
        // These words are free. The thread treats them like those of another file.
        let other = wait_alone(&lender, Segments::of(1 << 16, 1 << 16));
        assert_eq!(other.recv_timeout(LONG), Ok(true));
        let all_wait = waits.iter().all(|wait| wait.try_recv().is_err());
        assert!(all_wait, "the other read waited for the loan");
        lender.end();
        for wait in waits {
            assert_eq!(wait.recv_timeout(LONG), Ok(true));
        }
    });
}

/// Reads all of the lender's file. The receiver gets the result, and whether the words were free at the reply.
fn read_and_see_words(lender: &Lender) -> Receiver<(Result<usize, i32>, bool)> {
    let bed = &lender.bed;
    let (mounted, file) = (bed.mounted.clone(), bed.file.clone());
    let (tx, rx) = channel();
    let reply = move |read: jericho_fs::Result<usize>, _: Vec<u8>| {
        let are_free = mounted.fast.slot(&file).range_counts(all()).is_some();
        let _ = tx.send((read.map_err(|error| error.errno()), are_free));
    };
    let len = (PAGES * PAGE) as u32;
    (bed.mounted).read(&bed.handle, 0, len, false, vec![], reply);
    rx
}

#[test]
fn a_read_that_waited_and_fails_releases_the_words_before_its_reply() {
    in_time(|| {
        let lender = Lender::new();
        lender.begin(files::coarse_realtime_ns());
        simulated::evict(&lender.bed.mounted, &lender.bed.handle);
        let seen = read_and_see_words(&lender);
        assert!(seen.try_recv().is_err(), "half of a write was read");
        simulated::fail_reads(&lender.bed.device);
        lender.end();
        let seen = seen.recv_timeout(LONG);
        // Removes the faults before an assertion can fail: closing the volume reads.
        lender.bed.device.set_plan(FaultPlan::default());
        assert_eq!(seen, Ok((Err(libc::EIO), true)));
    });
}

#[test]
fn a_read_that_waited_while_the_file_was_truncated_releases_the_words_before_its_reply() {
    in_time(|| {
        let lender = Lender::new();
        lender.begin(files::coarse_realtime_ns());
        let seen = read_and_see_words(&lender);
        lender.bed.truncate(0);
        assert!(seen.try_recv().is_err(), "half of a write was read");
        lender.end();
        assert_eq!(seen.recv_timeout(LONG), Ok((Ok(0), true)));
    });
}
