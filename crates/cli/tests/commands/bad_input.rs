//! Every bad input gets a non-zero status and a message that names the thing and a remedy. It changes nothing.

use std::os::unix::fs::symlink;

use super::support::{Volume, fail, jericho, succeed};

#[track_caller]
pub fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn a_file_that_is_no_volume_is_not_mounted() {
    let volume = Volume::formatted();
    let bytes = vec![7u8; 1 << 20];
    std::fs::write(volume.file(), &bytes).unwrap();
    assert_says(
        &fail(&mut volume.mount_command(), 1),
        &["volume", "not a Jericho volume", "format"],
    );
    assert_eq!(
        std::fs::read(volume.file()).unwrap(),
        bytes,
        "the refused mount changed the file"
    );
    assert!(!volume.is_mounted());
    assert_says(
        &fail(jericho(["check"]).arg(volume.file()), 1),
        &["not a Jericho volume"],
    );
}

#[test]
fn a_volume_that_does_not_exist_is_named_with_the_command_that_makes_one() {
    let volume = Volume::formatted();
    std::fs::remove_file(volume.file()).unwrap();
    assert_says(
        &fail(&mut volume.mount_command(), 1),
        &["does not exist", "jericho format"],
    );
}

#[test]
fn a_truncated_volume_is_not_mounted_and_not_changed() {
    let volume = Volume::formatted();
    let file = std::fs::File::options()
        .write(true)
        .open(volume.file())
        .unwrap();
    file.set_len(100 << 20).unwrap();
    assert_says(&fail(&mut volume.mount_command(), 1), &["truncated"]);
    assert!(!volume.is_mounted());
    file.set_len(256 << 20).unwrap();
}

#[test]
fn a_formatted_volume_is_not_formatted_again_without_force() {
    let volume = Volume::mounted();
    std::fs::write(volume.at("kept"), b"kept").unwrap();
    volume.umount();
    let mut again = jericho(["format", "--size", "256M"]);
    assert_says(
        &fail(again.arg(volume.file()), 1),
        &["already holds", "--force"],
    );
    volume.mount();
    assert_eq!(std::fs::read(volume.at("kept")).unwrap(), b"kept");
    volume.umount();
    succeed(jericho(["format", "--size", "256M", "--force"]).arg(volume.file()));
    volume.mount();
    assert!(
        !volume.at("kept").exists(),
        "format --force must make an empty volume"
    );
}

#[test]
fn a_mounted_volume_is_neither_formatted_nor_checked() {
    let volume = Volume::mounted();
    let pid = volume.daemon_pid().to_string();
    let mut format = jericho(["format", "--size", "256M", "--force"]);
    assert_says(&fail(format.arg(volume.file()), 1), &["in use", &pid]);
    assert_says(
        &fail(jericho(["check"]).arg(volume.file()), 1),
        &["in use", &pid],
    );
}

#[test]
fn zero_slices_too_many_slices_and_too_little_space_are_refused() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = dir.path().join("new");
    let format = |args: &[&str]| fail(jericho(["format"]).arg(&file).args(args), 1);
    assert_says(
        &format(&["--size", "256M", "--slices", "0"]),
        &["at least 1 slice"],
    );
    assert_says(
        &format(&["--size", "256M", "--slices", "65000"]),
        &["65000", "at most"],
    );
    assert_says(&format(&["--size", "64K"]), &["too small", "bytes"]);
    assert_says(&format(&[]), &["--size"]);
    assert!(!file.exists(), "a refused format left a file");
}

#[test]
fn an_invalid_size_is_wrong_usage() {
    for size in ["0", "1X", "many", "-1G", "99999999999G"] {
        let size = format!("--size={size}");
        let message = fail(&mut jericho(["format", "/nonexistent/v", &size]), 2);
        assert_says(&message, &["--size"]);
    }
}

#[test]
fn a_missing_directory_is_named_with_the_command_that_makes_it() {
    let volume = Volume::formatted();
    std::fs::remove_dir(volume.mnt()).unwrap();
    assert_says(
        &fail(&mut volume.mount_command(), 1),
        &["mnt does not exist", "mkdir"],
    );
    std::fs::create_dir(volume.mnt()).unwrap();
}

#[test]
fn a_directory_that_is_not_empty_is_no_mount_point() {
    let volume = Volume::formatted();
    std::fs::write(volume.at("precious"), b"x").unwrap();
    assert_says(&fail(&mut volume.mount_command(), 1), &["not empty"]);
    assert!(!volume.is_mounted());
    std::fs::remove_file(volume.at("precious")).unwrap();
}

