//! Programs under `jericho run` are killed in the middle of their writes, again and again, while others verify.
//!
//! A killed writer may leave half of its last write, as after any killed program: never bytes that nobody wrote, never a page
//! that hangs, never a loss of what it wrote before. After it all, the volume is sound and holds the same.
//!
//! Writers own pages of one file, and each page holds a *record* that follows from page and sequence number. After each
//! write a writer notes the sequence numbers in a [`Ledger`] beside the mount, which survives its death. So the bytes of
//! a page are at any time those of the noted record or of the one after it.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use jericho_sim::Random;

use crate::roles::{self, from_environment, said_by};
use crate::volume::Volume;

const PAGE: usize = 4096;
/// The first ones run under `jericho run`, the last one does not: both ways are killed and mixed.
const WRITERS: u64 = 3;
const INLINE_WRITERS: u64 = 2;
const PAGES_EACH: u64 = 300;
const MOST_PAGES_IN_A_WRITE: u64 = 4;
const LOG_BYTES_MOST: u64 = 4 << 20;
/// Nothing here takes longer unless it hangs.
const HANG: Duration = Duration::from_secs(60);
/// How long writers are killed (`make soak` asks for more), but at least so often.
const SECONDS: u64 = 8;
const KILLS_MIN: u32 = 10;

