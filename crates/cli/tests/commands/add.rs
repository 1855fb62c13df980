//! `jericho add`: on files, mounted and not, and every request that it refuses.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags};

use super::support::commands::wait_until;
use super::support::loops::Loop;
use super::support::{Volume, fail, jericho, output, pattern, succeed};

const MIB: u64 = 1 << 20;

/// Returns `jericho add` with these arguments.
fn add(volume: &Path, new: &Path, arguments: &[&str]) -> Command {
    let mut command = jericho(["add"]);
    command.arg(volume).arg(new).args(arguments);
    command
}

fn slices(volume: &Volume) -> usize {
    volume.stat()["slices"].as_array().expect("slices").len()
}

/// Makes directories in the root with a file each. Returns the slices in which they are.
fn fill(volume: &Volume, name: &str) -> Vec<u64> {
    let make = |number| {
        let dir = volume.at(&format!("{name}{number}"));
        fs::create_dir(&dir).expect("mkdir");
        fs::write(dir.join("file"), pattern(number, 100_000)).expect("write");
        let place = succeed(jericho(["where", "--json"]).arg(dir.join("file")));
        let place: serde_json::Value = serde_json::from_str(&place).expect("JSON");
        place["slice"].as_u64().expect("a slice")
    };
    (0..6).map(make).collect()
}

fn assert_filled(volume: &Volume, name: &str) {
    for number in 0..6 {
        let path = volume.at(&format!("{name}{number}/file"));
        assert!(fs::read(path).expect("read") == pattern(number, 100_000));
    }
}

#[test]
fn an_added_file_is_used_by_the_next_mount_and_keeps_what_it_gets() {
    let volume = Volume::mounted();
    fill(&volume, "before");
    let size = rustix::fs::statvfs(volume.mnt()).expect("statvfs").f_blocks;
    volume.umount();
    let new = volume.beside("new");
    let text = succeed(&mut add(
        &volume.file(),
        &new,
        &["--size", "160M", "--slices", "2"],
    ));
    assert!(
        text.contains("slice 2") && text.contains("slice 3"),
        "{text}"
    );
    assert_eq!(fs::metadata(&new).expect("the file").len(), 160 * MIB);
    volume.check();
    volume.mount();
    assert_eq!(slices(&volume), 4);
    let grown = rustix::fs::statvfs(volume.mnt()).expect("statvfs").f_blocks - size;
    assert!(grown > 100 * MIB / 4096, "{grown} blocks");
    assert_filled(&volume, "before");
    let found = fill(&volume, "after");
    assert!((0..4).all(|slice| found.contains(&slice)), "{found:?}");
    volume.remount();
    assert_filled(&volume, "before");
    assert_filled(&volume, "after");
    volume.umount();
    volume.check();
    // The device is one of the volume now: it is found at another path, and missed if it is away.
    let elsewhere = volume.beside("elsewhere");
    fs::rename(&new, &elsewhere).expect("rename");
    volume.mount();
    assert_filled(&volume, "after");
    volume.umount();
}

/// A program under `jericho run` that appends lines with numbers to a file, until another file exists.
struct Counter {
    child: std::process::Child,
    log: PathBuf,
    stop: PathBuf,
}

impl Counter {
    fn start(volume: &Volume) -> Counter {
        let (log, stop) = (volume.at("log"), volume.at("stop"));
        let text = "i=0; until test -e \"$2\"; do i=$((i + 1)); echo $i >> \"$1\" || exit 1; done";
        let mut run = jericho(["run", "--", "sh", "-c", text, "sh"]);
        run.arg(&log).arg(&stop).stdin(Stdio::null());
        let child = run.spawn().expect("jericho run");
        Counter { child, log, stop }
    }

    fn lines(&self) -> u64 {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        text.lines().count() as u64
    }

    /// Waits until the program has written more.
    fn goes_on(&self) {
        let before = self.lines();
        wait_until("the program writes on", || self.lines() > before + 5);
    }

    fn end(mut self) {
        File::create(&self.stop).expect("a file");
        assert!(self.child.wait().expect("its end").success());
        let text = fs::read_to_string(&self.log).expect("the log");
        for (line, number) in text.lines().zip(1..) {
            assert_eq!(line, number.to_string());
        }
    }
}

