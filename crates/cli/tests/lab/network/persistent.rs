//! Persistent memory of a node, served to another host as a device of volumes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::hosts::{Layout, Target, Told};
use crate::commands::wait_until;
use crate::guest::{ask, content, jericho};
use crate::nvdimm::{Flushes, compare, is_open_direct, mount, sectors_written, write_files};

const MNT: &str = "/mnt";
const LAYOUT: Layout = Layout(3, 3);

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
