//! The test kills programs under `jericho run` in the middle of their writes, again and again, while other programs verify.
//!
//! A killed writer may leave half of its last write, as on any filesystem. It must not leave bytes that no write contained or a
//! page that blocks other programs, and its earlier writes must stay. In the end the volume is sound and holds the same data.
//!
//! Writers own pages of one file, each of which holds a record (see `killing`), and a log of text.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use jericho_sim::Random;

use crate::killing::{
    self, Entry, Ledger, Plan, Play, Stage, Writing, assert_record, assert_record_or_next, record,
    text,
};
use crate::volume::Volume;

const PAGE: usize = 4096;
/// Writing programs. The first `INLINE_WRITERS` run under `jericho run`, the last one does not, so that both kinds are mixed.
const WRITERS: u64 = 3;
const INLINE_WRITERS: u64 = 2;
const PAGES_EACH: u64 = 300;
const MOST_PAGES_IN_A_WRITE: u64 = 4;
const LOG_BYTES_MOST: u64 = 4 << 20;
/// Limit of every wait. A program that reaches it hangs.
const HANG: Duration = Duration::from_secs(60);
/// How long the test kills writers (`make soak` asks for more), and how often at least.
const SECONDS: u64 = 8;
const KILLS_MIN: u32 = 10;

/// Returns the entry for the number of bytes that a writer has written to its log.
fn log_entry(writer: u64) -> Entry {
    Entry::Own(writer)
}

/// Returns the entry for the sequence number that was last written to a page.
fn record_entry(page: u64) -> Entry {
    Entry::Own(WRITERS + page)
}

/// The test's files as one of its processes sees them.
struct Files<'a>(&'a Stage);

impl Files<'_> {
    fn records(&self) -> File {
        self.0.file("records")
    }

    fn log(&self, writer: u64) -> PathBuf {
        self.0.on_mount.join(format!("log{writer}"))
    }

    /// Writes the pages and the log of one writer until the process is killed.
    fn write(&self, writing: Writing) {
        let (writer, mut random) = (writing.number, writing.random);
        let (ledger, records) = (&self.0.ledger, self.records());
        let first = writer * PAGES_EACH;
        let write = |page: u64, pages: u64| {
            let next = |page| ledger.get(record_entry(page)) + 1;
            let bytes: Vec<u8> = (page..page + pages)
                .flat_map(|page| record(page, next(page)))
                .collect();
            let written = records.write_all_at(&bytes, page * PAGE as u64);
            written.expect("a write of records");
            for page in page..page + pages {
                ledger.set(record_entry(page), next(page));
            }
        };
        let mut options = File::options();
        let log = options.append(true).create(true).open(self.log(writer));
        let mut log = log.expect("the log opens");
        let mut logged = log.metadata().expect("metadata").len();
        if logged > LOG_BYTES_MOST {
            ledger.set(log_entry(writer), 0);
            log.set_len(0).expect("a log is emptied");
            logged = 0;
        }
        for page in first..first + PAGES_EACH {
            write(page, 1);
        }
        ledger.set(Entry::WholeSince(writer), writing.kills);
        loop {
            let pages = 1 + random.below(MOST_PAGES_IN_A_WRITE);
            write(first + random.below(PAGES_EACH - pages + 1), pages);
            if random.below(16) == 0 && logged < LOG_BYTES_MOST {
                let more = text(writer, logged..logged + 1 + random.below(9000));
                log.write_all(&more).expect("a write to the log");
                logged += more.len() as u64;
                ledger.set(log_entry(writer), logged);
            }
            if random.below(200) == 0 {
                records.sync_data().expect("a sync");
            }
        }
    }

    /// Reads pages and logs of all writers until the test ends. Returns how many reads were judged.
    fn verify(&self, mut random: Random) -> u64 {
        let (ledger, records) = (&self.0.ledger, self.records());
        let (mut judged, mut bytes) = (0, vec![0; PAGE]);
        while ledger.get(Entry::Stop) == 0 {
            let page = random.below(WRITERS * PAGES_EACH);
            let writer = page / PAGES_EACH;
            let (whole, from) = (ledger.whole(writer), ledger.get(record_entry(page)));
            let read = records.read_exact_at(&mut bytes, page * PAGE as u64);
            read.expect("a read of a record");
            let to = ledger.get(record_entry(page)) + 1;
            if whole.is_none() || ledger.whole(writer) != whole {
                // The page of a killed writer may be half written. `assert_nothing_foreign` judges it when the writer is dead.
                continue;
            }
            assert_record(&bytes, page, from, to);
            judged += 1;
            self.verify_log(writer, whole, &mut random);
        }
        judged
    }

    fn verify_log(&self, writer: u64, whole: Option<u64>, random: &mut Random) {
        let logged = self.0.ledger.get(log_entry(writer));
        if logged == 0 {
            return;
        }
        let at = random.below(logged);
        let mut bytes = vec![0; (logged - at).min(5000) as usize];
        let log = File::open(self.log(writer)).expect("the log opens");
        let read = log.read_exact_at(&mut bytes, at);
        // The next writer may have emptied the log meanwhile, after this one was killed.
        if self.0.ledger.whole(writer) == whole {
            read.unwrap_or_else(|e| panic!("log of writer {writer} at {at} of {logged}: {e}"));
            assert_text(writer, at, &bytes, logged);
        }
    }

    /// Asserts that each byte that a dead writer left comes from the noted write or from the next, in which the writer died.
    fn assert_nothing_foreign(&self, writer: u64) {
        let records = self.records();
        let mut bytes = vec![0; PAGE];
        for page in writer * PAGES_EACH..(writer + 1) * PAGES_EACH {
            let read = records.read_exact_at(&mut bytes, page * PAGE as u64);
            read.expect("a read of a record");
            assert_record_or_next(&bytes, page, self.0.ledger.get(record_entry(page)));
        }
        let log = std::fs::read(self.log(writer)).unwrap_or_default();
        let logged = self.0.ledger.get(log_entry(writer));
        assert!(
            log.len() as u64 >= logged,
            "log of writer {writer}: {logged} bytes were written, it has {}",
            log.len()
        );
        assert_text(writer, 0, &log, logged);
    }
}

