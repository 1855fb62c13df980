//! Sixty-four threads in six programs share three files, and programs with many writing threads are killed again and again.
//!
//! Each writing thread has a *cell* in every page of one file, so that threads of all programs write within the same pages.
//! It owns pages of a second file, which it writes several at a time. It appends *lines* of one size to a third file. After each
//! write the thread notes a sequence number in the ledger (see `killing`). So a cell or a page holds at any time the noted write or
//! the one after it, and the third file holds each noted line once. A killed program may leave its last writes half done, in
//! its own cells and pages only.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jericho_sim::Random;

use crate::commands::wait_until;
use crate::killing::{
    self, Entry, Ledger, Plan, Play, Stage, Writing, assert_record, assert_record_or_next,
    number_at, record,
};
use crate::volume::Volume;

const PAGE: usize = 4096;
/// Writing programs, and threads of each. The last program writes through the kernel.
const PROGRAMS: u64 = 4;
const INLINE_PROGRAMS: u64 = 3;
const THREADS_EACH: u64 = 12;
const THREADS: u64 = PROGRAMS * THREADS_EACH;
/// Threads of each of the two programs that verify.
const VERIFIERS_EACH: u64 = 8;
/// Bytes of a cell. Every thread has one cell in each page of the first file.
const CELL: usize = 64;
const CELL_PAGES: u64 = 12;
const PAGES_EACH: u64 = 8;
const MOST_PAGES_IN_A_WRITE: u64 = 4;
const LINE: usize = 256;
const LINES_EACH_MAX: u64 = 1500;
/// Limit of every wait. A program that reaches it hangs.
const HANG: Duration = Duration::from_secs(90);
/// How long the test kills programs (`make soak` asks for more), and how often at least.
const SECONDS: u64 = 12;
const KILLS_MIN: u32 = 8;

/// Returns a thread's cell in a page after the write with this sequence number. A cell is the start of a page's record.
fn cell(thread: u64, page: u64, sequence: u64) -> Vec<u8> {
    record(1 << 16 | thread << 8 | page, sequence)[..CELL].to_vec()
}

fn cell_at(thread: u64, page: u64) -> u64 {
    page * PAGE as u64 + thread * CELL as u64
}

fn line(thread: u64, sequence: u64) -> Vec<u8> {
    let mut line = thread.to_le_bytes().to_vec();
    line.extend_from_slice(&record(1 << 17 | thread, sequence)[..LINE - 8]);
    line
}

/// Returns the entry for the number of a thread's writes, which shows that the thread continues.
fn writes(thread: u64) -> Entry {
    Entry::Own(thread)
}

/// Returns the entry for the last line that a thread has appended.
fn appended(thread: u64) -> Entry {
    Entry::Own(THREADS + thread)
}

/// Returns the entry for the last write of a thread's cell in a page.
fn cell_written(thread: u64, page: u64) -> Entry {
    Entry::Own(2 * THREADS + thread * CELL_PAGES + page)
}

/// Returns the entry for the last write of a page of the second file.
fn page_written(page: u64) -> Entry {
    Entry::Own((2 + CELL_PAGES) * THREADS + page)
}

const ENTRIES: u64 = (2 + CELL_PAGES + PAGES_EACH) * THREADS;

fn threads_of(program: u64) -> Range<u64> {
    program * THREADS_EACH..(program + 1) * THREADS_EACH
}

/// The test's files as one of its processes sees them.
struct Files<'a>(&'a Stage);

