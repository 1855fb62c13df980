//! Jericho finds the devices of a volume after their names have changed.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::support::loops::Loop;
use super::support::{Volume, fail, jericho, output, succeed};

fn file_of(volume: &Volume, name: &str) -> PathBuf {
    let path = volume.beside(name);
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(64 << 20).unwrap();
    path
}

fn mount(volume: &Volume, first: &Path, options: &[&Path]) -> Command {
    let mut command = jericho(["mount", "--cache", "16M", "--log"]);
    command.arg(volume.log());
    for path in options {
        command.arg("--device").arg(path);
    }
    command.arg(first).arg(volume.mnt());
    command
}

/// Exchanges the backing files of two loop devices.
fn exchange(one: &Loop, one_file: &Path, other: &Loop, other_file: &Path) {
    for device in [one, other] {
        succeed(Command::new("losetup").arg("-d").arg(&device.0));
    }
    for (device, file) in [(one, other_file), (other, one_file)] {
        // Another process may have taken the freed device for a while.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !output(Command::new("losetup").arg(&device.0).arg(file))
            .status
            .success()
        {
            assert!(
                std::time::Instant::now() < deadline,
                "{} stays in use",
                device.0.display()
            );
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }
}

#[test]
fn devices_that_exchanged_their_names_are_found_though_a_wrong_one_is_busy() {
    let volume = Volume::formatted();
    let files = ["a", "b", "c"].map(|name| file_of(&volume, name));
    // The second device is in another directory than the first, so that a search beside the first device does not find it.
    let apart = volume.beside("apart");
    std::fs::create_dir(&apart).unwrap();
    let second = apart.join("b");
    std::fs::rename(&files[1], &second).unwrap();
    let (Some(first), Some(b), Some(c)) = (
        Loop::over(&files[0]),
        Loop::over(&second),
        Loop::over(&files[2]),
    ) else {
        return;
    };
    succeed(jericho(["format", "--slices", "2"]).arg(&first.0).arg(&b.0));
    succeed(jericho(["format"]).arg(&c.0));
    succeed(&mut mount(&volume, &first.0, &[]));
    std::fs::write(volume.at("kept"), b"kept").unwrap();
    volume.umount();
    exchange(&b, &second, &c, &files[2]);
    // The second device's old name now belongs to another volume that is in use.
    let other = volume.beside("other");
    std::fs::create_dir(&other).unwrap();
    let mut busy = jericho(["mount", "--cache", "16M", "--log"]);
    succeed(busy.arg(volume.beside("log2")).arg(&b.0).arg(&other));
    succeed(&mut mount(&volume, &first.0, &[]));
    assert_eq!(std::fs::read(volume.at("kept")).unwrap(), b"kept");
    volume.umount();
    succeed(jericho(["check"]).arg(&first.0));
    succeed(jericho(["umount"]).arg(&other));
}

#[test]
fn a_device_that_was_named_by_a_link_is_found_where_the_link_leads() {
    let volume = Volume::formatted();
    let (first, second) = (file_of(&volume, "a"), file_of(&volume, "b"));
    let (apart, link) = (volume.beside("apart"), volume.beside("by-id"));
    std::fs::create_dir(&apart).unwrap();
    symlink(&second, &link).unwrap();
    succeed(jericho(["format", "--slices", "2"]).arg(&first).arg(&link));
    let moved = apart.join("elsewhere");
    std::fs::rename(&second, &moved).unwrap();
    std::fs::remove_file(&link).unwrap();
    symlink(&moved, &link).unwrap();
    succeed(&mut mount(&volume, &first, &[]));
    volume.umount();
    // A device beside the first one is found under any name.
    std::fs::remove_file(&link).unwrap();
    std::fs::rename(&moved, volume.beside("z")).unwrap();
    succeed(&mut mount(&volume, &first, &[]));
    volume.umount();
}

#[test]
fn the_message_names_a_missing_device_and_an_option_gives_its_path() {
    let volume = Volume::formatted();
    let (first, second) = (file_of(&volume, "a"), file_of(&volume, "b"));
    succeed(
        jericho(["format", "--slices", "2"])
            .arg(&first)
            .arg(&second),
    );
    let apart = volume.beside("apart");
    std::fs::create_dir(&apart).unwrap();
    let moved = apart.join("elsewhere");
    std::fs::rename(&second, &moved).unwrap();
    // The slices on the other devices can be used without it.
    let mounted = output(&mut mount(&volume, &first, &[]));
    assert!(mounted.status.success(), "{mounted:?}");
    volume.umount();
    let warning = String::from_utf8_lossy(&mounted.stderr).into_owned();
    for message in [warning, fail(jericho(["check"]).arg(&first), 1)] {
        for part in ["device 1", second.to_str().unwrap(), "--device"] {
            assert!(message.contains(part), "{part} is not in {message}");
        }
    }
    // --device may also name paths that are not the missing device.
    succeed(&mut mount(&volume, &first, &[&first, &moved]));
    std::fs::write(volume.at("kept"), b"kept").unwrap();
    volume.umount();
    succeed(jericho(["check", "--device"]).arg(&moved).arg(&first));
    // --device takes relative paths.
    let mut relative = jericho(["mount", "--cache", "16M", "--device", "elsewhere", "--log"]);
    relative.arg(volume.log()).arg(&first).arg(volume.mnt());
    succeed(relative.current_dir(&apart));
    volume.umount();
}

#[test]
fn a_copy_of_a_whole_volume_is_another_volume_and_a_part_of_a_copy_is_refused() {
    let volume = Volume::formatted();
    let copy = volume.beside("copy");
    std::fs::copy(volume.file(), &copy).unwrap();
    // In both orders.
    for (used, other) in [(volume.file(), copy.clone()), (copy, volume.file())] {
        let before = std::fs::read(&other).unwrap();
        succeed(&mut mount(&volume, &used, &[&other]));
        std::fs::write(volume.at("kept"), b"kept").unwrap();
        volume.umount();
        assert!(std::fs::read(&other).unwrap() == before);
        std::fs::write(&other, before).unwrap();
    }
    let (first, second) = (file_of(&volume, "a"), file_of(&volume, "b"));
    succeed(
        jericho(["format", "--slices", "2"])
            .arg(&first)
            .arg(&second),
    );
    let copy = volume.beside("copy-of-a");
    std::fs::copy(&first, &copy).unwrap();
    let bytes = || [&first, &second, &copy].map(|path| std::fs::read(path).unwrap());
    let before = bytes();
    for message in [
        fail(&mut mount(&volume, &copy, &[]), 1),
        fail(jericho(["check", "--repair"]).arg(&copy), 1),
        fail(jericho(["grow", "--size", "80M"]).arg(&copy), 1),
    ] {
        for part in ["/a ", "copy-of-a", "--device"] {
            assert!(message.contains(part), "{part} is not in {message}");
        }
    }
    assert!(bytes() == before);
    succeed(&mut mount(&volume, &first, &[]));
    volume.umount();
}

#[test]
fn copies_of_block_devices_are_never_used_with_the_originals_unless_they_are_named() {
    let volume = Volume::formatted();
    let files = ["a", "b"].map(|name| file_of(&volume, name));
    let (Some(a), Some(b)) = (Loop::over(&files[0]), Loop::over(&files[1])) else {
        return;
    };
    succeed(jericho(["format", "--slices", "2"]).arg(&a.0).arg(&b.0));
    let copies = ["a2", "b2"].map(|name| volume.beside(name));
    for (file, copy) in files.iter().zip(&copies) {
        std::fs::copy(file, copy).unwrap();
    }
    let (Some(a2), Some(b2)) = (Loop::over(&copies[0]), Loop::over(&copies[1])) else {
        return;
    };
    let before = copies.each_ref().map(|copy| std::fs::read(copy).unwrap());
    // The copy of the first device has both second devices to choose from.
    let error = fail(&mut mount(&volume, &a2.0, &[]), 1);
    assert!(error.contains("is a copy"), "{error}");
    assert!(error.contains(&a2.0.display().to_string()), "{error}");
    // And the copy of the second one is where a search may find it first.
    drop(b);
    let error = fail(&mut mount(&volume, &a.0, &[]), 1);
    assert!(error.contains(&a2.0.display().to_string()), "{error}");
    assert!(before == copies.each_ref().map(|copy| std::fs::read(copy).unwrap()));
    // The user decides.
    succeed(&mut mount(&volume, &a2.0, &[&b2.0]));
    volume.umount();
}
