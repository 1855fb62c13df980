//! Reading, writing, appending, synchronous and direct I/O, locks.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::process::Command;

use super::support::{Volume, pattern, succeed};

#[test]
fn stat_is_right_after_each_change() {
    let v = Volume::mounted();
    let file = File::create(v.at("f")).unwrap();
    let of = || fs::metadata(v.at("f")).unwrap();
    assert_eq!((of().len(), of().blocks()), (0, 0));
    let before = of().mtime_nsec() as i128 + i128::from(of().mtime()) * 1_000_000_000;
    file.write_all_at(&[1; 10_000], 0).unwrap();
    let now = of();
    assert_eq!((now.len(), now.blocks()), (10_000, 24), "three pages");
    assert!(now.mtime_nsec() as i128 + i128::from(now.mtime()) * 1_000_000_000 > before);
    file.write_all_at(&[1; 100], 1_000_000).unwrap();
    assert_eq!(
        (of().len(), of().blocks()),
        (1_000_100, 32),
        "sparse in between"
    );
    file.set_len(5000).unwrap();
    assert_eq!((of().len(), of().blocks()), (5000, 16));
    file.set_len(1 << 40).unwrap();
    assert_eq!((of().len(), of().blocks()), (1 << 40, 16));
}

#[test]
fn a_file_that_would_be_too_large_is_refused_and_the_volume_stays_usable() {
    let v = Volume::mounted();
    let file = File::create(v.at("f")).unwrap();
    file.write_all_at(b"here", 0).unwrap();
    for offset in [1 << 46, (1 << 62) - 4096, i64::MAX as u64 - 4096] {
        let error = file.write_at(b"x", offset).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(27), "EFBIG at {offset}: {error}");
        assert!(file.set_len(offset + 1).is_err());
    }
    file.write_all_at(b"y", (1 << 46) - 1).unwrap();
    assert_eq!(fs::metadata(v.at("f")).unwrap().len(), 1 << 46);
    file.set_len(4).unwrap();
    assert_eq!(fs::read(v.at("f")).unwrap(), b"here");
}

#[test]
fn bytes_beyond_a_truncation_read_as_zeros_when_the_file_grows_again() {
    let v = Volume::mounted();
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(v.at("f"))
        .unwrap();
    file.write_all_at(&[0xff; 12_000], 0).unwrap();
    file.set_len(5000).unwrap();
    file.set_len(12_000).unwrap();
    let mut bytes = vec![1; 12_000];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes[..5000].iter().all(|b| *b == 0xff) && bytes[5000..].iter().all(|b| *b == 0));
}

#[test]
fn unaligned_reads_and_writes_of_all_sizes_agree_with_memory() {
    let v = Volume::mounted();
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(v.at("f"))
        .unwrap();
    let mut model = Vec::new();
    let mut seed = 99u64;
    for round in 0..300u64 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let offset = (seed >> 33) as usize % (3 << 20);
        let length = 1 + (seed >> 20) as usize % if round % 10 == 0 { 2 << 20 } else { 9000 };
        let bytes = pattern(round, length);
        file.write_all_at(&bytes, offset as u64).unwrap();
        if model.len() < offset + length {
            model.resize(offset + length, 0);
        }
        model[offset..offset + length].copy_from_slice(&bytes);
        let at = (seed >> 40) as usize % model.len();
        let n = (model.len() - at).min(70_000);
        let mut read = vec![0; n];
        file.read_exact_at(&mut read, at as u64).unwrap();
        assert!(read == model[at..at + n], "round {round}");
    }
    drop(file);
    v.remount();
    assert!(fs::read(v.at("f")).unwrap() == model);
}

#[test]
fn appending_writers_lose_nothing() {
    let v = Volume::mounted();
    std::thread::scope(|scope| {
        for writer in 0..4u8 {
            let path = v.at("log");
            scope.spawn(move || {
                let mut file = File::options()
                    .append(true)
                    .create(true)
                    .open(path)
                    .unwrap();
                for _ in 0..200 {
                    file.write_all(&[b'a' + writer; 101]).unwrap();
                }
            });
        }
    });
    let bytes = fs::read(v.at("log")).unwrap();
    assert_eq!(bytes.len(), 4 * 200 * 101);
    assert!(
        bytes.chunks(101).all(|c| c.iter().all(|b| *b == c[0])),
        "a record was torn"
    );
    // pwrite on a descriptor with O_APPEND appends, as on every Linux filesystem.
    let file = File::options().append(true).open(v.at("log")).unwrap();
    file.write_all_at(b"end", 0).unwrap();
    assert!(fs::read(v.at("log")).unwrap().ends_with(b"end"));
}

