//! Requests that hang on one device hold threads of the daemon, and never all of them.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use super::failing_device::{Lift, Pair, assert_holds, synced};
use super::support::commands::wait_until;
use super::support::{Volume, pattern, succeed};

const BYTES: usize = 10_000;
/// Rounds of each program that makes ordinary load. They take long enough for many looks of the supervisor.
const ROUNDS: u64 = 1000;
/// Syncs that hang beyond the regular number of threads.
const MORE: usize = 8;

/// Returns the number of a process's threads whose names begin with `begin`.
fn threads_named(pid: u64, begin: &str) -> usize {
    let names = fs::read_dir(format!("/proc/{pid}/task"))
        .expect("the daemon's threads")
        .filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with(begin)).count()
}

fn pid_of(stat: &serde_json::Value) -> u64 {
    stat["pid"].as_u64().expect("a process id")
}

/// Lets more syncs than there are threads with these names hang on one device. Meanwhile uses files on the other one.
fn more_syncs_hang(transport: &'static str, threads: &str) {
    let pair = Pair::filled_over(transport);
    let stat = pair.stat();
    assert_eq!(stat["transport"], transport);
    let pid = pid_of(&stat);
    let regular = threads_named(pid, threads);
    let syncs = regular + MORE;
    let files: Vec<File> = (0..syncs)
        .map(|n| {
            let file = File::create(pair.y().join(format!("f{n}"))).expect("create");
            // Too large for the journal, so the page that changes is overwritten on the device, by the thread that syncs.
            let contents = pattern(n as u64, 20 * 4096);
            file.write_all_at(&contents, 0).expect("write");
            file.sync_all().expect("fsync");
            file.write_all_at(&[n as u8; 4096], 0).expect("write");
            file
        })
        .collect();
    pair.order("/b write hang\n");
    std::thread::scope(|scope| {
        let lift = Lift(&pair);
        let slow: Vec<_> = files
            .iter()
            .map(|file| scope.spawn(|| file.sync_data()))
            .collect();
        wait_until("each sync has a thread, and others are left", || {
            threads_named(pid, threads) > syncs
        });
        for number in 0..20 {
            let path = pair.x().join(format!("new{number}"));
            synced(&path, number).expect("a durable file");
            assert_holds(&path, number);
            fs::rename(&path, pair.x().join("renamed")).expect("rename");
        }
        assert!(slow.iter().all(|sync| !sync.is_finished()));
        drop(lift);
        for sync in slow {
            sync.join()
                .expect("no panic")
                .expect("a sync that was only slow");
        }
    });
    drop(files);
    // A thread that is one too many ends after its next request.
    let again = File::open(pair.x().join("old")).expect("open");
    wait_until("the further threads have ended", || {
        again.sync_all().expect("fsync");
        threads_named(pid, threads) <= regular
    });
    assert_eq!(threads_named(pid, threads), regular);
    drop(again);
    pair.umount();
    pair.assert_sound();
}

#[test]
fn more_syncs_than_workers_that_hang_on_one_device_delay_nothing_on_another() {
    more_syncs_hang("device", "mount-worker-");
}

#[test]
fn more_syncs_than_helpers_that_hang_on_one_device_delay_nothing_on_another() {
    let offered = fs::read_to_string("/sys/module/fuse/parameters/enable_uring");
    if !offered.is_ok_and(|switch| switch.trim() == "Y") {
        eprintln!("SKIPPED: the kernel does not offer the FUSE ring");
        return;
    }
    more_syncs_hang("ring", "mount-helper-");
}

/// Lets 16 programs read, write and open cached files at once. Returns the most threads that `serving` has counted meanwhile.
fn most_threads(volume: &Volume, serving: impl Fn() -> usize + Send) -> usize {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let programs: Vec<_> = (0..16)
            .map(|program| {
                let path = volume.at(&format!("f{program}"));
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let contents = pattern(program + round, BYTES);
                        let options = File::options().read(true).write(true).open(&path);
                        let file = options.expect("open");
                        file.set_len(1).expect("truncate");
                        file.write_all_at(&contents, 0).expect("write");
                        assert_eq!(fs::metadata(&path).expect("stat").len(), BYTES as u64);
                        assert!(fs::read(&path).expect("read") == contents);
                    }
                })
            })
            .collect();
        let ended = &ended;
        let most = scope.spawn(move || {
            let mut most = serving();
            while !ended.load(Ordering::Relaxed) {
                most = most.max(serving());
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            most
        });
        let results: Vec<_> = programs.into_iter().map(|p| p.join()).collect();
        ended.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|r| r.expect("a program"));
        most.join().expect("a count")
    })
}

#[test]
fn requests_that_do_not_hang_start_no_thread_however_many_there_are_at_once() {
    let volume = Volume::formatted();
    // Over the FUSE ring, the threads of the ring serve nearly all of these requests.
    succeed(volume.mount_command().args(["--transport", "device"]));
    let pid = pid_of(&volume.stat());
    let serving = || threads_named(pid, "mount-worker-");
    let regular = serving();
    for program in 0..16 {
        fs::write(volume.at(&format!("f{program}")), [0; BYTES]).expect("write");
    }
    // On a machine that is busy with other work, a request may take very long for once. Not in each of these rounds.
    let mut counts = Vec::new();
    while counts.last() != Some(&regular) {
        assert!(counts.len() < 5, "{counts:?} threads in place of {regular}");
        wait_until("only the regular threads are there", || {
            let _ = fs::metadata(volume.mnt());
            let name = volume.mnt().join("new");
            fs::write(&name, b"x").expect("write");
            fs::rename(&name, volume.mnt().join("f16")).expect("rename");
            serving() == regular
        });
        counts.push(most_threads(&volume, serving));
    }
    volume.umount();
    volume.check();
}
