//! A panic of the committer ends the process, so that no caller waits for it for ever.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use jericho_fs::Result;
use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, ROOT};
use jericho_fs::{Fs, FsOptions};
use jericho_sim::{FaultPlan, Operation, SimDevice};
use jericho_storage::Device;
use jericho_volume::{FormatOptions, OpenMode, Volume};

const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};
const ABORTED: i32 = 6;

fn formatted() -> Arc<SimDevice> {
    let device = Arc::new(SimDevice::new("sim", 64 << 20));
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    format_devices(&devices, &[PathBuf::from("sim")], &FormatOptions::default()).unwrap();
    device
}

fn open(device: &Arc<SimDevice>) -> Arc<Fs> {
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    let volume = Volume::open_from_devices(devices, OpenMode::WRITE).unwrap();
    let options = FsOptions {
        store_cache_bytes: 64 << 20,
        read_only: false,
        inode_cache: 50,
        commit_interval_ms: 3_600_000,
    };
    Fs::open(Arc::new(volume), Vec::new(), options).unwrap()
}

fn sync(fs: &Fs) -> Result<()> {
    let (sender, receiver) = channel();
    fs.fsync_dir(ROOT, Box::new(move |result| sender.send(result).unwrap()));
    receiver.recv().unwrap()
}

/// Runs the test `name` of this program again as a child, which takes the other branch. Returns the child's standard error
/// after it has aborted. Kills the child if it still runs after a minute.
fn aborted(name: &str) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env("JERICHO_TEST_CHILD", name)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if Instant::now() > end => {
                child.kill().unwrap();
                break child.wait().unwrap();
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let said = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
    assert_eq!(status.signal(), Some(ABORTED), "{status}: {said}");
    said
}

#[test]
fn a_committer_that_panics_ends_the_process_with_its_name_and_cause() {
    let name = "a_committer_that_panics_ends_the_process_with_its_name_and_cause";
    if std::env::var_os("JERICHO_TEST_CHILD").is_none() {
        let said = aborted(name);
        assert!(said.contains("the thread committer panicked"), "{said}");
        assert!(said.contains("wants a panic"), "{said}");
        return;
    }
    let device = formatted();
    let fs = open(&device);
    fs.mkdir(ROOT, b"dir", 0o755, CALLER).unwrap();
    device.set_plan(FaultPlan::panic_at(Some(Operation::DurableWrite), 1));
    // The sync returns only if the process ends.
    let _ = sync(&fs);
    panic!("the process continued without its committer");
}
