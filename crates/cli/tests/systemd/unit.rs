//! The guarantees of the unit.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use crate::commands::{kill, succeed, wait_until};
use crate::processes::{has_ended, memory_of, openers_of, segments_kib, state_of};
use crate::program::{LEFT_KIB_MAX, PAGE, PAGES, Program, content};
use crate::service::{Service, unit_of};

/// Returns the first content of a file.
fn first_content() -> Vec<u8> {
    (0..PAGES as u64).flat_map(|n| content(!n)).collect()
}

fn with_synced_file(name: &str) -> (Service, PathBuf) {
    let service = Service::started(name);
    let path = service.dir().join("file");
    let file = File::create(&path).expect("create");
    file.write_all_at(&first_content(), 0).expect("write");
    file.sync_all().expect("fsync");
    (service, path)
}

#[test]
#[ignore = "for the container of make systemd"]
fn systemd_finds_nothing_wrong_with_the_units() {
    // The command prints its findings, and succeeds in spite of some of them.
    let output = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .args(["jericho@srv-data.service", "jericho-serve@data.service"])
        .output()
        .expect("systemd-analyze is installed");
    let said = [output.stdout, output.stderr].concat();
    assert_eq!(String::from_utf8_lossy(&said), "");
    assert!(output.status.success(), "{}", output.status);
}

#[test]
#[ignore = "for the container of make systemd"]
fn settings_may_have_the_name_of_the_instance_and_without_settings_the_start_fails() {
    let service = Service::started_with("/srv/plain", "/etc/jericho/srv-plain.conf");
    service.assert_serves();
    let other = unit_of("/srv/none");
    let output = Command::new("systemctl").args(["start", &*other]).output();
    let output = output.expect("systemctl is installed");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("Assert"),
        "{said}"
    );
}

#[test]
#[ignore = "for the container of make systemd"]
fn a_start_ends_when_the_mount_serves_and_programs_are_served_inline() {
    let (service, file) = with_synced_file("start");
    service.assert_serves();
    let keeper = service.keeper();
    let program = Program::start(&service, &file, false);
    assert!(segments_kib(program.pid()) > 2 * LEFT_KIB_MAX);
    assert_eq!(service.keeper(), keeper);
    assert_eq!(service.property("NRestarts"), "0");
    // The daemon must have raised its limit of open files to the maximum, because many programs need more than systemd's default.
    let limits = fs::read_to_string(format!("/proc/{}/limits", service.daemon()));
    let limits = limits.expect("the daemon runs");
    let files = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    let files: Vec<&str> = files.expect("a limit").split_whitespace().collect();
    assert_eq!(files[3], files[4], "{limits}");
}

#[test]
#[ignore = "for the container of make systemd"]
fn a_killed_daemon_is_replaced_and_its_programs_and_memory_are_released() {
    let (service, file) = with_synced_file("killed");
    let mut program = Program::start(&service, &file, false);
    let (daemon, keeper) = (service.daemon(), service.keeper());
    let memory = memory_of(daemon);
    assert!(openers_of(&memory).contains(&keeper));
    kill("KILL", daemon);
    program.wait_until_access_fails();
    wait_until("the keeper ends", || has_ended(keeper));
    assert_eq!(openers_of(&memory), [0; 0]);
    service.wait_for_restart(1);
    assert_ne!(service.daemon(), daemon);
    assert_eq!(fs::read(&file).expect("read"), first_content());
    assert_eq!(program.reads("new file"), format!("{PAGE} bytes"));
    assert!(program.reads("old file").contains("os error 107"));
    let _another = Program::start(&service, &file, true);
}

#[test]
#[ignore = "for the container of make systemd"]
fn systemd_does_not_wait_for_a_late_keeper_or_kill_it() {
    let (service, file) = with_synced_file("late");
    let program = Program::start(&service, &file, false);
    let (daemon, keeper) = (service.daemon(), service.keeper());
    kill("STOP", keeper);
    wait_until("the keeper stops", || state_of(keeper) == Some('T'));
    kill("KILL", daemon);
    service.wait_for_restart(1);
    assert_eq!(state_of(keeper), Some('T'));
    kill("CONT", keeper);
    program.wait_until_access_fails();
    wait_until("the keeper ends", || has_ended(keeper));
    let another = Program::start(&service, &file, false);
    another.wait_until_continues_inline(&service);
}

#[test]
#[ignore = "for the container of make systemd"]
fn a_stop_writes_all_data_back_and_leaves_no_mount_and_no_process() {
    let (service, file) = with_synced_file("stop");
    // The program has the file open, so the mount is in use. No fsync has covered its writes.
    let program = Program::start(&service, &file, true);
    let unsynced = service.dir().join("unsynced");
    fs::write(&unsynced, first_content()).expect("write");
    service.systemctl("stop");
    service.assert_over();
    let done = program.wait_until_access_fails();
    service.check();
    service.systemctl("start");
    assert_eq!(fs::read(&unsynced).expect("read"), first_content());
    assert_has_all_that_was_written(&file, done);
}

#[test]
#[ignore = "for the container of make systemd"]
fn a_restart_loses_nothing_that_a_running_program_has_written() {
    let (service, file) = with_synced_file("restart");
    let mut program = Program::start(&service, &file, true);
    let (daemon, keeper) = (service.daemon(), service.keeper());
    service.systemctl("restart");
    service.assert_serves();
    assert_ne!(service.daemon(), daemon);
    assert_eq!(service.property("Result"), "success");
    let done = program.wait_until_access_fails();
    wait_until("the keeper ends", || has_ended(keeper));
    assert_has_all_that_was_written(&file, done);
    assert_eq!(program.reads("new file"), format!("{PAGE} bytes"));
    assert!(program.reads("old file").contains("os error 107"));
    let _another = Program::start(&service, &file, true);
}

/// Asserts that a file holds the first `done` writes of a writing program. The file may also hold a part of the next write, which
/// failed.
fn assert_has_all_that_was_written(file: &std::path::Path, done: u64) {
    let bytes = fs::read(file).expect("read");
    assert_eq!(bytes.len(), PAGES * PAGE);
    for number in done - PAGES as u64..done {
        let at = number as usize % PAGES * PAGE;
        if number % PAGES as u64 == done % PAGES as u64 {
            continue;
        }
        assert!(
            bytes[at..at + PAGE] == content(number),
            "write {number} of {done}"
        );
    }
}

#[test]
#[ignore = "for the container of make systemd"]
fn an_unmount_by_an_administrator_stops_the_unit_without_a_restart() {
    let (service, _) = with_synced_file("unmounted");
    succeed(Command::new("jericho").arg("umount").arg(service.dir()));
    wait_until("the unit stops", || {
        service.property("ActiveState") == "inactive"
    });
    service.assert_over();
    assert_eq!(service.property("NRestarts"), "0");
    service.check();
}
