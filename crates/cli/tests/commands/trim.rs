//! The daemon returns freed space to the host, and so do `jericho trim` and fstrim(8).

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::support::loops::Loop;
use super::support::{Volume, fail, jericho, open_to_all, output, pattern, succeed};

const MIB: u64 = 1 << 20;

/// Returns how many bytes a file occupies on its host.
fn space(path: &Path) -> u64 {
    path.metadata().unwrap().blocks() * 512
}

/// Makes a volume on `first` and mounts it.
fn mount(volume: &Volume, first: &Path, format: &[&str]) {
    succeed(jericho(["format"]).arg(first).args(format));
    let mut mount = jericho(["mount", "--cache", "32M", "--log"]);
    succeed(mount.arg(volume.log()).arg(first).arg(volume.mnt()));
}

fn sparse(volume: &Volume) -> std::path::PathBuf {
    let file = volume.beside("sparse");
    mount(
        volume,
        &file,
        &["--size", "256M", "--sparse", "--slices", "2"],
    );
    file
}

/// Writes a durable file of `mib` MiB.
fn put(volume: &Volume, name: &str, mib: u64) -> Vec<u8> {
    let data = pattern(mib, (mib * MIB) as usize);
    std::fs::write(volume.at(name), &data).unwrap();
    File::open(volume.at(name)).unwrap().sync_all().unwrap();
    data
}

fn remove(volume: &Volume, name: &str) {
    std::fs::remove_file(volume.at(name)).unwrap();
    File::open(volume.mnt()).unwrap().sync_all().unwrap();
}

