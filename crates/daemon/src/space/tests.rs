use std::sync::mpsc;
use std::time::Duration;

use jericho_format::PAGE_BYTES;
use jericho_fs::types::{ROOT, SetAttr};
use jericho_shm::{Answer, Segments};

use super::*;
use crate::simulated::{self, LONG};
use crate::{Mounted, WriteMode};

const PAGE: usize = PAGE_BYTES as usize;
const NEVER: Duration = Duration::from_secs(3600);
/// A full volume with a file of one page. The rest of its space belongs to a file that was removed and is still open.
struct Full {
    mounted: Arc<Mounted>,
    file: Arc<Handle>,
    removed: Arc<Handle>,
}

type Replied<T> = mpsc::Receiver<Result<T>>;

impl Full {
    fn new(patience: Duration) -> Full {
        let mounted = simulated::mount(&simulated::device());
        mounted.serve_clients(Arc::new(())).unwrap();
        mounted.fs().set_space_patience(patience);
        let create = |name| simulated::create(&mounted, name);
        let (file, removed) = (create(b"file".as_slice()), create(b"removed"));
        let full = Full {
            mounted,
            file,
            removed,
        };
        let written = full.write(0, &[1; PAGE]);
        assert_eq!(written.recv_timeout(LONG).unwrap().unwrap(), PAGE as u32);
        simulated::fill(&full.mounted, &full.removed);
        full.mounted.fs().unlink(ROOT, b"removed").unwrap();
        full
    }

    fn write(&self, at: usize, data: &[u8]) -> Replied<u32> {
        let (tx, rx) = mpsc::channel();
        let reply = move |written| tx.send(written).unwrap();
        (self.mounted).write(&self.file, at as u64, data, WriteMode::PLAIN, reply);
        rx
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let range = (at as u64, len as u32);
        let read = simulated::read(&self.mounted, &self.file, range, false);
        read.recv_timeout(LONG).unwrap()
    }

    fn fallocate(&self, at: u64, len: u64) -> Replied<()> {
        let (tx, rx) = mpsc::channel();
        let reply = move |result| tx.send(result).unwrap();
        self.mounted.fallocate(&self.file, 0, at, len, reply);
        rx
    }

    fn copy(&self, to: u64, len: u64) -> Replied<u64> {
        let (tx, rx) = mpsc::channel();
        let reply = move |result| tx.send(result).unwrap();
        (self.mounted).copy_range((&self.file, 0), (&self.file, to), len, reply);
        rx
    }

    /// Makes a program an inline writer of the file.
    fn grant(&self) -> mpsc::Receiver<Answer> {
        let (tx, rx) = mpsc::channel();
        let reply = move |answer| tx.send(answer).unwrap();
        (self.mounted).call(&self.file, simulated::WRITE, simulated::asker(), reply);
        rx
    }

    fn wait_for_waits(&self, count: usize) {
        simulated::wait_until("requests wait", || self.mounted.fs().space_waits() >= count);
    }

    /// Closes the removed file, which frees its space.
    fn free(&self) {
        self.mounted.close_file(&self.removed);
        self.mounted.fs().forget(self.removed.file.ino(), 1);
    }
}

fn answer<T>(replied: &Replied<T>) -> Result<T> {
    replied.recv_timeout(LONG).expect("a request is answered")
}

fn is_full<T>(replied: &Replied<T>) -> bool {
    matches!(answer(replied), Err(error) if error.is_full_volume())
}

#[test]
fn a_write_that_waits_for_space_delays_no_other_request() {
    let full = Full::new(NEVER);
    // Covers several pages; space for the first one is allocated.
    let waiting = full.write(0, &[2; 3 * PAGE]);
    full.wait_for_waits(1);
    let granted = full.grant().recv_timeout(LONG);
    assert_eq!(granted.expect("a grant waits for no such write").status, 0);
    let other = full.write(3, &[3]);
    assert_eq!(answer(&other).unwrap(), 1);
    assert_eq!(full.read(0, 5), [1, 1, 1, 3, 1], "half of the write");
    full.mounted.getattr(full.file.file.ino()).unwrap();
    assert!(waiting.try_recv().is_err());
    full.free();
    assert_eq!(answer(&waiting).unwrap(), 3 * PAGE as u32);
    assert_eq!(full.read(0, 4 * PAGE), [2; 3 * PAGE]);
}