#[test]
fn a_device_is_added_while_programs_use_the_volume_and_its_slices_are_used_at_once() {
    let volume = Volume::mounted();
    fill(&volume, "before");
    let size = || rustix::fs::statvfs(volume.mnt()).expect("statvfs").f_blocks;
    let old_size = size();
    let counter = Counter::start(&volume);
    counter.goes_on();
    let new = [volume.beside("one"), volume.beside("two")];
    // By the volume, and by the directory of the mount.
    let text = succeed(&mut add(&volume.file(), &new[0], &["--size", "96M"]));
    assert!(
        text.contains("slice 2") && text.contains("the new slice now"),
        "{text}"
    );
    assert_eq!(slices(&volume), 3);
    let grown = size() - old_size;
    assert!(grown > 60 * MIB / 4096, "{grown} blocks");
    let found = fill(&volume, "one");
    assert!((0..3).all(|slice| found.contains(&slice)), "{found:?}");
    counter.goes_on();
    let arguments = ["--size", "160M", "--slices", "2"];
    let text = succeed(&mut add(&volume.mnt(), &new[1], &arguments));
    assert!(
        text.contains("slice 3") && text.contains("slice 4"),
        "{text}"
    );
    counter.goes_on();
    assert_eq!(slices(&volume), 5);
    let grown = size() - old_size;
    assert!(grown > 170 * MIB / 4096, "{grown} blocks");
    let found = fill(&volume, "two");
    assert!((0..5).all(|slice| found.contains(&slice)), "{found:?}");

    let message = fail(&mut add(&volume.mnt(), &new[0], &[]), 1);
    assert!(message.contains("device 1 of this volume"), "{message}");
    let message = fail(&mut add(&volume.mnt(), &new[0], &["--force"]), 1);
    assert!(message.contains("in use by process"), "{message}");
    // Old and new devices grow.
    for (device, bytes) in [(&new[0], "128M"), (&volume.file(), "384M")] {
        let old_size = size();
        let mut grow = jericho(["grow"]);
        grow.arg(volume.mnt()).arg("--device").arg(device);
        succeed(grow.args(["--size", bytes]));
        assert!(size() > old_size, "{}", device.display());
    }
    counter.goes_on();
    counter.end();
    let names = ["before", "one", "two"];
    names.iter().for_each(|name| assert_filled(&volume, name));

    volume.umount();
    volume.check();
    volume.mount();
    assert_eq!(slices(&volume), 5);
    names.iter().for_each(|name| assert_filled(&volume, name));
    volume.umount();
    volume.check();
}

/// A program that writes and reads files. It waits for a line before it uses the second directory.
const ACCESSES: &str = r#"
import os, sys
def check(path, seed):
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    data = bytes(i * seed % 251 for i in range(300000))
    for at in range(0, len(data), 50000):
        os.pwrite(fd, data[at : at + 50000], at)
    for round in range(20):
        assert os.pread(fd, 400000, 0) == data, round
    for at in range(0, 4096, 64):
        os.pwrite(fd, b"x" * 64, at)
    os.pwrite(fd, b"y" * 5000, 300000)
    data = b"x" * 4096 + data[4096:] + b"y" * 5000
    assert os.pread(fd, 400000, 0) == data
    os.fsync(fd)
    os.close(fd)
    assert open(path, "rb").read() == data
old, new, name = sys.argv[1:]
check(old + "/" + name, 3)
# Stays open, and is moved to the new slice.
held = os.open(old + "/held-" + name, os.O_RDWR | os.O_CREAT)
for at in range(0, 20000, 500):
    os.pwrite(held, b"a" * 500, at)
print("ready", flush=True)
sys.stdin.readline()
assert os.pread(held, 30000, 0) == b"a" * 20000
for at in range(0, 21000, 500):
    os.pwrite(held, b"b" * 500, at)
assert os.pread(held, 30000, 0) == b"b" * 21000
assert os.lseek(held, 0, os.SEEK_END) == 21000 == os.fstat(held).st_size
os.write(held, b"c" * 10)
os.fsync(held)
check(new + "/" + name, 5)
os.rename(new + "/" + name, old + "/moved-" + name)
check(new + "/" + name, 7)
check(old + "/last-" + name, 9)
"#;

