//! The life of a mount: its start, its end, and its state after a killed daemon.

use std::fs::File;
use std::io::Write;
use std::process::Stdio;

use rustix::process::Signal;

use super::support::{Volume, fail, is_mounted, jericho, output, pattern, succeed};

#[test]
fn written_data_is_there_after_umount_and_mount() {
    let volume = Volume::mounted();
    let bytes = pattern(1, 3_000_001);
    std::fs::create_dir(volume.at("dir")).unwrap();
    std::fs::write(volume.at("dir/file"), &bytes).unwrap();
    volume.umount();
    assert!(!volume.is_mounted());
    assert!(!volume.at("dir").exists());
    volume.check();
    volume.mount();
    assert!(std::fs::read(volume.at("dir/file")).unwrap() == bytes);
}

/// `make test` runs this test with the FUSE ring of the kernel and without it.
#[test]
fn requests_use_the_selected_transport() {
    let switch = std::fs::read_to_string("/sys/module/fuse/parameters/enable_uring");
    let offered = switch.is_ok_and(|switch| switch.trim() == "Y");
    let volume = Volume::formatted();
    let best = if offered { "ring" } else { "device" };
    for (asked, used) in [("device", "device"), ("auto", best), ("ring", "ring")] {
        let mut command = volume.mount_command();
        command.args(["--transport", asked]);
        if asked == "ring" && !offered {
            let message = fail(&mut command, 1);
            assert!(message.contains("enable_uring"), "{message}");
            assert!(!volume.is_mounted());
            continue;
        }
        succeed(&mut command);
        assert_eq!(volume.stat()["transport"], used, "{asked}");
        let bytes = pattern(3, 3_000_001);
        std::fs::write(volume.at(asked), &bytes).unwrap();
        assert!(std::fs::read(volume.at(asked)).unwrap() == bytes);
        volume.umount();
    }
    volume.check();
}

#[test]
fn umount_returns_only_when_the_daemon_has_ended() {
    let volume = Volume::mounted();
    std::fs::write(volume.at("file"), pattern(2, 8 << 20)).unwrap();
    let pid = volume.daemon_pid();
    volume.umount();
    assert!(!std::path::Path::new(&format!("/proc/{pid}/fd/0")).exists());
}

#[test]
fn the_daemon_keeps_nothing_of_its_caller_open() {
    let volume = Volume::formatted();
    let marker = volume.beside("marker");
    File::create(&marker).unwrap();
    let mount = volume.mount_command();
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "exec 7<\"$0\" && exec \"$@\""]);
    shell.arg(&marker).arg(mount.get_program());
    succeed(shell.args(mount.get_args()));
    let descriptors = format!("/proc/{}/fd", volume.daemon_pid());
    for entry in std::fs::read_dir(descriptors).unwrap() {
        let open = std::fs::read_link(entry.unwrap().path());
        assert_ne!(open.ok().as_ref(), Some(&marker));
    }
    volume.umount();
}

#[test]
fn sigterm_unmounts_cleanly() {
    for signal in [Signal::TERM, Signal::INT] {
        let volume = Volume::mounted();
        let bytes = pattern(3, 1 << 20);
        std::fs::write(volume.at("file"), &bytes).unwrap();
        let pid = volume.signal_daemon(signal);
        Volume::wait_for_end(pid);
        assert!(!volume.is_mounted());
        volume.check();
        volume.mount();
        assert!(std::fs::read(volume.at("file")).unwrap() == bytes);
    }
}

#[test]
fn sigterm_ends_a_mount_that_is_in_use_and_keeps_written_data() {
    let volume = Volume::mounted();
    let mut file = File::create(volume.at("file")).unwrap();
    file.write_all(b"written before").unwrap();
    let pid = volume.signal_daemon(Signal::TERM);
    Volume::wait_for_end(pid);
    let error = file.write_all(b"after").expect_err("the mount is over");
    assert_eq!(error.raw_os_error(), Some(libc::ENOTCONN), "{error}");
    drop(file);
    volume.check();
    volume.mount();
    assert_eq!(std::fs::read(volume.at("file")).unwrap(), b"written before");
}

