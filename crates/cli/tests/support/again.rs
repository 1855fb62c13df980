//! Runs the cases of a test program again, in processes under `jericho run`.
//!
//! `jericho run` tells its command which volumes are mounted at that moment, so a case cannot start under `jericho run`: its volume
//! is not mounted yet. Instead, each case starts as usual in a process of its own. Once its volume is mounted, the process executes
//! `jericho run -- THE-SAME-TEST THE-SAME-CASE`. So the case starts a second time, and its fixture finds the volume mounted. From
//! then on, reads and writes of the case and of its programs go through the preload library.
#![allow(dead_code)] // each test program uses its own part

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;

/// The variable that tells a case to continue under `jericho run`. Its value is the case's working directory.
const DIR: &str = "JERICHO_TEST_DIR";
/// The variable that is set once the case runs under `jericho run`.
const UNDER: &str = "JERICHO_TEST_UNDER_RUN";
/// The line that a case prints under `jericho run`. A case without it does not count as passed.
const MARK: &str = "this case runs under jericho run";
/// The name of a case's first directory. The case's second process takes it over.
const FIRST: &str = "first";
/// Time limit in seconds, far more than any case needs. A case that reaches it hangs.
const LIMIT_S: &str = "900";

/// Returns whether this process runs under `jericho run`.
pub fn under_run() -> bool {
    std::env::var_os(UNDER).is_some()
}

/// Returns the words before a command that run it under `jericho run`.
pub fn run_prefix() -> [&'static str; 3] {
    [env!("CARGO_BIN_EXE_jericho"), "run", "--"]
}

/// Asserts that this process has loaded the preload library.
fn assert_library_is_loaded() {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("proc is mounted");
    assert!(
        maps.contains("libjericho_preload"),
        "jericho run started this process without its preload library"
    );
}

/// A directory of one fixture. It is removed when dropped.
pub struct TestDir {
    path: PathBuf,
    /// True while the directory has a mounted volume that the fixture has not taken yet.
    mounted: AtomicBool,
}