#[test]
fn a_write_that_waits_for_space_keeps_no_lock_of_inline_writers() {
    let full = Full::new(NEVER);
    assert_eq!(full.grant().recv_timeout(LONG).unwrap().status, 0);
    let waiting = full.write(0, &[2; 3 * PAGE]);
    full.wait_for_waits(1);
    let fast = &full.mounted.fast;
    let slot_file = fast.slot_file(full.file.file.ino()).unwrap();
    let slot = fast.slot(&slot_file);
    // Tries once: a client does not get a word that a thread of the daemon keeps.
    let held = slot.lock_range(Segments::of(0, 3 * PAGE_BYTES), 7);
    slot.unlock_range(&held.expect("the range is free"));
    let held = slot.extend_lock().try_lock(7);
    assert!(
        slot.extend_lock()
            .unlock(held.expect("the extend lock is free"))
    );
    full.free();
    assert_eq!(answer(&waiting).unwrap(), 3 * PAGE as u32);
    assert_eq!(full.read(0, 4 * PAGE), [2; 3 * PAGE]);
}

#[test]
fn many_requests_wait_and_the_thread_that_sent_them_frees_the_space() {
    const COUNT: usize = 40;
    let full = Full::new(NEVER);
    let writes: Vec<_> = (1..COUNT)
        .map(|n| full.write(n * PAGE, &[n as u8; PAGE]))
        .collect();
    let fallocate = full.fallocate(100 * PAGE_BYTES, 8 * PAGE_BYTES);
    let copy = full.copy(200 * PAGE_BYTES, PAGE_BYTES);
    full.wait_for_waits(COUNT + 1);
    full.free();
    for (n, written) in (1..).zip(writes) {
        assert_eq!(answer(&written).unwrap(), PAGE as u32, "{n}");
        assert_eq!(full.read(n * PAGE, PAGE), [n as u8; PAGE]);
    }
    answer(&fallocate).unwrap();
    assert_eq!(answer(&copy).unwrap(), PAGE_BYTES);
    assert_eq!(full.read(200 * PAGE, PAGE), [1; PAGE]);
}

#[test]
fn no_request_waits_for_ever() {
    let full = Full::new(Duration::from_millis(200));
    let writes: Vec<_> = (1..9).map(|n| full.write(n * PAGE, &[1; PAGE])).collect();
    let (fallocate, copy) = (full.fallocate(1 << 20, 4096), full.copy(1 << 20, 4096));
    assert!(writes.iter().all(is_full));
    assert!(is_full(&fallocate) && is_full(&copy));
    let overwritten = full.write(0, &[2; PAGE]);
    assert_eq!(answer(&overwritten).unwrap(), PAGE as u32);
}

#[test]
fn requests_beyond_the_limit_do_not_wait() {
    let full = Full::new(NEVER);
    full.mounted.limit_space_waits(4);
    let first = [full.write(PAGE, &[1]), full.write(2 * PAGE, &[1])];
    full.wait_for_waits(2);
    assert!(is_full(&full.write(3 * PAGE, &[1])));
    assert!(is_full(&full.fallocate(1 << 20, 4096)));
    full.free();
    assert!(first.iter().all(|replied| answer(replied).is_ok()));
}

#[test]
fn one_user_takes_at_most_half_of_the_places() {
    let full = Full::new(NEVER);
    full.mounted.limit_space_waits(4);
    full.file.set_user(1000);
    let first = [full.write(PAGE, &[1]), full.write(2 * PAGE, &[1])];
    full.wait_for_waits(2);
    assert!(is_full(&full.write(3 * PAGE, &[1])));
    full.file.set_user(0);
    let other = full.write(4 * PAGE, &[1]);
    full.wait_for_waits(3);
    full.free();
    assert!(first.iter().all(|replied| answer(replied).is_ok()));
    assert!(answer(&other).is_ok());
}

/// Truncates a file to size 0.
fn truncate(full: &Full, handle: &Handle) {
    let set = SetAttr {
        size: Some(0),
        ..Default::default()
    };
    let ino = handle.file.ino();
    full.mounted.setattr(ino, set, simulated::CALLER).unwrap();
}

