//! A volume has one writer or several readers, under all names of its devices. A directory has one mount.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::support::loops::Loop;
use super::support::{Volume, fail, jericho, succeed};

/// Asserts that every command that opens the volume at `path` refuses it as in use and changes nothing.
#[track_caller]
fn all_are_refused(volume: &Volume, path: &Path, why: &str) {
    let other = volume.beside("other");
    std::fs::create_dir_all(&other).unwrap();
    let mount = |options: &[&str]| {
        let mut command = jericho(["mount", "--cache", "16M", "--log"]);
        command.arg(volume.beside("other.log")).args(options);
        command.arg(path).arg(&other);
        fail(&mut command, 1)
    };
    let messages = [
        mount(&[]),
        mount(&["--read-only"]),
        fail(jericho(["check"]).arg(path), 1),
        fail(jericho(["check", "--repair"]).arg(path), 1),
        fail(jericho(["format", "--force"]).arg(path), 1),
    ];
    for message in messages {
        assert!(message.contains(why), "{why:?} is not in {message}");
    }
}

fn mount_by(volume: &Volume, path: &Path) -> Command {
    let mut command = jericho(["mount", "--cache", "16M", "--log"]);
    command.arg(volume.log()).arg(path).arg(volume.mnt());
    command
}

#[test]
fn a_mounted_file_is_not_used_through_a_loop_device_nor_the_other_way_round() {
    let volume = Volume::formatted();
    let Some(device) = Loop::over(&volume.file()) else {
        return;
    };
    let Some(above) = Loop::over(&device.0) else {
        return;
    };
    let names = [volume.file(), device.0.clone(), above.0.clone()];
    for mounted in &names {
        succeed(&mut mount_by(&volume, mounted));
        std::fs::write(volume.at("kept"), mounted.to_str().unwrap()).unwrap();
        for path in &names {
            all_are_refused(&volume, path, "in use");
        }
        let kept = std::fs::read_to_string(volume.at("kept")).unwrap();
        assert_eq!(kept, mounted.to_str().unwrap());
        volume.umount();
    }
    volume.check();
}

#[test]
fn a_file_below_a_loop_device_is_known_by_its_inode() {
    let volume = Volume::formatted();
    let Some(device) = Loop::over(&volume.file()) else {
        return;
    };
    // The test renames the file and puts another file in its place.
    let renamed = volume.beside("renamed");
    std::fs::rename(volume.file(), &renamed).unwrap();
    std::fs::write(volume.file(), b"").unwrap();
    succeed(&mut mount_by(&volume, &device.0));
    all_are_refused(&volume, &renamed, "in use");
    // A copy of the device's node is the same device.
    let copy = volume.beside("node");
    succeed(Command::new("cp").arg("-a").arg(&device.0).arg(&copy));
    assert!(
        std::fs::metadata(&copy)
            .unwrap()
            .file_type()
            .is_block_device()
    );
    all_are_refused(&volume, &copy, "in use");
    volume.umount();
}

#[test]
fn each_part_of_a_file_has_its_own_lock() {
    const MIB: u64 = 1 << 20;
    let volume = Volume::formatted();
    let disk = volume.beside("disk");
    std::fs::File::create(&disk)
        .unwrap()
        .set_len(129 * MIB)
        .unwrap();
    let Some(whole) = Loop::over(&disk) else {
        return;
    };
    let mut partitions = vec![];
    for (number, start) in [("1", 1), ("2", 65)] {
        let sectors = |bytes: u64| (bytes / 512).to_string();
        succeed(Command::new("addpart").arg(&whole.0).args([
            number,
            &sectors(start * MIB),
            &sectors(64 * MIB),
        ]));
        let node = PathBuf::from(format!("{}p{number}", whole.0.display()));
        if !node.exists() {
            eprintln!(
                "SKIPPED: /dev shows no node of a partition of {}",
                whole.0.display()
            );
            return;
        }
        partitions.push(node);
    }
    for partition in &partitions {
        succeed(jericho(["format"]).arg(partition));
    }
    succeed(&mut mount_by(&volume, &partitions[0]));
    // Another loop device with the same bytes is in use, and so is the whole file.
    let same = Loop::made_by(
        Command::new("losetup")
            .args(["--find", "--show", "--offset", &MIB.to_string()])
            .args(["--sizelimit", &(64 * MIB).to_string()])
            .arg(&disk),
    );
    all_are_refused(&volume, &same.as_ref().unwrap().0, "in use");
    let format = fail(jericho(["format", "--force"]).arg(&disk), 1);
    assert!(format.contains("in use"), "{format}");
    // The other half is another volume.
    succeed(jericho(["check"]).arg(&partitions[1]));
    let other = volume.beside("mnt2");
    std::fs::create_dir(&other).unwrap();
    let mut second = jericho(["mount", "--cache", "16M", "--log"]);
    second
        .arg(volume.beside("log2"))
        .arg(&partitions[1])
        .arg(&other);
    succeed(&mut second);
    succeed(jericho(["umount"]).arg(&other));
    volume.umount();
    for number in ["1", "2"] {
        succeed(Command::new("delpart").arg(&whole.0).arg(number));
    }
}

