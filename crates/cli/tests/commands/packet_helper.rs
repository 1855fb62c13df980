//! The program `jericho-packet`: what it opens, what it refuses, and `jericho` of a user who needs it.

use std::os::unix::fs::MetadataExt;
use std::process::Command;

use super::namespaces::{JOINED, inside, without_net_raw};
use super::support::{fail, open_to_all, output, succeed};

const HELPER: &str = env!("CARGO_BIN_EXE_jericho-packet");

#[test]
fn the_helper_lends_a_socket_that_receives_one_ethertype_on_one_interface() {
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/commands/packet_helper.py"
    );
    let mut command = Command::new("unshare");
    succeed(command.args(["-Urn", "python3", "-B", script, HELPER]));
}

#[test]
fn without_the_capability_each_command_names_the_helper() {
    for arguments in [
        &["serve", "null:1M", "--name", "data", "--no-auth", "--nic"][..],
        &["discover", "--nic"],
    ] {
        let arguments = [arguments, &["t0"]].concat();
        let message = fail(&mut inside(&without_net_raw(JOINED), &arguments), 1);
        // File capabilities have no effect in the namespace of a user.
        for text in ["t0", "CAP_NET_RAW", HELPER, "setcap cap_net_raw+ep"] {
            assert!(message.contains(text), "{message}");
        }
    }
}

/// Runs the script of `make install`. Returns what it says, and the capabilities of the installed file.
fn install(group: &str) -> (String, String) {
    let dir = tempfile::tempdir().expect("a directory");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/install-packet");
    let installed = dir.path().join("libexec/jericho-packet");
    let mut command = Command::new(script);
    command.arg(HELPER).arg(&installed);
    let said = succeed(command.args(["/final/jericho-packet", group]));
    let mode = std::fs::metadata(&installed).expect("a file").mode();
    assert_eq!(mode & 0o7777, 0o750);
    let mut command = Command::new("env");
    let path = format!(
        "PATH={}:/usr/sbin:/sbin",
        std::env::var("PATH").unwrap_or_default()
    );
    let capabilities = output(command.args([&*path, "getcap"]).arg(&installed));
    (
        said,
        String::from_utf8_lossy(&capabilities.stdout).into_owned(),
    )
}

#[test]
fn an_installation_gives_the_capability_or_says_how() {
    let (said, capabilities) = install("no-such-group");
    assert_eq!(capabilities, "");
    for text in [
        "no group no-such-group",
        "groupadd",
        "chown root:no-such-group /final/",
        "setcap cap_net_raw+ep /final/jericho-packet",
    ] {
        assert!(said.contains(text), "{said}");
    }
    // A group that all hosts have.
    let (said, capabilities) = install("daemon");
    assert_eq!(said.is_empty(), capabilities.contains("cap_net_raw=ep"));
}

/// Makes a network and a directory of devices with a /dev/fuse that all users may open.
const AS_ROOT: &str = "
    mkdir dev && mount -t tmpfs none dev && mknod -m 666 dev/fuse c 10 229
    mount --bind dev/fuse /dev/fuse
    ip link add t0 mtu 9000 type veth peer name i0 mtu 9000; ip link set t0 up; ip link set i0 up
    nobody='setpriv --reuid 65534 --regid 65534'
    serve='bin/jericho serve null:1M --nic t0 --no-auth --name data --host hostb --state state'
    $nobody --clear-groups $serve 2>missing && exit 9
    grep 'make install' missing
    mkdir -p libexec/jericho
    install -m 750 -g 4321 \"$HELPER\" libexec/jericho/jericho-packet
    $nobody --clear-groups $serve 2>denied && exit 9
    grep 'usermod' denied
    $nobody --groups 4321 $serve 2>plain && exit 9
    grep 'setcap cap_net_raw+ep' plain
    if ! setcap cap_net_raw+ep libexec/jericho/jericho-packet; then echo no setcap; exit 0; fi
    $nobody --groups 4321 $serve --ethertype 0x800 2>refused && exit 9
    grep 'belongs to IP' refused
    exec $nobody --groups 4321 sh -euxc \"$SCRIPT\"";

#[test]
fn an_ordinary_user_of_the_group_serves_attaches_and_mounts_a_device() {
    let helper = Command::new("fusermount3").arg("-V").output().is_ok();
    if !rustix::process::geteuid().is_root() || !helper {
        eprintln!(
            "SKIPPED: needs root (to give the helper its capability and become another user) and fusermount3"
        );
        return;
    }
    // The build directory may be reachable only by root.
    let dir = tempfile::tempdir().expect("a directory");
    open_to_all(dir.path());
    std::fs::create_dir(dir.path().join("bin")).expect("a directory");
    let program = dir.path().join("bin/jericho");
    std::fs::copy(env!("CARGO_BIN_EXE_jericho"), program).expect("a copy");
    let script = "
        grep '^CapEff:.0*$' /proc/self/status
        truncate -s 256M disk
        bin/jericho serve disk --nic t0 --no-auth --name data --host hostb --state state >out 2>&1 & server=$!
        trap 'cat out .local/state/jericho/*; fusermount3 -u -z mnt 2>&- || true; kill $server 2>&- || true' EXIT
        until grep -q tyche out; do kill -0 $server; sleep 0.02; done
        bin/jericho discover --nic i0 | grep tyche://hostb/data
        export JERICHO_NIC=i0
        disk=$(bin/jericho attach tyche://hostb/data --at at)
        dd if=/dev/zero of=\"$disk\" bs=4k count=16 conv=notrunc,fsync
        bin/jericho detach \"$disk\"
        bin/jericho format tyche://hostb/data
        mkdir mnt
        bin/jericho mount tyche://hostb/data mnt --cache 32M
        echo kept >mnt/file
        bin/jericho umount mnt
        bin/jericho run --no-preload --volume tyche://hostb/data --at mnt -- grep kept mnt/file
        kill $server; wait $server
        echo all done";
    let mut command = Command::new("unshare");
    command.args(["-nm", "--propagation", "private", "sh", "-euxc", AS_ROOT]);
    command
        .current_dir(dir.path())
        .env("HOME", dir.path())
        .env("HELPER", HELPER)
        .env("SCRIPT", script);
    let said = succeed(command.env_remove("XDG_STATE_HOME"));
    if said.contains("no setcap") {
        eprintln!("SKIPPED: setcap(8) is missing, or has no effect here");
        return;
    }
    assert!(said.contains("all done"), "{said}");
}
