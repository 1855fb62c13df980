//! sync(2) and syncfs(2) under `jericho run`, of which the kernel does not tell a FUSE daemon. Syncs of many threads, and the threads of the
//! daemon that serve them.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::commands::{kill, wait_until};
use crate::program::{command, outcome, succeed, under_run};
use crate::volume::Volume;

const PAGE: usize = 4096;
/// Files that threads sync, pages of each, and threads for each file.
const FILES: usize = 12;
const PAGES: usize = 8;
const THREADS_EACH: usize = 2;
const ROUNDS: u64 = 60;
const READERS: usize = 8;

#[test]
fn data_written_before_a_sync_under_run_survives_a_killed_daemon() {
    for arguments in [&[][..], &["-f", "written"]] {
        let volume = Volume::mounted("256M", 2, "32M");
        let dir = volume.make_dir("dir");
        // A program that does not sync writes several megabytes, inline and through the mount.
        let write =
            "head -c 3000000 /dev/zero | tr '\\0' x > written && head -c 1000 written > small";
        succeed(under_run("sh").args(["-e", "-c", write]).current_dir(&dir));
        succeed(under_run("sync").args(arguments).current_dir(&dir));
        volume.crash();
        volume.mount();
        let written = std::fs::read(dir.join("written")).expect("the file was synced");
        assert!(written.len() == 3_000_000 && written.iter().all(|byte| *byte == b'x'));
        let small = std::fs::read(dir.join("small")).expect("the file was synced");
        assert_eq!(small, [b'x'; 1000]);
        volume.finish();
    }
}

#[test]
fn a_sync_of_a_file_outside_the_mount_works_as_usual() {
    let volume = Volume::mounted("256M", 1, "32M");
    let file = volume.outside("elsewhere");
    std::fs::write(&file, "x").expect("a file");
    succeed(under_run("sync").arg("-f").arg(&file));
    let failed = outcome(under_run("sync").arg("-f").arg(volume.at("missing")));
    assert!(!failed.status.success());
    volume.finish();
}

/// Returns a page that names the write that made it.
fn page_of(file: usize, page: usize, round: u64) -> Vec<u8> {
    let mut bytes = vec![file as u8 ^ page as u8; PAGE];
    bytes[..8].copy_from_slice(&round.to_le_bytes());
    bytes
}

/// Overwrites pages of a file and makes each write durable in one way or another. Records in `synced` the last durable write of each page.
fn write_and_sync(dir: &Path, file: usize, part: usize, synced: &[AtomicU64]) {
    let path = dir.join(format!("file{file}"));
    let opened = File::options().read(true).write(true).open(path).unwrap();
    let directory = File::open(dir).unwrap();
    for round in 1..=ROUNDS {
        // Each thread has its own pages, in files that the threads share.
        let page = (round as usize * THREADS_EACH + part) % PAGES;
        let bytes = page_of(file, page, round);
        opened.write_all_at(&bytes, (page * PAGE) as u64).unwrap();
        match round % 4 {
            0 => opened.sync_all().unwrap(),
            1 => {
                let name = dir.join(format!("new{file}-{part}-{round}"));
                fs::write(&name, &bytes).unwrap();
                fs::rename(&name, dir.join(format!("last{file}-{part}"))).unwrap();
                directory.sync_all().unwrap();
                opened.sync_data().unwrap();
            }
            _ => opened.sync_data().unwrap(),
        }
        synced[page].store(round, Ordering::SeqCst);
    }
}

/// Reads pages that are not in the cache until all writers have ended.
fn read_at_random(path: &Path, reader: usize, writers: &AtomicU64) {
    let file = File::open(path).unwrap();
    let pages = file.metadata().unwrap().len() / PAGE as u64;
    let (mut at, mut bytes) = (reader as u64, [0; PAGE]);
    while writers.load(Ordering::SeqCst) > 0 {
        at = (at * 6_364_136_223 + 1_442_695) % pages;
        file.read_exact_at(&mut bytes, at * PAGE as u64).unwrap();
        assert_eq!(bytes, [7; PAGE]);
    }
}

#[test]
fn syncs_reads_and_changes_of_names_of_many_threads_end_and_what_was_synced_is_there() {
    let volume = Volume::mounted("256M", 2, "8M");
    let dir = volume.make_dir("dir");
    fs::write(dir.join("cold"), vec![7; 64 << 20]).unwrap();
    for file in 0..FILES {
        fs::write(dir.join(format!("file{file}")), [0; PAGES * PAGE]).unwrap();
    }
    succeed(command("sync").arg("-f").arg(&dir));
    volume.remount();
    let synced: Vec<Vec<AtomicU64>> = (0..FILES)
        .map(|_| (0..PAGES).map(|_| AtomicU64::new(0)).collect())
        .collect();
    let writers = AtomicU64::new((FILES * THREADS_EACH) as u64);
    std::thread::scope(|scope| {
        let (dir, writers) = (&dir, &writers);
        for (file, synced) in synced.iter().enumerate() {
            for part in 0..THREADS_EACH {
                scope.spawn(move || {
                    write_and_sync(dir, file, part, synced);
                    writers.fetch_sub(1, Ordering::SeqCst);
                });
            }
        }
        for reader in 0..READERS {
            scope.spawn(move || read_at_random(&dir.join("cold"), reader, writers));
        }
    });
    volume.crash();
    volume.mount();
    for (file, synced) in synced.iter().enumerate() {
        let bytes = fs::read(dir.join(format!("file{file}"))).unwrap();
        for (page, bytes) in bytes.chunks(PAGE).enumerate() {
            let round = synced[page].load(Ordering::SeqCst);
            assert!(round > 0);
            assert!(
                bytes == page_of(file, page, round),
                "file {file}, page {page}"
            );
        }
    }
    volume.finish();
}

