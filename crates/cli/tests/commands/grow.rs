//! `jericho grow`: on files and block devices, mounted and not, and every request that it refuses.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::full_host::Host;
use super::support::loops::Loop;
use super::support::{Volume, fail, jericho, output, pattern, succeed};

const MIB: u64 = 1 << 20;

/// Returns `jericho grow` of a volume with these arguments.
fn grow(volume: &Path, arguments: &[&str]) -> Command {
    let mut command = jericho(["grow"]);
    command.arg(volume).args(arguments);
    command
}

/// Returns the total and the free bytes of a mounted volume.
fn space(volume: &Volume) -> (u64, u64) {
    let stat = rustix::fs::statvfs(volume.mnt()).unwrap();
    (stat.f_blocks * stat.f_frsize, stat.f_bfree * stat.f_frsize)
}

/// Writes data of 1 MiB pieces until the volume is full or `mib` pieces are written. Returns the number of pieces.
fn write(file: &File, from: u64, mib: u64) -> u64 {
    for piece in from..from + mib {
        match file.write_all_at(&pattern(piece, MIB as usize), piece * MIB) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::StorageFull => return piece - from,
            Err(error) => panic!("{error}"),
        }
    }
    mib
}

fn assert_holds(path: &Path, mib: u64) {
    let file = File::open(path).unwrap();
    let mut bytes = vec![0; MIB as usize];
    for piece in 0..mib {
        file.read_exact_at(&mut bytes, piece * MIB).unwrap();
        assert!(bytes == pattern(piece, MIB as usize), "MiB {piece} differs");
    }
}

#[test]
fn a_full_volume_grows_while_a_program_writes_to_it() {
    let volume = Volume::mounted();
    let name = volume.at("file");
    let file = File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(&name);
    let file = file.unwrap();
    let before = space(&volume);
    let first = write(&file, 0, 1000);
    assert!(first > 128, "only {first} MiB fit");
    let other = File::create(volume.at("other")).unwrap();

    let said = succeed(&mut grow(&volume.mnt(), &["--size", "384M"]));
    assert!(said.contains("256 MiB to 384 MiB"), "{said}");
    let after = space(&volume);
    let added = after.0 - before.0;
    assert!((127 * MIB..=128 * MIB).contains(&added), "{added}");
    // The same description writes on, and so does another one.
    assert_eq!(write(&file, first, 100), 100);
    assert_eq!(write(&other, 0, 10), 10);
    file.sync_all().unwrap();
    other.sync_all().unwrap();
    assert_holds(&name, first + 100);
    let json = succeed(jericho(["where", "--json"]).arg(&name));
    assert!(json.contains("stored_bytes_by_slice"), "{json}");
    drop((file, other));
    volume.umount();
    volume.check();

    // Grows again, now without a mount.
    assert_eq!(volume.file().metadata().unwrap().len(), 384 * MIB);
    succeed(&mut grow(&volume.file(), &["--size", "448M"]));
    volume.check();
    volume.mount();
    assert!(space(&volume).0 >= after.0 + 63 * MIB);
    assert_holds(&name, first + 100);
    assert_holds(&volume.at("other"), 10);
    let other = File::options().write(true).open(volume.at("other"));
    assert_eq!(write(&other.unwrap(), 10, 50), 50);
    volume.remount();
    assert_holds(&volume.at("other"), 60);
    volume.umount();
    volume.check();
}

#[test]
fn writers_that_find_the_volume_full_go_on_while_it_grows_again_and_again() {
    let volume = Volume::mounted();
    let names = ["one", "two", "three"];
    std::thread::scope(|scope| {
        let writers = names.map(|name| {
            let file = File::create(volume.at(name)).unwrap();
            scope.spawn(move || {
                let mut done = 0;
                while done < 130 {
                    let added = write(&file, done, 130 - done);
                    done += added;
                    if added == 0 {
                        std::thread::yield_now();
                    }
                }
                file.sync_all().unwrap();
            })
        });
        let mut mib = 256;
        while !writers.iter().all(|writer| writer.is_finished()) {
            // 48 MiB more than the files need.
            mib = (mib + 16).min(480);
            succeed(&mut grow(&volume.mnt(), &["--size", &format!("{mib}M")]));
        }
    });
    let hold_all = || {
        for name in names {
            assert_holds(&volume.at(name), 130);
        }
    };
    hold_all();
    volume.umount();
    volume.check();
    volume.mount();
    hold_all();
    assert!(space(&volume).0 > 390 * MIB);
    succeed(jericho(["umount"]).arg(volume.mnt()));
}