#[test]
fn a_loop_device_with_a_removed_file_is_refused_and_force_still_respects_its_owner() {
    let volume = Volume::formatted();
    let Some(device) = Loop::over(&volume.file()) else {
        return;
    };
    // From here on no name leads to the file.
    let kept = std::fs::File::open(volume.file()).unwrap();
    std::fs::remove_file(volume.file()).unwrap();
    let message = fail(&mut mount_by(&volume, &device.0), 1);
    assert!(
        message.contains("cannot be opened here") && message.contains("--force"),
        "{message}"
    );
    succeed(mount_by(&volume, &device.0).arg("--force"));
    let by_descriptor = format!(
        "/proc/{}/fd/{}",
        std::process::id(),
        std::os::fd::AsRawFd::as_raw_fd(&kept)
    );
    let message = fail(jericho(["check"]).arg(by_descriptor), 1);
    assert!(
        message.contains(&volume.daemon_pid().to_string()),
        "{message}"
    );
    volume.umount();
}

#[test]
fn readers_share_a_volume_and_no_writer_joins_them() {
    let volume = Volume::mounted();
    std::fs::write(volume.at("kept"), b"kept").unwrap();
    volume.umount();
    let device = Loop::over(&volume.file());
    let before = std::fs::read(volume.file()).unwrap();
    succeed(mount_by(&volume, &volume.file()).arg("--read-only"));
    let path = device
        .as_ref()
        .map_or(volume.file(), |device| device.0.clone());
    let second = volume.beside("second");
    std::fs::create_dir(&second).unwrap();
    let mut mount = jericho(["mount", "--cache", "16M", "--read-only", "--log"]);
    succeed(mount.arg(volume.beside("log2")).arg(&path).arg(&second));
    assert_eq!(std::fs::read(second.join("kept")).unwrap(), b"kept");
    succeed(jericho(["check"]).arg(&path));
    let third = volume.beside("third");
    std::fs::create_dir(&third).unwrap();
    for command in [
        jericho(["mount", "--cache", "16M"]).arg(&path).arg(&third),
        jericho(["check", "--repair"]).arg(volume.file()),
        jericho(["format", "--force"]).arg(volume.file()),
    ] {
        let message = fail(command, 1);
        assert!(message.contains("in use"), "{message}");
    }
    succeed(jericho(["umount"]).arg(&second));
    volume.umount();
    assert!(
        std::fs::read(volume.file()).unwrap() == before,
        "readers wrote"
    );
}

#[test]
fn of_two_volumes_that_are_mounted_on_one_directory_at_the_same_moment_one_is_refused() {
    let (first, second) = (Volume::formatted(), Volume::formatted());
    for round in 0..5 {
        let mut commands = [&first, &second].map(|volume| {
            let mut command = jericho(["mount", "--cache", "16M", "--log"]);
            command
                .arg(volume.log())
                .arg(volume.file())
                .arg(first.mnt());
            command.stderr(std::process::Stdio::piped());
            command.spawn().expect("the command")
        });
        let ended = commands
            .each_mut()
            .map(|child| child.wait().expect("its end"));
        let served = ended.iter().filter(|status| status.success()).count();
        succeed(jericho(["umount"]).arg(first.mnt()));
        assert!(
            !first.is_mounted(),
            "round {round}: two mounts on one directory"
        );
        assert_eq!(served, 1, "round {round}");
    }
}
