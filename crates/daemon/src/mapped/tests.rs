//! Write-backs of pages that the kernel has, and when their records end.

use std::ops::Range;
use std::sync::Arc;

use jericho_fs::types::{Ino, SetAttr};
use parking_lot::Mutex;

use super::{PAGE, RECORDS_MANY, RECORDS_MAX, WRITES_MIN};
use crate::kernel_cache::KernelCache;
use crate::simulated::{self, CALLER};
use crate::{Handle, Mounted, WriteMode};

/// A mounted volume with one open file, as the kernel sees them.
struct Bed {
    mounted: Arc<Mounted>,
    handle: Arc<Handle>,
}

impl Bed {
    fn new(pages: usize) -> Bed {
        let mounted = simulated::mount(&simulated::device());
        let handle = simulated::create(&mounted, b"f");
        let bed = Bed { mounted, handle };
        for page in 0..pages {
            bed.write(page * PAGE, &[1; PAGE]);
        }
        bed
    }

    fn read(&self, at: usize, len: usize, fills_page_cache: bool) -> Vec<u8> {
        let bytes = (at as u64, len as u32);
        let read = simulated::read(&self.mounted, &self.handle, bytes, fills_page_cache);
        read.recv().unwrap()
    }

    /// Gives pages to the kernel.
    fn fill(&self, page: usize, pages: usize) -> Vec<u8> {
        self.read(page * PAGE, pages * PAGE, true)
    }

    fn put(&self, at: usize, bytes: &[u8], of_mapping: bool) {
        let mode = WriteMode {
            of_mapping,
            ..WriteMode::PLAIN
        };
        let done = simulated::write(&self.mounted, &self.handle, at as u64, bytes, mode);
        assert_eq!(done.recv().unwrap() as usize, bytes.len());
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        self.put(at, bytes, false);
    }

    fn write_back(&self, page: usize, bytes: &[u8]) {
        self.put(page * PAGE, bytes, true);
    }

    fn kept(&self) -> (u64, u64) {
        let counters = self.mounted.fast.counts().values();
        (counters.mapped_kept, counters.mapped_forgotten)
    }

    fn fallocate(&self, mode: i32, at: usize, len: usize) {
        let (at, len) = (at as u64, len as u64);
        let done = self.mounted.try_fallocate(&self.handle, mode, at, len);
        done.unwrap();
    }

    fn resize(&self, size: usize) {
        let set = SetAttr {
            size: Some(size as u64),
            ..SetAttr::default()
        };
        let ino = self.handle.file.ino();
        self.mounted.setattr(ino, set, CALLER).unwrap();
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.mounted.close().unwrap();
    }
}

/// Returns a page of ones with other bytes from `at` on.
fn page(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut page = vec![1; PAGE];
    page[at..at + bytes.len()].copy_from_slice(bytes);
    page
}

#[test]
fn a_write_back_overwrites_no_write_that_the_kernel_did_not_know() {
    let bed = Bed::new(3);
    assert_eq!(bed.fill(0, 3), vec![1; 3 * PAGE]);
    bed.write(PAGE - 2, &[5; 4]);
    // The kernel stored to the first two pages.
    let back = [page(0, &[7]), page(9, &[8])].concat();
    bed.write_back(0, &back);
    let want = [page(0, &[7]), page(9, &[8]), page(0, &[])].concat();
    let mut want: Vec<u8> = want;
    want[PAGE - 2..PAGE + 2].fill(5);
    assert_eq!(bed.read(0, 3 * PAGE, false), want);
    // The kernel is given the newest bytes, so it may change them back.
    assert_eq!(bed.fill(0, 3), want);
    bed.write_back(0, &[1; 3 * PAGE]);
    assert_eq!(bed.read(0, 3 * PAGE, false), [1; 3 * PAGE]);
    assert_eq!(bed.kept(), (2, 0));
}

