//! `jericho add`: on files, and every request that it refuses.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::support::{Volume, fail, jericho, pattern, succeed};

const MIB: u64 = 1 << 20;

/// Returns `jericho add` with these arguments.
fn add(volume: &Path, new: &Path, arguments: &[&str]) -> Command {
    let mut command = jericho(["add"]);
    command.arg(volume).arg(new).args(arguments);
    command
}

fn slices(volume: &Volume) -> usize {
    volume.stat()["slices"].as_array().expect("slices").len()
}

/// Makes directories in the root with a file each. Returns the slices in which they are.
fn fill(volume: &Volume, name: &str) -> Vec<u64> {
    let make = |number| {
        let dir = volume.at(&format!("{name}{number}"));
        fs::create_dir(&dir).expect("mkdir");
        fs::write(dir.join("file"), pattern(number, 100_000)).expect("write");
        let place = succeed(jericho(["where", "--json"]).arg(dir.join("file")));
        let place: serde_json::Value = serde_json::from_str(&place).expect("JSON");
        place["slice"].as_u64().expect("a slice")
    };
    (0..6).map(make).collect()
}

fn assert_filled(volume: &Volume, name: &str) {
    for number in 0..6 {
        let path = volume.at(&format!("{name}{number}/file"));
        assert!(fs::read(path).expect("read") == pattern(number, 100_000));
    }
}

#[test]
fn an_added_file_is_used_by_the_next_mount_and_keeps_what_it_gets() {
    let volume = Volume::mounted();
    fill(&volume, "before");
    let size = rustix::fs::statvfs(volume.mnt()).expect("statvfs").f_blocks;
    volume.umount();
    let new = volume.beside("new");
    let text = succeed(&mut add(
        &volume.file(),
        &new,
        &["--size", "160M", "--slices", "2"],
    ));
    assert!(
        text.contains("slice 2") && text.contains("slice 3"),
        "{text}"
    );
    assert_eq!(fs::metadata(&new).expect("the file").len(), 160 * MIB);
    volume.check();
    volume.mount();
    assert_eq!(slices(&volume), 4);
    let grown = rustix::fs::statvfs(volume.mnt()).expect("statvfs").f_blocks - size;
    assert!(grown > 100 * MIB / 4096, "{grown} blocks");
    assert_filled(&volume, "before");
    let found = fill(&volume, "after");
    assert!((0..4).all(|slice| found.contains(&slice)), "{found:?}");
    volume.remount();
    assert_filled(&volume, "before");
    assert_filled(&volume, "after");
    volume.umount();
    volume.check();
    // The device is one of the volume now: it is found at another path, and missed if it is away.
    let elsewhere = volume.beside("elsewhere");
    fs::rename(&new, &elsewhere).expect("rename");
    volume.mount();
    assert_filled(&volume, "after");
    volume.umount();
}

#[test]
fn additions_that_are_refused_change_nothing() {
    let volume = Volume::mounted();
    let file = |name: &str, mib: u64| -> PathBuf {
        let path = volume.beside(name);
        let file = File::create(&path).expect("a file");
        file.set_len(mib * MIB).expect("its length");
        path
    };
    let new = file("new", 100);
    let refused = |new: &Path, arguments: &[&str], words: &[&str]| {
        let before = fs::read(new).ok();
        let message = fail(&mut add(&volume.file(), new, arguments), 1);
        for word in words {
            assert!(message.contains(word), "{word} is not in {message}");
        }
        assert!(fs::read(new).ok() == before, "{} changed", new.display());
    };
    refused(&new, &[], &["in use"]);
    volume.umount();
    let device = fs::read(volume.file()).expect("the volume");
    refused(&new, &["--slices", "2"], &["too small", "fewer slices"]);
    refused(&new, &["--slices", "0"], &["at least 1 slice"]);
    refused(&new, &["--slices", "255"], &["slices"]);
    refused(&volume.beside("missing"), &[], &["--size"]);
    let own = volume.file();
    refused(&own, &[], &["a Jericho volume"]);
    refused(&own, &["--force"], &["in use"]);
    let other = file("other", 100);
    succeed(jericho(["format"]).arg(&other));
    refused(&other, &[], &["a Jericho volume", "--force"]);
    let text = volume.beside("text");
    fs::write(&text, pattern(1, 100 << 20)).expect("write");
    refused(&text, &[], &["data", "--force"]);
    assert!(fs::read(volume.file()).expect("the volume") == device);

    // Slices that share a store cannot be joined.
    let small = file("small", 64);
    succeed(jericho(["format", "--slices", "2"]).arg(&small));
    let message = fail(&mut add(&small, &new, &[]), 1);
    assert!(message.contains("share one metadata store"), "{message}");
    // With --force, `add` takes the device that it refused above.
    succeed(&mut add(&volume.file(), &other, &["--force"]));
    volume.mount();
    assert_eq!(slices(&volume), 3);
    volume.umount();
    volume.check();
}
