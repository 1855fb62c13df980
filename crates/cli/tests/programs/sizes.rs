//! A file that programs extend and truncate inline has exactly the size that they gave it, and reads as zeros when it grows again.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate};

use crate::program::{outcome, succeed, under_run};
use crate::roles;
use crate::volume::Volume;

const ROUNDS: u64 = 2_000;
/// Appends to a file without asking for its size.
const APPEND: &str = "import os, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
for _ in range(60):
    os.write(log, bytes(301))
";
const HANG: Duration = Duration::from_secs(240);

/// Extends, truncates and punches a file, and checks its size.
#[test]
#[ignore = "a part of the test here, which starts it as a process of its own"]
fn changer() {
    let Some([path]) = roles::role() else { return };
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(true);
    let file = options.open(&path).expect("open");
    for round in 0..ROUNDS {
        let end = 20_000 + round * 7 % 30_000;
        let mut at = file.metadata().expect("stat").len();
        while at < end {
            let len = (end - at).min(1_500);
            file.write_all_at(&vec![7; len as usize], at)
                .expect("write");
            at += len;
        }
        let size_after_truncation = 1 + round * 13 % 9_000;
        file.set_len(size_after_truncation).expect("ftruncate");
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, punch, 0, 100).expect("fallocate");
        let size = file.metadata().expect("stat").len();
        assert_eq!(size, size_after_truncation, "round {round}");
    }
}

/// Asks for a file's size until the test stops it.
#[test]
#[ignore = "a part of the test here, which starts it as a process of its own"]
fn size_reader() {
    let Some([path, stop]) = roles::role() else {
        return;
    };
    while !Path::new(&stop).exists() {
        for _ in 0..100 {
            let _ = std::fs::metadata(&path);
        }
    }
}

#[test]
fn a_truncated_file_does_not_grow_by_itself_while_others_ask_for_its_size() {
    let volume = Volume::mounted("256M", 1, "16M");
    let (path, stop) = (volume.at("file"), volume.outside("stop"));
    let (path, stop) = (path.to_str().expect("UTF-8"), stop.to_str().expect("UTF-8"));
    let size_reader = |_| {
        roles::start(&mut roles::command(
            "sizes::size_reader",
            &[path, stop],
            false,
        ))
    };
    let mut size_readers: Vec<_> = (0..2).map(size_reader).collect();
    let mut changer = roles::start(&mut roles::command("sizes::changer", &[path], true));
    let status = roles::wait_for_end(&mut changer, "the program that changes the size", HANG);
    std::fs::write(stop, "").expect("write");
    for size_reader in &mut size_readers {
        roles::wait_for_end(size_reader, "the program that asks for the size", HANG);
    }
    assert!(status.success(), "{}", roles::output_of(&mut changer));
    volume.finish();
}

#[test]
fn an_append_through_the_mount_lands_after_the_inline_appends_of_an_ended_program() {
    let volume = Volume::mounted("256M", 1, "16M");
    let path = volume.at("log");
    let log = File::options().append(true).create(true).open(&path);
    let mut log = log.expect("open");
    let (mut expected, line) = (vec![], *b"by the mount\n");
    for round in 0..10 {
        log.write_all(&line).expect("write");
        expected.extend(line);
        // Enough appends that some are inline (the first ones go through the kernel), over several pages.
        let mut append = under_run("python3");
        append.args(["-c", APPEND]).arg(&path);
        succeed(&mut append);
        expected.resize(expected.len() + 301 * 60, 0);
        // No program has asked for the size meanwhile, so the kernel still knows the old one.
        log.write_all(&line).expect("write");
        expected.extend(line);
        log.write_all(&[7; 9000]).expect("write");
        expected.resize(expected.len() + 9000, 7);
        let found = std::fs::read(&path).expect("read");
        assert!(
            found == expected,
            "round {round}: {} bytes of {}",
            found.len(),
            expected.len()
        );
    }
    drop(log);
    volume.finish();
}

#[test]
fn a_program_that_dies_in_a_write_leaves_zeros_after_the_end_of_the_file() {
    let volume = Volume::mounted("256M", 1, "16M");
    let (source, options) = (
        include_str!("broken_write.c"),
        ["-O1", "-Wall", "-Wextra", "-Werror"],
    );
    let program = volume.compile("broken", source, &options);
    for round in 0..4 {
        let path = volume.at(&format!("file{round}"));
        let ended = outcome(under_run(&program).arg(&path));
        // SIGSEGV proves that the write was inline: the kernel would have failed it with EFAULT.
        let signal = ended
            .status
            .signal()
            .or(ended.status.code().map(|c| c - 128));
        assert_eq!(signal, Some(11), "{ended:?}");
        let size = std::fs::metadata(&path).expect("stat").len();
        assert_eq!(size, 100_000);
        let file = File::options().read(true).write(true).open(&path);
        let file = file.expect("open");
        // Three ways to extend the file, and then one of them after write-back of the dirty pages.
        match round {
            0 => file.set_len(120_000).expect("ftruncate"),
            1 => file.write_all_at(b"a", 119_999).expect("write"),
            2 => fallocate(&file, FallocateFlags::empty(), 0, 120_000).expect("fallocate"),
            _ => {
                file.sync_all().expect("fsync");
                file.set_len(120_000).expect("ftruncate");
            }
        }
        let mut bytes = vec![1; 19_999];
        file.read_exact_at(&mut bytes, 100_000).expect("read");
        let wrong = bytes.iter().position(|byte| *byte != 0);
        assert_eq!(wrong, None, "round {round}");
    }
    volume.finish();
}
