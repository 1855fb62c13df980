//! The unit that serves a device.

use std::fs::{self, File};
use std::process::{Command, Stdio};

use crate::commands::{kill, output, succeed, wait_until};

const UNIT: &str = "jericho-serve@data.service";

fn systemctl(verb: &str) {
    succeed(Command::new("systemctl").args([verb, UNIT]));
}

fn property(name: &str) -> String {
    let mut command = Command::new("systemctl");
    let value = succeed(command.args(["show", "--value", "--property", name, UNIT]));
    value.trim().to_owned()
}

/// Returns what another host finds on the network.
fn found() -> String {
    let mut command = Command::new("jericho");
    succeed(command.args(["discover", "--nic", "i0"]))
}

fn ip(arguments: &str) {
    succeed(Command::new("ip").args(arguments.split(' ')));
}

#[test]
#[ignore = "for the container of make systemd"]
fn a_device_is_served_from_the_start_until_the_stop_and_again_after_a_crash() {
    ip("link add t0 mtu 9000 type veth peer name i0 mtu 9000");
    ip("link set i0 up");
    fs::create_dir_all("/etc/jericho/serve").expect("mkdir");
    let disk = File::create("/srv/disk").expect("a file");
    disk.set_len(16 << 20).expect("a size");
    let settings = "DEVICE=/srv/disk\nNICS=t0\nOPTIONS=--no-auth --host hostb\n";
    fs::write("/etc/jericho/serve/data.conf", settings).expect("settings");
    // An interface that comes up late. Until then each start fails.
    let mut start = Command::new("systemctl");
    start.args(["start", "--no-block", UNIT]);
    succeed(start.stderr(Stdio::null()));
    wait_until("a start fails", || property("NRestarts") != "0");
    assert_eq!(found(), "");
    ip("link set t0 up");
    wait_until("the device is served", || {
        property("ActiveState") == "active"
    });
    assert_eq!(found(), "tyche://hostb/data\n");
    let server = property("MainPID");
    let status = fs::read_to_string(format!("/proc/{server}/status")).expect("a process");
    // CAP_NET_RAW is number 13.
    assert!(status.contains("CapBnd:\t0000000000002000"), "{status}");
    assert!(status.contains("NoNewPrivs:\t1"), "{status}");

    kill("KILL", server.parse().expect("a process"));
    wait_until("the next server", || {
        let next = property("MainPID");
        let is_next = next != server && next != "0";
        is_next && property("ActiveState") == "active"
    });
    assert_eq!(found(), "tyche://hostb/data\n");
    assert!(fs::exists("/var/lib/jericho/serve").expect("a directory"));

    // Programs of another host write, and the unit stops in the middle of their session.
    let mut attach = Command::new("jericho");
    attach.args(["attach", "tyche://hostb/data", "--nic", "i0", "--at"]);
    let path = succeed(attach.arg("/run/attached")).trim().to_owned();
    fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut file| {
            std::io::Write::write_all(&mut file, &[7; 8192])?;
            file.sync_all()
        })
        .expect("a write");
    systemctl("restart");
    let bytes = fs::read(&path).expect("the session goes on");
    assert!(bytes[..8192].iter().all(|byte| *byte == 7));
    succeed(Command::new("jericho").arg("detach").arg(&path));
    systemctl("stop");
    assert_eq!(property("Result"), "success");
    assert_eq!(found(), "");
    assert_eq!(fs::read("/srv/disk").expect("a file")[..8192], [7; 8192]);

    fs::remove_file("/etc/jericho/serve/data.conf").expect("settings");
    let failed = output(Command::new("systemctl").args(["start", UNIT]));
    assert!(!failed.status.success(), "started without settings");
    systemctl("stop");
}