/// Asserts that the bytes at an offset of a log are the bytes that its writer appended there.
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

/// Runs as a writing or a verifying process of the test below.
#[test]
#[ignore = "a part of the test here, which starts it as a process of its own"]
fn role() {
    killing::play(
        |stage, writing| Files(stage).write(writing),
        |stage, random| Files(stage).verify(random),
    );
}

#[test]
fn programs_killed_in_their_writes_leave_only_bytes_that_they_wrote() {
    let volume = Volume::mounted("512M", 2, "8M");
    let on_mount = volume.make_dir("killed");
    let pages = WRITERS * PAGES_EACH;
    let bytes: Vec<u8> = (0..pages).flat_map(|page| record(page, 0)).collect();
    std::fs::write(on_mount.join("records"), bytes).expect("the first records");
    let ledger = volume.outside("ledger");
    Ledger::create(&ledger, WRITERS + pages);
    let plan = Plan {
        role: "killed::role",
        programs: WRITERS,
        inline: INLINE_WRITERS,
        seconds: SECONDS,
        kills_min: KILLS_MIN,
        pause_max: Duration::from_millis(40),
        hang: HANG,
    };
    let mut play = Play::start(plan, on_mount, ledger);
    let assert_nothing_foreign =
        |stage: &Stage, writer| Files(stage).assert_nothing_foreign(writer);
    play.kill_again_and_again(assert_nothing_foreign);
    play.end_verifying();
    play.kill_all(assert_nothing_foreign);
    for _ in 0..2 {
        for writer in 0..WRITERS {
            Files(&play.stage).assert_nothing_foreign(writer);
        }
        volume.remount();
    }
    volume.umount();
    volume.check();
}