#[test]
fn a_write_back_fills_no_part_of_a_page_that_was_zeroed_since() {
    const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    for mode in [PUNCH, libc::FALLOC_FL_ZERO_RANGE] {
        let bed = Bed::new(4);
        bed.fill(0, 4);
        // Zeroes a range that begins and ends in the middle of pages, and then a range within one page.
        bed.fallocate(mode, PAGE / 2, 2 * PAGE);
        bed.fallocate(mode, 3 * PAGE + 10, 20);
        // The kernel has stored to the first page, and writes back before it learns that the call has ended.
        bed.write_back(0, &page(0, &[7]));
        bed.write_back(2, &page(0, &[]));
        bed.write_back(3, &page(9, &[8]));
        let mut want = vec![1; 4 * PAGE];
        want[0] = 7;
        want[PAGE / 2..5 * PAGE / 2].fill(0);
        want[3 * PAGE + 9] = 8;
        want[3 * PAGE + 10..3 * PAGE + 30].fill(0);
        assert_eq!(bed.read(0, 4 * PAGE, false), want);
        // A page that is a hole already needs no space.
        bed.fallocate(mode, PAGE + 5, 10);
    }
}

#[test]
fn a_page_that_had_to_be_fetched_is_compared_too() {
    // Writes more than the cache holds.
    let pages = 3000;
    let bed = Bed::new(pages);
    bed.fill(0, 1);
    let rest = bed.read(PAGE, PAGE, false);
    assert_eq!(rest, [1; PAGE]);
    for page in 1..pages {
        bed.read(page * PAGE, PAGE, false);
    }
    bed.write(0, &[5; PAGE]);
    for page in 1..pages {
        bed.read(page * PAGE, PAGE, false);
    }
    bed.write_back(0, &page(3, &[7]));
    let mut want = vec![5; PAGE];
    want[3] = 7;
    assert_eq!(bed.read(0, PAGE, false), want);
}

#[test]
fn a_write_beyond_the_end_that_the_kernel_knows_is_kept() {
    let bed = Bed::new(0);
    bed.write(0, &[1; 10]);
    assert_eq!(bed.fill(0, 1), [1; 10]);
    bed.write(10, &[2; 10]);
    let mut back = vec![0; PAGE];
    back[..10].fill(3);
    bed.write_back(0, &back[..20]);
    assert_eq!(bed.read(0, PAGE, false), [[3; 10], [2; 10]].concat());
    // The truncated part is zero on both sides.
    bed.resize(15);
    bed.write(0, &[4; 20]);
    back[..10].fill(3);
    bed.write_back(0, &back[..20]);
    let want = [&[4; 10][..], &[4; 5], &[4; 5]].concat();
    assert_eq!(bed.read(0, PAGE, false)[10..], want[10..]);
}

#[test]
fn the_number_of_records_is_limited_and_the_oldest_go_first() {
    let pages = RECORDS_MAX + 10;
    let bed = Bed::new(pages);
    bed.fill(0, pages.min(256));
    for at in 0..pages {
        bed.write(at * PAGE, &[5]);
    }
    let (kept, forgotten) = bed.kept();
    assert_eq!(kept as usize, pages);
    assert!((10..20).contains(&forgotten), "{forgotten}");
    bed.write_back(pages - 1, &[1; PAGE]);
    assert_eq!(bed.read((pages - 1) * PAGE, 1, false), [5]);
}

#[test]
fn a_file_that_no_program_has_open_is_not_watched() {
    let bed = Bed::new(1);
    let ino = bed.handle.file.ino();
    bed.fill(0, 1);
    bed.write(0, &[5]);
    assert_eq!(bed.kept(), (1, 0));
    let other = bed.mounted.open_file(ino, true).unwrap();
    bed.mounted.close_file(&bed.handle);
    assert!(bed.mounted.mapped.file(ino).is_some());
    bed.mounted.close_file(&other);
    assert!(bed.mounted.mapped.file(ino).is_none());
    let handle = bed.mounted.open_file(ino, true).unwrap();
    assert!(!handle.file.writing().is_watched());
}