#[test]
fn a_limit_of_file_sizes_refuses_a_growth_and_does_not_end_the_daemon() {
    let volume = Volume::formatted();
    // In blocks of 512 bytes: 300 MiB.
    let limited = |command: &Command| {
        let mut shell = Command::new("sh");
        shell.args(["-c", "ulimit -f 614400; exec \"$@\"", "sh"]);
        shell.arg(command.get_program()).args(command.get_args());
        shell
    };
    let too_large = grow(&volume.file(), &["--size", "400M"]);
    let said = fail(&mut limited(&too_large), 1);
    assert!(said.contains("File too large"), "{said}");
    succeed(&mut limited(&volume.mount_command()));
    let said = fail(&mut grow(&volume.mnt(), &["--size", "400M"]), 1);
    assert!(said.contains("File too large"), "{said}");
    assert_eq!(volume.file().metadata().unwrap().len(), 256 * MIB);
    succeed(&mut grow(&volume.mnt(), &["--size", "288M"]));
    fs::write(volume.at("file"), pattern(1, MIB as usize)).unwrap();
    volume.umount();
    volume.check();
}

#[test]
fn a_killed_daemon_loses_neither_the_new_size_nor_synced_data_there() {
    let volume = Volume::mounted();
    let file = File::create(volume.at("file")).unwrap();
    let first = write(&file, 0, 1000);
    // The volume's file names the mount, too.
    succeed(&mut grow(&volume.file(), &["--size", "320M"]));
    assert_eq!(write(&file, first, 40), 40);
    file.sync_all().unwrap();
    let pid = volume.signal_daemon(rustix::process::Signal::KILL);
    Volume::wait_for_end(pid);
    drop(file);
    let _ = output(jericho(["umount"]).arg(volume.mnt()));
    volume.check();
    volume.mount();
    assert_holds(&volume.at("file"), first + 40);
    assert!(space(&volume).0 > 256 * MIB);
}

#[test]
fn what_cannot_be_done_is_refused_with_the_reason_and_changes_nothing() {
    let volume = Volume::formatted();
    let (file, mnt) = (volume.file(), volume.mnt());
    let other = volume.beside("other");
    succeed(jericho(["format", "--size", "64M"]).arg(&other));
    let other = other.to_str().unwrap();
    let before = fs::read(&file).unwrap();
    let refusals: [(&[&str], &str); 4] = [
        (&["--size", "128M"], "shrinking is not supported"),
        (&["--size", "262148K"], "next possible size"),
        (&["--size", "4194304T"], "at most"),
        (&["--device", other], "another volume"),
    ];
    let all_are_refused = |named: &Path| {
        for (arguments, reason) in refusals {
            let said = fail(&mut grow(named, arguments), 1);
            assert!(said.contains(reason), "{arguments:?}: {said}");
        }
        for nothing in [&[][..], &["--size", "256M"]] {
            let said = succeed(&mut grow(named, nothing));
            assert!(said.contains("nothing to do"), "{said}");
        }
    };
    all_are_refused(&file);
    let said = fail(&mut grow(&volume.beside("missing"), &[]), 1);
    assert!(said.contains("does not exist"), "{said}");
    let text = volume.beside("text");
    fs::write(&text, vec![b'x'; 8192]).unwrap();
    let said = fail(&mut grow(&text, &["--size", "1G"]), 1);
    assert!(said.contains("not a Jericho volume"), "{said}");
    let said = fail(&mut grow(&volume.beside("."), &["--size", "1G"]), 1);
    assert!(said.contains("not on a mounted Jericho volume"), "{said}");
    fail(&mut grow(&file, &["--size", "0"]), 2);
    assert!(fs::read(&file).unwrap() == before);

    volume.mount();
    all_are_refused(&mnt);
    all_are_refused(&file);
    assert_eq!(file.metadata().unwrap().len(), 256 * MIB);
    volume.umount();
    let mut mount = volume.mount_command();
    succeed(mount.arg("--read-only"));
    let said = fail(&mut grow(&mnt, &["--size", "512M"]), 1);
    assert!(said.contains("read-only"), "{said}");
    assert_eq!(file.metadata().unwrap().len(), 256 * MIB);
}