impl Files<'_> {
    fn cells_and_pages(&self) -> (File, File) {
        (self.0.file("cells"), self.0.file("pages"))
    }

    fn lines(&self) -> PathBuf {
        self.0.on_mount.join("lines")
    }

    /// Writes as the threads of one program until it is killed.
    fn write(&self, writing: Writing) {
        let (program, mut random) = (writing.number, writing.random);
        let (cells, pages) = self.cells_and_pages();
        let begun = Barrier::new(THREADS_EACH as usize);
        let (cells, pages, begun) = (&cells, &pages, &begun);
        std::thread::scope(|scope| {
            for thread in threads_of(program) {
                let mut random = Random::new(random.next_u64());
                scope.spawn(move || {
                    let first = thread * PAGES_EACH;
                    (0..CELL_PAGES).for_each(|page| self.write_cell(cells, thread, page));
                    (first..first + PAGES_EACH).for_each(|page| self.write_pages(pages, page, 1));
                    begun.wait();
                    if thread % THREADS_EACH == 0 {
                        self.0.ledger.set(Entry::WholeSince(program), writing.kills);
                    }
                    self.write_on(thread, (cells, pages), &mut random);
                });
            }
        });
    }

    fn write_on(&self, thread: u64, (cells, pages): (&File, &File), random: &mut Random) {
        let mut lines = File::options();
        let lines = lines.append(true).open(self.lines());
        let mut lines = lines.expect("the lines open");
        let mut number = self.0.ledger.get(appended(thread));
        for done in 1.. {
            match random.below(8) {
                0..4 => self.write_cell(cells, thread, random.below(CELL_PAGES)),
                4..7 => {
                    let count = 1 + random.below(MOST_PAGES_IN_A_WRITE);
                    let page = thread * PAGES_EACH + random.below(PAGES_EACH - count + 1);
                    self.write_pages(pages, page, count);
                }
                _ if number < LINES_EACH_MAX => {
                    let written = lines.write(&line(thread, number + 1));
                    assert_eq!(written.expect("an append"), LINE, "a short append");
                    number += 1;
                    self.0.ledger.set(appended(thread), number);
                }
                _ => {}
            }
            if random.below(1000) == 0 {
                pages.sync_data().expect("a sync");
            }
            self.0.ledger.set(writes(thread), done);
        }
    }

    fn write_cell(&self, cells: &File, thread: u64, page: u64) {
        let entry = cell_written(thread, page);
        let next = self.0.ledger.get(entry) + 1;
        let written = cells.write_all_at(&cell(thread, page, next), cell_at(thread, page));
        written.expect("a write of a cell");
        self.0.ledger.set(entry, next);
    }

    fn write_pages(&self, pages: &File, first: u64, count: u64) {
        let next = |page| self.0.ledger.get(page_written(page)) + 1;
        let all = first..first + count;
        let bytes: Vec<u8> = all
            .clone()
            .flat_map(|page| record(page, next(page)))
            .collect();
        let written = pages.write_all_at(&bytes, first * PAGE as u64);
        written.expect("a write of pages");
        all.for_each(|page| self.0.ledger.set(page_written(page), next(page)));
    }

    /// Reads as several threads until the test ends. Returns how many reads were judged.
    fn verify(&self, mut random: Random) -> u64 {
        let (cells, pages) = self.cells_and_pages();
        let lines = File::open(self.lines()).expect("the lines open");
        let judged = AtomicU64::new(0);
        let files = (&cells, &pages, &lines);
        std::thread::scope(|scope| {
            for _ in 0..VERIFIERS_EACH {
                let (mut random, judged) = (Random::new(random.next_u64()), &judged);
                scope.spawn(move || {
                    while self.0.ledger.get(Entry::Stop) == 0 {
                        let is_judged = match random.below(3) {
                            0 => self.verify_cell(files.0, &mut random),
                            1 => self.verify_page(files.1, &mut random),
                            _ => verify_line(files.2, &mut random),
                        };
                        judged.fetch_add(u64::from(is_judged), Ordering::Relaxed);
                        // The pause leaves the CPUs to the writers.
                        std::thread::sleep(Duration::from_micros(500));
                    }
                });
            }
        });
        judged.into_inner()
    }

    fn verify_cell(&self, cells: &File, random: &mut Random) -> bool {
        let (thread, page) = (random.below(THREADS), random.below(CELL_PAGES));
        let (whole, from) = (
            self.0.ledger.whole(thread / THREADS_EACH),
            self.0.ledger.get(cell_written(thread, page)),
        );
        let mut bytes = [0; CELL];
        let read = cells.read_exact_at(&mut bytes, cell_at(thread, page));
        read.expect("a read of a cell");
        let to = self.0.ledger.get(cell_written(thread, page)) + 1;
        if whole.is_none() || self.0.ledger.whole(thread / THREADS_EACH) != whole {
            return false;
        }
        let sequence = number_at(&bytes, 0);
        assert!(
            (from..=to).contains(&sequence) && bytes[..] == cell(thread, page, sequence),
            "cell of thread {thread} in page {page}: numbers {from} to {to} are possible: {bytes:02x?}"
        );
        true
    }

    fn verify_page(&self, pages: &File, random: &mut Random) -> bool {
        let page = random.below(THREADS * PAGES_EACH);
        let thread = page / PAGES_EACH;
        let (whole, from) = (
            self.0.ledger.whole(thread / THREADS_EACH),
            self.0.ledger.get(page_written(page)),
        );
        let mut bytes = vec![0; PAGE];
        let read = pages.read_exact_at(&mut bytes, page * PAGE as u64);
        read.expect("a read of a page");
        let to = self.0.ledger.get(page_written(page)) + 1;
        if whole.is_none() || self.0.ledger.whole(thread / THREADS_EACH) != whole {
            return false;
        }
        assert_record(&bytes, page, from, to);
        true
    }

    /// Asserts that each byte in the cells and pages of a dead or idle program comes from the noted write or from the one after it.
    fn assert_nothing_foreign(&self, program: u64) {
        let (cells, pages) = self.cells_and_pages();
        for thread in threads_of(program) {
            for page in 0..CELL_PAGES {
                let mut bytes = [0; CELL];
                let read = cells.read_exact_at(&mut bytes, cell_at(thread, page));
                read.expect("a read of a cell");
                let noted = self.0.ledger.get(cell_written(thread, page));
                let [old, new] = [noted, noted + 1].map(|number| cell(thread, page, number));
                let known = |at: usize| bytes[at] == old[at] || bytes[at] == new[at];
                let foreign = (0..CELL).find(|at| !known(*at));
                assert_eq!(
                    foreign, None,
                    "the cell of thread {thread} in page {page} has a byte that no write contained"
                );
            }
            for page in thread * PAGES_EACH..(thread + 1) * PAGES_EACH {
                let mut bytes = vec![0; PAGE];
                let read = pages.read_exact_at(&mut bytes, page * PAGE as u64);
                read.expect("a read of a page");
                assert_record_or_next(&bytes, page, self.0.ledger.get(page_written(page)));
            }
        }
    }

    /// Asserts that the file of lines holds each noted line once, in its thread's order. It may also hold the lines that
    /// `unacknowledged` names, and no others.
    fn assert_lines(&self, unacknowledged: &BTreeSet<(u64, u64)>) {
        let bytes = std::fs::read(self.lines()).expect("the lines");
        assert_eq!(bytes.len() % LINE, 0, "a line is not whole");
        let mut found = vec![vec![]; THREADS as usize];
        for (index, bytes) in bytes.chunks(LINE).enumerate() {
            let (thread, sequence) = (number_at(bytes, 0), number_at(bytes, 8));
            assert!(
                thread < THREADS && bytes == line(thread, sequence),
                "line {index}, of thread {thread}, number {sequence}, is not whole"
            );
            found[thread as usize].push(sequence);
        }
        for (thread, found) in (0..).zip(found) {
            let noted = self.0.ledger.get(appended(thread));
            let found: Vec<u64> = found
                .into_iter()
                .filter(|sequence| !unacknowledged.contains(&(thread, *sequence)))
                .collect();
            let expected: Vec<u64> = (1..=noted)
                .filter(|sequence| !unacknowledged.contains(&(thread, *sequence)))
                .collect();
            assert!(
                found == expected,
                "thread {thread} appended lines up to {noted}, without {unacknowledged:?}: {found:?}"
            );
        }
    }
}