#[test]
fn synchronous_writes_survive_the_death_of_the_daemon() {
    let v = Volume::mounted();
    for (name, flag) in [("sync", libc::O_SYNC), ("dsync", libc::O_DSYNC)] {
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .custom_flags(flag)
            .open(v.at(name))
            .unwrap();
        file.write_all(&pattern(7, 50_000)).unwrap();
    }
    File::open(v.mnt()).unwrap().sync_all().unwrap();
    let pid = v.signal_daemon(rustix::process::Signal::KILL);
    Volume::wait_for_end(pid);
    v.mount();
    for name in ["sync", "dsync"] {
        assert!(
            fs::read(v.at(name)).unwrap() == pattern(7, 50_000),
            "{name}"
        );
    }
}

#[test]
fn direct_io_sees_and_makes_the_same_bytes() {
    let v = Volume::mounted();
    fs::write(v.at("f"), pattern(8, 1 << 20)).unwrap();
    let mnt = v.mnt();
    let dd = |args: &[&str]| {
        succeed(
            Command::new("dd")
                .args(args)
                .arg("status=none")
                .current_dir(&mnt),
        )
    };
    dd(&["if=f", "of=copy", "bs=128K", "iflag=direct", "oflag=direct"]);
    assert!(fs::read(v.at("copy")).unwrap() == pattern(8, 1 << 20));
    dd(&[
        "if=f",
        "of=copy",
        "bs=4K",
        "count=1",
        "seek=3",
        "conv=notrunc",
        "oflag=direct",
    ]);
    assert!(fs::read(v.at("copy")).unwrap()[12_288..16_384] == pattern(8, 4096));
}

#[test]
fn locks_exclude_processes_from_each_other() {
    let v = Volume::mounted();
    let file = File::create(v.at("lock")).unwrap();
    file.try_lock().unwrap();
    let taken = || {
        let status = Command::new("flock")
            .arg("--nonblock")
            .arg(v.at("lock"))
            .arg("true")
            .status();
        status.expect("flock").code()
    };
    assert_eq!(taken(), Some(1), "flock sees our lock");
    file.unlock().unwrap();
    assert_eq!(taken(), Some(0));

    use rustix::fs::{FlockOperation, fcntl_lock};
    fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
    let script = "import fcntl,sys\n\
        f=open(sys.argv[1],'r+b')\n\
        try: fcntl.lockf(f, fcntl.LOCK_EX|fcntl.LOCK_NB)\n\
        except OSError: sys.exit(9)";
    let other = || {
        let status = Command::new("python3")
            .args(["-c", script])
            .arg(v.at("lock"))
            .status();
        status.expect("python3").code()
    };
    assert_eq!(other(), Some(9), "fcntl sees our lock");
    fcntl_lock(&file, FlockOperation::NonBlockingUnlock).unwrap();
    assert_eq!(other(), Some(0));
}

#[test]
fn a_copy_by_the_kernel_is_a_copy() {
    let v = Volume::mounted();
    fs::write(v.at("a"), pattern(9, 700_001)).unwrap();
    assert_eq!(fs::copy(v.at("a"), v.at("b")).unwrap(), 700_001);
    assert!(fs::read(v.at("b")).unwrap() == pattern(9, 700_001));
}

/// Writes and syncs while a timer signal interrupts the program.
const INTERRUPTED: &str = "
import os, signal
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
file = os.open('f', os.O_RDWR | os.O_CREAT)
for n in range(200):
    os.pwrite(file, b'x' * 8192, n * 8192)
    os.fsync(file)
    os.pread(file, 4096, n * 4096)
signal.setitimer(signal.ITIMER_REAL, 0)
";

#[test]
fn requests_that_signals_interrupt_leave_no_complaint_in_the_log() {
    let v = Volume::mounted();
    let mut command = Command::new("python3");
    succeed(command.args(["-c", INTERRUPTED]).current_dir(v.mnt()));
    assert_eq!(fs::metadata(v.at("f")).unwrap().len(), 200 * 8192);
    let log = fs::read_to_string(v.log()).unwrap();
    assert!(!log.contains("ERROR"), "{log}");
}

#[test]
fn a_running_program_is_not_truncated() {
    let v = Volume::mounted();
    let program = v.at("sleep");
    fs::copy("/bin/sleep", &program).unwrap();
    let length = fs::metadata(&program).unwrap().len();
    let mut running = Command::new(&program).arg("60").spawn().unwrap();
    let truncating =
        |options: &mut fs::OpenOptions| options.custom_flags(libc::O_TRUNC).open(&program);
    let opens = [
        truncating(fs::OpenOptions::new().write(true)),
        // O_TRUNC truncates a file that is opened for reading, too.
        truncating(fs::OpenOptions::new().read(true)),
    ];
    let left = fs::metadata(&program).unwrap().len();
    running.kill().unwrap();
    running.wait().unwrap();
    assert_eq!(left, length);
    for open in opens {
        assert_eq!(open.unwrap_err().raw_os_error(), Some(libc::ETXTBSY));
    }
}
