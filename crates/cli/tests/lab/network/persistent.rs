//! Persistent memory of a node (`/dev/pmemN`), as a device of volumes and served to another host.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::hosts::{Layout, Target, Told};
use crate::commands::wait_until;
use crate::guest::{ask, content, jericho};

const MNT: &str = "/mnt";
const LAYOUT: Layout = Layout(3, 3);
/// Where the daemon writes its log.
const LOG: &str = "/tmp/daemon.log";
/// Flag of open(2), in /proc/PID/fdinfo.
const O_DIRECT: u32 = 0o40000;

/// Counts the kernel's calls of `nvdimm_flush`, which makes the writes to persistent memory durable.
struct Flushes;

impl Flushes {
    fn new() -> Flushes {
        if !Path::new("/sys/kernel/tracing/kprobe_events").exists() {
            let mut mount = Command::new("mount");
            let mounted = mount.args(["-t", "tracefs", "none", "/sys/kernel/tracing"]);
            crate::commands::succeed(mounted);
        }
        let tracing = Path::new("/sys/kernel/tracing");
        fs::write(tracing.join("kprobe_events"), "p:flushes nvdimm_flush\n").expect("a kprobe");
        fs::write(tracing.join("events/kprobes/flushes/enable"), "1").expect("a kprobe");
        Flushes
    }

    fn count(&self) -> u64 {
        let text = fs::read_to_string("/sys/kernel/tracing/kprobe_profile").expect("a profile");
        let line = text.lines().find(|line| line.contains("flushes"));
        let hits = line.and_then(|line| line.split_whitespace().nth(1));
        hits.expect("hits").parse().expect("a number")
    }
}

impl Drop for Flushes {
    fn drop(&mut self) {
        let tracing = Path::new("/sys/kernel/tracing");
        let _ = fs::write(tracing.join("events/kprobes/flushes/enable"), "0");
        let _ = fs::write(tracing.join("kprobe_events"), "");
    }
}

/// Returns whether a process has a device open without the page cache.
fn is_open_direct(pid: u64, device: &str) -> bool {
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
struct Mounted;

impl Mounted {
    fn umount(self) {
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

fn mount(devices: &str, options: &str) -> Mounted {
    jericho(&format!(
        "mount {devices} {MNT} --cache 64M --log {LOG} {options}"
    ));
    Mounted
}

/// Writes files into directories, which are on all slices. Returns them, with the number of each one's content.
fn write_files(round: usize) -> Vec<(PathBuf, usize)> {
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

fn compare(files: &[(PathBuf, usize)]) {
    for (file, number) in files {
        let bytes = fs::read(file).expect("read");
        assert!(bytes == content(*number, 4), "{}", file.display());
    }
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

fn home(file: &Path) -> u64 {
    let found = ask(&format!("where {} --json", file.display()));
    found["home_node"].as_u64().expect("a node")
}

/// Returns the sectors that were written to a device. The kernel counts them from the first call on.
fn sectors_written(node: usize) -> u64 {
    fs::write(format!("/sys/block/pmem{node}/queue/iostats"), "1").expect("an attribute");
    let stat = fs::read_to_string(format!("/sys/block/pmem{node}/stat")).expect("counters");
    stat.split_whitespace()
        .nth(6)
        .expect("sectors")
        .parse()
        .expect("a number")
}

#[test]
#[ignore = "for the guest of make lab"]
fn a_slice_on_persistent_memory_of_another_host_keeps_its_bytes_when_the_target_is_killed() {
    let serve = || Target::serve("/dev/pmem0", "nvm", LAYOUT, Told::Truth);
    let flushes = Flushes::new();
    let target = serve();
    assert!(is_open_direct(target.pid(), "/dev/pmem0"));
    let network = format!("--nic {}", LAYOUT.interfaces('i').join(","));
    jericho(&format!(
        "format /dev/pmem1 tyche://hostb/nvm --force {network}"
    ));
    let mounted = mount("/dev/pmem1", &network);
    let stat = ask(&format!("stat {MNT} --json"));
    println!(
        "lab: persistent memory of another host: {}, {}",
        stat["devices"], stat["slices"]
    );
    let before = (sectors_written(0), flushes.count());
    let mut files = write_files(0);
    let remote = files.iter().filter(|(file, _)| slice(file) == 1).count();
    assert!(remote > 0, "no file is in the slice of the other host");
    for (file, _) in &files {
        fs::File::open(file)
            .and_then(|file| file.sync_all())
            .expect("fsync");
    }
    println!(
        "lab: {remote} of {} files of 4 MiB on the other host: sectors written {}, flushes {}",
        files.len(),
        sectors_written(0) - before.0,
        flushes.count() - before.1
    );
    assert!(flushes.count() > before.1, "an fsync flushes the device");
    // The target dies while it has writes, and comes back. Another process writes: the next command would wait for files that are open here.
    let copies: Vec<(PathBuf, usize)> = (4..12)
        .map(|number| {
            (
                PathBuf::from(format!("{MNT}/{}/copy{number}", number % 4)),
                number,
            )
        })
        .collect();
    let mut script = String::from("set -e\n");
    for (file, number) in &copies {
        fs::write(format!("/tmp/{number}"), content(*number, 4)).expect("write");
        script += &format!("cat /tmp/{number} > {}\n", file.display());
    }
    script += &format!("jericho sync {MNT}\n");
    let begun = sectors_written(0);
    let mut writer = Command::new("/usr/bin/sh");
    let mut writer = writer.args(["-c", &script]).spawn().expect("sh");
    wait_until("the target writes", || sectors_written(0) > begun);
    target.kill();
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert!(
        writer.try_wait().expect("wait").is_none(),
        "nothing waited for the target"
    );
    let _target = serve();
    assert!(writer.wait().expect("wait").success(), "the writer");
    files.extend(copies);
    compare(&files);
    mounted.umount();
    jericho(&format!("check /dev/pmem1 {network}"));
    let mounted = mount("/dev/pmem1", &network);
    compare(&files);
    let stat = ask(&format!("stat {MNT} --json"));
    for channel in stat["network"][0]["channels"].as_array().expect("channels") {
        assert!(channel["node"].is_u64(), "{channel}");
    }
    mounted.umount();
}

fn slice(file: &Path) -> u64 {
    let found = ask(&format!("where {} --json", file.display()));
    found["slice"].as_u64().expect("a slice")
}