/// Reads and checks the last line or a random one. Returns false when there is no line.
fn verify_line(lines: &File, random: &mut Random) -> bool {
    let size = lines.metadata().expect("metadata").len();
    let count = size / LINE as u64;
    assert_eq!(size % LINE as u64, 0, "the file ends within a line");
    let index = match random.below(4) {
        _ if count == 0 => return false,
        0 => count - 1,
        _ => random.below(count),
    };
    let mut bytes = [0; LINE];
    let read = lines.read_exact_at(&mut bytes, index * LINE as u64);
    read.expect("a read of a line");
    let (thread, sequence) = (number_at(&bytes, 0), number_at(&bytes, 8));
    assert!(
        thread < THREADS && bytes[..] == line(thread, sequence),
        "line {index} of {count}, of thread {thread}, number {sequence}, is not whole"
    );
    true
}

/// Runs as a writing or a verifying process of the test below.
#[test]
#[ignore = "a part of the test here, which starts it as a process of its own"]
fn role() {
    killing::play(
        |stage, writing| Files(stage).write(writing),
        |stage, random| Files(stage).verify(random),
    );
}

/// Asserts that the counters of `jericho stat` agree with each other, once the daemon has seen the end of all programs.
fn assert_counters(volume: &Volume) {
    // The test's own process is a client too when it runs under `jericho run`.
    let is_another = |client: &serde_json::Value| client["pid"] != std::process::id();
    let programs_left = || {
        let stat = volume.stat();
        let clients = stat["clients"].as_array().expect("a list");
        clients.iter().any(is_another)
    };
    wait_until("the daemon forgets the dead programs", || !programs_left());
    let stat = volume.stat();
    let mut inline = 0;
    for slice in stat["slices"].as_array().expect("a list") {
        let number = |name: &str| slice[name].as_u64().expect("a number");
        assert!(number("dirty") <= number("resident"), "{slice}");
        assert!(number("resident") <= number("frames"), "{slice}");
        assert!(number("used_bytes") <= number("capacity_bytes"), "{slice}");
        assert_eq!(number("write_errors"), 0, "{slice}");
        inline += slice["locality"]["local"].as_u64().expect("a number");
        inline += slice["locality"]["remote"].as_u64().expect("a number");
    }
    assert!(inline > 10_000, "{inline} pages were accessed: {stat}");
}

