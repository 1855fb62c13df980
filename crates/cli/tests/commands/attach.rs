//! `jericho attach` and `jericho detach`: the file of a disk, the loop device over it, and what happens when either is in use, fails or dies.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use jericho_sim::Random;
use jericho_sys::process::Process;
use rustix::fs::FallocateFlags;
use tempfile::TempDir;

use super::support::commands::{kill, wait_until};
use super::support::{fail, jericho, output, pattern, succeed};

const MIB: usize = 1 << 20;
/// Enough for a filesystem of XFS.
const BYTES: usize = 320 * MIB;

/// A device in a directory of its own, and the disk that `attach` makes of it. Both are removed when it is dropped.
pub struct Disk {
    dir: TempDir,
}

impl Disk {
    pub fn new() -> Disk {
        // In the build directory, because /tmp may be a tmpfs, which has no direct I/O.
        let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let disk = Disk { dir };
        let file = File::create(disk.device()).unwrap();
        file.set_len(BYTES as u64).unwrap();
        disk
    }

    pub fn device(&self) -> PathBuf {
        self.beside("device")
    }

    pub fn beside(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn at(&self) -> PathBuf {
        self.beside("at")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.beside("log")).unwrap()
    }

    pub fn attach_command(&self, arguments: &[&str]) -> Command {
        let mut command = jericho(["attach"]);
        command.args(arguments).arg("--at").arg(self.at());
        command.arg("--log").arg(self.beside("log"));
        command.arg(self.device());
        command
    }

    /// Attaches the device. Returns the path that `attach` prints.
    pub fn attach(&self, arguments: &[&str]) -> PathBuf {
        only_line(&succeed(&mut self.attach_command(arguments)))
    }

    pub fn detach(&self) {
        assert_eq!(succeed(jericho(["detach"]).arg(self.device())), "");
        assert!(!self.at().exists(), "the directory that attach has made");
    }

    /// Returns the process that serves the disk.
    pub fn server(&self) -> u64 {
        let mut value = [0; 1000];
        let length = rustix::fs::getxattr(self.at(), "jericho.attached", &mut value[..]).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&value[..length]).unwrap();
        value["pid"].as_u64().unwrap()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Most tests have detached it.
        let _ = jericho(["detach", "--force"]).arg(self.device()).output();
    }
}

pub fn only_line(text: &str) -> PathBuf {
    let lines: Vec<&str> = text.lines().collect();
    let [line] = lines[..] else {
        panic!("not one line: {text}");
    };
    line.into()
}

/// Returns whether this user and machine can have loop devices. Prints a message if not.
pub fn has_loops() -> bool {
    let has = rustix::process::geteuid().is_root() && Path::new("/dev/loop-control").exists();
    if !has {
        eprintln!("SKIPPED: a loop device needs root and /dev/loop-control");
    }
    has
}

/// A mounted directory.
pub struct Mounted(PathBuf);