/// Runs `ACCESSES` under `jericho run`.
struct Accesses {
    child: std::process::Child,
    report: PathBuf,
}

impl Accesses {
    /// Starts the program. Returns when it has used the first directory.
    fn start(volume: &Volume, old: &Path, new: &Path, name: &str) -> Accesses {
        let report = volume.beside(&format!("report-{name}"));
        let mut run = jericho(["run", "--", "python3", "-c", ACCESSES]);
        run.arg(old).arg(new).arg(name);
        run.env("JERICHO_REPORT", &report);
        run.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = run.spawn().expect("jericho run");
        let mut said = [0; 6];
        let stdout = child.stdout.as_mut().expect("its output");
        std::io::Read::read_exact(stdout, &mut said).expect("its first line");
        assert_eq!(&said, b"ready\n");
        Accesses { child, report }
    }

    /// Has the program go on, and waits for its end. Returns the bytes that it read without the kernel.
    fn end(mut self) -> u64 {
        drop(self.child.stdin.take());
        assert!(self.child.wait().expect("its end").success());
        let report = fs::read_to_string(&self.report).expect("the report");
        let words: Vec<&str> = report.split_whitespace().collect();
        let inline = words.windows(2).filter(|words| words[0] == "with");
        let bytes = inline.filter_map(|words| words[1].parse::<u64>().ok());
        bytes.max().unwrap_or(0)
    }
}

#[test]
fn programs_that_attached_before_and_after_an_addition_use_files_in_the_new_slice() {
    let volume = Volume::mounted();
    let (old, new) = (volume.at("old"), volume.at("new"));
    for dir in [&old, &new] {
        fs::create_dir(dir).expect("mkdir");
    }
    let before = Accesses::start(&volume, &old, &new, "before");
    succeed(&mut add(
        &volume.mnt(),
        &volume.beside("three"),
        &["--size", "96M"],
    ));
    succeed(jericho(["place", "--slice", "2"]).arg(&new));
    let after = Accesses::start(&volume, &new, &new, "after");
    let slice_of = |path: &Path| {
        let place = succeed(jericho(["where", "--json"]).arg(path));
        let place: serde_json::Value = serde_json::from_str(&place).expect("JSON");
        place["slice"].as_u64()
    };
    let held = old.join("held-before");
    succeed(jericho(["place", "--slice", "2", "--move"]).arg(&held));
    // It has read 20 times 300,000 bytes of each file. The new one has the memory of the new slice.
    assert_eq!(slice_of(&new.join("after")), Some(2));
    let inline = after.end();
    assert!(inline > 12 << 20, "{inline} bytes");
    let inline = before.end();
    assert!(inline > 6 << 20, "{inline} bytes");
    assert_eq!(slice_of(&new.join("before")), Some(2));
    assert_eq!(slice_of(&old.join("moved-before")), Some(2));
    assert_eq!(slice_of(&held), Some(2));
    let stat = volume.stat();
    assert!(stat["slices"][2]["hits"].as_u64() > Some(0), "{stat}");
    let read = |dir: &Path, name: &str| fs::read(dir.join(name)).expect("a file");
    let files = || {
        let moved = ["before", "after", "moved-after"].map(|name| read(&new, name));
        let kept = ["before", "moved-before", "last-before", "held-before"];
        (moved, kept.map(|name| read(&old, name)))
    };
    let found = files();
    volume.remount();
    assert!(files() == found);
    volume.umount();
    volume.check();
}

#[test]
fn a_daemon_that_is_killed_after_an_addition_has_what_was_synced_in_the_new_slice() {
    let volume = Volume::mounted();
    fill(&volume, "before");
    succeed(&mut add(
        &volume.mnt(),
        &volume.beside("new"),
        &["--size", "96M"],
    ));
    let found = fill(&volume, "after");
    assert!(found.contains(&2), "{found:?}");
    succeed(jericho(["sync"]).arg(volume.mnt()));
    let pid = volume.signal_daemon(rustix::process::Signal::KILL);
    Volume::wait_for_end(pid);
    let _ = output(jericho(["umount"]).arg(volume.mnt()));
    volume.check();
    volume.mount();
    assert_eq!(slices(&volume), 3);
    assert_filled(&volume, "before");
    assert_filled(&volume, "after");
    volume.umount();
    volume.check();
}

