//! A volume on an ordinary file. The tests control it with the `jericho` command, as a user would.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::again::TestDir;
use crate::program::{command, outcome, succeed, within_limit};

/// Returns the command under test.
pub fn jericho() -> Command {
    within_limit(env!("CARGO_BIN_EXE_jericho"))
}

/// A volume and its mount point. Both are removed when it is dropped, also when a test panics.
pub struct Volume {
    dir: TestDir,
    cache: &'static str,
}

impl Volume {
    /// Formats a volume and mounts it with as many virtual nodes as it has slices.
    pub fn mounted(size: &str, slices: u16, cache: &'static str) -> Volume {
        let volume = Volume {
            dir: TestDir::new(),
            cache,
        };
        if volume.dir.take_mount() {
            return volume;
        }
        std::fs::create_dir(volume.mnt()).expect("a mount point");
        let slices = slices.to_string();
        succeed(
            jericho()
                .arg("format")
                .arg(volume.file())
                .args(["--size", size, "--slices", &slices]),
        );
        volume.mount();
        volume
    }

    /// Returns the path of the file that holds the volume.
    pub fn file(&self) -> PathBuf {
        self.dir.path().join("volume")
    }

    /// Returns the mount point.
    pub fn mnt(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    /// Returns a path on the mounted volume.
    pub fn at(&self, path: &str) -> PathBuf {
        self.mnt().join(path)
    }

    /// Makes a directory on the mounted volume and returns its path.
    pub fn make_dir(&self, path: &str) -> PathBuf {
        let path = self.at(path);
        std::fs::create_dir_all(&path).expect("mkdir on the mount");
        path
    }

    /// Returns a path outside the volume.
    pub fn outside(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Compiles a C program outside the volume and returns its path.
    pub fn compile(&self, name: &str, source: &str, options: &[&str]) -> PathBuf {
        let (file, program) = (self.outside(&format!("{name}.c")), self.outside(name));
        std::fs::write(&file, source).expect("the source");
        let mut compiler = within_limit("cc");
        succeed(compiler.args(options).arg("-o").args([&program, &file]));
        program
    }

    /// Mounts the volume.
    pub fn mount(&self) {
        succeed(
            jericho()
                .arg("mount")
                .arg(self.file())
                .arg(self.mnt())
                .args(["--cache", self.cache, "--topology", "virtual:2"])
                .arg("--log")
                .arg(self.outside("log")),
        );
        self.dir.is_mounted_now();
    }

    /// Returns the log of the volume's daemons so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.outside("log")).expect("the log")
    }

    /// Unmounts the volume. Afterwards all data is on the device.
    pub fn umount(&self) {
        succeed(jericho().arg("umount").arg(self.mnt()));
    }

    /// Asserts that the unmounted volume is sound.
    pub fn check(&self) {
        succeed(jericho().arg("check").arg(self.file()));
    }

    /// Unmounts, checks and mounts the volume. Afterwards its cache is empty.
    pub fn remount(&self) {
        self.umount();
        self.check();
        self.mount();
    }

    /// Unmounts and checks the volume at the end of a test.
    pub fn finish(self) {
        self.umount();
        self.check();
    }

    /// Returns the result of `jericho stat --json`.
    pub fn stat(&self) -> Value {
        let text = succeed(jericho().arg("stat").arg(self.mnt()).arg("--json"));
        serde_json::from_str(&text).expect("stat --json prints JSON")
    }

    /// Returns the sum of a counter over all slices.
    pub fn total(&self, counter: &str) -> u64 {
        let stat = self.stat();
        let slices = stat["slices"].as_array().expect("slices is a list");
        slices
            .iter()
            .map(|s| {
                s[counter]
                    .as_u64()
                    .unwrap_or_else(|| panic!("no counter {counter}"))
            })
            .sum()
    }

    /// Returns the result of `jericho where --json`.
    pub fn where_is(&self, path: &Path) -> Value {
        let text = succeed(jericho().arg("where").arg(path).arg("--json"));
        serde_json::from_str(&text).expect("where --json prints JSON")
    }

    /// Returns the process id of the daemon.
    pub fn daemon_pid(&self) -> u64 {
        self.stat()["pid"]
            .as_u64()
            .expect("stat tells the daemon's pid")
    }

    /// Kills the daemon with SIGKILL and removes the dead mount.
    pub fn crash(&self) {
        let pid = self.daemon_pid().to_string();
        succeed(command("kill").args(["-KILL", &pid]));
        // The lock on the volume is released only when the process has ended.
        succeed(command("tail").args(["--pid", &pid, "-f", "/dev/null"]));
        self.detach();
    }

    fn is_mounted(&self) -> bool {
        let mnt = self.mnt();
        let mnt = mnt.to_str().expect("the path is UTF-8");
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("proc is mounted");
        mounts
            .lines()
            .any(|line| line.split(' ').nth(1) == Some(mnt))
    }

    /// Removes a mount whose daemon has died.
    pub fn detach(&self) {
        while self.is_mounted() {
            let ended = outcome(command("umount").arg("-l").arg(self.mnt()))
                .status
                .success()
                || outcome(command("fusermount3").arg("-uz").arg(self.mnt()))
                    .status
                    .success();
            assert!(
                ended,
                "the mount {} could not be removed",
                self.mnt().display()
            );
        }
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if !self.is_mounted() {
            return;
        }
        // The test failed before its end. The mount and a hung daemon must not stay.
        let stat = outcome(jericho().arg("stat").arg(self.mnt()).arg("--json"));
        let pid = serde_json::from_slice::<Value>(&stat.stdout)
            .ok()
            .and_then(|s| s["pid"].as_u64());
        let umount = outcome(jericho().arg("umount").arg(self.mnt()));
        if let (false, Some(pid)) = (umount.status.success(), pid) {
            outcome(command("kill").args(["-KILL", &pid.to_string()]));
        }
        if self.is_mounted() {
            outcome(command("umount").arg("-l").arg(self.mnt()));
            outcome(command("fusermount3").arg("-uz").arg(self.mnt()));
        }
    }
}