impl Mounted {
    pub fn new(device: &Path, dir: PathBuf) -> Mounted {
        fs::create_dir_all(&dir).unwrap();
        succeed(Command::new("mount").arg(device).arg(&dir));
        Mounted(dir)
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn umount(self) {
        succeed(Command::new("umount").arg(&self.0));
        std::mem::forget(self);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A test has failed.
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

fn mkfs(kind: &str, path: &Path) {
    let force = if kind == "ext4" { "-F" } else { "-f" };
    succeed(
        Command::new(format!("mkfs.{kind}"))
            .args([force, "-q"])
            .arg(path),
    );
}

fn check(kind: &str, path: &Path) {
    let mut check = match kind {
        "ext4" => Command::new("e2fsck"),
        _ => Command::new("xfs_repair"),
    };
    match kind {
        "ext4" => check.arg("-fn"),
        _ if path.is_file() => check.args(["-n", "-f"]),
        _ => check.arg("-n"),
    };
    succeed(check.arg(path));
}

fn errno(result: std::io::Result<impl std::fmt::Debug>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

#[test]
fn a_filesystem_is_made_in_the_file_of_a_disk() {
    for kind in ["ext4", "xfs"] {
        let disk = Disk::new();
        let path = disk.attach(&[]);
        assert_eq!(path, disk.at().canonicalize().unwrap().join("device"));
        assert_eq!(path.metadata().unwrap().len(), BYTES as u64);
        mkfs(kind, &path);
        check(kind, &path);
        // A script knows only the path that `attach` has printed.
        succeed(jericho(["detach"]).arg(&path));
        check(kind, &disk.device());
    }
}

#[test]
fn a_file_of_a_disk_keeps_its_size_and_its_place() {
    let disk = Disk::new();
    let path = disk.attach(&[]);
    fs::write(disk.beside("in"), pattern(1, MIB)).unwrap();
    let mut dd = Command::new("dd");
    dd.args(["bs=64k", "seek=3", "conv=notrunc,fsync"])
        .arg(format!("if={}", disk.beside("in").display()))
        .arg(format!("of={}", path.display()));
    succeed(&mut dd);
    let truncating = OpenOptions::new().write(true).truncate(true).open(&path);
    assert_eq!(errno(truncating), libc::EPERM);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    assert_eq!(errno(file.set_len(BYTES as u64 + 4096)), libc::EPERM);
    file.set_len(BYTES as u64).unwrap();
    // At the end it is full.
    assert_eq!(file.write_at(b"ab", BYTES as u64 - 1).unwrap(), 1);
    assert_eq!(errno(file.write_at(b"b", BYTES as u64)), libc::ENOSPC);
    assert_eq!(file.read_at(&mut [0; 10], BYTES as u64 - 1).unwrap(), 1);
    for beyond in [0, 5, 4096, 5000] {
        let read = file.read_at(&mut [0; 10], BYTES as u64 + beyond);
        assert_eq!(read.unwrap(), 0, "{beyond} bytes beyond the end");
    }
    assert_eq!(errno(File::create(disk.at().join("new"))), libc::EPERM);
    assert_eq!(errno(fs::remove_file(&path)), libc::EPERM);
    assert_eq!(errno(fs::rename(&path, disk.at().join("new"))), libc::EPERM);
    let names: Vec<_> = fs::read_dir(disk.at())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names, ["device"]);
    drop(file);
    disk.detach();
    let bytes = fs::read(disk.device()).unwrap();
    let (start, end) = (3 << 16, (3 << 16) + MIB);
    assert!(bytes[start..end] == pattern(1, MIB));
    assert!(
        bytes[..start]
            .iter()
            .chain(&bytes[end..BYTES - 1])
            .all(|byte| *byte == 0)
    );
    assert_eq!(bytes[BYTES - 1], b'a');
}

#[test]
fn writes_of_any_bytes_keep_all_others() {
    let disk = Disk::new();
    let path = disk.attach(&[]);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let size = MIB;
    let mut random = Random::new(5);
    let mut model = vec![0; size];
    for round in 0..300_u32 {
        let start = random.below(size as u64) as usize;
        let length = 1 + random.below(20_000.min((size - start) as u64)) as usize;
        let bytes = pattern(round.into(), length);
        file.write_all_at(&bytes, start as u64).unwrap();
        model[start..start + length].copy_from_slice(&bytes);
        let start = random.below(size as u64) as usize;
        let mut read = vec![0; 1 + random.below(20_000) as usize];
        let length = read.len().min(size - start);
        file.read_exact_at(&mut read[..length], start as u64)
            .unwrap();
        assert!(
            read[..length] == model[start..start + length],
            "round {round}"
        );
    }
    drop(file);
    disk.detach();
    assert!(fs::read(disk.device()).unwrap()[..size] == model);
}

#[test]
fn sixty_four_writers_of_the_same_blocks_lose_nothing() {
    const WRITERS: usize = 64;
    const PIECE: usize = 300;
    let disk = Disk::new();
    let path = disk.attach(&[]);
    // Piece N of each turn is that of writer N, and a block has pieces of a dozen writers.
    let byte = |turn: usize, writer: usize| (1 + (turn * 7 + writer) % 255) as u8;
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let path = &path;
            scope.spawn(move || {
                let file = OpenOptions::new().write(true).open(path).unwrap();
                for turn in 0..40 {
                    let at = (turn * WRITERS + writer) * PIECE;
                    file.write_all_at(&[byte(turn, writer); PIECE], at as u64)
                        .unwrap();
                }
                file.sync_all().unwrap();
            });
        }
    });
    disk.detach();
    let bytes = fs::read(disk.device()).unwrap();
    for (index, piece) in bytes.chunks_exact(PIECE).take(40 * WRITERS).enumerate() {
        let expected = byte(index / WRITERS, index % WRITERS);
        assert!(piece.iter().all(|byte| *byte == expected), "piece {index}");
    }
}