#[test]
fn a_daemon_that_is_killed_in_an_addition_leaves_the_old_volume_or_the_new_one() {
    let is_labelled = |new: &Path| fs::read(new).is_ok_and(|bytes| bytes.starts_with(b"JERICHO"));
    let stages: [&dyn Fn(&Path) -> bool; 4] = [
        &|_| true,
        &|new| new.exists(),
        &|new| fs::metadata(new).is_ok_and(|metadata| metadata.len() == 96 * MIB),
        &is_labelled,
    ];
    for (stage, is_reached) in stages.iter().enumerate() {
        let volume = Volume::mounted();
        fill(&volume, "before");
        succeed(jericho(["sync"]).arg(volume.mnt()));
        let new = volume.beside("new");
        let mut adding = add(&volume.file(), &new, &["--size", "96M"]);
        adding.stdout(Stdio::piped()).stderr(Stdio::piped());
        let adding = adding.spawn().expect("jericho add");
        wait_until("the addition gets that far", || is_reached(&new));
        let pid = volume.signal_daemon(rustix::process::Signal::KILL);
        Volume::wait_for_end(pid);
        let is_added = adding.wait_with_output().expect("its end").status.success();
        let _ = output(jericho(["umount"]).arg(volume.mnt()));
        volume.check();
        volume.mount();
        let count = slices(&volume);
        assert!(
            count == 3 || (count == 2 && !is_added),
            "stage {stage}: {count} slices"
        );
        assert_filled(&volume, "before");
        if count == 2 {
            succeed(&mut add(
                &volume.file(),
                &new,
                &["--size", "96M", "--force"],
            ));
            volume.remount();
        }
        assert_eq!(slices(&volume), 3, "stage {stage}");
        fill(&volume, "after");
        volume.remount();
        assert_filled(&volume, "before");
        assert_filled(&volume, "after");
        volume.umount();
        volume.check();
    }
}

#[test]
fn additions_that_are_refused_change_nothing() {
    let volume = Volume::formatted();
    let file = |name: &str, mib: u64| -> PathBuf {
        let path = volume.beside(name);
        let file = File::create(&path).expect("a file");
        file.set_len(mib * MIB).expect("its length");
        path
    };
    let new = file("new", 100);
    let other = file("other", 100);
    succeed(jericho(["format"]).arg(&other));
    let text = volume.beside("text");
    fs::write(&text, pattern(1, 100 << 20)).expect("write");
    let copy = volume.beside("copy");
    fs::copy(volume.file(), &copy).expect("a copy");
    let refused = |new: &Path, arguments: &[&str], words: &[&str]| {
        let before = fs::read(new).ok();
        let message = fail(&mut add(&volume.file(), new, arguments), 1);
        for word in words {
            assert!(message.contains(word), "{word} is not in {message}");
        }
        assert!(fs::read(new).ok() == before, "{} changed", new.display());
    };
    let all_are_refused = || {
        refused(&new, &["--slices", "2"], &["too small", "fewer slices"]);
        refused(&new, &["--slices", "0"], &["at least 1 slice"]);
        refused(&new, &["--slices", "255"], &["slices"]);
        refused(&volume.beside("missing"), &[], &["--size"]);
        refused(
            &copy,
            &[],
            &["device 0 of this volume", "a copy of it", "--force"],
        );
        refused(&other, &[], &["a Jericho volume", "--force"]);
        refused(&text, &[], &["data", "--force"]);
    };
    let own = volume.file();
    let device = fs::read(volume.file()).expect("the volume");
    all_are_refused();
    refused(&own, &[], &["device 0 of this volume"]);
    refused(&own, &["--force"], &["in use"]);
    assert!(fs::read(volume.file()).expect("the volume") == device);
    volume.mount();
    all_are_refused();
    let message = fail(&mut add(&own, &own, &["--force"]), 1);
    assert!(message.contains("in use by process"), "{message}");
    // A device of another mounted volume is in use by its daemon.
    let mnt = volume.beside("other-mnt");
    fs::create_dir(&mnt).expect("mkdir");
    succeed(jericho(["mount", "--cache", "32M"]).arg(&other).arg(&mnt));
    refused(&other, &["--force"], &["other is in use by process"]);
    succeed(jericho(["umount"]).arg(&mnt));
    assert_eq!(slices(&volume), 2);
    volume.umount();
    volume.check();
    succeed(volume.mount_command().arg("--read-only"));
    refused(&new, &[], &["read-only"]);
    volume.umount();

    // Slices that share a store cannot be joined.
    let small = file("small", 64);
    succeed(jericho(["format", "--slices", "2"]).arg(&small));
    let message = fail(&mut add(&small, &new, &[]), 1);
    assert!(message.contains("share one metadata store"), "{message}");
    // The volume loses an addition, as if a crash had interrupted it before its last step.
    succeed(&mut add(&volume.file(), &new, &[]));
    fs::write(volume.file(), &device).expect("write");
    refused(&new, &[], &["that addition did not end", "--force"]);
    // With --force, `add` takes the devices that it refused above.
    succeed(&mut add(&volume.file(), &new, &["--force"]));
    succeed(&mut add(&volume.file(), &other, &["--force"]));
    volume.mount();
    assert_eq!(slices(&volume), 4);
    volume.umount();
    volume.check();
}