#[test]
fn a_file_is_no_mount_point() {
    let volume = Volume::formatted();
    let mut command = jericho(["mount"]);
    assert_says(
        &fail(command.arg(volume.file()).arg(volume.file()), 1),
        &["not a directory"],
    );
}

#[test]
fn a_directory_that_is_a_mount_already_is_refused() {
    let volume = Volume::mounted();
    let other = Volume::formatted();
    let mut command = jericho(["mount", "--log"]);
    command.arg(other.log()).arg(other.file()).arg(volume.mnt());
    assert_says(&fail(&mut command, 1), &["already a mount"]);
    std::fs::write(volume.at("a"), b"still serving").unwrap();
}

#[test]
fn a_second_mount_of_a_volume_names_the_daemon_that_holds_it() {
    let volume = Volume::mounted();
    let second = volume.beside("second");
    std::fs::create_dir(&second).unwrap();
    let link = volume.beside("link");
    symlink(volume.file(), &link).unwrap();
    let pid = volume.daemon_pid().to_string();
    for path in [volume.file(), link] {
        let mut command = jericho(["mount", "--log"]);
        command.arg(volume.beside("log2")).arg(path).arg(&second);
        assert_says(
            &fail(&mut command, 1),
            &[&pid, volume.mnt().to_str().unwrap()],
        );
    }
    std::fs::write(volume.at("a"), b"still serving").unwrap();
}

#[test]
fn an_unknown_transport_is_refused() {
    let volume = Volume::formatted();
    let mut command = volume.mount_command();
    command.args(["--transport", "pigeon"]);
    assert_says(
        &fail(&mut command, 2),
        &["--transport", "pigeon", "auto, device or ring"],
    );
    assert!(!volume.is_mounted());
}

#[test]
fn a_topology_file_with_an_error_is_shown_with_line_and_column() {
    let volume = Volume::formatted();
    let topology = volume.beside("nodes.topology");
    std::fs::write(&topology, "this is no topology\n").unwrap();
    let message = fail(volume.mount_command().arg("--topology").arg(&topology), 2);
    assert_says(&message, &["--topology"]);
    let mut command = jericho(["mount"]);
    command
        .arg(volume.file())
        .arg(volume.mnt())
        .arg("--topology")
        .arg(&topology);
    assert_says(&fail(&mut command, 1), &["nodes.topology:1:1"]);
    assert_says(
        &fail(jericho(["topology", "--topology"]).arg(&topology), 1),
        &["nodes.topology:1:1"],
    );
    assert_says(
        &fail(&mut jericho(["topology", "--topology", "virtual:0"]), 1),
        &["virtual:0"],
    );
    assert!(!volume.is_mounted());
}

#[test]
fn a_cache_larger_than_memory_is_refused() {
    let volume = Volume::formatted();
    let mut command = jericho(["mount", "--cache", "100T"]);
    command.arg(volume.file()).arg(volume.mnt());
    assert_says(
        &fail(&mut command, 1),
        &["104857600 MiB", "memory", "--cache"],
    );
    assert!(!volume.is_mounted());
}

#[test]
fn a_log_that_cannot_be_written_is_named() {
    let volume = Volume::formatted();
    let mut command = jericho(["mount", "--log", "/nonexistent/dir/log"]);
    command.arg(volume.file()).arg(volume.mnt());
    assert_says(&fail(&mut command, 1), &["/nonexistent/dir/log", "--log"]);
    assert!(!volume.is_mounted());
}

#[test]
fn without_the_device_the_message_says_how_to_get_it() {
    let volume = Volume::formatted();
    // The script runs in a mount namespace in which the device is hidden.
    let script = "mount -t tmpfs none /dev && exec \"$@\"";
    let mut command = std::process::Command::new("unshare");
    command.args([
        "--mount",
        "sh",
        "-c",
        script,
        "sh",
        env!("CARGO_BIN_EXE_jericho"),
        "mount",
    ]);
    command
        .arg("--log")
        .arg(volume.log())
        .arg(volume.file())
        .arg(volume.mnt());
    assert_says(&fail(&mut command, 1), &["/dev/fuse", "modprobe fuse"]);
    volume.check();
}

