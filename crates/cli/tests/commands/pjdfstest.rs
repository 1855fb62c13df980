//! pjdfstest, an external suite that tests what POSIX says about each call on files, on the mount and under `jericho run`.
//!
//! `scripts/with-ring on` runs it again over the FUSE ring. `pjdfstest.toml` selects the tests and lists those that are known to fail.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::support::{Volume, open_to_all, output, tool_command};

const SETTINGS: &str = include_str!("pjdfstest.toml");
/// Tests that do not apply: a filesystem over FUSE cannot tell the kernel the largest number of a file's links.
const SKIPPED: [&str; 1] = ["link::link_count_max"];
/// Least number of passed tests. Fewer mean that the suite did not run completely.
const PASSES_MIN: usize = 384;
/// A part of the names of tests that remount the mount read-only.
const READ_ONLY: &str = "erofs";

/// A script that runs instead of mount(8). With `-i`, mount(8) does not use a helper for the remount, which may not be installed.
const MOUNT: &str = "#!/bin/sh\nPATH=${PATH#*:}\nexec mount -i \"$@\"\n";

/// Returns a PATH in which `mount` is the script above.
fn path(volume: &Volume) -> std::ffi::OsString {
    let dir = volume.beside("bin");
    std::fs::create_dir_all(&dir).expect("a directory");
    std::fs::write(dir.join("mount"), MOUNT).expect("a script");
    std::fs::set_permissions(dir.join("mount"), Permissions::from_mode(0o755)).expect("chmod");
    let before = std::env::var_os("PATH").unwrap_or_default();
    let all = std::iter::once(dir).chain(std::env::split_paths(&before));
    std::env::join_paths(all.collect::<Vec<PathBuf>>()).expect("a PATH")
}

/// The lines that pjdfstest printed about its tests.
struct Results(String);

impl Results {
    /// Runs the tests whose names contain `pattern`, with the library if `run` is true. Panics if a test fails that is not known to
    /// fail, or if a test passes that is known to fail.
    fn of(volume: &Volume, settings: &str, pattern: &str, run: bool) -> Results {
        let file = volume.beside("pjdfstest.toml");
        std::fs::write(&file, settings).expect("settings");
        let mut command = tool_command("pjdfstest", run);
        command.arg("-c").arg(file).arg("-p").arg(volume.mnt());
        command.arg(pattern).env("PATH", path(volume));
        let output = output(command.env("RUST_BACKTRACE", "0"));
        let results = Results(String::from_utf8_lossy(&output.stdout).into_owned());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}\n{errors}", results.0);
        results
    }

    fn with(&self, result: &str) -> Vec<&str> {
        let lines = self.0.lines().map(|line| line.split_whitespace());
        let fields = lines.filter_map(|mut words| Some((words.next()?, words.next_back()?)));
        let these = fields.filter(|(_, last)| *last == result);
        these.map(|(name, _)| name).collect()
    }
}

fn test_all(run: bool) {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not tested: pjdfstest needs root, to become other users and to remount");
        return;
    }
    let volume = Volume::mounted();
    // Other users must reach the mount.
    open_to_all(&volume.beside(""));
    let results = Results::of(&volume, SETTINGS, "", run);
    let (passed, mut skipped) = (results.with("ok"), results.with("skipped"));
    assert!(passed.len() >= PASSES_MIN, "{passed:?}");

    // These tests run in a process of their own: other tests of the suite leave files open, and a filesystem with files open for
    // writing cannot become read-only.
    let settings = SETTINGS.replace("allow_remount = false", "allow_remount = true");
    let results = Results::of(&volume, &settings, READ_ONLY, run);
    let passed = results.with("ok");
    skipped.retain(|name| !passed.contains(name));
    assert_eq!(skipped, SKIPPED);
    volume.umount();
    volume.check();
}

#[test]
fn calls_on_files_do_what_posix_says() {
    test_all(false);
}

#[test]
fn calls_on_files_do_what_posix_says_under_jericho_run() {
    test_all(true);
}
