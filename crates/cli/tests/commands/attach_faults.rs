//! Attached disks over devices that follow orders (`crates/storage/src/faults.rs`): flushes that reach the device, fail, or never end.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use super::attach::{Disk, Mounted, has_loops, only_line, wait_for_end};
use super::support::commands::{kill, wait_until};
use super::support::{fail, jericho, output, pattern, succeed};

/// Attaches a disk whose device follows orders.
fn attach(disk: &Disk, arguments: &[&str]) -> PathBuf {
    let mut attach = disk.attach_command(arguments);
    attach.env("JERICHO_FAULTS", disk.beside("orders"));
    only_line(&succeed(&mut attach))
}

fn order(disk: &Disk, orders: &str) {
    fs::write(disk.beside("new"), orders).unwrap();
    fs::rename(disk.beside("new"), disk.beside("orders")).unwrap();
}

/// Returns how many operations were noted.
fn noted(disk: &Disk, operation: &str) -> usize {
    let notes = fs::read_to_string(disk.beside("orders.notes")).unwrap_or_default();
    let lines = notes.lines();
    lines.filter(|line| line.ends_with(operation)).count()
}

#[test]
fn each_sync_of_a_file_or_filesystem_on_a_disk_flushes_the_device() {
    let disk = Disk::new();
    let path = attach(&disk, &[]);
    order(&disk, "device flush note\n");
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&pattern(1, 10_000), 0).unwrap();
    assert_eq!(noted(&disk, "flush"), 0);
    file.sync_data().unwrap();
    assert_eq!(noted(&disk, "flush"), 1);
    file.sync_all().unwrap();
    assert_eq!(noted(&disk, "flush"), 2);
    drop(file);
    let mut dd = Command::new("dd");
    dd.args([
        "if=/dev/zero",
        "bs=4k",
        "count=3",
        "oflag=dsync",
        "conv=notrunc",
    ]);
    succeed(dd.arg(format!("of={}", path.display())));
    assert_eq!(noted(&disk, "flush"), 5);
    disk.detach();
    assert!(noted(&disk, "flush") > 5);
    if !has_loops() {
        return;
    }
    let device = attach(&disk, &["--loop"]);
    succeed(Command::new("mkfs.ext4").args(["-F", "-q"]).arg(&device));
    let mounted = Mounted::new(&device, disk.beside("mnt"));
    let file = File::create(mounted.at("file")).unwrap();
    file.sync_all().unwrap();
    for round in 0..5 {
        let before = noted(&disk, "flush");
        file.write_all_at(&pattern(round, 5000), round * 5000)
            .unwrap();
        file.sync_all().unwrap();
        assert!(noted(&disk, "flush") > before, "round {round}");
    }
    drop(file);
    mounted.umount();
    disk.detach();
}

#[test]
fn a_disk_that_cannot_be_made_durable_stays_attached_and_detach_gives_the_cause() {
    let disk = Disk::new();
    let path = attach(&disk, &[]);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&pattern(1, 10_000), 0).unwrap();
    drop(file);
    order(&disk, "device flush fail EIO\n");
    let said = fail(jericho(["detach"]).arg(&path), 1);
    for text in ["stays attached", "flush", "Input/output error", "--force"] {
        assert!(said.contains(text), "{said}");
    }
    assert!(path.exists());
    succeed(jericho(["detach", "--force"]).arg(&path));
    assert!(!path.exists());
    if !has_loops() {
        return;
    }
    order(&disk, "");
    let device = attach(&disk, &["--loop"]);
    order(&disk, "device flush fail EIO\n");
    // The page cache of the block device, which detach writes back.
    let written = OpenOptions::new().write(true).open(&device).unwrap();
    written.write_all_at(&pattern(2, 8192), 0).unwrap();
    drop(written);
    let said = fail(jericho(["detach"]).arg(&device), 1);
    assert!(said.contains("stays attached"), "{said}");
    assert!(said.contains("Input/output error"), "{said}");
    succeed(Command::new("losetup").arg(&device));
    succeed(jericho(["detach", "--force"]).arg(&device));
    wait_until("the end of the loop device", || {
        let shown = Command::new("losetup").arg(&device).output().unwrap();
        !shown.status.success()
    });
}