fn mix(mut n: u64) -> u64 {
    n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

/// What a page holds after its write with this number.
pub fn record(page: u64, sequence: u64) -> Vec<u8> {
    let cells = (1..PAGE as u64 / 8).map(|cell| mix((page << 44) ^ (sequence << 9) ^ cell));
    let cells = std::iter::once(sequence).chain(cells);
    cells.flat_map(u64::to_le_bytes).collect()
}

/// Bytes of the endless text that a writer appends to its log.
fn text(writer: u64, range: std::ops::Range<u64>) -> Vec<u8> {
    let byte = |at: u64| (mix((writer << 56) ^ (at / 8)) >> (at % 8 * 8)) as u8;
    range.map(byte).collect()
}

/// Numbers beside the mount that everybody shares: what was written, who lives, when to stop.
struct Ledger(File);

#[derive(Clone, Copy)]
enum Entry {
    /// Not 0: verifiers end.
    Stop,
    /// Process id of the writer, 0 until it runs.
    Pid(u64),
    /// One more before each kill of the writer.
    Kills(u64),
    /// The number of kills for which the writer has written all its pages anew: none is half written.
    WholeSince(u64),
    /// Bytes of its log that are written.
    Logged(u64),
    /// The sequence number of a page that is written.
    Written(u64),
}

impl Ledger {
    fn open(path: &Path) -> Ledger {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        Ledger(options.open(path).expect("the ledger opens"))
    }

    fn offset(entry: Entry) -> u64 {
        let index = match entry {
            Entry::Stop => 0,
            Entry::Pid(writer) => 1 + writer,
            Entry::Kills(writer) => 1 + WRITERS + writer,
            Entry::WholeSince(writer) => 1 + 2 * WRITERS + writer,
            Entry::Logged(writer) => 1 + 3 * WRITERS + writer,
            Entry::Written(page) => 1 + 4 * WRITERS + page,
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
        let at = Self::offset(entry);
        let bytes = value.to_le_bytes();
        self.0.write_all_at(&bytes, at).expect("the ledger");
    }

    /// `Some` kills when none of the writer's pages may be half written.
    fn whole(&self, writer: u64) -> Option<u64> {
        let kills = self.get(Entry::Kills(writer));
        (self.get(Entry::WholeSince(writer)) == kills).then_some(kills)
    }
}

/// Everything that the processes of a test find by its directory names.
struct Stage {
    on_mount: PathBuf,
    ledger: Ledger,
}

impl Stage {
    fn open(on_mount: PathBuf, ledger: &Path) -> Stage {
        Stage {
            on_mount,
            ledger: Ledger::open(ledger),
        }
    }

    fn records(&self) -> File {
        let mut options = File::options();
        let file = options.read(true).write(true);
        let file = file.open(self.on_mount.join("records"));
        file.expect("the records open")
    }

    fn log(&self, writer: u64) -> PathBuf {
        self.on_mount.join(format!("log{writer}"))
    }

    /// Writes pages and log of one writer until it is killed.
    fn write(&self, writer: u64, mut random: Random) {
        let (ledger, records) = (&self.ledger, self.records());
        let first = writer * PAGES_EACH;
        let write = |page: u64, pages: u64| {
            let next = |page| ledger.get(Entry::Written(page)) + 1;
            let bytes: Vec<u8> = (page..page + pages)
                .flat_map(|page| record(page, next(page)))
                .collect();
            let written = records.write_all_at(&bytes, page * PAGE as u64);
            written.expect("a write of records");
            for page in page..page + pages {
                ledger.set(Entry::Written(page), next(page));
            }
        };
        let mut options = File::options();
        let log = options.append(true).create(true).open(self.log(writer));
        let mut log = log.expect("the log opens");
        let mut logged = log.metadata().expect("metadata").len();
        if logged > LOG_BYTES_MOST {
            ledger.set(Entry::Logged(writer), 0);
            log.set_len(0).expect("a log is emptied");
            logged = 0;
        }
        let kills = ledger.get(Entry::Kills(writer));
        for page in first..first + PAGES_EACH {
            write(page, 1);
        }
        ledger.set(Entry::WholeSince(writer), kills);
        loop {
            let pages = 1 + random.below(MOST_PAGES_IN_A_WRITE);
            write(first + random.below(PAGES_EACH - pages + 1), pages);
            if random.below(16) == 0 && logged < LOG_BYTES_MOST {
                let more = text(writer, logged..logged + 1 + random.below(9000));
                log.write_all(&more).expect("a write to the log");
                logged += more.len() as u64;
                ledger.set(Entry::Logged(writer), logged);
            }
            if random.below(200) == 0 {
                records.sync_data().expect("a sync");
            }
        }
    }

    /// Reads pages and logs of all writers until it is told to stop; gives how many reads could be judged.
    fn verify(&self, mut random: Random) -> u64 {
        let (ledger, records) = (&self.ledger, self.records());
        let (mut judged, mut bytes) = (0, vec![0; PAGE]);
        while ledger.get(Entry::Stop) == 0 {
            let page = random.below(WRITERS * PAGES_EACH);
            let writer = page / PAGES_EACH;
            let (whole, from) = (ledger.whole(writer), ledger.get(Entry::Written(page)));
            let read = records.read_exact_at(&mut bytes, page * PAGE as u64);
            read.expect("a read of a record");
            let to = ledger.get(Entry::Written(page)) + 1;
            if whole.is_none() || ledger.whole(writer) != whole {
                // A killed writer's page may be half written: that is judged when it is dead.
                continue;
            }
            let sequence = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
            assert!(
                (from..=to).contains(&sequence) && bytes == record(page, sequence),
                "page {page}: numbers {from} to {to} are possible, it begins with {sequence}; {}",
                blame(&bytes, page, from, to)
            );
            judged += 1;
            self.verify_log(writer, whole, &mut random);
        }
        judged
    }

    fn verify_log(&self, writer: u64, whole: Option<u64>, random: &mut Random) {
        let logged = self.ledger.get(Entry::Logged(writer));
        if logged == 0 {
            return;
        }
        let at = random.below(logged);
        let mut bytes = vec![0; (logged - at).min(5000) as usize];
        let log = File::open(self.log(writer)).expect("the log opens");
        let read = log.read_exact_at(&mut bytes, at);
        // It may have been emptied meanwhile, by the successor of a killed writer.
        if self.ledger.whole(writer) == whole {
            read.unwrap_or_else(|e| panic!("log of writer {writer} at {at} of {logged}: {e}"));
            assert_text(writer, at, &bytes, logged);
        }
    }

    /// What a dead writer left: each byte is the noted write's or the one's in which it died.
    fn assert_nothing_foreign(&self, writer: u64) {
        let records = self.records();
        let mut bytes = vec![0; PAGE];
        for page in writer * PAGES_EACH..(writer + 1) * PAGES_EACH {
            let read = records.read_exact_at(&mut bytes, page * PAGE as u64);
            read.expect("a read of a record");
            let written = self.ledger.get(Entry::Written(page));
            let (old, new) = (record(page, written), record(page, written + 1));
            let known = |at: usize| bytes[at] == old[at] || bytes[at] == new[at];
            if let Some(at) = (0..PAGE).find(|at| !known(*at)) {
                let blame = blame(&bytes, page, 0, written + 1);
                panic!("page {page}, written {written} times, has a foreign byte at {at}; {blame}");
            }
        }
        let log = std::fs::read(self.log(writer)).unwrap_or_default();
        let logged = self.ledger.get(Entry::Logged(writer));
        assert!(
            log.len() as u64 >= logged,
            "log of writer {writer}: {logged} bytes were written, it has {}",
            log.len()
        );
        assert_text(writer, 0, &log, logged);
    }
}

/// The bytes at an offset of a log are what its writer appended there.
fn assert_text(writer: u64, at: u64, bytes: &[u8], logged: u64) {
    let expected = text(writer, at..at + bytes.len() as u64);
    let foreign: Vec<usize> = (0..bytes.len())
        .filter(|n| bytes[*n] != expected[*n])
        .collect();
    let zeros = foreign.iter().filter(|n| bytes[**n] == 0).count();
    if let (Some(first), Some(last)) = (foreign.first(), foreign.last()) {
        panic!(
            "log of writer {writer}, {logged} bytes: read {} at {at}, {} are foreign ({zeros} zero), from {} to {}",
            bytes.len(),
            foreign.len(),
            at + *first as u64,
            at + *last as u64
        );
    }
}

/// How many cells of a page belong to which of some records.
pub fn blame(bytes: &[u8], page: u64, from: u64, to: u64) -> String {
    let cells = |bytes: &[u8]| -> Vec<[u8; 8]> { bytes.as_chunks().0.to_vec() };
    let found = cells(bytes);
    let mut said = String::new();
    for sequence in from.max(to.saturating_sub(1000))..=to {
        let expected = cells(&record(page, sequence));
        let same = found.iter().zip(&expected).filter(|(a, b)| a == b).count();
        if same > 0 {
            said += &format!("{same} of {} cells are of number {sequence}; ", found.len());
        }
    }
    let zeros = found.iter().filter(|cell| **cell == [0; 8]).count();
    said + &format!("{zeros} are zero")
}

/// The other processes of the test below.
#[test]
#[ignore = "a part of the test here, which starts it as a process of its own"]
fn role() {
    let Some([kind, number, seed, on_mount, ledger]) = roles::role() else {
        return;
    };
    let stage = Stage::open(on_mount.into(), Path::new(&ledger));
    let number: u64 = number.parse().expect("a number");
    let random = Random::new(seed.parse().expect("a seed"));
    if kind == "write" {
        stage
            .ledger
            .set(Entry::Pid(number), std::process::id().into());
        stage.write(number, random);
    } else {
        println!("judged {}", stage.verify(random));
    }
}

/// The test: its volume, its processes.
struct Play {
    volume: Volume,
    stage: Stage,
    ledger: PathBuf,
    writers: Vec<Child>,
    random: Random,
}

impl Play {
    fn start(&mut self, kind: &str, number: u64, inline: bool) -> Child {
        let (number, seed) = (number.to_string(), self.random.below(u64::MAX).to_string());
        let path = |path: &Path| path.display().to_string();
        let (on_mount, ledger) = (path(&self.stage.on_mount), path(&self.ledger));
        let role = [kind, &number, &seed, &on_mount, &ledger];
        roles::start(&mut roles::command("killed::role", &role, inline))
    }

    fn start_writer(&mut self, writer: u64) -> Child {
        self.stage.ledger.set(Entry::Pid(writer), 0);
        self.start("write", writer, writer < INLINE_WRITERS)
    }

    /// Waits for something that a writer will do, unless it ends or hangs.
    fn wait_for(&mut self, writer: u64, what: &str, done: impl Fn(&Ledger) -> bool) {
        let deadline = Instant::now() + HANG;
        while !done(&self.stage.ledger) {
            let child = &mut self.writers[writer as usize];
            if child.try_wait().expect("wait").is_some() {
                let said = said_by(child);
                panic!("writer {writer} ended before {what}:\n{said}");
            }
            assert!(
                Instant::now() < deadline,
                "writer {writer} hangs before {what}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn kill(&mut self, writer: u64) {
        self.wait_for(writer, "it runs", |ledger| {
            ledger.get(Entry::Pid(writer)) != 0
        });
        // Noted first: who verifies must never take half a page for a fault.
        let kills = self.stage.ledger.get(Entry::Kills(writer));
        self.stage.ledger.set(Entry::Kills(writer), kills + 1);
        let pid = self.stage.ledger.get(Entry::Pid(writer)) as i32;
        let pid = rustix::process::Pid::from_raw(pid).expect("a process id");
        let killed = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        let child = &mut self.writers[writer as usize];
        roles::wait_for_end(child, &format!("writer {writer}, which was killed,"), HANG);
        if killed.is_err() {
            panic!("writer {writer} had ended by itself:\n{}", said_by(child));
        }
        self.stage.assert_nothing_foreign(writer);
    }
}

impl Drop for Play {
    fn drop(&mut self) {
        // When the test has failed they still run.
        self.stage.ledger.set(Entry::Stop, 1);
        for writer in 0..WRITERS {
            let pid = self.stage.ledger.get(Entry::Pid(writer)) as i32;
            if let Some(child) = self.writers.get_mut(writer as usize)
                && matches!(child.try_wait(), Ok(None))
                && let Some(pid) = rustix::process::Pid::from_raw(pid)
            {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

#[test]
fn programs_killed_in_their_writes_leave_nothing_that_nobody_wrote() {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = from_environment("JERICHO_SEED")
        .unwrap_or_else(|| now.map_or(1, |now| now.as_nanos() as u64));
    // Shown when the test fails. The moments of the kills depend on the machine, too.
    println!("JERICHO_SEED={seed}");
    let duration = Duration::from_secs(from_environment("JERICHO_SOAK_SECONDS").unwrap_or(SECONDS));
    let volume = Volume::mounted("512M", 2, "8M");
    let on_mount = volume.make_dir("killed");
    let pages = WRITERS * PAGES_EACH;
    let bytes: Vec<u8> = (0..pages).flat_map(|page| record(page, 0)).collect();
    std::fs::write(on_mount.join("records"), bytes).expect("the first records");
    let ledger = volume.outside("ledger");
    let numbers = Ledger::offset(Entry::Written(pages)) as usize;
    std::fs::write(&ledger, vec![0; numbers]).expect("the ledger");
    let mut play = Play {
        stage: Stage::open(on_mount, &ledger),
        volume,
        ledger,
        writers: Vec::new(),
        random: Random::new(seed),
    };
    for writer in 0..WRITERS {
        // Nobody's pages are whole until their writer says so.
        play.stage.ledger.set(Entry::Kills(writer), 1);
        let child = play.start_writer(writer);
        play.writers.push(child);
    }
    let verifiers: Vec<(&str, Child)> = [("inline", true), ("through the kernel", false)]
        .map(|(how, inline)| (how, play.start("verify", 0, inline)))
        .into();

    let until = Instant::now() + duration;
    let mut kills = 0;
    while Instant::now() < until || kills < KILLS_MIN {
        let writer = play.random.below(WRITERS);
        if play.random.below(4) > 0 {
            // Most die in the middle of their work, some while they begin.
            play.wait_for(writer, "it has written its pages", |ledger| {
                ledger.whole(writer).is_some()
            });
        }
        std::thread::sleep(Duration::from_micros(play.random.below(40_000)));
        play.kill(writer);
        play.writers[writer as usize] = play.start_writer(writer);
        kills += 1;
    }
    play.stage.ledger.set(Entry::Stop, 1);
    for (how, mut child) in verifiers {
        let status = roles::wait_for_end(&mut child, &format!("who verifies {how}"), HANG);
        let said = said_by(&mut child);
        assert!(status.success(), "verifying {how}:\n{said}");
        let judged = said.lines().find_map(|line| line.strip_prefix("judged "));
        let judged: u64 = judged.and_then(|n| n.parse().ok()).expect("a count");
        println!("{judged} reads judged {how}");
        assert!(judged > 0, "nothing could be judged {how}");
    }
    for writer in 0..WRITERS {
        play.kill(writer);
    }
    println!("{kills} kills");
    for _ in 0..2 {
        for writer in 0..WRITERS {
            play.stage.assert_nothing_foreign(writer);
        }
        play.volume.remount();
    }
    play.volume.umount();
    play.volume.check();
}
