//! Persistent memory of a node (`/dev/pmemN`), as a device of volumes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::guest::{self, ask, content, jericho};
use crate::kernel_trace::tracing;

const MNT: &str = "/mnt";
/// Where the daemon writes its log.
const LOG: &str = "/tmp/daemon.log";
/// Flag of open(2), in /proc/PID/fdinfo.
const O_DIRECT: u32 = 0o40000;

/// Counts the kernel's calls of `nvdimm_flush`, which makes the writes to persistent memory durable.
pub struct Flushes;

impl Flushes {
    pub fn new() -> Flushes {
        let tracing = tracing();
        fs::write(tracing.join("kprobe_events"), "p:flushes nvdimm_flush\n").expect("a kprobe");
        fs::write(tracing.join("events/kprobes/flushes/enable"), "1").expect("a kprobe");
        Flushes
    }

    pub fn count(&self) -> u64 {
        let text = fs::read_to_string(tracing().join("kprobe_profile")).expect("a profile");
        let line = text.lines().find(|line| line.contains("flushes"));
        let hits = line.and_then(|line| line.split_whitespace().nth(1));
        hits.expect("hits").parse().expect("a number")
    }
}

impl Drop for Flushes {
    fn drop(&mut self) {
        let tracing = tracing();
        let _ = fs::write(tracing.join("events/kprobes/flushes/enable"), "0");
        let _ = fs::write(tracing.join("kprobe_events"), "");
    }
}

/// Returns whether a process has a device open without the page cache.
pub fn is_open_direct(pid: u64, device: &str) -> bool {
    let directory = fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors");
    let flags = directory.filter_map(|entry| {
        let path = entry.ok()?.path();
        if fs::read_link(&path).ok()? != Path::new(device) {
            return None;
        }
        let fd = path.file_name()?.to_str()?.to_owned();
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).ok()?;
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
        u32::from_str_radix(flags.trim(), 8).ok()
    });
    let flags: Vec<u32> = flags.collect();
    let direct = flags.iter().filter(|flags| *flags & O_DIRECT != 0).count();
    println!(
        "lab: {device}: open {} times, {direct} with O_DIRECT",
        flags.len()
    );
    direct > 0
}

/// Unmounts when it is dropped, also after a failure.
pub struct Mounted;

impl Mounted {
    pub fn umount(self) {
        jericho(&format!("umount {MNT}"));
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = fs::read_to_string(LOG).unwrap_or_default();
            println!("the daemon's log:\n{log}");
        }
        let _ = Command::new("/usr/bin/jericho")
            .args(["umount", MNT])
            .output();
    }
}

pub fn mount(devices: &str, options: &str) -> Mounted {
    jericho(&format!(
        "mount {devices} {MNT} --cache 64M --log {LOG} {options}"
    ));
    Mounted
}

/// Writes files into directories, which are on all slices. Returns them, with the number of each one's content.
pub fn write_files(round: usize) -> Vec<(PathBuf, usize)> {
    let mut files = Vec::new();
    for directory in 0..4 {
        let path = PathBuf::from(format!("{MNT}/{directory}"));
        fs::create_dir_all(&path).expect("mkdir");
        let file = path.join(format!("file{round}"));
        let number = round * 4 + directory;
        fs::write(&file, content(number, 4)).expect("write");
        files.push((file, number));
    }
    files
}

pub fn compare(files: &[(PathBuf, usize)]) {
    for (file, number) in files {
        let bytes = fs::read(file).expect("read");
        assert!(bytes == content(*number, 4), "{}", file.display());
    }
}

fn home(file: &Path) -> u64 {
    let found = ask(&format!("where {} --json", file.display()));
    found["home_node"].as_u64().expect("a node")
}

/// Returns the sectors that were written to a device. The kernel counts them from the first call on.
pub fn sectors_written(node: usize) -> u64 {
    fs::write(format!("/sys/block/pmem{node}/queue/iostats"), "1").expect("an attribute");
    guest::sectors_written(&format!("pmem{node}"))
}

#[test]
#[ignore = "for the guest of make lab"]
fn slices_on_persistent_memory_are_on_its_nodes() {
    let flushes = Flushes::new();
    jericho("format /dev/pmem0 /dev/pmem1 --force");
    let mounted = mount("/dev/pmem0", "");
    let stat = ask(&format!("stat {MNT} --json"));
    println!("lab: persistent memory: {}", stat["devices"]);
    let nodes = |stat: &serde_json::Value| -> Vec<u64> {
        let slices = stat["slices"].as_array().expect("slices");
        slices
            .iter()
            .map(|slice| slice["node"].as_u64().expect("a node"))
            .collect()
    };
    assert_eq!(nodes(&stat), [0, 1], "{stat}");
    let daemon = stat["pid"].as_u64().expect("a process");
    for node in 0..2 {
        assert!(is_open_direct(daemon, &format!("/dev/pmem{node}")));
        let cache = format!("/sys/block/pmem{node}/queue/write_cache");
        let cache = fs::read_to_string(cache).expect("an attribute");
        println!("lab: /dev/pmem{node}: write cache {}", cache.trim());
    }
    let files = write_files(0);
    // Each slice's bytes are on the memory of its node: the kernel counts the sectors of each device.
    let before = [0, 1].map(sectors_written);
    let (file, _) = files
        .iter()
        .find(|(file, _)| home(file) == 1)
        .expect("a file on node 1");
    let flushed = flushes.count();
    let fresh = file.with_file_name("fresh");
    fs::write(&fresh, content(9, 8)).expect("write");
    fs::File::open(&fresh)
        .and_then(|file| file.sync_all())
        .expect("fsync");
    let after = [0, 1].map(sectors_written);
    println!(
        "lab: a file of 8 MiB on node 1: sectors written to each device {:?}, flushes of persistent memory {}",
        [after[0] - before[0], after[1] - before[1]],
        flushes.count() - flushed
    );
    assert!(after[1] - before[1] >= (8 << 20) / 512);
    assert!(flushes.count() > flushed, "an fsync flushes the device");
    compare(&files);
    mounted.umount();
    jericho("check /dev/pmem0");
}
