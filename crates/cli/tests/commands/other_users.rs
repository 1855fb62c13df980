//! Users other than the one who mounts: which of them get the fast path, and whether a refused one can harm the others.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::support::{fail, jericho, number, open_to_all, succeed};

/// Users and a group that no account database knows.
const NAMED: u32 = 54321;
const GROUP: u32 = 54322;
const STRANGER: u32 = 54323;
const FILE_BYTES: usize = 1 << 20;
/// Least number of programs that start while another user attacks.
const PROGRAMS_MIN: usize = 20;
/// How long another user attacks. `make soak` asks for more.
const ATTACK_SECONDS: u64 = 6;
/// More attempts than the attacker can make.
const ATTEMPTS_MAX: usize = 10_000_000;
const ATTACK: &str = include_str!("attack.py");

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("not tested: needs root, to become another user");
    }
    root
}

/// A volume that root mounts in a place that other users can reach, with a copy of the command.
struct Shared {
    dir: tempfile::TempDir,
}

impl Shared {
    fn mounted(options: &[&str]) -> Shared {
        // The build directory may be reachable only by root.
        let shared = Shared {
            dir: tempfile::tempdir().expect("a directory"),
        };
        open_to_all(shared.dir.path());
        let library = "libjericho_preload.so";
        let built = std::env::current_exe()
            .expect("a path")
            .with_file_name(library);
        std::fs::copy(env!("CARGO_BIN_EXE_jericho"), shared.at("jericho")).expect("copy");
        std::fs::copy(built, shared.at(library)).expect("copy");
        std::fs::create_dir(shared.at("mnt")).expect("mkdir");
        let volume = shared.at("volume");
        succeed(
            jericho(["format"])
                .arg(&volume)
                .args(["--size", "256M", "--slices", "2"]),
        );
        let mut mount = jericho(["mount", "--cache", "32M", "--topology", "virtual:2"]);
        mount.args(options).arg("--log").arg(shared.at("log"));
        succeed(mount.arg(&volume).arg(shared.at("mnt")));
        std::fs::write(shared.at("mnt/file"), vec![7; FILE_BYTES]).expect("write");
        shared
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns how many bytes of the file a program of this user and group read inline.
    fn inline_bytes_of(&self, uid: u32, gid: u32) -> u64 {
        let report = self.at("report");
        let mut command = Command::new(self.at("jericho"));
        command
            .args(["run", "--", "head", "-c", &FILE_BYTES.to_string()])
            .arg(self.at("mnt/file"))
            .env("JERICHO_REPORT", &report)
            .current_dir("/")
            .stdin(Stdio::null());
        if (uid, gid) != (0, 0) {
            command.uid(uid).gid(gid);
        }
        let output = command.output().expect("the command starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let said = std::fs::read_to_string(&report).expect("a report");
        // The library would append the next report.
        std::fs::remove_file(report).expect("remove");
        let line = said
            .lines()
            .find(|line| line.starts_with("jericho: reads:"));
        let numbers = |line: &str| -> Vec<u64> {
            let words = line.split(|c: char| !c.is_ascii_digit());
            words.filter_map(|word| word.parse().ok()).collect()
        };
        match line.map(numbers).as_deref() {
            Some([_, bytes, ..]) => *bytes,
            other => panic!("{other:?} in {said}"),
        }
    }

    /// Returns the name of the socket on which the daemon admits programs.
    fn socket(&self) -> String {
        let json = succeed(jericho(["stat", "--json"]).arg(self.at("mnt")));
        let stat: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        let fds = format!("/proc/{}/fd", stat["pid"].as_u64().expect("a pid"));
        let inodes: Vec<String> = std::fs::read_dir(fds)
            .expect("the daemon's descriptors")
            .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
            .filter_map(|link| {
                let inode = link.to_str()?.strip_prefix("socket:[")?;
                Some(inode.strip_suffix(']')?.to_owned())
            })
            .collect();
        let sockets = std::fs::read_to_string("/proc/net/unix").expect("proc is mounted");
        let name = sockets.lines().find_map(|line| {
            let mut words = line.split_whitespace().skip(6);
            let (inode, name) = (words.next()?, words.next()?);
            let ours = inodes.iter().any(|own| own == inode) && name.starts_with("@jericho-");
            ours.then(|| name[1..].to_owned())
        });
        name.expect("the daemon listens")
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let mut umount = jericho(["umount"]);
        let unmounted = umount.arg(self.at("mnt")).status();
        if !unmounted.is_ok_and(|status| status.success()) {
            let _ = Command::new("umount")
                .arg("-l")
                .arg(self.at("mnt"))
                .status();
        }
    }
}

fn attack_seconds() -> u64 {
    number("JERICHO_SOAK_SECONDS", ATTACK_SECONDS)
}

/// A process of another user that attacks the socket.
struct Attack {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Attack {
    fn start(shared: &Shared) -> Attack {
        std::fs::write(shared.at("attack.py"), ATTACK).expect("write");
        // Ends the attacker if the test cannot.
        let limit = 600 + attack_seconds();
        let mut command = Command::new("timeout");
        command
            .args(["--signal=KILL", &limit.to_string(), "python3"])
            .arg(shared.at("attack.py"))
            .arg(shared.socket())
            .arg(ATTEMPTS_MAX.to_string())
            .uid(STRANGER)
            .gid(STRANGER)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().expect("python3 runs");
        let mut said = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        said.read_line(&mut line).expect("a line");
        assert_eq!(line, "attacking\n");
        Attack { child, said }
    }

    /// Ends the attacker. Returns what it printed.
    fn end(&mut self) -> String {
        drop(self.child.stdin.take());
        let mut said = String::new();
        self.said.read_to_string(&mut said).expect("text");
        let status = self.child.wait().expect("wait");
        assert!(status.success(), "{status}: {said}");
        said
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn another_user_neither_grows_a_volume_nor_adds_a_device() {
    if !is_root() {
        return;
    }
    let shared = Shared::mounted(&[]);
    // The kernel lets everybody set attributes of an own directory, so the daemon gets the requests.
    let own = shared.at("mnt/own");
    std::fs::create_dir(&own).expect("mkdir");
    std::os::unix::fs::chown(&own, Some(STRANGER), Some(GROUP)).expect("chown");
    let new = shared.at("new");
    let requests: [&[&str]; 2] = [&["grow", "--size", "512M"], &["add", "--size", "96M"]];
    for request in requests {
        let mut command = Command::new(shared.at("jericho"));
        command.args(request).arg(&own).current_dir("/");
        if request[0] == "add" {
            command.arg(&new);
        }
        let said = fail(command.uid(STRANGER).gid(GROUP), 1);
        assert!(
            said.contains("only root and the user who mounted"),
            "{said}"
        );
    }
    assert!(!new.exists());
    let length = std::fs::metadata(shared.at("volume"))
        .expect("the volume")
        .len();
    assert_eq!(length, 256 << 20);
}

#[test]
fn programs_get_the_fast_path_while_another_user_attacks_the_socket() {
    if !is_root() {
        return;
    }
    let shared = Shared::mounted(&[]);
    let mut attacks = [Attack::start(&shared), Attack::start(&shared)];
    let until = Instant::now() + Duration::from_secs(attack_seconds());
    let (mut programs, mut inline) = (0, 0);
    while programs < PROGRAMS_MIN || Instant::now() < until {
        inline += usize::from(shared.inline_bytes_of(0, 0) > 0);
        programs += 1;
    }
    for attack in &mut attacks {
        println!("{}", attack.end());
    }
    assert_eq!(
        inline, programs,
        "only {inline} of {programs} programs got the fast path"
    );
}

#[test]
fn named_users_and_groups_get_the_fast_path_and_others_do_not() {
    if !is_root() {
        return;
    }
    let group = format!(":{GROUP}");
    let shared = Shared::mounted(&["--fast-path", &NAMED.to_string(), "--fast-path", &group]);
    for (uid, gid) in [(0, 0), (NAMED, STRANGER), (STRANGER, GROUP)] {
        let bytes = shared.inline_bytes_of(uid, gid);
        assert!(bytes >= FILE_BYTES as u64 / 2, "{uid}:{gid}: {bytes} bytes");
    }
    for (uid, gid) in [(STRANGER, STRANGER), (GROUP, NAMED)] {
        assert_eq!(shared.inline_bytes_of(uid, gid), 0, "{uid}:{gid}");
    }
    drop(shared);
    let shared = Shared::mounted(&[]);
    assert!(shared.inline_bytes_of(0, 0) > 0);
    assert_eq!(shared.inline_bytes_of(NAMED, NAMED), 0);
}

#[test]
fn an_unknown_user_or_group_for_the_fast_path_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("volume"), "").unwrap();
    let mut mount = jericho([
        "mount",
        "--fast-path",
        "root",
        "--fast-path",
        "no-such-name",
    ]);
    let said = fail(mount.arg(dir.path().join("volume")).arg(dir.path()), 1);
    assert!(
        said.contains("--fast-path") && said.contains("\"no-such-name\""),
        "{said}"
    );
}
