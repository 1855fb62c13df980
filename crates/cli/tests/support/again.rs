//! The cases of a test program once more, in processes under `jericho run`.
//!
//! `jericho run` tells its command which volumes are mounted at that moment, so a case cannot begin there: its volume is not
//! mounted yet. Each case gets a process of its own instead. It begins as usual, and once its volume is mounted it becomes
//! `jericho run -- THE-SAME-TEST THE-SAME-CASE`. There it begins anew, and its fixture finds the volume mounted.
//! What the case and the programs that it starts read and write goes through the preload library from then on.
#![allow(dead_code)] // each test program uses its own part

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;

/// Set for a case that is to end up under `jericho run`: the directory that it works in.
const DIR: &str = "JERICHO_TEST_DIR";
/// Set once it is there.
const UNDER: &str = "JERICHO_TEST_UNDER_RUN";
/// What such a case says, so that none counts that never got there.
const MARK: &str = "this case runs under jericho run";
/// The name of the first directory of a case, which is handed over.
const FIRST: &str = "first";
/// Far more than any case needs: only something that hangs meets it.
const LIMIT_S: &str = "900";

/// Whether this process runs under `jericho run`.
pub fn under_run() -> bool {
    std::env::var_os(UNDER).is_some()
}

/// What a command needs in front of it to run under `jericho run`.
pub fn run_prefix() -> [&'static str; 3] {
    [env!("CARGO_BIN_EXE_jericho"), "run", "--"]
}

/// Asserts that this process has the library that answers its reads and writes.
fn assert_library_is_loaded() {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("proc is mounted");
    assert!(
        maps.contains("libjericho_preload"),
        "jericho run started this process without its preload library"
    );
}

/// A directory of one fixture, gone with it.
pub struct TestDir {
    path: PathBuf,
    /// There is a mounted volume in it, which nobody has asked for yet.
    mounted: AtomicBool,
}

impl TestDir {
    /// A new directory; the first one of a case under `jericho run` is what its earlier self left.
    pub fn new() -> TestDir {
        // Beside the build, not in a tmpfs, which knows no direct I/O.
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

    /// Whether a volume is there and mounted, formatted by this case's earlier self.
    pub fn is_taken_over(&self) -> bool {
        self.mounted.load(Ordering::Relaxed)
    }

    /// Whether the volume is mounted already. True once: after an unmount it has to be mounted as ever.
    pub fn take_mount(&self) -> bool {
        self.mounted.swap(false, Ordering::Relaxed)
    }

    /// To be called when the volume of this directory has been mounted: where this process is a case that has to go
    /// under `jericho run`, it does, and the call does not return.
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

/// Mounted directories below a directory.
fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("proc is mounted");
    let dirs = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    dirs.map(PathBuf::from)
        .filter(|mount| mount.starts_with(dir))
        .collect()
}

/// Removes a directory, unless something is mounted in it: that would be emptied, too.
fn remove(dir: &Path) {
    let mounts = mounts_below(dir);
    if !mounts.is_empty() {
        eprintln!("left behind, still mounted: {mounts:?}");
    } else if let Err(error) = std::fs::remove_dir_all(dir) {
        eprintln!("left behind: {}: {error}", dir.display());
    }
}

/// Takes away what a case that failed left mounted.
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
        assert!(gone, "{} cannot be taken away", mount.display());
    }
}

/// Names of this test program's cases; those to be ignored are left out.
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

/// Runs one case in a process of its own; what went wrong.
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

/// Runs each case of this test program whose name begins with none of `without`; all must pass.
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
