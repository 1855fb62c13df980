//! The test kills the daemon while programs write. Then the volume mounts, is sound, and holds all synced data.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::program::{command, succeed, under_run};
use crate::volume::Volume;

const O_DSYNC: i32 = 0o10000;
const PAGE: u64 = 4096;
const PAGES: u64 = 256;

/// Returns a page whose content tells its number and the round in which it was written.
fn page(number: u64, round: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(PAGE as usize);
    while bytes.len() < PAGE as usize {
        bytes.extend_from_slice(&number.to_le_bytes());
        bytes.extend_from_slice(&round.to_le_bytes());
    }
    bytes
}

/// Appends records of odd length, syncs each, and counts the synced ones in `acknowledged`.
fn append(path: &Path, acknowledged: &AtomicU64) -> io::Result<()> {
    let mut file = File::options().append(true).create(true).open(path)?;
    loop {
        let n = acknowledged.load(Ordering::SeqCst);
        file.write_all(format!("record {n:>20} end\n").as_bytes())?;
        file.sync_data()?;
        acknowledged.fetch_add(1, Ordering::SeqCst);
    }
}

fn assert_appended(path: &Path, acknowledged: u64) {
    let text = fs::read_to_string(path).expect("the appended file");
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    assert!(
        lines.len() as u64 >= acknowledged,
        "{acknowledged} records were synced, {} are there",
        lines.len()
    );
    for (n, line) in lines.iter().take(acknowledged as usize).enumerate() {
        assert_eq!(*line, format!("record {n:>20} end\n"));
    }
}

/// Overwrites pages in place through O_DSYNC, round after round.
fn overwrite(path: &Path, acknowledged: &AtomicU64) -> io::Result<()> {
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(O_DSYNC)
        .open(path)?;
    loop {
        let n = acknowledged.load(Ordering::SeqCst);
        file.write_all_at(&page(n % PAGES, n / PAGES), n % PAGES * PAGE)?;
        acknowledged.fetch_add(1, Ordering::SeqCst);
    }
}

fn assert_overwritten(path: &Path, acknowledged: u64) {
    let bytes = fs::read(path).expect("the overwritten file");
    for number in 0..PAGES.min(acknowledged) {
        // The page may hold its newest acknowledged round, or the round that was in flight when the daemon died.
        let round = (acknowledged - 1 - number) / PAGES;
        let at = (number * PAGE) as usize;
        let found = bytes
            .get(at..at + PAGE as usize)
            .expect("the file is as long as what was synced");
        assert!(
            found == page(number, round) || found == page(number, round + 1),
            "page {number}, round {round}"
        );
    }
}

/// Makes each file under a temporary name, syncs it, renames it, syncs the directory.
fn publish(dir: &Path, acknowledged: &AtomicU64) -> io::Result<()> {
    loop {
        let n = acknowledged.load(Ordering::SeqCst);
        let temporary = dir.join(format!("{n}.tmp"));
        let mut file = File::create(&temporary)?;
        file.write_all(&page(n, 0))?;
        file.write_all(b"tail")?;
        file.sync_all()?;
        fs::rename(&temporary, dir.join(n.to_string()))?;
        File::open(dir)?.sync_all()?;
        acknowledged.fetch_add(1, Ordering::SeqCst);
    }
}

fn assert_published(dir: &Path, acknowledged: u64) {
    for n in 0..acknowledged {
        let bytes =
            fs::read(dir.join(n.to_string())).unwrap_or_else(|e| panic!("published file {n}: {e}"));
        assert!(
            bytes.starts_with(&page(n, 0)) && bytes.ends_with(b"tail"),
            "published file {n}"
        );
    }
}

/// Runs sqlite3, which commits numbered rows with synchronous=EXTRA and prints each number after its commit.
fn commit(db: &Path, acknowledged: &AtomicU64) -> io::Result<()> {
    // stdbuf passes on each line at once: sqlite3 alone would keep the lines until its buffer is full.
    let mut child = command("stdbuf")
        .args(["-oL", "sqlite3", "-bail"])
        .arg(db)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut sql = child.stdin.take().expect("piped");
    let feeding = std::thread::spawn(move || -> io::Result<()> {
        writeln!(
            sql,
            "PRAGMA synchronous=EXTRA; CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB);"
        )?;
        for n in 1u64.. {
            writeln!(
                sql,
                "INSERT INTO t VALUES({n}, randomblob(3000)); SELECT {n};"
            )?;
        }
        Ok(())
    });
    for line in BufReader::new(child.stdout.take().expect("piped")).lines() {
        let n: u64 = line?
            .parse()
            .expect("sqlite prints the numbers of the commands");
        // After sqlite has removed its journal, it opens and syncs the directory, and ignores a failure of the open. So a commit
        // counts only if the daemon lives after it. The kernel does not know the absent name, so it asks the daemon.
        let answer = fs::symlink_metadata(db.with_file_name(format!("absent{n}")));
        if answer.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            acknowledged.store(n, Ordering::SeqCst);
        }
    }
    child.wait()?;
    feeding.join().expect("the feeding thread does not panic")
}

