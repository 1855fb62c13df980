//! `jericho nbd` as a command: devices in use, socket files, signals and wrong arguments.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::support::commands::kill;
use super::support::{Volume, fail, jericho, output, pattern, succeed};

pub const MIB: usize = 1 << 20;

/// A running `jericho nbd`.
pub struct Nbd {
    child: Child,
    pub uri: String,
}

impl Nbd {
    pub fn start(device: &Path, arguments: &[&str]) -> Nbd {
        let mut command = jericho(["nbd"]);
        command.arg(device).args(arguments).stdout(Stdio::piped());
        Nbd::of(command)
    }

    /// Serves at a socket beside the device.
    pub fn beside(device: &Path, arguments: &[&str]) -> Nbd {
        let socket = device.with_extension("socket");
        let all = [&["--socket", socket.to_str().unwrap()], arguments].concat();
        Nbd::start(device, &all)
    }

    /// Waits for the line that says that it serves.
    fn of(mut command: Command) -> Nbd {
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        assert!(line.starts_with("serving "), "{line}");
        let uri = line.trim().rsplit(" at ").next().unwrap().to_owned();
        Nbd { child, uri }
    }

    /// Ends it with a signal. It must succeed.
    pub fn stop(mut self, signal: &str) {
        kill(signal, self.child.id().into());
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        // An error is ignored: it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes a sparse file with some data in it.
pub fn image(dir: &Path, name: &str, seed: u64) -> PathBuf {
    let path = dir.join(name);
    let mut bytes = vec![0; 24 * MIB];
    bytes[MIB..3 * MIB].copy_from_slice(&pattern(seed, 2 * MIB));
    bytes[10 * MIB + 100..10 * MIB + 5000].copy_from_slice(&pattern(seed + 1, 4900));
    fs::write(&path, &bytes).unwrap();
    succeed(Command::new("fallocate").arg("--dig-holes").arg(&path));
    path
}

pub fn empty(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    let file = fs::File::create(&path).unwrap();
    file.set_len(24 * MIB as u64).unwrap();
    path
}

pub fn qemu_img(arguments: &[&str]) -> String {
    succeed(Command::new("qemu-img").args(arguments))
}

#[test]
fn a_read_only_device_may_have_several_servers_and_no_writer() {
    let dir = tempfile::tempdir().unwrap();
    let file = image(dir.path(), "file", 9);
    let socket = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let start = |name: &str| Nbd::start(&file, &["--read-only", "--socket", &socket(name)]);
    let (first, second) = (start("one"), start("two"));
    qemu_img(&["compare", "-f", "raw", "-F", "raw", &first.uri, &second.uri]);
    let info = succeed(Command::new("nbdinfo").arg(&first.uri));
    assert!(info.contains("is_read_only: true"), "{info}");
    let mut write = Command::new("qemu-io");
    let refused = output(write.args(["-f", "raw", "-c", "write 0 512", &first.uri]));
    assert!(!refused.status.success());
    let mut writer = jericho(["nbd", "--socket", &socket("three")]);
    let said = fail(writer.arg(&file), 1);
    assert!(said.contains("in use by process"), "{said}");
    assert!(said.contains("end that process first"), "{said}");
}

#[test]
fn a_volume_that_is_mounted_is_refused_with_the_command_that_unmounts_it() {
    let volume = Volume::mounted();
    for read_only in [&[][..], &["--read-only"]] {
        let mut nbd = jericho(["nbd", "--listen", "127.0.0.1:0"]);
        let said = fail(nbd.args(read_only).arg(volume.file()), 1);
        let remedy = format!("jericho umount {}", volume.mnt().display());
        assert!(said.contains("is in use"), "{said}");
        assert!(said.contains(&remedy), "{said}");
    }
    volume.umount();
    // The other way round, too.
    let nbd = Nbd::beside(&volume.file(), &[]);
    let said = fail(&mut volume.mount_command(), 1);
    assert!(said.contains("in use"), "{said}");
    nbd.stop("TERM");
    volume.mount();
}

#[test]
fn the_socket_of_a_dead_server_is_replaced_and_that_of_a_live_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let (file, other) = (empty(dir.path(), "file"), empty(dir.path(), "other"));
    let socket = file.with_extension("socket");
    let mut nbd = Nbd::beside(&file, &[]);
    let mut second = jericho(["nbd"]);
    second.arg(&other).arg("--socket").arg(&socket);
    let said = fail(&mut second, 1);
    assert!(said.contains("a server already listens at"), "{said}");
    succeed(Command::new("nbdinfo").arg(&nbd.uri));
    nbd.child.kill().unwrap();
    nbd.child.wait().unwrap();
    assert!(socket.exists());
    second.stdout(Stdio::piped());
    let nbd = Nbd::of(second);
    succeed(Command::new("nbdinfo").arg(&nbd.uri));
    nbd.stop("HUP");
    assert!(!socket.exists());
    // What is no socket stays.
    drop(UnixListener::bind(dir.path().join("stale")).unwrap());
    let said = fail(jericho(["nbd"]).arg(&file).arg("--socket").arg(&other), 1);
    assert!(said.contains("is not a socket"), "{said}");
    assert_eq!(other.metadata().unwrap().len(), 24 * MIB as u64);
}

#[test]
fn wrong_arguments_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = empty(dir.path(), "file");
    fail(jericho(["nbd"]).arg(&file), 2);
    let both = ["nbd", "--listen", "127.0.0.1:0", "--socket", "s"];
    fail(jericho(both).arg(&file), 2);
    let said = fail(jericho(["nbd", "--listen", "127.0.0.1:x"]).arg(&file), 1);
    assert!(said.contains("127.0.0.1:x"), "{said}");
    let missing = dir.path().join("missing");
    let said = fail(jericho(["nbd", "--listen", "127.0.0.1:0"]).arg(&missing), 1);
    assert!(said.contains("missing"), "{said}");
    assert!(!missing.exists());
    let said = fail(
        jericho(["nbd", "--listen", "127.0.0.1:0"]).arg(dir.path()),
        1,
    );
    assert!(said.contains("directory"), "{said}");
}