#[test]
fn a_flush_that_fails_after_the_unmount_is_reported_by_detach() {
    let disk = Disk::new();
    let path = attach(&disk, &[]);
    // The first flush is that of the command, and the second one that of the server's end.
    order(&disk, "device flush fail-nth 2 EIO lasting\n");
    let said = fail(jericho(["detach"]).arg(&path), 1);
    for text in [
        "was detached, but not everything is durable",
        "Input/output error",
    ] {
        assert!(said.contains(text), "{said}");
    }
    let said = fail(jericho(["detach"]).arg(&path), 1);
    assert!(said.contains("is not attached"), "{said}");
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
}

#[test]
fn requests_that_hang_end_when_the_server_is_killed() {
    let disk = Disk::new();
    let path = attach(&disk, &[]);
    order(&disk, "device write hang\n");
    std::thread::scope(|scope| {
        let path = &path;
        // More than the server has threads.
        let writers: Vec<_> = (0..64)
            .map(|writer| {
                let file = OpenOptions::new().write(true).open(path).unwrap();
                scope.spawn(move || file.write_all_at(&[1; 4096], writer * 4096).unwrap_err())
            })
            .collect();
        wait_until("writes that hang", || noted(&disk, "write") > 20);
        succeed(jericho(["detach", "--force"]).arg(path));
        for writer in writers {
            let error = writer.join().unwrap().raw_os_error();
            let expected = [Some(libc::ENOTCONN), Some(libc::ECONNABORTED)];
            assert!(expected.contains(&error), "{error:?}");
        }
    });
}

#[test]
fn a_flush_that_fails_keeps_the_loop_device() {
    if !has_loops() {
        return;
    }
    let disk = Disk::new();
    let device = attach(&disk, &["--loop"]);
    // The first flush is that of the loop device, and the second one that of the file.
    order(&disk, "device flush fail-nth 2 EIO lasting\n");
    let said = fail(jericho(["detach"]).arg(&device), 1);
    assert!(said.contains("stays attached"), "{said}");
    succeed(Command::new("losetup").arg(&device));
    succeed(jericho(["detach", "--force"]).arg(&device));
}

#[test]
fn a_server_that_is_killed_before_its_last_flush_leaves_a_message() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root unmounts");
        return;
    }
    let disk = Disk::new();
    let path = attach(&disk, &[]);
    let (server, dir) = (disk.server(), path.parent().unwrap().to_owned());
    order(&disk, "device flush hang\n");
    // Another test that looks for users of its disk may use this one for a moment.
    wait_until("the unmount", || {
        output(Command::new("umount").arg(&dir)).status.success()
    });
    wait_until("the last flush", || noted(&disk, "flush") > 0);
    kill("KILL", server);
    wait_for_end(server);
    order(&disk, "");
    let path = attach(&disk, &[]);
    let log = fs::read_to_string(disk.beside("log")).unwrap();
    assert!(
        log.contains("was killed before everything was durable"),
        "{log}"
    );
    succeed(jericho(["detach"]).arg(&path));
    assert_eq!(fs::read_dir(dir).unwrap().count(), 0);
}

#[test]
fn signals_end_a_server_whose_device_hangs() {
    for arguments in [&[] as &[&str], &["--loop"]] {
        if !arguments.is_empty() && !has_loops() {
            continue;
        }
        let disk = Disk::new();
        let path = attach(&disk, arguments);
        let server = disk.server();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&pattern(1, 10_000), 0).unwrap();
        drop(file);
        order(&disk, "device flush hang\n");
        kill("TERM", server);
        wait_until("the flush of the first signal", || {
            noted(&disk, "flush") > 0
        });
        kill("TERM", server);
        wait_until("the last flush", || noted(&disk, "flush") > 1);
        kill("TERM", server);
        wait_for_end(server);
        order(&disk, "");
        let log = fs::read_to_string(disk.beside("log")).unwrap();
        assert!(log.contains("the device did not answer"), "{log}");
        attach(&disk, &[]);
        succeed(jericho(["detach"]).arg(disk.device()));
        let log = fs::read_to_string(disk.beside("log")).unwrap();
        assert!(log.contains("lost what programs had not synced"), "{log}");
    }
}