fn assert_committed(db: &Path, acknowledged: u64) {
    assert_eq!(
        succeed(command("sqlite3").arg(db).arg("PRAGMA integrity_check")).trim(),
        "ok"
    );
    let rows = succeed(
        command("sqlite3")
            .arg(db)
            .arg(format!("SELECT count(*) FROM t WHERE id <= {acknowledged}")),
    );
    assert_eq!(rows.trim(), acknowledged.to_string(), "committed rows");
}

/// Kills the daemon once every writer has `target` acknowledgements. Then asserts that all synced data is there.
fn everything_synced_survives(target: u64) {
    let volume = Volume::mounted("512M", 2, "8M");
    let counters: [AtomicU64; 4] = Default::default();
    let (logs, pages) = (
        volume.make_dir("logs").join("log"),
        volume.make_dir("pages").join("pages"),
    );
    let (published, db) = (
        volume.make_dir("published"),
        volume.make_dir("db").join("test.db"),
    );
    // The writers do not sync the directories above, and a crash may lose directories that are not synced.
    for dir in ["logs", "pages", "published", "db", "."] {
        File::open(volume.at(dir))
            .and_then(|dir| dir.sync_all())
            .expect("sync of a directory");
    }
    std::thread::scope(|scope| {
        let [appends, overwrites, publications, commits] = &counters;
        let writers = [
            scope.spawn(|| append(&logs, appends)),
            scope.spawn(|| overwrite(&pages, overwrites)),
            scope.spawn(|| publish(&published, publications)),
            scope.spawn(|| commit(&db, commits)),
        ];
        // Fills the cache with other data meanwhile. It ends when the daemon dies.
        let churn = scope.spawn(|| {
            for n in 0.. {
                fs::write(
                    volume.at(&format!("churn{}", n % 4)),
                    vec![n as u8; 3 << 20],
                )?;
            }
            io::Result::Ok(())
        });
        let deadline = Instant::now() + Duration::from_secs(120);
        while counters.iter().any(|c| c.load(Ordering::SeqCst) < target) {
            let stuck = Instant::now() > deadline || writers.iter().any(|w| w.is_finished());
            if stuck {
                // The scope ends only after the writers.
                volume.crash();
                panic!("a writer failed or hangs; acknowledged so far: {counters:?}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        volume.crash();
        for writer in writers {
            // The error of the dead mount ends the writers. sqlite ends with a status instead.
            let _ = writer.join().expect("a writer does not panic");
        }
        churn
            .join()
            .expect("the thread does not panic")
            .expect_err("the mount is gone");
    });
    let [appends, overwrites, publications, commits] = counters.map(AtomicU64::into_inner);
    volume.mount();
    assert_appended(&logs, appends);
    assert_overwritten(&pages, overwrites);
    assert_published(&published, publications);
    assert_committed(&db, commits);
    volume.finish();
}

#[test]
fn synced_data_survives_a_daemon_that_is_killed_early() {
    everything_synced_survives(3);
}

#[test]
fn synced_data_survives_a_daemon_that_is_killed_in_the_middle() {
    everything_synced_survives(40);
}

#[test]
fn synced_data_survives_a_daemon_that_is_killed_late() {
    everything_synced_survives(200);
}

#[test]
fn a_volume_whose_daemon_was_killed_is_sound_and_mounts_again_each_time() {
    let volume = Volume::mounted("512M", 2, "8M");
    let dir = volume.make_dir("dir");
    let root = File::open(volume.mnt()).expect("the root opens");
    root.sync_all().expect("sync of the root");
    drop(root);
    for round in 0..5u64 {
        let kept = dir.join(format!("kept{round}"));
        let mut file = File::create(&kept).expect("create");
        file.write_all(&page(round, round)).expect("write");
        file.sync_all().expect("sync");
        File::open(&dir)
            .and_then(|dir| dir.sync_all())
            .expect("sync of the directory");
        // This file is not synced: the crash may lose it, and it must not harm the synced files.
        fs::write(dir.join(format!("loose{round}")), vec![1; 5 << 20]).expect("write");
        drop(file);
        volume.crash();
        volume.check();
        volume.mount();
        for n in 0..=round {
            assert_eq!(
                fs::read(dir.join(format!("kept{n}"))).expect("a synced file"),
                page(n, n)
            );
        }
    }
    volume.finish();
}

#[test]
fn a_file_that_was_written_inline_and_renamed_over_another_is_whole_after_a_crash() {
    const PROGRAM: &str = "
import os, sys
new, name = sys.argv[1] + '/new', sys.argv[1] + '/name'
file = os.open(new, os.O_RDWR | os.O_CREAT)
for at in range(200):
    assert os.pwrite(file, bytes([7]) * 1000, at * 1000) == 1000
os.rename(new, name)
os.fsync(os.open(sys.argv[1], os.O_RDONLY))
";
    let volume = Volume::mounted("256M", 2, "16M");
    let dir = volume.make_dir("replaced");
    fs::write(dir.join("name"), "old").expect("write");
    let report = volume.outside("report");
    let mut program = under_run("python3");
    program.args(["-c", PROGRAM]).arg(&dir);
    succeed(program.env("JERICHO_REPORT", &report));
    let report = fs::read_to_string(report).expect("the report");
    assert!(report.contains("inline"), "{report}");
    volume.crash();
    volume.check();
    volume.mount();
    let found = fs::read(dir.join("name")).expect("read");
    assert!(found == vec![7; 200_000], "{} bytes", found.len());
    volume.finish();
}