#[test]
fn bytes_after_the_last_whole_block_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, vec![1; 8192 + 512]).unwrap();
    let socket = dir.path().join("socket");
    let mut command = jericho(["nbd", "--read-only", "--socket"]);
    command.arg(&socket).arg(&file);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut nbd = Nbd::of(command);
    let size = succeed(Command::new("nbdinfo").arg("--size").arg(&nbd.uri));
    assert_eq!(size.trim(), "8192");
    let mut log = BufReader::new(nbd.child.stderr.take().unwrap());
    kill("TERM", nbd.child.id().into());
    let mut text = String::new();
    std::io::Read::read_to_string(&mut log, &mut text).unwrap();
    assert!(text.contains("the last 512 bytes"), "{text}");
}

#[test]
fn the_service_manager_is_told_when_it_serves_and_when_it_stops() {
    let dir = tempfile::tempdir().unwrap();
    let file = empty(dir.path(), "file");
    let notified = dir.path().join("notify");
    let manager = UnixDatagram::bind(&notified).unwrap();
    let mut command = jericho(["nbd", "--listen", "127.0.0.1:0"]);
    command.arg(&file).env("NOTIFY_SOCKET", &notified);
    command.stdout(Stdio::piped());
    let nbd = Nbd::of(command);
    let receive = || {
        let mut bytes = [0; 1000];
        let length = manager.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };
    let ready = receive();
    assert!(ready.starts_with("READY=1"), "{ready}");
    assert!(ready.contains(&nbd.uri), "{ready}");
    nbd.stop("TERM");
    assert!(receive().starts_with("STOPPING=1"));
}
