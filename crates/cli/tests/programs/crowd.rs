//! Sixty-four threads in six programs share three files, and programs with many writing threads are killed again and again.
//!
//! Each writing thread has a *cell* in every page of one file, so that threads of all programs write within the same pages.
//! It owns pages of a second file, which it writes several at a time. It appends *lines* of one size to a third file. After each
//! write the thread notes a sequence number in a ledger beside the mount. So a cell or a page holds at any time what was noted or
//! the write after it, and the third file holds each noted line once. A killed program may leave its last writes half done, in
//! its own cells and pages only.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jericho_sim::Random;

use crate::killed::{blame, record};
use crate::roles::{self, from_environment, said_by};
use crate::volume::Volume;

const PAGE: usize = 4096;
/// Programs that write, and threads of each. The last program writes through the kernel.
const PROGRAMS: u64 = 4;
const INLINE_PROGRAMS: u64 = 3;
const THREADS_EACH: u64 = 12;
const THREADS: u64 = PROGRAMS * THREADS_EACH;
/// Threads of each of the two programs that verify.
const VERIFIERS_EACH: u64 = 8;
/// Every thread has one in each page of the first file.
const CELL: usize = 64;
const CELL_PAGES: u64 = 12;
const PAGES_EACH: u64 = 8;
const MOST_PAGES_IN_A_WRITE: u64 = 4;
const LINE: usize = 256;
const LINES_EACH_MAX: u64 = 1500;
/// Nothing here takes longer unless it hangs.
const HANG: Duration = Duration::from_secs(90);
/// How long programs are killed (`make soak` asks for more), but at least so often.
const SECONDS: u64 = 12;
const KILLS_MIN: u32 = 8;

/// Returns the cell of a thread in a page after the write with this number. A cell is the start of a page's record.
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

fn number_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// Numbers beside the mount that all processes share.
struct Ledger(File);

#[derive(Clone, Copy)]
enum Entry {
    /// Not 0: verifiers end.
    Stop,
    /// Process id of the program, 0 until it runs.
    Pid(u64),
    /// One more before each kill of the program.
    Kills(u64),
    /// The number of kills for which the program has written all its cells and pages again: none is half written.
    WholeSince(u64),
    /// Number of writes of a thread, to see that it goes on.
    Writes(u64),
    /// The last line that a thread has appended.
    Appended(u64),
    /// The last write of a thread's cell in a page.
    Cell(u64, u64),
    /// The last write of a page of the second file.
    Page(u64),
    End,
}

impl Ledger {
    fn open(path: &Path) -> Ledger {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        Ledger(options.open(path).expect("the ledger opens"))
    }

    fn offset(entry: Entry) -> u64 {
        let threads = 1 + 3 * PROGRAMS;
        let cells = threads + 2 * THREADS;
        let pages = cells + THREADS * CELL_PAGES;
        let index = match entry {
            Entry::Stop => 0,
            Entry::Pid(program) => 1 + program,
            Entry::Kills(program) => 1 + PROGRAMS + program,
            Entry::WholeSince(program) => 1 + 2 * PROGRAMS + program,
            Entry::Writes(thread) => threads + thread,
            Entry::Appended(thread) => threads + THREADS + thread,
            Entry::Cell(thread, page) => cells + thread * CELL_PAGES + page,
            Entry::Page(page) => pages + page,
            Entry::End => pages + THREADS * PAGES_EACH,
        };
        index * 8
    }

    fn get(&self, entry: Entry) -> u64 {
        let mut bytes = [0; 8];
        let at = Self::offset(entry);
        self.0.read_exact_at(&mut bytes, at).expect("the ledger");
        u64::from_le_bytes(bytes)
    }

    fn set(&self, entry: Entry, value: u64) {
        let (at, bytes) = (Self::offset(entry), value.to_le_bytes());
        self.0.write_all_at(&bytes, at).expect("the ledger");
    }

    /// Returns the number of kills of a thread's program, if none of its cells and pages may be half written.
    fn whole(&self, thread: u64) -> Option<u64> {
        let program = thread / THREADS_EACH;
        let kills = self.get(Entry::Kills(program));
        (self.get(Entry::WholeSince(program)) == kills).then_some(kills)
    }
}

/// The files, as a process of the test sees them.
struct Stage {
    on_mount: PathBuf,
    ledger: Ledger,
}

impl Stage {
    fn open(on_mount: PathBuf, ledger: &Path) -> Stage {
        let ledger = Ledger::open(ledger);
        Stage { on_mount, ledger }
    }

    fn file(&self, name: &str) -> File {
        let mut options = File::options();
        let file = options.read(true).write(true);
        file.open(self.on_mount.join(name)).expect("a file opens")
    }

    fn lines(&self) -> PathBuf {
        self.on_mount.join("lines")
    }