#[test]
fn holes_and_zeros_reach_the_device() {
    let disk = Disk::new();
    let path = disk.attach(&[]);
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    file.write_all_at(&vec![7; 4 * MIB], 0).unwrap();
    let call = |flags, start, length| rustix::fs::fallocate(&file, flags, start, length);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    call(punch, MIB as u64, MIB as u64).unwrap();
    call(FallocateFlags::ZERO_RANGE, 3 * MIB as u64 + 100, 5000).unwrap();
    // Nothing can be inserted, and nothing appended.
    let refused = call(FallocateFlags::INSERT_RANGE, 0, MIB as u64);
    assert_eq!(refused, Err(rustix::io::Errno::OPNOTSUPP));
    let refused = call(FallocateFlags::empty(), BYTES as u64, 1);
    assert_eq!(refused, Err(rustix::io::Errno::NOSPC));
    call(FallocateFlags::empty(), 8 * MIB as u64, MIB as u64).unwrap();
    let seek = |whence| rustix::fs::seek(&file, whence).unwrap();
    assert_eq!(seek(rustix::fs::SeekFrom::Hole(5)), MIB as u64);
    assert_eq!(
        seek(rustix::fs::SeekFrom::Data(MIB as u64 + 5)),
        2 * MIB as u64
    );
    assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), BYTES as u64);
    drop(file);
    disk.detach();
    let bytes = fs::read(disk.device()).unwrap();
    let zeros =
        |at: usize| (MIB..2 * MIB).contains(&at) || (3 * MIB + 100..3 * MIB + 5100).contains(&at);
    assert!((0..4 * MIB).all(|at| (bytes[at] == 0) == zeros(at)));
}

#[test]
fn a_read_only_disk_refuses_changes() {
    let disk = Disk::new();
    let path = disk.attach(&[]);
    // A loop device cannot have smaller blocks.
    succeed(
        Command::new("mkfs.ext4")
            .args(["-F", "-q", "-b", "4096"])
            .arg(&path),
    );
    disk.detach();
    let before = fs::read(disk.device()).unwrap();
    let path = disk.attach(&["--read-only"]);
    check("ext4", &path);
    assert_eq!(
        errno(OpenOptions::new().write(true).open(&path)),
        libc::EROFS
    );
    let said = fail(&mut disk.attach_command(&[]), 1);
    assert!(said.contains("in use"), "{said}");
    disk.detach();
    if has_loops() {
        let device = disk.attach(&["--read-only", "--loop"]);
        let mounted = disk.beside("mnt");
        fs::create_dir(&mounted).unwrap();
        let writable = Command::new("blockdev")
            .arg("--getro")
            .arg(&device)
            .output()
            .unwrap();
        assert_eq!(writable.stdout, b"1\n");
        let mounted = Mounted::new(&device, mounted);
        assert!(mounted.at("lost+found").exists());
        assert_eq!(errno(File::create(mounted.at("new"))), libc::EROFS);
        mounted.umount();
        disk.detach();
    }
    assert!(fs::read(disk.device()).unwrap() == before);
}

#[test]
fn filesystems_on_a_loop_device_are_on_the_device_after_detach() {
    if !has_loops() {
        return;
    }
    for kind in ["ext4", "xfs"] {
        let disk = Disk::new();
        let device = disk.attach(&["--loop"]);
        let shown = succeed(
            Command::new("losetup")
                .args(["-nO", "DIO,LOG-SEC,AUTOCLEAR"])
                .arg(&device),
        );
        assert_eq!(
            shown.split_whitespace().collect::<Vec<_>>(),
            ["1", "4096", "0"]
        );
        mkfs(kind, &device);
        let mounted = Mounted::new(&device, disk.beside("mnt"));
        for number in 0..20 {
            let path = mounted.at(&format!("file{number}"));
            fs::write(&path, pattern(number, 100_000 + 4567 * number as usize)).unwrap();
        }
        File::open(mounted.at("file3")).unwrap().sync_all().unwrap();
        succeed(&mut Command::new("sync"));
        mounted.umount();
        check(kind, &device);
        succeed(jericho(["detach"]).arg(&device));
        assert!(!disk.at().exists());
        check(kind, &disk.device());
        // The bytes are in the device: another loop device shows them, without any server.
        let Some(again) = super::support::loops::Loop::over(&disk.device()) else {
            return;
        };
        let mounted = Mounted::new(&again.0, disk.beside("mnt"));
        for number in 0..20 {
            let read = fs::read(mounted.at(&format!("file{number}"))).unwrap();
            assert!(read == pattern(number, 100_000 + 4567 * number as usize));
        }
        mounted.umount();
    }
}

