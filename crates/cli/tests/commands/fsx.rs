//! fsx, an external test program, performs random operations and compares every byte that it reads with the bytes that it wrote.
//!
//! It runs on the mount over both transports (`scripts/with-ring on` repeats these tests), and under `jericho run` with mappings and
//! without (a mapped file is not written inline). It also runs under `jericho run` while another program reads through the mount.
//! `make conformance` runs a million operations over ten seeds.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};

use super::support::{Volume, jericho, number, output, tool_command};

/// Operations and seeds of a short run.
const OPERATIONS: u64 = 4000;
const SEEDS: u64 = 1;

/// Writes fsx's settings, with the frequencies of the operations, and returns their path. fsx reopens the file at each `close_open`.
fn settings(volume: &Volume, mapped: bool) -> PathBuf {
    let maps = if mapped { "5.0" } else { "0.0" };
    let path = volume.beside("fsx.toml");
    let text = format!(
        "flen = 1048576\n[weights]\nclose_open = 1.0\ninvalidate = {}\nmapread = {maps}\nmapwrite = {maps}\n\
         read = 10.0\nwrite = 10.0\ntruncate = 3.0\nfsync = 0.2\nfdatasync = 0.2\nposix_fallocate = 1.0\n\
         punch_hole = 2.0\nsendfile = 2.0\nposix_fadvise = 1.0\ncopy_file_range = 2.0\n",
        if mapped { "1.0" } else { "0.0" }
    );
    std::fs::write(&path, text).unwrap();
    path
}

/// Runs fsx with each seed on a file of the mount, under `jericho run` if `run`.
fn exercise(volume: &Volume, mapped: bool, run: bool) {
    let settings = settings(volume, mapped);
    let operations = number("JERICHO_FSX_OPERATIONS", OPERATIONS);
    for seed in 1..=number("JERICHO_FSX_SEEDS", SEEDS) {
        let mut command = tool_command("fsx", run);
        command.arg("-f").arg(&settings);
        command.arg("-P").arg(volume.beside(""));
        command.args(["-N", &operations.to_string(), "-S", &seed.to_string()]);
        command.arg(volume.at("exercised"));
        let output = output(command.stdin(Stdio::null()));
        assert!(
            output.status.success(),
            "seed {seed}: {}\n{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

#[test]
fn fsx_finds_every_byte_on_the_mount() {
    exercise(&Volume::mounted(), true, false);
}

#[test]
fn fsx_finds_every_byte_under_jericho_run() {
    exercise(&Volume::mounted(), false, true);
}

#[test]
fn fsx_finds_every_byte_under_jericho_run_when_it_maps_the_file() {
    exercise(&Volume::mounted(), true, true);
}

#[test]
fn fsx_finds_every_byte_on_a_volume_with_checksums() {
    let volume = Volume::mounted_with_checksums();
    exercise(&volume, true, false);
    exercise(&volume, false, true);
    let stat = volume.stat();
    for slice in stat["slices"].as_array().unwrap() {
        assert_eq!(slice["checksum_errors"], 0, "{slice}");
    }
    volume.umount();
    let checked = output(jericho(["check", "--data"]).arg(volume.file()));
    let text = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(checked.status.success(), "{text}");
    assert!(text.contains("0 pages damaged or unreadable"), "{text}");
}

/// Returns the bytes of a file as sendfile(2) reads them: through the kernel's page cache, which plain reads do not fill.
fn sent(path: &Path) -> Vec<u8> {
    let file = File::open(path).expect("the file opens");
    let mut copy = tempfile::tempfile().expect("a file beside the mount");
    let mut at = 0;
    while rustix::fs::sendfile(&copy, &file, Some(&mut at), 1 << 20).expect("sendfile") > 0 {}
    let mut bytes = vec![];
    copy.rewind().expect("rewind");
    copy.read_to_end(&mut bytes).expect("read");
    bytes
}

#[test]
fn fsx_finds_every_byte_while_another_program_reads_through_the_mount() {
    let volume = Volume::mounted();
    let path = volume.at("exercised");
    std::fs::write(&path, b"").unwrap();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            // Fills the kernel's page cache with bytes that later reads must not return.
            let mut most = 0;
            while !ended.load(Ordering::Relaxed) {
                most = most.max(sent(&path).len());
            }
            most
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            exercise(&volume, false, true);
        }));
        ended.store(true, Ordering::Relaxed);
        let most = reader.join();
        if let Err(cause) = result {
            std::panic::resume_unwind(cause);
        }
        assert!(most.expect("the reader") > 0, "the reader read nothing");
    });
    // At the end the page cache must hold the writer's last bytes.
    let inline = output(jericho(["run", "--", "cat"]).arg(&path)).stdout;
    assert!(!inline.is_empty());
    assert!(sent(&path) == inline, "the page cache has other bytes");
    assert!(
        std::fs::read(&path).unwrap() == inline,
        "a plain read gets other bytes"
    );
}