#[test]
fn many_threads_of_killed_and_running_programs_lose_and_tear_nothing() {
    let volume = Volume::mounted("512M", 2, "8M");
    let on_mount = volume.make_dir("crowd");
    let pages = 0..THREADS * PAGES_EACH;
    let bytes: Vec<u8> = pages.flat_map(|page| record(page, 0)).collect();
    std::fs::write(on_mount.join("pages"), bytes).expect("the first pages");
    let page_of_cells = |page: u64| {
        let cells = (0..THREADS).flat_map(move |thread| cell(thread, page, 0));
        cells.chain(std::iter::repeat(0)).take(PAGE)
    };
    let bytes: Vec<u8> = (0..CELL_PAGES).flat_map(page_of_cells).collect();
    std::fs::write(on_mount.join("cells"), bytes).expect("the first cells");
    std::fs::write(on_mount.join("lines"), b"").expect("no lines");
    let ledger = volume.outside("ledger");
    Ledger::create(&ledger, ENTRIES);
    let plan = Plan {
        role: "crowd::role",
        programs: PROGRAMS,
        inline: INLINE_PROGRAMS,
        seconds: SECONDS,
        kills_min: KILLS_MIN,
        pause_max: Duration::from_millis(200),
        hang: HANG,
    };
    let mut play = Play::start(plan, on_mount, ledger);
    // Lines that a program may have appended without noting them, because it was killed.
    let mut unacknowledged = BTreeSet::new();
    let mut after_kill = |stage: &Stage, program| {
        for thread in threads_of(program) {
            // The next program continues after the line that this one may have been appending.
            let next = stage.ledger.get(appended(thread)) + 1;
            unacknowledged.insert((thread, next));
            stage.ledger.set(appended(thread), next);
        }
        Files(stage).assert_nothing_foreign(program);
    };
    play.kill_again_and_again(&mut after_kill);
    // Each thread must continue.
    for program in 0..PROGRAMS {
        play.wait_until_whole(program);
        for thread in threads_of(program) {
            play.stage.ledger.set(writes(thread), 0);
        }
        for thread in threads_of(program) {
            play.wait_for(program, "each thread writes", |ledger| {
                ledger.get(writes(thread)) != 0
            });
        }
    }
    play.end_verifying();
    play.kill_all(&mut after_kill);
    assert_counters(&volume);
    for _ in 0..2 {
        let files = Files(&play.stage);
        (0..PROGRAMS).for_each(|program| files.assert_nothing_foreign(program));
        files.assert_lines(&unacknowledged);
        volume.remount();
    }
    drop(play);
    volume.finish();
}