impl TestDir {
    /// Creates a directory. The first one of a case under `jericho run` is the directory of its earlier process.
    pub fn new() -> TestDir {
        // In the build directory, because /tmp may be a tmpfs, which has no direct I/O.
        let parent = std::env::var_os(DIR);
        let parent = parent.map_or_else(|| env!("CARGO_TARGET_TMPDIR").into(), PathBuf::from);
        static FIRST_IS_TAKEN: AtomicBool = AtomicBool::new(false);
        let handed_over =
            std::env::var_os(DIR).is_some() && !FIRST_IS_TAKEN.swap(true, Ordering::Relaxed);
        if !handed_over {
            let path = TempDir::new_in(parent).expect("a directory for the test");
            return TestDir {
                path: path.keep(),
                mounted: AtomicBool::new(false),
            };
        }
        let path = parent.join(FIRST);
        if under_run() {
            assert_library_is_loaded();
            eprintln!("{MARK}");
        } else {
            std::fs::create_dir(&path).expect("a directory for the test");
        }
        TestDir {
            path,
            mounted: AtomicBool::new(under_run()),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the directory has a mounted volume, which this case's earlier process formatted.
    pub fn is_taken_over(&self) -> bool {
        self.mounted.load(Ordering::Relaxed)
    }

    /// Returns whether the volume is mounted already. Returns true only once: after an unmount the fixture mounts the volume as usual.
    pub fn take_mount(&self) -> bool {
        self.mounted.swap(false, Ordering::Relaxed)
    }

    /// Continues this case under `jericho run` if `cases_again` started it. Then the call does not return. The fixture calls this when
    /// it has mounted the volume of this directory.
    pub fn is_mounted_now(&self) {
        if std::env::var_os(DIR).is_none() || under_run() {
            return;
        }
        let [jericho, run, dashes] = run_prefix();
        let me = std::env::current_exe().expect("this program has a path");
        let error = Command::new(jericho)
            .args([run, dashes])
            .arg(me)
            .args(std::env::args_os().skip(1))
            .env(UNDER, "1")
            .exec();
        panic!("cannot become jericho run: {error}");
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// Returns the mount points below a directory.
fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("proc is mounted");
    let dirs = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    dirs.map(PathBuf::from)
        .filter(|mount| mount.starts_with(dir))
        .collect()
}

/// Removes a directory. Does nothing if it has a mount point, because the removal would also empty the mounted filesystem.
fn remove(dir: &Path) {
    let mounts = mounts_below(dir);
    if !mounts.is_empty() {
        eprintln!("left behind, still mounted: {mounts:?}");
    } else if let Err(error) = std::fs::remove_dir_all(dir) {
        eprintln!("left behind: {}: {error}", dir.display());
    }
}

/// Detaches the mounts that a failed case has left.
fn detach_below(dir: &Path) {
    for mount in mounts_below(dir) {
        let commands = [
            ["umount", "-l"].as_slice(),
            ["fusermount3", "-u", "-z"].as_slice(),
        ];
        let gone = commands.iter().any(|command| {
            let mut umount = Command::new(command[0]);
            umount.args(&command[1..]).arg(&mount).stderr(Stdio::null());
            umount.status().is_ok_and(|status| status.success())
        });
        assert!(gone, "{} cannot be unmounted", mount.display());
    }
}

/// Returns the names of this test program's cases, without the ignored ones.
fn cases() -> BTreeSet<String> {
    let list = |option: &[&str]| -> BTreeSet<String> {
        let me = std::env::current_exe().expect("this program has a path");
        let mut command = Command::new(me);
        command.args(["--list", "--format", "terse"]).args(option);
        let output = command.output().expect("this program runs");
        let text = String::from_utf8(output.stdout).expect("names are text");
        text.lines()
            .filter_map(|line| line.strip_suffix(": test"))
            .map(str::to_owned)
            .collect()
    };
    let ignored = list(&["--ignored"]);
    list(&[]).difference(&ignored).cloned().collect()
}

/// Runs one case in a process of its own. Fails with the output of the case.
fn run_case(case: &str) -> Result<(), String> {
    let parent = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for the case");
    let me = std::env::current_exe().expect("this program has a path");
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new("timeout")
        .args(["--signal=KILL", LIMIT_S])
        .arg(me)
        .args([case, "--exact", "--nocapture"])
        .env(DIR, parent.path())
        .stdin(Stdio::null())
        .output()
        .expect("coreutils' timeout runs");
    detach_below(parent.path());
    let (out, err) = (
        String::from_utf8_lossy(&stdout),
        String::from_utf8_lossy(&stderr),
    );
    if status.success() && out.contains("1 passed") && err.contains(MARK) {
        return Ok(());
    }
    Err(format!(
        "=== {case}: {status} (137: it hung)\n{out}\n{err}\n"
    ))
}

/// Runs each case of this test program whose name begins with none of `without`. Panics unless all pass.
pub fn cases_again(without: &[&str]) {
    let chosen: Vec<String> = cases()
        .into_iter()
        .filter(|case| !without.iter().any(|prefix| case.starts_with(prefix)))
        .collect();
    assert!(!chosen.is_empty(), "this program lists no cases");
    let rest = Mutex::new(chosen.iter());
    let failures = Mutex::new(Vec::new());
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..workers.min(8) {
            scope.spawn(|| {
                loop {
                    let next = rest.lock().expect("no worker panics here").next();
                    let Some(case) = next else { return };
                    if let Err(failure) = run_case(case) {
                        failures
                            .lock()
                            .expect("no worker panics here")
                            .push(failure);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no worker panicked");
    assert!(
        failures.is_empty(),
        "{} of {} cases failed under jericho run:\n{}",
        failures.len(),
        chosen.len(),
        failures.join("\n")
    );
}
