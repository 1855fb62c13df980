//! Mounts by an ordinary user, through the setuid helper.

use std::process::Command;

use super::support::{open_to_all, succeed};

/// Runs the script as `nobody`, in a mount namespace with a /dev/fuse that all users may open, as on an ordinary machine. In
/// containers, often only root may open it.
const AS_NOBODY: &str = "
    mkdir dev && mount -t tmpfs none dev && mknod -m 666 dev/fuse c 10 229
    mount --bind dev/fuse /dev/fuse
    exec setpriv --reuid 65534 --regid 65534 --clear-groups sh -euxc \"$SCRIPT\"";

#[test]
fn an_ordinary_user_formats_mounts_uses_and_unmounts_a_volume() {
    let helper = Command::new("fusermount3").arg("-V").output().is_ok();
    if !rustix::process::geteuid().is_root() || !helper {
        eprintln!("not tested: needs root (to become another user) and fusermount3");
        return;
    }
    // The build directory may be reachable only by root.
    let dir = tempfile::tempdir().unwrap();
    open_to_all(dir.path());
    let program = dir.path().join("jericho");
    std::fs::copy(env!("CARGO_BIN_EXE_jericho"), &program).unwrap();
    let library = "libjericho_preload.so";
    let built = std::env::current_exe().unwrap().with_file_name(library);
    std::fs::copy(built, dir.path().join(library)).unwrap();
    let script = "
        trap 'cat .local/state/jericho/*; fusermount3 -u -z mnt 2>&- || true' EXIT
        mkdir mnt
        ./jericho format vol --size 256M --slices 2
        ./jericho mount vol mnt --cache 32M --topology virtual:2
        echo kept > mnt/file
        mkdir mnt/dir
        ./jericho stat mnt
        ./jericho place mnt/dir --node 0
        test -s .local/state/jericho/*vol.log
        ./jericho umount mnt
        ./jericho check vol
        ./jericho run --volume vol --at mnt -- grep kept mnt/file
        ! mountpoint -q mnt
        echo all done";
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-euc",
        AS_NOBODY,
    ]);
    command
        .current_dir(dir.path())
        .env("HOME", dir.path())
        .env("SCRIPT", script);
    let said = succeed(command.env_remove("XDG_STATE_HOME"));
    assert!(said.contains("all done"), "{said}");
}
