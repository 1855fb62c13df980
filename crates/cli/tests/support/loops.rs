//! Loop devices: block devices over files.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::output;

/// A loop device. It is detached when dropped.
pub struct Loop(pub PathBuf);

impl Loop {
    /// Makes a loop device over `file`. Returns `None` and prints a message if this user or machine has no loop devices.
    pub fn over(file: &Path) -> Option<Loop> {
        Loop::made_by(Command::new("losetup").args(["--find", "--show"]).arg(file))
    }

    /// Runs a command that makes a loop device and prints its path.
    pub fn made_by(command: &mut Command) -> Option<Loop> {
        let output = output(command);
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
            eprintln!("SKIPPED: cannot make a loop device, which needs root and /dev/loop-control");
            return None;
        }
        assert!(output.status.success(), "{command:?}: {output:?}");
        let path = String::from_utf8(output.stdout).unwrap();
        Some(Loop(PathBuf::from(path.trim())))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).output();
    }
}