/// Returns a full volume on which another file uses 1 MiB.
fn full_with_other(patience: Duration) -> (Full, Arc<Handle>) {
    let full = Full::new(patience);
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (removed, mounted) = (&full.removed, &full.mounted);
    mounted.try_fallocate(removed, punch, 0, 1 << 20).unwrap();
    mounted.fs().commit().unwrap();
    let other = simulated::create(mounted, b"other");
    let at = simulated::fill(mounted, &other);
    assert!(at >= 1 << 19, "{at}");
    (full, other)
}

#[test]
fn requests_beyond_the_limit_take_space_that_a_commit_frees() {
    let (full, other) = full_with_other(NEVER);
    full.mounted.limit_space_waits(1);
    let first = full.write(PAGE, &[1; PAGE]);
    full.wait_for_waits(1);
    // This truncation is not durable yet.
    truncate(&full, &other);
    let others: Vec<_> = (2..12).map(|n| full.write(n * PAGE, &[1; PAGE])).collect();
    let fallocate = full.fallocate(1 << 20, 4096);
    let copy = full.copy(2 << 20, PAGE_BYTES);
    assert!(others.iter().all(|replied| answer(replied).is_ok()));
    answer(&fallocate).unwrap();
    assert_eq!(answer(&copy).unwrap(), PAGE_BYTES);
    assert!(answer(&first).is_ok());
}

#[test]
fn a_write_that_waits_takes_space_that_another_file_frees() {
    let (full, other) = full_with_other(NEVER);
    let waiting = full.write(PAGE, &[1; PAGE]);
    full.wait_for_waits(1);
    truncate(&full, &other);
    full.mounted.fs().commit().unwrap();
    assert_eq!(answer(&waiting).unwrap(), PAGE as u32);
}

#[test]
fn a_request_that_can_never_fit_does_not_wait() {
    let full = Full::new(NEVER);
    assert!(is_full(&full.fallocate(0, 1 << 40)));
    // A request that fits into the space that can become free waits for it.
    let waiting = full.fallocate(0, PAGE_BYTES * 3);
    full.wait_for_waits(1);
    full.free();
    answer(&waiting).unwrap();
}

#[test]
fn a_range_of_a_mapped_file_that_cannot_be_zeroed_is_unchanged() {
    let full = Full::new(Duration::ZERO);
    let read = simulated::read(&full.mounted, &full.file, (0, PAGE as u32), true);
    read.recv_timeout(LONG).unwrap();
    assert!(full.mounted.mapped.file(full.file.file.ino()).is_some());
    let (tx, rx) = mpsc::channel();
    let reply = move |result| tx.send(result).unwrap();
    let zero = libc::FALLOC_FL_ZERO_RANGE;
    (full.mounted).fallocate(&full.file, zero, 100, 1 << 30, reply);
    assert!(is_full(&rx));
    assert_eq!(full.read(0, PAGE), [1; PAGE]);
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let result = (full.mounted).try_fallocate(&full.file, punch, 100, 1 << 60);
    assert!(matches!(result, Err(Error::Errno(libc::EFBIG))));
    assert_eq!(full.read(0, PAGE), [1; PAGE]);
    (full.mounted)
        .try_fallocate(&full.file, zero, 100, 50)
        .unwrap();
    assert_eq!(full.read(98, 4), [1, 1, 0, 0]);
}

#[test]
fn a_copy_that_waits_checks_again_whether_the_file_is_mapped() {
    let full = Full::new(NEVER);
    // The range is not a whole page. If the file is mapped, the kernel has to copy such a range itself.
    let copy = full.copy(PAGE_BYTES + 100, 1000);
    full.wait_for_waits(1);
    let read = simulated::read(&full.mounted, &full.file, (0, PAGE as u32), true);
    read.recv_timeout(LONG).unwrap();
    full.free();
    let result = answer(&copy);
    assert!(
        matches!(result, Err(Error::Errno(libc::EOPNOTSUPP))),
        "{result:?}"
    );
}

#[test]
fn the_end_of_the_mount_ends_the_waits() {
    let full = Full::new(NEVER);
    let write = full.write(PAGE, &[1; PAGE]);
    let fallocate = full.fallocate(1 << 20, 4096);
    full.wait_for_waits(2);
    full.mounted.close().unwrap();
    assert!(is_full(&write) && is_full(&fallocate));
}