fn wait_for_space(path: &Path, most: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while space(path) > most {
        assert!(Instant::now() < deadline, "{} bytes stay", space(path));
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Runs `jericho trim` with these arguments. Returns how many bytes it discarded.
fn trim(volume: &Volume, arguments: &[&str]) -> u64 {
    let mut command = jericho(["trim", "--json"]);
    let json = succeed(command.arg(volume.mnt()).args(arguments));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    json["bytes"].as_u64().unwrap()
}

fn free(volume: &Volume) -> u64 {
    let stat = rustix::fs::statvfs(volume.mnt()).unwrap();
    stat.f_bfree * stat.f_frsize
}

#[test]
fn a_sparse_volume_returns_the_space_of_removed_files() {
    let volume = Volume::formatted();
    let file = sparse(&volume);
    let kept = put(&volume, "kept", 8);
    let before = space(&file);
    put(&volume, "gone", 64);
    assert!(space(&file) >= before + 64 * MIB);
    remove(&volume, "gone");
    // Freed space at the ends of containers may be too short to be discarded.
    wait_for_space(&file, before + 4 * MIB);
    // The space can be used again.
    let again = put(&volume, "again", 64);
    assert!(space(&file) >= before + 60 * MIB);
    std::fs::remove_file(volume.at("again")).unwrap();
    // The test does not wait before the unmount, which must return the space too.
    volume.umount();
    assert!(space(&file) <= before + 4 * MIB);
    succeed(jericho(["check"]).arg(&file));
    let mut mount = jericho(["mount", "--cache", "32M", "--log"]);
    succeed(mount.arg(volume.log()).arg(&file).arg(volume.mnt()));
    assert!(std::fs::read(volume.at("kept")).unwrap() == kept);
    drop(again);
}

#[test]
fn a_volume_with_allocated_space_keeps_it_and_trim_says_so() {
    let volume = Volume::formatted();
    volume.mount();
    // The file may occupy a little more, because the host also stores metadata for it.
    let size = volume.file().metadata().unwrap().len();
    let keeps_all = || space(&volume.file()) >= size;
    assert!(size >= 255 * MIB && keeps_all());
    put(&volume, "gone", 64);
    remove(&volume, "gone");
    let error = fail(jericho(["trim"]).arg(volume.mnt()), 1);
    assert!(error.contains("--sparse"), "{error}");
    let fstrim = output(Command::new("fstrim").arg(volume.mnt()));
    let said = String::from_utf8_lossy(&fstrim.stderr).into_owned();
    assert!(
        !fstrim.status.success() && said.contains("not supported"),
        "{said}"
    );
    // After the unmount, no discard is pending.
    volume.umount();
    assert!(keeps_all());
}

#[test]
fn a_block_device_gets_discards_of_removed_files() {
    let volume = Volume::formatted();
    let file = volume.beside("disk");
    File::create(&file).unwrap().set_len(256 * MIB).unwrap();
    let Some(device) = Loop::over(&file) else {
        return;
    };
    mount(&volume, &device.0, &[]);
    let kept = put(&volume, "kept", 8);
    let before = space(&file);
    put(&volume, "gone", 64);
    assert!(space(&file) >= before + 64 * MIB);
    remove(&volume, "gone");
    wait_for_space(&file, before + 4 * MIB);
    put(&volume, "gone", 32);
    remove(&volume, "gone");
    assert_eq!(trim(&volume, &[]), free(&volume));
    assert!(space(&file) <= before + MIB);
    assert!(std::fs::read(volume.at("kept")).unwrap() == kept);
    volume.umount();
    succeed(jericho(["check"]).arg(&device.0));
}

#[test]
fn a_trim_returns_runs_that_the_daemon_does_not_return_by_itself() {
    let volume = Volume::formatted();
    let file = sparse(&volume);
    let name = |number| volume.at(&format!("small{number}"));
    for number in 0..600 {
        std::fs::write(name(number), pattern(number, 40_000)).unwrap();
    }
    succeed(jericho(["sync"]).arg(volume.mnt()));
    let before = space(&file);
    // The test removes every other file, so that no two freed runs are adjacent.
    for number in (0..600).step_by(2) {
        std::fs::remove_file(name(number)).unwrap();
    }
    // A trim makes removals durable first.
    let given_back = trim(&volume, &[]);
    assert_eq!(given_back, free(&volume));
    let gone = before - space(&file);
    assert!(gone >= 300 * 40_000 / 10 * 9, "{gone} of {before} are gone");
    for number in (1..600).step_by(2) {
        assert!(std::fs::read(name(number)).unwrap() == pattern(number, 40_000));
    }
    let large = trim(&volume, &["--minimum", "1M"]);
    assert!(large < given_back && large > 100 * MIB, "{large}");
    assert_eq!(trim(&volume, &["--minimum", "1T"]), 0);
    let said = succeed(jericho(["trim"]).arg(volume.mnt()));
    let bytes = format!("({given_back} bytes) trimmed\n");
    assert!(said.ends_with(&bytes), "{said}");
}

#[test]
fn fstrim_works_on_a_mount() {
    let volume = Volume::formatted();
    sparse(&volume);
    put(&volume, "kept", 8);
    let fstrim = |options: &[&str]| {
        let mut command = Command::new("fstrim");
        let said = succeed(command.arg("-v").args(options).arg(volume.mnt()));
        let (_, bytes) = said.split_once('(').unwrap();
        bytes.split_once(' ').unwrap().0.parse::<u64>().unwrap()
    };
    assert_eq!(fstrim(&[]), free(&volume));
    let part = fstrim(&["--offset", "128M", "--length", "64M"]);
    assert!(part > 0 && part <= 64 * MIB, "{part}");
}

#[test]
fn only_root_and_the_mounting_user_may_trim() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: needs root, to become another user");
        return;
    }
    let volume = Volume::formatted();
    sparse(&volume);
    open_to_all(&volume.mnt());
    // The command may be reachable only by root, so this requests the attribute that the command uses.
    let trim = |uid: &str| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", uid, "--clear-groups", "getfattr"]);
        command.args(["--only-values", "-n", "jericho.trim+0+0", "."]);
        output(command.current_dir(volume.mnt()))
    };
    assert!(trim("0").status.success());
    let refused = trim("54321");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("Operation not permitted"), "{said}");
    let mut not_there = jericho(["trim"]);
    fail(not_there.arg(volume.beside("nowhere")), 1);
    let elsewhere = fail(&mut jericho(["trim", "/"]), 1);
    assert!(
        elsewhere.contains("not on a mounted Jericho volume"),
        "{elsewhere}"
    );
}
