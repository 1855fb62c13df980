//! Mounting without being root, through the setuid helper.

use std::path::Path;
use std::process::Command;

use super::support::{open_to_all, output, succeed};

/// uid and gid of `nobody`.
const NOBODY: &str = "65534";

#[test]
fn an_ordinary_user_formats_mounts_uses_and_unmounts_a_volume() {
    let helper = Command::new("fusermount3").arg("-V").output().is_ok();
    if !rustix::process::geteuid().is_root() || !helper {
        eprintln!("not tested: needs root (to become somebody else) and fusermount3");
        return;
    }
    // The build may be where only root can go.
    let dir = tempfile::tempdir().unwrap();
    open_to_all(dir.path());
    let program = dir.path().join("jericho");
    std::fs::copy(env!("CARGO_BIN_EXE_jericho"), &program).unwrap();
    let as_nobody = |script: &str| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]);
        command.args(["sh", "-euc", script]).current_dir(dir.path());
        command
            .env("HOME", dir.path())
            .env("J", &program)
            .env_remove("XDG_STATE_HOME");
        command
    };
    succeed(&mut as_nobody(
        "mkdir mnt && \"$J\" format vol --size 256M --slices 2 && \"$J\" mount vol mnt --cache 32M",
    ));
    let mounted = Mounted(dir.path());
    succeed(&mut as_nobody(
        "echo kept > mnt/file && mkdir mnt/dir && \"$J\" stat mnt && \"$J\" place mnt/dir --node 0",
    ));
    assert!(
        dir.path().join(".local/state/jericho").is_dir(),
        "the log is in the user's state"
    );
    succeed(&mut as_nobody("\"$J\" umount mnt && \"$J\" check vol"));
    succeed(&mut as_nobody(
        "\"$J\" run --volume vol --at mnt -- grep -q kept mnt/file",
    ));
    drop(mounted);
}

struct Mounted<'d>(&'d Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        if super::support::is_mounted(&self.0.join("mnt")) {
            output(
                Command::new("fusermount3")
                    .args(["-u", "-z"])
                    .arg(self.0.join("mnt")),
            );
        }
    }
}