#[test]
fn a_disk_in_use_stays_attached_and_its_users_are_named() {
    let disk = Disk::new();
    let path = disk.attach(&[]);
    let file = File::open(&path).unwrap();
    let said = fail(jericho(["detach"]).arg(&path), 1);
    let own = format!("process {}", std::process::id());
    assert!(said.contains("is in use") && said.contains(&own), "{said}");
    drop(file);
    disk.detach();
    let said = fail(jericho(["detach"]).arg(&path), 1);
    assert!(said.contains("is not attached"), "{said}");
    if !has_loops() {
        return;
    }
    let device = disk.attach(&["--loop"]);
    mkfs("ext4", &device);
    let dir = disk.beside("mnt");
    let mounted = Mounted::new(&device, dir.clone());
    for name in [&device, &disk.device(), &disk.at()] {
        let said = fail(jericho(["detach"]).arg(name), 1);
        let mounted_on = format!("mounted on {}", dir.canonicalize().unwrap().display());
        assert!(said.contains(&mounted_on), "{said}");
    }
    fs::write(mounted.at("new"), "still works").unwrap();
    File::open(mounted.at("new")).unwrap().sync_all().unwrap();
    // A signal does not take it away either.
    kill("TERM", disk.server());
    wait_until("the message of the server", || {
        disk.log().contains("The disk stays")
    });
    fs::write(mounted.at("newer"), "still works").unwrap();
    mounted.umount();
    disk.detach();
    check("ext4", &disk.device());
}

/// Waits until a process that is no child of this one has ended.
pub fn wait_for_end(pid: u64) {
    match Process::open(pid.try_into().unwrap()) {
        Ok(process) => assert!(process.wait(Some(Duration::from_secs(60))).unwrap()),
        Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ESRCH)),
    }
}

