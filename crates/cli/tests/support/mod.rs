//! A volume on an ordinary file and its mount, which tests control with the real command. Both are removed when the guard is
//! dropped, also when a test panics.
#![allow(dead_code)] // each test program uses its own part

pub mod again;
pub mod commands;
pub mod loops;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use again::TestDir;
pub use commands::{output, succeed};

/// Returns the command under test with arguments.
pub fn jericho<A: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = A>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_jericho"));
    command
        .args(args)
        .env("RUST_LOG", "info")
        // Without a report, so mounts use the default costs of moves on every machine.
        .env("JERICHO_PROBE", "")
        .stdin(std::process::Stdio::null());
    command
}

/// Runs a command that must fail with this status. Returns its standard error.
pub fn fail(command: &mut Command, status: i32) -> String {
    let output = output(command);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        output.status.code(),
        Some(status),
        "{command:?} said {message}"
    );
    assert!(
        !message.trim().is_empty(),
        "{command:?} failed without a message"
    );
    message
}

/// Returns the path at which `scripts/setup test` installs a program with cargo.
fn tool(name: &str) -> PathBuf {
    let build = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("the build directory");
    let path = build.join("tools/bin").join(name);
    assert!(
        path.exists(),
        "{} is missing: run scripts/setup test",
        path.display()
    );
    path
}

/// Returns a command that runs a program of `scripts/setup test`, under `jericho run` if `run` is true.
pub fn tool_command(name: &str, run: bool) -> Command {
    let mut command = match run {
        true => jericho(["run", "--"]),
        false => Command::new("env"),
    };
    command.arg(tool(name));
    command
}

/// Returns a number from the environment.
pub fn number(name: &str, default: u64) -> u64 {
    let value = std::env::var(name);
    value.map_or(default, |text| text.parse().expect("a number"))
}

/// A volume. It may be mounted.
pub struct Volume {
    dir: TestDir,
}

impl Volume {
    /// Formats a volume of 256 MiB with two slices.
    pub fn formatted() -> Volume {
        Volume::of_size("256M")
    }

    pub fn of_size(size: &str) -> Volume {
        Volume::with_options(&["--size", size])
    }

    fn with_options(options: &[&str]) -> Volume {
        let volume = Volume {
            dir: TestDir::new(),
        };
        if volume.dir.is_taken_over() {
            return volume;
        }
        std::fs::create_dir(volume.mnt()).expect("a mount point");
        succeed(
            jericho(["format"])
                .arg(volume.file())
                .args(["--slices", "2"])
                .args(options),
        );
        volume
    }

    pub fn mounted() -> Volume {
        let volume = Volume::formatted();
        volume.mount();
        volume
    }

    /// Mounts a volume that keeps checksums of the data.
    pub fn mounted_with_checksums() -> Volume {
        let volume = Volume::with_options(&["--size", "256M", "--checksums"]);
        volume.mount();
        volume
    }

    pub fn file(&self) -> PathBuf {
        self.dir.path().join("volume")
    }

    pub fn mnt(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    /// Returns a path on the mount.
    pub fn at(&self, name: &str) -> PathBuf {
        self.mnt().join(name)
    }

    /// Returns a path beside the mount point.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn log(&self) -> PathBuf {
        self.beside("log")
    }

    /// Returns the command `jericho mount` for this volume.
    pub fn mount_command(&self) -> Command {
        let mut command = jericho([
            "mount",
            "--cache",
            "32M",
            "--topology",
            "virtual:2",
            "--log",
        ]);
        command.arg(self.log()).arg(self.file()).arg(self.mnt());
        command
    }

    pub fn mount(&self) {
        if !self.dir.take_mount() {
            succeed(&mut self.mount_command());
            self.dir.is_mounted_now();
        }
    }

    pub fn umount(&self) {
        succeed(jericho(["umount"]).arg(self.mnt()));
    }

    pub fn remount(&self) {
        self.umount();
        self.mount();
    }

    pub fn stat(&self) -> serde_json::Value {
        let json = succeed(jericho(["stat", "--json"]).arg(self.mnt()));
        serde_json::from_str(&json).expect("stat gives JSON")
    }

    pub fn daemon_pid(&self) -> i32 {
        self.stat()["pid"].as_i64().expect("a process id") as i32
    }

    pub fn check(&self) {
        succeed(jericho(["check"]).arg(self.file()));
    }

    pub fn is_mounted(&self) -> bool {
        is_mounted(&self.mnt())
    }

    /// Waits until the process has ended.
    pub fn wait_for_end(pid: i32) {
        let pid = rustix::process::Pid::from_raw(pid).expect("a process id");
        let Ok(descriptor) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())
        else {
            return;
        };
        let mut events = [rustix::event::PollFd::new(
            &descriptor,
            rustix::event::PollFlags::IN,
        )];
        let limit = rustix::event::Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        };
        let ended = rustix::event::poll(&mut events, Some(&limit)).expect("poll");
        assert_eq!(ended, 1, "process {pid:?} still runs after a minute");
    }

    pub fn signal_daemon(&self, signal: rustix::process::Signal) -> i32 {
        let pid = self.daemon_pid();
        let target = rustix::process::Pid::from_raw(pid).expect("a process id");
        rustix::process::kill_process(target, signal).expect("kill");
        pid
    }
}

pub fn is_mounted(dir: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("the list of mounts");
    mounts.lines().any(|l| l.split(' ').nth(1) == dir.to_str())
}

impl Drop for Volume {
    fn drop(&mut self) {
        if !self.is_mounted() {
            return;
        }
        let umount = jericho(["umount"]).arg(self.mnt()).output();
        if !umount.is_ok_and(|o| o.status.success()) {
            // The daemon of a detached mount ends by itself once no program uses the mount.
            let _ = Command::new("fusermount3")
                .args(["-u", "-z"])
                .arg(self.mnt())
                .output();
        }
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.log()).unwrap_or_default();
            eprintln!("the daemon's log:\n{log}");
        }
    }
}

/// Gives all users all rights on a path.
pub fn open_to_all(path: &Path) {
    std::fs::set_permissions(path, Permissions::from_mode(0o777)).expect("chmod");
}

/// Returns bytes that differ from page to page and from seed to seed.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