/// Returns whether the daemon is gone, or going.
fn is_of_dead_daemon(error: &io::Error) -> bool {
    let gone = [ErrorKind::NotConnected, ErrorKind::ConnectionAborted];
    gone.contains(&error.kind())
}

#[test]
fn a_daemon_that_is_told_to_end_during_syncs_ends_and_leaves_a_sound_volume() {
    let volume = Volume::mounted("256M", 2, "32M");
    let dir = volume.make_dir("dir");
    let pid = volume.daemon_pid();
    let begun = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..16 {
            let (dir, begun) = (&dir, &begun);
            scope.spawn(move || {
                let mut options = File::options();
                options.create(true).append(thread % 2 == 0).write(true);
                let file = options.open(dir.join(format!("file{thread}"))).unwrap();
                for round in 0_u64.. {
                    let at = round % PAGES as u64 * PAGE as u64;
                    let ended = file
                        .write_all_at(&[1; PAGE], at)
                        .and_then(|()| file.sync_data());
                    match ended {
                        Ok(()) => drop(begun.fetch_add(1, Ordering::SeqCst)),
                        Err(error) => {
                            assert!(is_of_dead_daemon(&error), "{error}");
                            return;
                        }
                    }
                }
            });
        }
        wait_until("threads sync", || begun.load(Ordering::SeqCst) > 200);
        kill("TERM", pid);
    });
    succeed(command("tail").args(["--pid", &pid.to_string(), "-f", "/dev/null"]));
    volume.detach();
    volume.check();
}

/// Returns how many requests helpers of the FUSE ring have served.
fn helped(volume: &Volume) -> u64 {
    volume.stat()["ring_helped"].as_u64().unwrap()
}

#[test]
fn the_thread_of_the_ring_serves_changes_of_names_and_syncs_of_a_lone_program_itself() {
    const EACH: u64 = 100;
    let volume = Volume::mounted("256M", 1, "32M");
    let dir = volume.make_dir("dir");
    // What the question itself takes.
    let before = helped(&volume);
    let own = helped(&volume) - before;
    let is_ring = volume.stat()["transport"] == "ring";
    assert_eq!(own > 0, is_ring);
    let before = before + 2 * own;
    for n in 0..EACH {
        let (name, other) = (dir.join(format!("a{n}")), dir.join(format!("b{n}")));
        let mut options = File::options();
        options.create_new(true).write(true).mode(0o600);
        drop(options.open(&name).unwrap());
        chown(&name, None, None).unwrap();
        fs::set_permissions(&name, PermissionsExt::from_mode(0o640)).unwrap();
        fs::hard_link(&name, dir.join("link")).unwrap();
        fs::remove_file(dir.join("link")).unwrap();
        fs::rename(&name, &other).unwrap();
        fs::create_dir(&name).unwrap();
        fs::remove_dir(&name).unwrap();
        fs::remove_file(&other).unwrap();
    }
    let after_names = helped(&volume);
    assert_eq!(after_names - before - own, 0);
    let file = File::create(dir.join("file")).unwrap();
    for n in 0..EACH {
        file.write_all_at(&[2; PAGE], n * PAGE as u64).unwrap();
        file.sync_data().unwrap();
    }
    // A slow device or other requests may have some served by helpers, but not all.
    let syncs = helped(&volume) - after_names - own;
    assert!(syncs < EACH, "{syncs}");
    drop(file);
    volume.finish();
}

#[test]
fn stat_counts_each_request_of_the_kernel_once() {
    const EACH: u64 = 200;
    let volume = Volume::mounted("256M", 1, "32M");
    let dir = volume.make_dir("dir");
    let requests = || volume.stat()["requests"].as_u64().unwrap();
    let file = File::create(dir.join("file")).unwrap();
    file.write_all_at(&[1; PAGE], 0).unwrap();
    file.sync_data().unwrap();
    let before = requests();
    let of_question = requests() - before;
    let before = requests();
    for _ in 0..EACH {
        file.sync_data().unwrap();
    }
    assert_eq!(requests() - before - of_question, EACH);
    let before = requests();
    for n in 0..EACH {
        file.write_all_at(&[2; PAGE], n * PAGE as u64).unwrap();
        file.sync_data().unwrap();
    }
    assert_eq!(requests() - before - of_question, 2 * EACH);
    drop(file);
    volume.finish();
}