#[test]
fn after_sigkill_the_volume_mounts_again_and_shows_everything_that_was_synced() {
    let volume = Volume::mounted();
    let bytes = pattern(4, 5 << 20);
    std::fs::create_dir(volume.at("dir")).unwrap();
    let mut file = File::create(volume.at("dir/synced")).unwrap();
    file.write_all(&bytes).unwrap();
    file.sync_all().unwrap();
    File::open(volume.at("dir")).unwrap().sync_all().unwrap();
    std::fs::write(volume.at("dir/not synced"), &bytes).unwrap();
    drop(file);
    let pid = volume.signal_daemon(Signal::KILL);
    Volume::wait_for_end(pid);
    // The dead mount is still there. The next mount command removes it.
    volume.mount();
    assert!(std::fs::read(volume.at("dir/synced")).unwrap() == bytes);
    volume.umount();
    volume.check();
}

#[test]
fn umount_removes_a_mount_whose_daemon_died_and_says_so() {
    let volume = Volume::mounted();
    let pid = volume.signal_daemon(Signal::KILL);
    Volume::wait_for_end(pid);
    let message = fail(jericho(["stat"]).arg(volume.mnt()), 1);
    assert!(message.contains("daemon"), "{message}");
    let message = fail(jericho(["umount"]).arg(volume.mnt()), 1);
    assert!(message.contains("had died"), "{message}");
    assert!(!volume.is_mounted());
    volume.mount();
}

#[test]
fn a_busy_mount_stays_and_the_message_names_the_process_that_uses_it() {
    let volume = Volume::mounted();
    let mut file = File::create(volume.at("open")).unwrap();
    let message = fail(jericho(["umount"]).arg(volume.mnt()), 1);
    let pid = std::process::id().to_string();
    for part in ["busy", &pid, "open"] {
        assert!(message.contains(part), "{part:?} is not in {message}");
    }
    file.write_all(b"still serving").unwrap();
    drop(file);
    volume.umount();
}

#[test]
fn umount_by_the_system_ends_the_daemon_cleanly_too() {
    let volume = Volume::mounted();
    std::fs::write(volume.at("file"), b"bytes").unwrap();
    let pid = volume.daemon_pid();
    succeed(std::process::Command::new("umount").arg(volume.mnt()));
    Volume::wait_for_end(pid);
    volume.check();
}

#[test]
fn a_read_only_mount_changes_nothing() {
    let volume = Volume::mounted();
    std::fs::write(volume.at("file"), b"bytes").unwrap();
    volume.umount();
    let before = std::fs::read(volume.file()).unwrap();
    succeed(volume.mount_command().arg("--read-only"));
    assert_eq!(std::fs::read(volume.at("file")).unwrap(), b"bytes");
    let error = std::fs::write(volume.at("new"), b"x").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    assert!(volume.stat()["read_only"].as_bool().unwrap());
    volume.umount();
    assert!(
        std::fs::read(volume.file()).unwrap() == before,
        "the volume was changed"
    );
}

#[test]
fn run_mounts_runs_unmounts_and_passes_the_status_on() {
    let volume = Volume::formatted();
    let run = |script: &str| {
        let mut command = jericho(["run", "--log"]);
        command
            .arg(volume.log())
            .arg("--volume")
            .arg(volume.file())
            .arg("--at");
        command
            .arg(volume.mnt())
            .args(["--cache", "32M", "--", "sh", "-c", script]);
        output(command.env("MNT", volume.mnt())).status.code()
    };
    assert_eq!(run("echo kept > \"$MNT/file\""), Some(0));
    assert!(!volume.is_mounted());
    assert_eq!(run("grep -q kept \"$MNT/file\""), Some(0));
    assert_eq!(run("exit 7"), Some(7));
    assert_eq!(run("kill -KILL $$"), Some(128 + 9));
    assert!(!volume.is_mounted());
    volume.check();
}