/// Waits until a child has ended.
fn ends(child: &mut Child) -> std::process::ExitStatus {
    let mut status = None;
    wait_until("the end of a process", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

#[test]
fn a_server_in_the_foreground_ends_at_a_signal_and_a_second_one_ends_a_disk_in_use() {
    let disk = Disk::new();
    let start = || {
        let mut command = disk.attach_command(&["--foreground"]);
        command.stderr(File::create(disk.beside("log")).unwrap());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let out = child.stdout.take().unwrap();
        BufReader::new(out).read_line(&mut line).unwrap();
        (child, only_line(&line))
    };
    let (mut child, path) = start();
    fs::metadata(&path).unwrap();
    kill("TERM", child.id().into());
    assert!(ends(&mut child).success());
    assert!(!disk.at().exists());
    let (mut child, path) = start();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    file.write_all_at(&[9; 5000], 100).unwrap();
    let refused = |count| {
        wait_until("the message of the server", || {
            disk.log().matches("The disk stays").count() == count
        });
    };
    kill("HUP", child.id().into());
    refused(1);
    kill("TERM", child.id().into());
    refused(2);
    file.write_all_at(&[9; 5000], 100).unwrap();
    kill("TERM", child.id().into());
    assert!(ends(&mut child).success());
    assert_eq!(errno(file.read_at(&mut [0; 10], 0)), libc::ENOTCONN);
    assert!(fs::read(disk.device()).unwrap()[100..5100] == [9; 5000]);
}

#[test]
fn programs_get_errors_when_the_server_is_killed() {
    let disk = Disk::new();
    let path = disk.attach(&[]);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    std::thread::scope(|scope| {
        let file = &file;
        let writing = scope.spawn(move || {
            loop {
                if let Err(error) = file
                    .write_all_at(&[1; 10_000], 5)
                    .and_then(|()| file.sync_all())
                {
                    return error.raw_os_error().unwrap();
                }
            }
        });
        kill("KILL", disk.server());
        let errno = writing.join().unwrap();
        // EIO: of an fsync that the kernel had not sent yet.
        assert!(
            [libc::ENOTCONN, libc::ECONNABORTED, libc::EIO].contains(&errno),
            "{errno}"
        );
    });
    drop(file);
    let said = fail(jericho(["detach"]).arg(&path), 1);
    assert!(said.contains("had died"), "{said}");
    // The same directory and device are free again.
    disk.attach(&[]);
    // An attach takes the place of a dead server, too.
    kill("KILL", disk.server());
    wait_until("the end of the server", || {
        fs::read_dir(disk.at()).is_err_and(|error| error.kind() == ErrorKind::NotConnected)
    });
    disk.attach(&[]);
    fs::read_dir(disk.at()).unwrap();
    // A server that was killed has not removed the directory, so it may be the user's.
    succeed(jericho(["detach"]).arg(disk.device()));
}

#[test]
fn a_loop_device_of_a_dead_server_is_removed() {
    if !has_loops() {
        return;
    }
    let disk = Disk::new();
    let device = disk.attach(&["--loop"]);
    mkfs("ext4", &device);
    let mounted = Mounted::new(&device, disk.beside("mnt"));
    fs::write(mounted.at("synced"), pattern(3, MIB)).unwrap();
    let file = File::open(mounted.at("synced")).unwrap();
    file.sync_all().unwrap();
    kill("KILL", disk.server());
    wait_until("an error of the filesystem", || {
        let new = File::create(mounted.at("new"));
        new.and_then(|file| file.sync_all()).is_err()
    });
    drop(file);
    let said = fail(jericho(["detach"]).arg(&device), 1);
    assert!(said.contains("had died"), "{said}");
    assert!(said.contains("when nothing uses it any more"), "{said}");
    // It may report the lost writes.
    let _ = output(Command::new("umount").arg(disk.beside("mnt")));
    std::mem::forget(mounted);
    wait_until("the end of the loop device", || {
        let shown = output(Command::new("losetup").arg(&device));
        !shown.status.success()
    });
    let device = disk.attach(&["--loop"]);
    let mounted = Mounted::new(&device, disk.beside("mnt"));
    assert!(fs::read(mounted.at("synced")).unwrap() == pattern(3, MIB));
    mounted.umount();
    succeed(jericho(["detach"]).arg(disk.device()));
}

/// Returns the number of loop devices over the file of a disk.
fn loops_over(path: &Path) -> usize {
    let shown = succeed(Command::new("losetup").args(["-nO", "BACK-FILE"]));
    let path = path.to_str().unwrap();
    shown.lines().filter(|line| line.trim() == path).count()
}

#[test]
fn an_attach_removes_the_loop_device_of_a_dead_server() {
    if !has_loops() {
        return;
    }
    let disk = Disk::new();
    let first = disk.attach(&["--loop"]);
    let file = disk.at().canonicalize().unwrap().join("device");
    let server = disk.server();
    let number = file.metadata().unwrap().dev();
    let number = format!(
        "{}:{}",
        rustix::fs::major(number),
        rustix::fs::minor(number)
    );
    kill("KILL", server);
    wait_for_end(server);
    assert_eq!(loops_over(&file), 1);
    disk.attach(&["--loop"]);
    // The first device would hold the number and show the path inside the mount.
    let mut shown = Command::new("losetup");
    shown.args(["-nO", "BACK-MAJ:MIN,BACK-FILE"]).arg(&first);
    let shown = String::from_utf8(output(&mut shown).stdout).unwrap();
    let fields: Vec<_> = shown.split_whitespace().collect();
    assert_ne!(fields, [number.as_str(), "/device"]);
    assert_eq!(loops_over(&file), 1);
    assert!(disk.log().contains("killed before everything was durable"));
    succeed(jericho(["detach"]).arg(disk.device()));
    assert_eq!(loops_over(&file), 0);
}

#[test]
fn all_loop_devices_stay_if_one_of_them_is_in_use() {
    if !has_loops() {
        return;
    }
    let disk = Disk::new();
    disk.attach(&["--loop"]);
    let file = disk.at().canonicalize().unwrap().join("device");
    let Some(second) = super::support::loops::Loop::over(&file) else {
        return;
    };
    mkfs("ext4", &second.0);
    let mounted = Mounted::new(&second.0, disk.beside("mnt"));
    let said = fail(jericho(["detach"]).arg(disk.device()), 1);
    assert!(said.contains("mounted on"), "{said}");
    assert_eq!(loops_over(&file), 2);
    mounted.umount();
    disk.detach();
    assert_eq!(loops_over(&file), 0);
    std::mem::forget(second);
}

#[test]
fn a_loop_device_over_a_file_of_the_same_path_elsewhere_stays() {
    if !has_loops() {
        return;
    }
    let (disk, other) = (Disk::new(), Disk::new());
    disk.attach(&[]);
    let script =
        r#"umount "$1" && mount --bind "$2" "$1" && losetup -f --show "$1/device" && read line"#;
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script, "sh"]);
    command.arg(disk.at().canonicalize().unwrap());
    command.arg(other.device().parent().unwrap());
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut elsewhere = command.spawn().unwrap();
    let mut line = String::new();
    let out = elsewhere.stdout.take().unwrap();
    BufReader::new(out).read_line(&mut line).unwrap();
    let device = super::support::loops::Loop(only_line(&line));
    let file = disk.at().canonicalize().unwrap().join("device");
    assert_eq!(loops_over(&file), 1, "the path is the same");
    let said = fail(jericho(["detach"]).arg(&device.0), 1);
    assert!(said.contains("is not attached"), "{said}");
    disk.detach();
    succeed(Command::new("losetup").arg(&device.0));
    drop(device);
    drop(elsewhere.stdin.take());
    ends(&mut elsewhere);
}

