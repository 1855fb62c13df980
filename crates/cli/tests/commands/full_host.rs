//! A full host filesystem: programs that need space get an error at once, and all others continue. All programs continue when there
//! is space again.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::support::commands::LONG;
use super::support::{Volume, fail, is_mounted, jericho, output, succeed};

const MIB: usize = 1 << 20;

/// A small filesystem with a sparse volume that is larger than it, and the volume's mount.
pub struct Host {
    dir: tempfile::TempDir,
}

impl Host {
    /// Mounts the small filesystem. Returns `None` and prints a message if this user may not mount.
    pub fn new(mib: usize) -> Option<Host> {
        let host = Host {
            dir: tempfile::tempdir().expect("a directory"),
        };
        fs::create_dir(host.disk()).expect("mkdir");
        fs::create_dir(host.mnt()).expect("mkdir");
        if !rustix::process::geteuid().is_root() {
            eprintln!("not tested: needs root, to mount a small filesystem");
            return None;
        }
        let size = format!("size={mib}m");
        let mut mount = Command::new("mount");
        succeed(
            mount
                .args(["-t", "tmpfs", "-o", &size, "none"])
                .arg(host.disk()),
        );
        Some(host)
    }

    /// Makes and mounts a sparse volume of 512 MiB in two slices.
    pub fn mounted(mib: usize) -> Option<Host> {
        let host = Host::new(mib)?;
        let mut format = jericho(["format", "--size", "512M", "--slices", "2", "--sparse"]);
        succeed(format.arg(host.volume()));
        host.mount();
        Some(host)
    }

    pub fn mount(&self) {
        succeed(
            jericho([
                "mount",
                "--cache",
                "48M",
                "--topology",
                "virtual:2",
                "--log",
            ])
            .arg(self.log())
            .arg(self.volume())
            .arg(self.mnt()),
        );
    }

    fn mounting(&self) -> Command {
        let mut mount = jericho(["mount", "--cache", "48M", "--log"]);
        mount.arg(self.log()).arg(self.volume()).arg(self.mnt());
        mount
    }

    pub fn disk(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    pub fn volume(&self) -> PathBuf {
        self.disk().join("volume")
    }

    pub fn mnt(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    pub fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    /// Returns the number of log lines that contain `words`.
    pub fn said(&self, words: &str) -> usize {
        let log = fs::read_to_string(self.log()).expect("the log");
        log.lines().filter(|line| line.contains(words)).count()
    }

    /// Waits until `lines` lines of the log contain `words`.
    fn logs(&self, words: &str, lines: usize) {
        at_last(words, || {
            let said = self.said(words);
            (said == lines)
                .then_some(())
                .ok_or(format!("{said} lines, not {lines}"))
        });
    }

    /// Fills the host except for `mib` MiB.
    pub fn leave(&self, mib: usize) {
        let stat = rustix::fs::statvfs(self.disk()).expect("statvfs");
        let free = (stat.f_bavail * stat.f_frsize) as usize;
        let mut filler = File::options();
        let filler = filler.create(true).append(true).open(self.filler());
        let mut filler = filler.expect("a file that takes the space");
        let bytes = free.saturating_sub(mib * MIB);
        filler.write_all(&vec![1; bytes]).expect("space");
    }

    pub fn filler(&self) -> PathBuf {
        self.disk().join("filler")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Frees space first, so that the daemon can write back everything.
        let _ = fs::remove_file(self.filler());
        if is_mounted(&self.mnt()) {
            let _ = jericho(["umount"]).arg(self.mnt()).output();
            let _ = Command::new("umount").arg("-l").arg(self.mnt()).output();
        }
        let _ = Command::new("umount").arg("-l").arg(self.disk()).output();
    }
}

/// A process and its children. They are killed and reaped when dropped.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        let group = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = self.0.wait();
    }
}

/// Returns `bytes` bytes at offset `at` of the file with this seed.
fn pattern(seed: u8, at: usize, bytes: usize) -> Vec<u8> {
    let byte = |at: usize| (at / 7) as u8 ^ (at >> 13) as u8 ^ seed;
    (at..at + bytes).map(byte).collect()
}