#[test]
fn a_volume_that_is_mounted_in_another_namespace_is_in_use_and_not_discarded() {
    let volume = Volume::formatted();
    // The namespace exists until the program's input ends.
    let script = "\"$@\" && echo mounted && cat; umount \"$MNT\"";
    let mount = volume.mount_command();
    let mut program = std::process::Command::new("unshare");
    program.args(["--mount", "sh", "-c", script, "sh"]);
    program.arg(mount.get_program()).args(mount.get_args());
    program.env("MNT", volume.mnt());
    let (input, output) = (std::process::Stdio::piped(), std::process::Stdio::piped());
    let mut program = program.stdin(input).stdout(output).spawn().unwrap();
    let mut said = [0; 8];
    std::io::Read::read_exact(program.stdout.as_mut().unwrap(), &mut said).unwrap();
    assert!(!volume.is_mounted());
    assert_says(&fail(&mut volume.mount_command(), 1), &["in use"]);
    let mut force = jericho(["umount", "--force"]);
    let refused = fail(force.arg(volume.file()), 1);
    assert_says(&refused, &["another mount namespace", "nsenter"]);
    // The end of its input makes the program unmount the volume, which the refused command left mounted.
    drop(program.stdin.take());
    assert!(program.wait().unwrap().success());
}

#[test]
fn paths_outside_a_volume_have_no_statistics_and_no_place() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for subcommand in ["stat", "top", "where", "place"] {
        let message = fail(jericho([subcommand]).arg(dir.path()), 1);
        assert_says(&message, &["not on a mounted Jericho volume"]);
        let message = fail(jericho([subcommand]).arg(dir.path().join("missing")), 1);
        assert_says(&message, &["missing", "does not exist"]);
    }
    assert_says(
        &fail(jericho(["umount"]).arg(dir.path()), 1),
        &["no Jericho volume is mounted"],
    );
}

#[test]
fn an_unknown_node_is_refused_with_a_list_of_the_nodes() {
    let volume = Volume::mounted();
    let message = fail(jericho(["place", "--node", "9"]).arg(volume.mnt()), 1);
    assert_says(&message, &["node 9", "nodes 0, 1"]);
    let message = fail(jericho(["place", "--slice", "9"]).arg(volume.mnt()), 1);
    assert_says(&message, &["slice 9", "slices 0, 1"]);
    assert_says(
        &fail(jericho(["place", "--move"]).arg(volume.mnt()), 1),
        &["--node"],
    );
}

#[test]
fn an_unknown_policy_for_threads_is_refused_with_a_list_of_the_policies() {
    let volume = Volume::mounted();
    let words = ["never", "always", "adaptive"];
    let message = fail(
        jericho(["place", "--threads", "sometimes"]).arg(volume.mnt()),
        2,
    );
    assert_says(&message, &["sometimes", "inherit"]);
    assert_says(&message, &words);
    let message = fail(volume.mount_command().args(["--threads", "inherit"]), 2);
    assert_says(&message, &words);
    // The daemon also checks requests that do not come from the command.
    let set = |value: &[u8]| {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(volume.mnt(), "jericho.threads", value, flags)
    };
    for value in [&b"sometimes"[..], b"", b"\xff", b"node:0"] {
        assert_eq!(set(value), Err(rustix::io::Errno::INVAL));
    }
    assert_eq!(set(b"always\0"), Ok(()));
}

#[test]
fn run_with_half_of_its_options_names_the_missing_ones() {
    assert_says(&fail(&mut jericho(["run"]), 2), &["CMD"]);
    assert_says(
        &fail(&mut jericho(["run", "--volume", "v", "--", "true"]), 2),
        &["--at"],
    );
    assert_says(
        &fail(&mut jericho(["run", "--at", "d", "--", "true"]), 2),
        &["--volume"],
    );
    // Without --volume, `run` mounts nothing. It must not ignore --cache silently.
    assert_says(
        &fail(&mut jericho(["run", "--cache", "32M", "--", "true"]), 1),
        &["--cache", "--volume"],
    );
    assert_says(
        &fail(&mut jericho(["run", "--", "/nonexistent/program"]), 1),
        &["/nonexistent/program"],
    );
}

#[test]
fn run_without_its_library_names_the_path_and_a_remedy() {
    let run = |path: &str| {
        let mut command = jericho(["run", "--", "true"]);
        fail(command.env("JERICHO_PRELOAD", path), 1)
    };
    assert_says(
        &run("/nonexistent/library.so"),
        &["/nonexistent/library.so", "JERICHO_PRELOAD", "--no-preload"],
    );
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("with space.so");
    std::fs::write(&path, "").unwrap();
    assert_says(&run(path.to_str().unwrap()), &["with space.so", "colon"]);
}