#[test]
fn attaching_is_refused_with_what_to_do() {
    let disk = Disk::new();
    let refused = |command: &mut Command, expected: &[&str]| {
        let said = fail(command, 1);
        for text in expected {
            assert!(said.contains(text), "{said}");
        }
    };
    refused(
        jericho(["attach", "/nowhere/disk"]).args(["--at", "x"]),
        &["/nowhere/disk"],
    );
    fs::create_dir(disk.at()).unwrap();
    fs::write(disk.at().join("mine"), "mine").unwrap();
    refused(&mut disk.attach_command(&[]), &["at is not empty"]);
    fs::remove_file(disk.at().join("mine")).unwrap();
    // Not what a server leaves, but files of the user.
    let marker = disk.at().join("not-durable");
    fs::write(&marker, "mine").unwrap();
    refused(&mut disk.attach_command(&[]), &["at is not empty"]);
    fs::rename(&marker, disk.beside("mine")).unwrap();
    std::os::unix::fs::symlink(disk.beside("mine"), &marker).unwrap();
    refused(&mut disk.attach_command(&[]), &["at is not empty"]);
    assert_eq!(fs::read(disk.beside("mine")).unwrap(), b"mine");
    fs::remove_file(&marker).unwrap();
    let path = disk.attach(&[]);
    refused(&mut disk.attach_command(&[]), &["in use by process"]);
    refused(
        jericho(["format", "--force"]).arg(disk.device()),
        &["in use"],
    );
    // A disk is no volume.
    refused(
        jericho(["umount"]).arg(disk.at()),
        &["no Jericho volume is mounted on"],
    );
    // A shared mapping could lose what others write; a private one is harmless.
    let mut map = Command::new("python3");
    map.arg("-c").arg("import mmap,os,sys; f=os.open(sys.argv[1],os.O_RDWR); mmap.mmap(f,4096,mmap.MAP_PRIVATE); mmap.mmap(f,4096)");
    let mapped = output(map.arg(&path));
    let said = String::from_utf8_lossy(&mapped.stderr).into_owned();
    assert!(said.contains("Errno 19"), "{said}");
    succeed(jericho(["detach"]).arg(&path));
    assert!(
        disk.at().exists(),
        "a directory that the user has made stays"
    );
    let direct = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(disk.device());
    direct.unwrap();
}

#[test]
fn a_directory_that_cannot_have_a_marker_is_refused() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root mounts");
        return;
    }
    let disk = Disk::new();
    let mounted = disk.beside("mnt");
    fs::create_dir(&mounted).unwrap();
    let mut mount = Command::new("mount");
    succeed(mount.args(["-t", "tmpfs", "none"]).arg(&mounted));
    fs::create_dir(mounted.join("at")).unwrap();
    let mounted = Mounted(mounted);
    succeed(
        Command::new("mount")
            .args(["-o", "remount,ro"])
            .arg(&mounted.0),
    );
    let mut attach = jericho(["attach", "--log"]);
    attach
        .arg(disk.beside("log"))
        .arg("--at")
        .arg(mounted.at("at"));
    let said = fail(attach.arg(disk.device()), 1);
    for text in ["not-durable", "Read-only file system", "--at"] {
        assert!(said.contains(text), "{said}");
    }
    mounted.umount();
}