#[test]
fn each_of_several_devices_grows_and_a_size_needs_the_name_of_one() {
    let volume = Volume::formatted();
    let files: [PathBuf; 2] = ["one", "two"].map(|name| volume.beside(name));
    let mut format = jericho(["format", "--size", "96M", "--slices", "2", "--sparse"]);
    succeed(format.args(&files));
    let said = fail(&mut grow(&files[0], &["--size", "200M"]), 1);
    assert!(said.contains("--device"), "{said}");
    let said = fail(&mut grow(&files[1], &[]), 1);
    assert!(said.contains("first device"), "{said}");
    let second = files[1].to_str().unwrap();
    succeed(&mut grow(
        &files[0],
        &["--size", "200M", "--device", second],
    ));
    let length = |file: &PathBuf| file.metadata().unwrap().len() / MIB;
    assert_eq!(files.each_ref().map(length), [96, 200]);
    // A sparse file gets no space on the host.
    assert!(files[1].metadata().unwrap().blocks() * 512 < 96 * MIB);
    for file in &files {
        let file = File::options().write(true).open(file).unwrap();
        file.set_len(300 * MIB).unwrap();
    }
    let json = succeed(&mut grow(&files[0], &["--json"]));
    let grown: serde_json::Value = serde_json::from_str(&json).unwrap();
    let of = |device: usize| {
        let bytes = |key: &str| grown[device][key].as_u64().unwrap() / MIB;
        (bytes("old_bytes"), bytes("new_bytes"))
    };
    assert_eq!([of(0), of(1)], [(96, 300), (200, 300)]);
    succeed(jericho(["check"]).arg(&files[0]));
}

#[test]
fn a_loop_device_grows_with_its_file() {
    let volume = Volume::formatted();
    let image = volume.beside("image");
    let lengthen = |mib: u64| {
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&image);
        file.unwrap().set_len(mib * MIB).unwrap();
    };
    lengthen(128);
    let Some(device) = Loop::over(&image) else {
        return;
    };
    succeed(jericho(["format"]).arg(&device.0));
    let mut mount = jericho(["mount", "--cache", "32M", "--log"]);
    succeed(mount.arg(volume.log()).arg(&device.0).arg(volume.mnt()));
    let before = space(&volume);
    let said = fail(&mut grow(&device.0, &["--size", "256M"]), 1);
    assert!(said.contains("make the device larger first"), "{said}");
    lengthen(256);
    succeed(Command::new("losetup").arg("-c").arg(&device.0));
    succeed(&mut grow(&device.0, &[]));
    let after = space(&volume);
    assert_eq!(after.0 - before.0, 128 * MIB);
    let file = File::create(volume.at("file")).unwrap();
    assert_eq!(write(&file, 0, 180), 180);
    drop(file);
    volume.umount();
    succeed(jericho(["check"]).arg(&device.0));
    let mut mount = jericho(["mount", "--cache", "32M", "--log"]);
    succeed(mount.arg(volume.log()).arg(&device.0).arg(volume.mnt()));
    assert_holds(&volume.at("file"), 180);
    volume.umount();
}

#[test]
fn a_host_without_room_keeps_the_file_as_it_was() {
    let Some(host) = Host::new(96) else {
        return;
    };
    succeed(jericho(["format", "--size", "48M"]).arg(host.volume()));
    let free = || {
        let stat = rustix::fs::statvfs(host.disk()).unwrap();
        stat.f_bfree * stat.f_frsize
    };
    let before = free();
    let refused = |named: &Path| {
        let said = fail(&mut grow(named, &["--size", "200M"]), 1);
        assert!(said.contains("No space left"), "{said}");
        assert_eq!(host.volume().metadata().unwrap().len(), 48 * MIB);
        assert!(free().abs_diff(before) <= MIB, "{} of {before}", free());
    };
    refused(&host.volume());
    host.mount();
    refused(&host.mnt());
    succeed(&mut grow(&host.mnt(), &["--size", "80M"]));
    assert!(before - free() >= 31 * MIB);
    let data = pattern(1, 50 * MIB as usize);
    fs::write(host.mnt().join("file"), &data).unwrap();
    succeed(jericho(["umount"]).arg(host.mnt()));
    succeed(jericho(["check"]).arg(host.volume()));
    host.mount();
    assert!(fs::read(host.mnt().join("file")).unwrap() == data);
}