/// Writes a file until a write fails. Returns the number of accepted bytes, and the error.
fn write_until_refused(path: &Path, seed: u8) -> (usize, std::io::Error) {
    let mut file = File::create(path).expect("create");
    let mut at = 0;
    loop {
        match file.write(&pattern(seed, at, 64 << 10)) {
            Ok(bytes) => at += bytes,
            Err(error) => return (at, error),
        }
        assert!(at < 400 * MIB, "a full host accepted 400 MiB");
    }
}

/// Retries until an attempt succeeds.
pub fn at_last<T>(what: &str, mut attempt: impl FnMut() -> Result<T, String>) -> T {
    let begun = Instant::now();
    loop {
        match attempt() {
            Ok(value) => return value,
            Err(error) if begun.elapsed() > LONG => panic!("{what}: still {error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

#[test]
fn writers_on_a_full_host_get_an_error_and_accepted_data_is_not_lost() {
    let Some(host) = Host::mounted(96) else {
        return;
    };
    let placed = host.mnt().join("placed");
    fs::write(&placed, pattern(1, 0, MIB)).expect("write");
    let placed = File::options().read(true).write(true).open(&placed);
    let placed = placed.expect("open");
    placed.sync_all().expect("the host still has space");
    host.leave(4);

    let (big, begun) = (host.mnt().join("big"), Instant::now());
    let (accepted, error) = write_until_refused(&big, 2);
    assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
    assert!(
        begun.elapsed() < LONG,
        "the writer got the error after {:?}",
        begun.elapsed()
    );
    let synced = File::open(&big).expect("open").sync_all();
    assert_eq!(synced.expect_err("fsync").kind(), ErrorKind::StorageFull);
    assert_eq!(
        host.said("write-back of volume"),
        1,
        "the log has one line for all failures"
    );

    // Data whose space is allocated can be overwritten and synced.
    for round in 0..20 {
        let bytes = pattern(round, 0, 4096);
        placed
            .write_all_at(&bytes, u64::from(round) * 8192)
            .expect("an overwrite");
        placed.sync_data().expect("a sync of the overwrite");
    }

    fs::remove_file(host.filler()).expect("rm");
    at_last("fsync when there is room", || {
        let synced = File::open(&big).and_then(|file| file.sync_all());
        synced.map_err(|error| error.to_string())
    });
    host.logs("works again", 1);
    at_last("new data", || {
        fs::write(host.mnt().join("new"), pattern(3, 0, MIB)).map_err(|error| error.to_string())
    });
    assert_eq!(host.said("write-back of volume"), 2);
    drop(placed);
    succeed(jericho(["umount"]).arg(host.mnt()));
    succeed(jericho(["check"]).arg(host.volume()));
    host.mount();
    let mut read = Vec::new();
    let mut file = File::open(&big).expect("open");
    file.read_to_end(&mut read).expect("read");
    assert_eq!(read.len(), accepted);
    assert!(read == pattern(2, 0, accepted), "accepted bytes changed");
}

#[test]
fn writers_on_a_full_host_can_be_killed() {
    let Some(host) = Host::mounted(64) else {
        return;
    };
    host.leave(2);
    // The writers continue after errors.
    let script =
        "while :; do cat /dev/zero > a; dd if=/dev/zero of=b bs=1M oflag=append conv=notrunc; done";
    let writer = Command::new("sh")
        .args(["-c", script])
        .current_dir(host.mnt())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .expect("sh");
    let writer = Group(writer);
    host.logs("write-back of volume", 1);
    let lines = host.said("");
    // The writers still get errors.
    std::thread::sleep(Duration::from_secs(3));
    assert!(host.said("") < lines + 5, "the log grows");
    let ended = std::thread::spawn(move || drop(writer));
    at_last("the end of a killed writer", || {
        ended.is_finished().then_some(()).ok_or("running".into())
    });
    fs::remove_file(host.filler()).expect("rm");
    at_last("unmounting", || {
        let umount = output(jericho(["umount"]).arg(host.mnt()));
        umount
            .status
            .success()
            .then_some(())
            .ok_or(String::from_utf8_lossy(&umount.stderr).into())
    });
    succeed(jericho(["check"]).arg(host.volume()));
}

#[test]
fn format_allocates_all_space_of_a_file_or_leaves_no_file() {
    let Some(host) = Host::new(64) else {
        return;
    };
    let error = fail(jericho(["format", "--size", "256M"]).arg(host.volume()), 1);
    assert!(
        error.contains("--sparse") && error.contains("No space left"),
        "{error}"
    );
    assert!(!host.volume().exists());

    let whole = Volume::of_size("256M");
    let blocks = |path: &Path| fs::metadata(path).expect("stat").blocks() * 512;
    assert!(blocks(&whole.file()) >= 256 << 20);
    let mut format = jericho(["format", "--size", "256M", "--sparse"]);
    succeed(format.arg(host.volume()));
    assert!(blocks(&host.volume()) < 64 << 20);
}

/// Makes a mounted volume with 2 MiB of dirty data for which its host has no space.
fn unwritable() -> Option<Host> {
    let host = Host::mounted(96)?;
    host.leave(0);
    // The data is too little to start write-back before it is old.
    fs::write(host.mnt().join("kept"), pattern(5, 0, 2 * MIB))
        .expect("the data fits into the cache");
    Some(host)
}

/// Returns whether the mounted volume has the data that `unwritable` wrote.
fn kept(host: &Host) -> bool {
    let kept = fs::read(host.mnt().join("kept"));
    kept.is_ok_and(|bytes| bytes == pattern(5, 0, 2 * MIB))
}

#[test]
fn a_volume_with_unwritable_data_is_not_unmounted() {
    let Some(host) = unwritable() else { return };
    let error = fail(jericho(["sync"]).arg(host.mnt()), 1);
    assert!(error.contains("No space left"), "{error}");
    let error = fail(jericho(["umount"]).arg(host.mnt()), 1);
    assert!(
        error.contains("stays mounted") && error.contains("--force"),
        "{error}"
    );
    assert!(is_mounted(&host.mnt()));
    fs::remove_file(host.filler()).expect("rm");
    succeed(jericho(["sync"]).arg(host.mnt()));
    succeed(jericho(["umount"]).arg(host.mnt()));
    succeed(jericho(["check"]).arg(host.volume()));
    host.mount();
    assert!(kept(&host));
}

#[test]
fn after_an_unmount_that_cannot_be_refused_the_daemon_continues_write_back_and_holds_the_volume() {
    for unmount in [["umount", "-i"], ["fusermount3", "-u"]] {
        let Some(host) = unwritable() else { return };
        succeed(Command::new(unmount[0]).arg(unmount[1]).arg(host.mnt()));
        assert_continues_write_back(&host);
    }
}

/// Asserts that the daemon of an unmounted volume names the file that it cannot write, holds the volume, and ends once there is space
/// for the file.
fn assert_continues_write_back(host: &Host) {
    host.logs("/kept", 1);
    assert_eq!(host.said("still writing back"), 1);
    let refused = fail(jericho(["check"]).arg(host.volume()), 1);
    assert!(
        refused.contains("still writing back") && refused.contains("process"),
        "{refused}"
    );
    fs::remove_file(host.filler()).expect("rm");
    // The command itself waits for the daemon that still writes back.
    succeed(&mut host.mounting());
    assert!(kept(host));
}

#[test]
fn run_waits_while_the_former_daemon_writes_back() {
    let Some(host) = unwritable() else { return };
    let mut run = jericho(["run", "--volume"]);
    run.arg(host.volume()).arg("--at").arg(host.mnt());
    run.arg("--log").arg(host.log());
    run.args(["--cache", "48M", "--", "cat"])
        .arg(host.mnt().join("kept"));
    let output = assert_waits(&host, &mut run);
    assert!(output == pattern(5, 0, 2 * MIB));
    assert!(!is_mounted(&host.mnt()));
}

#[test]
fn mount_waits_while_the_former_daemon_writes_back() {
    let Some(host) = unwritable() else { return };
    assert_waits(&host, &mut host.mounting());
    assert!(kept(&host));
}

/// Unmounts the volume of `unwritable`. Asserts that a command for the volume waits until there is space and then succeeds. Returns
/// the command's output.
fn assert_waits(host: &Host, waiting: &mut Command) -> Vec<u8> {
    succeed(Command::new("umount").arg("-i").arg(host.mnt()));
    host.logs("still writing back:", 1);
    let child = waiting.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().expect("the command starts");
    // A command with a time limit would give up before the end of this pause.
    std::thread::sleep(Duration::from_secs(13));
    assert!(
        child.try_wait().expect("wait").is_none(),
        "the command did not wait"
    );
    fs::remove_file(host.filler()).expect("rm");
    let output = child.wait_with_output().expect("the command ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("waiting for process"), "{said}");
    output.stdout
}

#[test]
fn a_lazy_unmount_with_unwritable_data_frees_the_directory_and_loses_nothing() {
    let Some(host) = unwritable() else { return };
    let open = File::open(host.mnt().join("kept")).expect("the file");
    succeed(jericho(["umount", "--lazy"]).arg(host.mnt()));
    assert!(!is_mounted(&host.mnt()));
    let mut first = [0; 100];
    open.read_exact_at(&mut first, 0)
        .expect("an open file stays readable");
    drop(open);
    host.logs("/kept", 1);
    assert_eq!(host.said("still writing back"), 1);
    fs::remove_file(host.filler()).expect("rm");
    // The command itself waits for the daemon that still writes back.
    succeed(&mut host.mounting());
    assert!(kept(&host));
}

#[test]
fn a_forced_unmount_discards_unwritable_data() {
    for is_unmounted in [false, true] {
        let Some(host) = unwritable() else { return };
        let mut force = jericho(["umount", "--force"]);
        if is_unmounted {
            succeed(Command::new("umount").arg("-i").arg(host.mnt()));
            force.arg(host.volume());
        } else {
            force.arg(host.mnt());
        }
        succeed(&mut force);
        assert!(!is_mounted(&host.mnt()));
        assert_eq!(host.said("as requested: /kept"), 1);
        fs::remove_file(host.filler()).expect("rm");
        succeed(jericho(["check"]).arg(host.volume()));
        host.mount();
        assert!(!kept(&host), "data without space on the host was kept");
    }
}

#[test]
fn a_forced_unmount_by_file_name_does_not_discard_data_of_a_mounted_volume() {
    let Some(host) = unwritable() else { return };
    let refused = fail(jericho(["umount", "--force"]).arg(host.volume()), 1);
    let dir = host.mnt().display().to_string();
    assert!(refused.contains(&format!("mounted on {dir}")), "{refused}");
    assert!(is_mounted(&host.mnt()));
    assert!(kept(&host));
}

#[test]
fn hangups_discard_nothing() {
    let Some(host) = unwritable() else { return };
    let stat = succeed(jericho(["stat", "--json"]).arg(host.mnt()));
    let stat: serde_json::Value = serde_json::from_str(&stat).expect("JSON");
    let pid = stat["pid"].as_i64().expect("a process id") as i32;
    let daemon = rustix::process::Pid::from_raw(pid).expect("a process id");
    succeed(Command::new("umount").arg("-i").arg(host.mnt()));
    // The test waits, because a hangup that arrives before the daemon notices the end of the mount would make it unmount.
    host.logs("still writing back:", 1);
    for hangups in 1..4 {
        rustix::process::kill_process(daemon, rustix::process::Signal::HUP)
            .expect("the daemon runs");
        host.logs("a hangup does not discard", hangups);
    }
    fs::remove_file(host.filler()).expect("rm");
    // The command itself waits for the daemon that still writes back.
    succeed(&mut host.mounting());
    assert!(kept(&host));
}