    /// Writes as the threads of one program until it is killed.
    fn write(&self, program: u64, mut random: Random) {
        let (cells, pages) = (self.file("cells"), self.file("pages"));
        let kills = self.ledger.get(Entry::Kills(program));
        let begun = Barrier::new(THREADS_EACH as usize);
        let (cells, pages, begun) = (&cells, &pages, &begun);
        self.ledger
            .set(Entry::Pid(program), std::process::id().into());
        std::thread::scope(|scope| {
            for thread in program * THREADS_EACH..(program + 1) * THREADS_EACH {
                let mut random = Random::new(random.next_u64());
                scope.spawn(move || {
                    let first = thread * PAGES_EACH;
                    (0..CELL_PAGES).for_each(|page| self.write_cell(cells, thread, page));
                    (first..first + PAGES_EACH).for_each(|page| self.write_pages(pages, page, 1));
                    begun.wait();
                    if thread % THREADS_EACH == 0 {
                        self.ledger.set(Entry::WholeSince(program), kills);
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
        let mut appended = self.ledger.get(Entry::Appended(thread));
        for writes in 1.. {
            match random.below(8) {
                0..4 => self.write_cell(cells, thread, random.below(CELL_PAGES)),
                4..7 => {
                    let count = 1 + random.below(MOST_PAGES_IN_A_WRITE);
                    let page = thread * PAGES_EACH + random.below(PAGES_EACH - count + 1);
                    self.write_pages(pages, page, count);
                }
                _ if appended < LINES_EACH_MAX => {
                    let written = lines.write(&line(thread, appended + 1));
                    assert_eq!(written.expect("an append"), LINE, "a short append");
                    appended += 1;
                    self.ledger.set(Entry::Appended(thread), appended);
                }
                _ => {}
            }
            if random.below(1000) == 0 {
                pages.sync_data().expect("a sync");
            }
            self.ledger.set(Entry::Writes(thread), writes);
        }
    }

    fn write_cell(&self, cells: &File, thread: u64, page: u64) {
        let entry = Entry::Cell(thread, page);
        let next = self.ledger.get(entry) + 1;
        let written = cells.write_all_at(&cell(thread, page, next), cell_at(thread, page));
        written.expect("a write of a cell");
        self.ledger.set(entry, next);
    }

    fn write_pages(&self, pages: &File, first: u64, count: u64) {
        let next = |page| self.ledger.get(Entry::Page(page)) + 1;
        let all = first..first + count;
        let bytes: Vec<u8> = all
            .clone()
            .flat_map(|page| record(page, next(page)))
            .collect();
        let written = pages.write_all_at(&bytes, first * PAGE as u64);
        written.expect("a write of pages");
        all.for_each(|page| self.ledger.set(Entry::Page(page), next(page)));
    }

    /// Reads as several threads until the test ends. Returns how many reads were judged.
    fn verify(&self, mut random: Random) -> u64 {
        let (cells, pages) = (self.file("cells"), self.file("pages"));
        let lines = File::open(self.lines()).expect("the lines open");
        let judged = AtomicU64::new(0);
        let files = (&cells, &pages, &lines);
        std::thread::scope(|scope| {
            for _ in 0..VERIFIERS_EACH {
                let (mut random, judged) = (Random::new(random.next_u64()), &judged);
                scope.spawn(move || {
                    while self.ledger.get(Entry::Stop) == 0 {
                        let is_judged = match random.below(3) {
                            0 => self.verify_cell(files.0, &mut random),
                            1 => self.verify_page(files.1, &mut random),
                            _ => verify_line(files.2, &mut random),
                        };
                        judged.fetch_add(u64::from(is_judged), Ordering::Relaxed);
                        // Leaves the CPUs to the writers.
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
            self.ledger.whole(thread),
            self.ledger.get(Entry::Cell(thread, page)),
        );
        let mut bytes = [0; CELL];
        let read = cells.read_exact_at(&mut bytes, cell_at(thread, page));
        read.expect("a read of a cell");
        let to = self.ledger.get(Entry::Cell(thread, page)) + 1;
        if whole.is_none() || self.ledger.whole(thread) != whole {
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
            self.ledger.whole(thread),
            self.ledger.get(Entry::Page(page)),
        );
        let mut bytes = vec![0; PAGE];
        let read = pages.read_exact_at(&mut bytes, page * PAGE as u64);
        read.expect("a read of a page");
        let to = self.ledger.get(Entry::Page(page)) + 1;
        if whole.is_none() || self.ledger.whole(thread) != whole {
            return false;
        }
        let sequence = number_at(&bytes, 0);
        assert!(
            (from..=to).contains(&sequence) && bytes == record(page, sequence),
            "page {page}: numbers {from} to {to} are possible, it begins with {sequence}; {}",
            blame(&bytes, page, from, to)
        );
        true
    }

    /// Asserts that each byte of the cells and pages of a dead or idle program is of the noted write or of the one after it.
    fn assert_nothing_foreign(&self, program: u64) {
        let (cells, pages) = (self.file("cells"), self.file("pages"));
        let assert_known = |what: &str, bytes: &[u8], old: &[u8], new: &[u8]| {
            let known = |at: usize| bytes[at] == old[at] || bytes[at] == new[at];
            let foreign = (0..bytes.len()).find(|at| !known(*at));
            assert_eq!(foreign, None, "{what} has a byte that nobody wrote");
        };
        for thread in program * THREADS_EACH..(program + 1) * THREADS_EACH {
            for page in 0..CELL_PAGES {
                let mut bytes = [0; CELL];
                let read = cells.read_exact_at(&mut bytes, cell_at(thread, page));
                read.expect("a read of a cell");
                let noted = self.ledger.get(Entry::Cell(thread, page));
                let [old, new] = [noted, noted + 1].map(|number| cell(thread, page, number));
                let what = format!("the cell of thread {thread} in page {page}");
                assert_known(&what, &bytes, &old, &new);
            }
            for page in thread * PAGES_EACH..(thread + 1) * PAGES_EACH {
                let mut bytes = vec![0; PAGE];
                let read = pages.read_exact_at(&mut bytes, page * PAGE as u64);
                read.expect("a read of a page");
                let noted = self.ledger.get(Entry::Page(page));
                let [old, new] = [noted, noted + 1].map(|number| record(page, number));
                assert_known(&format!("page {page}"), &bytes, &old, &new);
            }
        }
    }

    /// Asserts that the file of lines holds each noted line once, in its thread's order, and no other lines than those that
    /// `unacknowledged` names.
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
            let noted = self.ledger.get(Entry::Appended(thread));
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

/// Reads the last line, or any. Returns false when there is none.
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

/// The other processes of the test below.
#[test]
#[ignore = "a part of the test here, which starts it as a process of its own"]
fn role() {
    let Some([kind, number, seed, on_mount, ledger]) = roles::role() else {
        return;
    };
    let stage = Stage::open(on_mount.into(), Path::new(&ledger));
    let random = Random::new(seed.parse().expect("a seed"));
    if kind == "write" {
        stage.write(number.parse().expect("a number"), random);
    } else {
        println!("judged {}", stage.verify(random));
    }
}

/// The test: its processes and what it knows of them.
struct Play {
    stage: Stage,
    ledger: PathBuf,
    programs: Vec<Child>,
    verifiers: Vec<Child>,
    /// Lines that a program may have appended when it was killed.
    unacknowledged: BTreeSet<(u64, u64)>,
    random: Random,
}

impl Play {
    fn start(&mut self, kind: &str, number: u64, inline: bool) -> Child {
        let (number, seed) = (number.to_string(), self.random.below(u64::MAX).to_string());
        let path = |path: &Path| path.display().to_string();
        let (on_mount, ledger) = (path(&self.stage.on_mount), path(&self.ledger));
        let role = [kind, &number, &seed, &on_mount, &ledger];
        roles::start(&mut roles::command("crowd::role", &role, inline))
    }

    fn start_program(&mut self, program: u64) -> Child {
        self.stage.ledger.set(Entry::Pid(program), 0);
        self.start("write", program, program < INLINE_PROGRAMS)
    }

    /// Waits for something that a program will do, unless it ends or hangs.
    fn wait_for(&mut self, program: u64, what: &str, done: impl Fn(&Ledger) -> bool) {
        let deadline = Instant::now() + HANG;
        while !done(&self.stage.ledger) {
            let child = &mut self.programs[program as usize];
            if child.try_wait().expect("wait").is_some() {
                panic!("program {program} ended before {what}:\n{}", said_by(child));
            }
            assert!(
                Instant::now() < deadline,
                "program {program} hangs before {what}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn wait_until_whole(&mut self, program: u64) {
        let first = program * THREADS_EACH;
        self.wait_for(program, "it has written everything once", |ledger| {
            ledger.whole(first).is_some()
        });
    }

    fn kill(&mut self, program: u64) {
        self.wait_for(program, "it runs", |ledger| {
            ledger.get(Entry::Pid(program)) != 0
        });
        // Counted before the kill, so that no verifier judges half a page.
        let kills = self.stage.ledger.get(Entry::Kills(program));
        self.stage.ledger.set(Entry::Kills(program), kills + 1);
        let pid = self.stage.ledger.get(Entry::Pid(program)) as i32;
        let pid = rustix::process::Pid::from_raw(pid).expect("a process id");
        let killed = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        let child = &mut self.programs[program as usize];
        let who = format!("program {program}, which was killed,");
        roles::wait_for_end(child, &who, HANG);
        if killed.is_err() {
            panic!("program {program} had ended by itself:\n{}", said_by(child));
        }
        for thread in program * THREADS_EACH..(program + 1) * THREADS_EACH {
            // The next program goes on behind the line that this one may have been appending.
            let next = self.stage.ledger.get(Entry::Appended(thread)) + 1;
            self.unacknowledged.insert((thread, next));
            self.stage.ledger.set(Entry::Appended(thread), next);
        }
        self.stage.assert_nothing_foreign(program);
    }
}

impl Drop for Play {
    fn drop(&mut self) {
        // When the test has failed they still run.
        self.stage.ledger.set(Entry::Stop, 1);
        for (program, child) in (0..).zip(&mut self.programs) {
            let pid = self.stage.ledger.get(Entry::Pid(program)) as i32;
            if matches!(child.try_wait(), Ok(None))
                && let Some(pid) = rustix::process::Pid::from_raw(pid)
            {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        for child in self.programs.iter_mut().chain(&mut self.verifiers) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Asserts that the counters of `jericho stat` agree with each other, once the daemon has seen the end of all programs.
fn assert_counters(volume: &Volume) {
    let deadline = Instant::now() + HANG;
    // This process is one of them when it runs under `jericho run` itself.
    let is_another = |client: &serde_json::Value| client["pid"] != std::process::id();
    let programs_left = || {
        let stat = volume.stat();
        let clients = stat["clients"].as_array().expect("a list");
        clients.iter().any(is_another)
    };
    while programs_left() {
        assert!(Instant::now() < deadline, "a dead program stays a client");
        std::thread::sleep(Duration::from_millis(50));
    }
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
fn many_threads_of_killed_and_living_programs_lose_and_tear_nothing() {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = from_environment("JERICHO_SEED")
        .unwrap_or_else(|| now.map_or(1, |now| now.as_nanos() as u64));
    // Shown when the test fails. The moments of the kills depend on the machine, too.
    println!("JERICHO_SEED={seed}");
    let duration = Duration::from_secs(from_environment("JERICHO_SOAK_SECONDS").unwrap_or(SECONDS));
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
    std::fs::write(&ledger, vec![0; Ledger::offset(Entry::End) as usize]).expect("the ledger");
    let mut play = Play {
        stage: Stage::open(on_mount, &ledger),
        ledger,
        programs: vec![],
        verifiers: vec![],
        unacknowledged: BTreeSet::new(),
        random: Random::new(seed),
    };
    for program in 0..PROGRAMS {
        // Nothing of a program is whole until it says so.
        play.stage.ledger.set(Entry::Kills(program), 1);
        let child = play.start_program(program);
        play.programs.push(child);
    }
    for inline in [true, false] {
        let child = play.start("verify", 0, inline);
        play.verifiers.push(child);
    }

    let until = Instant::now() + duration;
    let mut kills = 0;
    while Instant::now() < until || kills < KILLS_MIN {
        let program = play.random.below(PROGRAMS);
        if play.random.below(4) > 0 {
            // Most die in the middle of their work, some while they begin.
            play.wait_until_whole(program);
        }
        std::thread::sleep(Duration::from_micros(play.random.below(200_000)));
        play.kill(program);
        play.programs[program as usize] = play.start_program(program);
        kills += 1;
    }
    // Each thread goes on.
    for program in 0..PROGRAMS {
        play.wait_until_whole(program);
        for thread in program * THREADS_EACH..(program + 1) * THREADS_EACH {
            play.stage.ledger.set(Entry::Writes(thread), 0);
        }
        for thread in program * THREADS_EACH..(program + 1) * THREADS_EACH {
            play.wait_for(program, "each thread writes", |ledger| {
                ledger.get(Entry::Writes(thread)) != 0
            });
        }
    }
    play.stage.ledger.set(Entry::Stop, 1);
    for (how, mut child) in ["inline", "through the kernel"]
        .into_iter()
        .zip(std::mem::take(&mut play.verifiers))
    {
        let status = roles::wait_for_end(&mut child, &format!("who verifies {how}"), HANG);
        let said = said_by(&mut child);
        assert!(status.success(), "verifying {how}:\n{said}");
        let judged = said.lines().find_map(|line| line.strip_prefix("judged "));
        let judged: u64 = judged.and_then(|n| n.parse().ok()).expect("a count");
        println!("{judged} reads judged {how}");
        assert!(judged > 0, "nothing could be judged {how}");
    }
    (0..PROGRAMS).for_each(|program| play.kill(program));
    println!("{kills} kills");
    assert_counters(&volume);
    for _ in 0..2 {
        (0..PROGRAMS).for_each(|program| play.stage.assert_nothing_foreign(program));
        play.stage.assert_lines(&play.unacknowledged);
        volume.remount();
    }
    drop(play);
    volume.finish();
}