#[test]
fn run_sets_the_policy_for_threads_only_with_the_option() {
    let volume = Volume::formatted();
    let told = |options: &[&str]| {
        let mut command = jericho(["run", "--log"]);
        command.arg(volume.log()).arg("--volume").arg(volume.file());
        command.arg("--at").arg(volume.mnt());
        command.args(["--cache", "32M"]).args(options);
        command.args(["--", "sh", "-c", "echo ${JERICHO_THREADS-nothing}"]);
        succeed(command.env_remove("JERICHO_THREADS"))
    };
    assert_eq!(told(&[]), "nothing\n");
    assert_eq!(told(&["--threads", "never"]), "never\n");
}

#[test]
fn run_passes_sigterm_on_to_the_command_and_unmounts_after_it() {
    let volume = Volume::formatted();
    let mut command = jericho(["run", "--log"]);
    command
        .arg(volume.log())
        .arg("--volume")
        .arg(volume.file())
        .arg("--at")
        .arg(volume.mnt());
    let script =
        "trap 'echo ended > \"$MNT/file\"; exit 3' TERM; echo up; while :; do sleep 0.1; done";
    command
        .args(["--", "sh", "-c", script])
        .env("MNT", volume.mnt())
        .stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut up = [0u8; 3];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut up).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(3));
    assert!(!volume.is_mounted());
    volume.mount();
    assert_eq!(std::fs::read(volume.at("file")).unwrap(), b"ended\n");
}

#[test]
fn run_of_a_command_that_does_not_exist_unmounts() {
    let volume = Volume::formatted();
    let mut command = jericho(["run", "--log"]);
    command
        .arg(volume.log())
        .arg("--volume")
        .arg(volume.file())
        .arg("--at")
        .arg(volume.mnt());
    let message = fail(command.args(["--", "/nonexistent/program"]), 1);
    assert!(message.contains("/nonexistent/program"), "{message}");
    assert!(!volume.is_mounted());
}

#[test]
fn in_the_foreground_the_daemon_notifies_the_service_manager_when_the_mount_serves() {
    let volume = Volume::formatted();
    let socket = volume.beside("notify");
    let listener = std::os::unix::net::UnixDatagram::bind(&socket).unwrap();
    listener
        .set_read_timeout(Some(std::time::Duration::from_secs(60)))
        .unwrap();
    let mut command = volume.mount_command();
    command
        .arg("--foreground")
        .env("NOTIFY_SOCKET", &socket)
        .stderr(Stdio::null());
    let mut daemon = command.spawn().unwrap();
    let mut buffer = [0u8; 4096];
    let length = listener
        .recv(&mut buffer)
        .expect("a message when the mount serves");
    let message = String::from_utf8_lossy(&buffer[..length]).into_owned();
    assert!(message.starts_with("READY=1\n"), "{message}");
    assert!(is_mounted(&volume.mnt()));
    let pid = rustix::process::Pid::from_child(&daemon);
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    let length = listener
        .recv(&mut buffer)
        .expect("a message when the daemon stops");
    assert!(buffer[..length].starts_with(b"STOPPING=1"));
    assert!(daemon.wait().unwrap().success());
    assert!(!volume.is_mounted());
    volume.check();
}

#[test]
fn a_dead_mount_is_noticed_though_the_kernel_has_its_attributes_in_its_cache() {
    let volume = Volume::mounted();
    let kill = || {
        std::fs::metadata(volume.mnt()).expect("the root");
        let pid = volume.signal_daemon(rustix::process::Signal::KILL);
        Volume::wait_for_end(pid);
    };
    kill();
    let message = fail(jericho(["umount"]).arg(volume.mnt()), 1);
    assert!(message.contains("the mount was removed"), "{message}");
    volume.mount();
    kill();
    // Removes the dead mount first.
    volume.mount();
    volume.umount();
}