#[test]
fn a_file_that_a_loop_device_uses_is_not_served_for_writing() {
    let disk = Disk::new();
    let Some(used) = super::support::loops::Loop::over(&disk.device()) else {
        return;
    };
    let socket = disk.beside("socket");
    let mut nbd = jericho(["nbd", "--socket"]);
    nbd.arg(&socket).arg(disk.device());
    for command in [&mut disk.attach_command(&[]), &mut nbd] {
        let said = fail(command, 1);
        let device = used.0.display().to_string();
        assert!(
            said.contains(&device) && said.contains("losetup -d"),
            "{said}"
        );
    }
    assert!(!disk.at().exists());
    disk.attach(&["--read-only"]);
    disk.detach();
    drop(used);
    disk.attach(&[]);
    disk.detach();
}

#[test]
fn a_signal_ends_a_disk_that_was_unmounted_and_no_other_disk_at_its_place() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root unmounts");
        return;
    }
    let (disk, other) = (Disk::new(), Disk::new());
    // The directory of a disk that is not read-only gets no other one while programs use it.
    let path = disk.attach(&["--read-only"]);
    let (server, file) = (disk.server(), File::open(&path).unwrap());
    succeed(Command::new("umount").arg("-l").arg(disk.at()));
    let mut attach = jericho(["attach", "--log"]);
    attach.arg(other.beside("log")).arg("--at").arg(disk.at());
    let path = only_line(&succeed(attach.arg(other.device())));
    kill("TERM", server);
    wait_for_end(server);
    assert_eq!(errno(file.read_at(&mut [0; 10], 0)), libc::ENOTCONN);
    File::open(&path)
        .unwrap()
        .read_exact_at(&mut [0; 10], 0)
        .unwrap();
    succeed(jericho(["detach"]).arg(other.device()));
}

#[test]
fn a_disk_below_another_mount_or_unmounted_in_use_keeps_its_directory() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root mounts");
        return;
    }
    let (disk, other) = (Disk::new(), Disk::new());
    let path = disk.attach(&[]);
    let (server, file) = (disk.server(), File::open(&path).unwrap());
    let mut mount = Command::new("mount");
    succeed(mount.args(["-t", "tmpfs", "none"]).arg(disk.at()));
    let above = Mounted(disk.at());
    for force in [&[] as &[&str], &["--force"]] {
        let said = fail(jericho(["detach"]).args(force).arg(disk.device()), 1);
        assert!(said.contains("another mount covers"), "{said}");
    }
    kill("TERM", server);
    wait_until("the message of the server", || {
        disk.log().contains("The disk stays")
    });
    above.umount();
    file.read_exact_at(&mut [0; 10], 0).unwrap();
    succeed(Command::new("umount").arg("-l").arg(disk.at()));
    let mut attach = jericho(["attach", "--log"]);
    attach.arg(other.beside("log")).arg("--at").arg(disk.at());
    let said = fail(attach.arg(other.device()), 1);
    assert!(said.contains("programs still use one"), "{said}");
    drop(file);
    wait_for_end(server);
    assert!(disk.log().contains("everything is on the device"));
}

/// Runs the script for two hosts. `how` is `file`, or `loop`.
fn on_two_hosts(namespaces: &str, how: &str) {
    let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::write(dir.path().join("in"), pattern(7, 96 * MIB)).unwrap();
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/commands/two_hosts_disk.sh"
    );
    let mut command = Command::new("unshare");
    command.args([namespaces, "sh", script]).arg(how);
    command.arg(jericho(["x"]).get_program()).arg(dir.path());
    succeed(&mut command);
    let log = fs::read_to_string(dir.path().join("attach.log")).unwrap();
    assert!(log.contains("sent again"), "{log}");
}

#[test]
fn a_disk_of_another_host_keeps_its_bytes_while_its_target_is_killed() {
    on_two_hosts("-Urnm", "file");
}

#[test]
fn a_filesystem_on_the_disk_of_another_host_survives_kills_of_its_target() {
    if has_loops() {
        on_two_hosts("-nm", "loop");
    }
}