/// Records the pages that it has to drop, and runs the test's action meanwhile.
#[derive(Default)]
struct Kernel {
    dropped: Mutex<Vec<Option<Range<u64>>>>,
    meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Kernel {
    fn drops(&self, what: Option<Range<u64>>) {
        self.dropped.lock().push(what);
        if let Some(meanwhile) = self.meanwhile.lock().take() {
            meanwhile();
        }
    }
}

impl KernelCache for Kernel {
    fn drop_attributes(&self, _: Ino) {}

    fn drop_pages(&self, _: Ino) {
        self.drops(None);
    }

    fn drop_some_pages(&self, _: Ino, bytes: Range<u64>) {
        self.drops(Some(bytes));
    }
}

#[test]
fn records_end_when_the_kernel_has_dropped_their_pages() {
    let bed = Arc::new(Bed::new(RECORDS_MANY + 2));
    let kernel = Kernel::default();
    bed.fill(0, RECORDS_MANY + 2);
    let file = bed.mounted.mapped.file(bed.handle.file.ino()).unwrap();
    for page in [0, 1, 3] {
        bed.write(page * PAGE, &[5]);
    }
    // Before the drop is complete, the kernel reads one page again, and a program writes it again.
    let again = bed.clone();
    *kernel.meanwhile.lock() = Some(Box::new(move || {
        again.fill(1, 1);
        again.write(PAGE, &[6]);
    }));
    file.drop_pages(&kernel);
    let pages = |pages: Range<u64>| Some(pages.start * PAGE as u64..pages.end * PAGE as u64);
    assert_eq!(*kernel.dropped.lock(), [pages(0..2), pages(3..4)]);
    let left: Vec<u64> = file
        .watch
        .lock()
        .changes
        .all()
        .iter()
        .map(|r| r.0)
        .collect();
    assert_eq!(left, [1]);
    bed.write_back(1, &page(0, &[5]));
    assert_eq!(bed.read(PAGE, 1, false), [6]);
}

#[test]
fn a_file_that_is_only_written_for_long_is_not_watched() {
    let bed = Arc::new(Bed::new(1));
    let kernel = Kernel::default();
    bed.fill(0, 1);
    let file = bed.mounted.mapped.file(bed.handle.file.ino()).unwrap();
    let write_much = |times: u32| (0..times).for_each(|n| bed.write(0, &[n as u8]));
    write_much(WRITES_MIN);
    let again = bed.clone();
    *kernel.meanwhile.lock() = Some(Box::new(move || drop(again.fill(0, 1))));
    file.drop_pages(&kernel);
    assert!(
        bed.handle.file.writing().is_watched(),
        "the kernel has read a page"
    );
    write_much(WRITES_MIN);
    file.drop_pages(&kernel);
    assert!(
        bed.handle.file.writing().is_watched(),
        "the drop was in vain"
    );
    write_much(4 * WRITES_MIN);
    file.drop_pages(&kernel);
    assert!(!bed.handle.file.writing().is_watched());
    assert!(kernel.dropped.lock().contains(&None));
}

#[test]
fn a_read_for_the_page_cache_waits_for_writes_that_keep_no_records() {
    let bed = Arc::new(Bed::new(1));
    let writing = bed.handle.file.writing();
    assert!(!writing.is_watched());
    assert!(!bed.mounted.mapped.try_begin_fill(&bed.handle.file).1);
    let reader = std::thread::spawn({
        let bed = bed.clone();
        move || bed.fill(0, 1)
    });
    // Writes that begin from here on do not delay it.
    let later = bed.handle.file.writing();
    assert!(later.is_watched() && !reader.is_finished());
    drop(writing);
    assert_eq!(reader.join().unwrap(), [1; PAGE]);
    assert!(bed.mounted.mapped.try_begin_fill(&bed.handle.file).1);
}