#[test]
fn a_file_on_the_volume_itself_is_refused() {
    let volume = Volume::mounted();
    let inner = volume.at("inner");
    let new = |name: &Path| add(&volume.file(), name, &["--size", "96M"]);
    let message = fail(&mut new(&inner), 1);
    assert!(message.contains("on the volume itself"), "{message}");
    assert!(!inner.exists());
    File::create(&inner).expect("a file");
    let message = fail(&mut new(&inner), 1);
    assert!(message.contains("on the volume itself"), "{message}");
    assert_eq!(fs::metadata(&inner).expect("the file").len(), 0);
    volume.remount();
    assert_eq!(slices(&volume), 2);
}

#[test]
fn a_path_at_which_the_daemon_finds_another_file_is_refused() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: a mount namespace needs root");
        return;
    }
    let volume = Volume::mounted();
    let (here, there) = (volume.beside("here"), volume.beside("there"));
    for dir in [&here, &there] {
        fs::create_dir(dir).expect("mkdir");
        fs::write(dir.join("file"), pattern(3, 100 << 20)).expect("write");
    }
    for name in ["file", "new"] {
        let mut elsewhere = Command::new("unshare");
        let text = "mount --bind \"$1\" \"$2\" && shift 2 && exec \"$@\"";
        elsewhere.args(["--mount", "sh", "-c", text, "sh"]);
        elsewhere.arg(&there).arg(&here);
        let adding = add(
            &volume.mnt(),
            &here.join(name),
            &["--size", "96M", "--force"],
        );
        elsewhere.arg(adding.get_program()).args(adding.get_args());
        let message = fail(&mut elsewhere, 1);
        assert!(message.contains("finds another file"), "{message}");
    }
    assert!(fs::read(here.join("file")).expect("read") == pattern(3, 100 << 20));
    assert!(!here.join("new").exists());
    assert_eq!(slices(&volume), 2);
}

#[test]
fn an_added_block_device_is_in_use_until_the_unmount() {
    let volume = Volume::mounted();
    let file = volume.beside("disk");
    let disk = File::create(&file).expect("a file");
    disk.set_len(100 * MIB).expect("its length");
    let Some(device) = Loop::over(&file) else {
        return;
    };
    succeed(&mut add(&volume.file(), &device.0, &[]));
    // As a mount of another filesystem and mkfs do.
    let take = || rustix::fs::open(&device.0, OFlags::RDWR | OFlags::EXCL, Mode::empty());
    assert_eq!(take().err(), Some(rustix::io::Errno::BUSY));
    volume.umount();
    take().expect("the device is free");
    volume.mount();
    assert_eq!(slices(&volume), 3);
    volume.umount();
}
