//! An instance of the unit with its own volume.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::commands::{succeed, wait_until};
use crate::processes;

/// The directory with the container's volumes.
const VOLUMES: &str = "/run/suite/volumes";

/// Returns the name of the unit that mounts on a directory.
pub fn unit_of(dir: &str) -> String {
    let instance = succeed(Command::new("systemd-escape").args(["--path", dir]));
    format!("jericho@{}.service", instance.trim())
}

/// A started service. It is stopped when dropped.
pub struct Service {
    unit: String,
    volume: PathBuf,
    dir: PathBuf,
}

impl Service {
    /// Makes and starts a service as an administrator does. The directory's name needs escapes in a unit's name and quotes in a command.
    pub fn started(name: &str) -> Service {
        let dir = format!("/srv/{name}-it is");
        Service::started_with(&dir, &format!("/etc/jericho{dir}.conf"))
    }

    /// Starts a service that mounts on this directory, with settings from this file.
    pub fn started_with(dir: &str, settings: &str) -> Service {
        fs::create_dir_all(dir).expect("mkdir");
        fs::create_dir_all("/etc/jericho/srv").expect("mkdir");
        fs::create_dir_all(VOLUMES).expect("mkdir");
        let volume = Path::new(VOLUMES).join(dir.replace('/', " "));
        let file = File::create(&volume).expect("create");
        file.set_len(256 << 20).expect("ftruncate");
        succeed(Command::new("jericho").arg("format").arg(&volume));
        let text = format!(
            "VOLUME=\"{}\"\nOPTIONS=--cache 16M --transport device\n",
            volume.display()
        );
        fs::write(settings, text).expect("write");
        let service = Service {
            unit: unit_of(dir),
            volume,
            dir: PathBuf::from(dir),
        };
        service.systemctl("start");
        service
    }

    /// Runs `systemctl`, which waits for the end of its job, on this unit.
    pub fn systemctl(&self, verb: &str) {
        succeed(Command::new("systemctl").args([verb, &*self.unit]));
    }

    /// Returns a property of the unit.
    pub fn property(&self, name: &str) -> String {
        let mut command = Command::new("systemctl");
        let text = succeed(command.args(["show", "-P", name, &*self.unit]));
        text.trim().to_owned()
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn daemon(&self) -> u64 {
        self.property("MainPID").parse().expect("a number")
    }

    /// Returns the processes of the unit.
    pub fn processes(&self) -> Vec<u64> {
        let slice = self.property("Slice");
        assert_eq!(slice, "system-jericho.slice");
        // systemd's name for the control group begins with the unit's name. The property is empty once the unit has stopped.
        let group = Path::new("/sys/fs/cgroup/system.slice")
            .join(slice)
            .join(&self.unit);
        let Ok(pids) = fs::read_to_string(group.join("cgroup.procs")) else {
            return Vec::new();
        };
        pids.lines()
            .map(|pid| pid.parse().expect("a number"))
            .collect()
    }

    /// Returns the keeper: the one process of the unit beside the daemon.
    pub fn keeper(&self) -> u64 {
        let daemon = self.daemon();
        let others: Vec<u64> = self
            .processes()
            .into_iter()
            .filter(|pid| *pid != daemon)
            .collect();
        let [keeper] = others[..] else {
            panic!("expected one process beside the daemon {daemon}, found {others:?}");
        };
        let args = fs::read(format!("/proc/{keeper}/cmdline")).expect("the keeper runs");
        assert_eq!(args.split(|byte| *byte == 0).nth(1), Some(&b"keeper"[..]));
        keeper
    }

    pub fn stat(&self) -> Value {
        let mut command = Command::new("jericho");
        let text = succeed(command.arg("stat").arg(&self.dir).arg("--json"));
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
    }

    pub fn is_mounted(&self) -> bool {
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("proc is mounted");
        let dir = self.dir.display().to_string().replace(' ', "\\040");
        mounts
            .lines()
            .any(|line| line.split(' ').nth(4) == Some(&dir))
    }

    /// Asserts that the unit is active and that its daemon answers on the mount.
    pub fn assert_serves(&self) {
        assert_eq!(self.property("ActiveState"), "active");
        assert!(self.is_mounted());
        assert_eq!(self.stat()["pid"], self.daemon());
    }

    /// Waits until systemd has restarted the unit `number` times.
    pub fn wait_for_restart(&self, number: usize) {
        wait_until("systemd starts it again", || {
            self.property("NRestarts") == number.to_string()
                && self.property("ActiveState") == "active"
        });
        self.assert_serves();
    }

    /// Waits until the unit has no process. Asserts that it stopped cleanly.
    pub fn assert_over(&self) {
        assert_eq!(self.property("ActiveState"), "inactive");
        assert_eq!(self.property("Result"), "success");
        assert_eq!(self.property("ExecMainStatus"), "0");
        assert!(!self.is_mounted());
        wait_until("the unit's processes end", || self.processes().is_empty());
    }

    /// Checks the volume of a stopped service.
    pub fn check(&self) {
        succeed(Command::new("jericho").arg("check").arg(&self.volume));
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for command in [
                Command::new("systemctl").args(["status", "--no-pager", "--lines=0", &*self.unit]),
                Command::new("journalctl").args([
                    "--no-pager",
                    "--output=cat",
                    "--lines=40",
                    "--unit",
                    &*self.unit,
                ]),
            ] {
                let output = command.output().expect("systemd's commands are here");
                let _ = std::io::stderr().write_all(&output.stdout);
            }
        }
        // A case that failed before its end may leave a mount or processes, which must not make the next case fail.
        for pid in self.processes() {
            if !processes::has_ended(pid) {
                let _ = Command::new("kill")
                    .args(["-s", "KILL", &pid.to_string()])
                    .output();
            }
        }
        let _ = Command::new("systemctl")
            .args(["stop", &*self.unit])
            .output();
        let _ = Command::new("umount")
            .args(["-i", "-l"])
            .arg(&self.dir)
            .output();
        let _ = fs::remove_file(&self.volume);
    }
}
