//! Bits and attributes that let a program run with rights that its caller does not have. A change of the file by another user
//! clears them.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use rustix::fs::{XattrFlags, getxattr, setxattr};
use rustix::io::Errno;

use super::support::{Volume, open_to_all, succeed};

const NOBODY: u32 = 65534;
const CAPABILITY: &str = "security.capability";

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// Runs a shell script on the mount as another user. Returns its output.
fn as_nobody(v: &Volume, script: &str) -> String {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    succeed(command.args(["sh", "-c", script]).current_dir(v.mnt()))
}

fn python(script: &str) -> String {
    format!("python3 -c \"import os; {script}\"")
}

/// Makes the files that `changes` copies from.
fn make_sources(v: &Volume) {
    fs::write(v.at("data"), [2; 4096]).unwrap();
    let hole = fs::File::create(v.at("hole")).unwrap();
    hole.set_len(1 << 20).unwrap();
    for name in ["data", "hole"] {
        set_mode(&v.at(name), 0o644);
    }
}

/// Returns commands that change the content of `f`.
fn changes() -> [String; 9] {
    let copy = |name: &str, to: u64| {
        python(&format!(
            "d = os.open('f', os.O_RDWR); s = os.open('{name}', os.O_RDONLY); \
             assert os.copy_file_range(s, d, 4096, 0, {to}) == 4096"
        ))
    };
    [
        "printf x >> f".into(),
        "truncate -s 5 f".into(),
        ": > f".into(),
        "fallocate -l 8192 f".into(),
        "fallocate --punch-hole -o 0 -l 4096 f".into(),
        python("d = os.open('f', os.O_RDWR); os.pwrite(d, b'y', 1)"),
        copy("data", 0),
        copy("hole", 0),
        // Behind the end of the file.
        copy("hole", 8192),
    ]
}

#[test]
fn a_program_that_another_user_wrote_to_does_not_run_as_its_owner() {
    let v = Volume::mounted();
    open_to_all(&v.mnt());
    for round in 0..3 {
        fs::copy("/usr/bin/id", v.at("id")).unwrap();
        set_mode(&v.at("id"), 0o4777);
        assert_eq!(as_nobody(&v, "./id -u").trim(), "0", "round {round}");
        assert_eq!(as_nobody(&v, "printf x >> id; ./id -u").trim(), "65534");
        assert_eq!(mode(&v.at("id")), 0o777);
    }
}

#[test]
fn a_change_of_content_by_another_user_drops_the_set_id_bits() {
    let v = Volume::mounted();
    open_to_all(&v.mnt());
    make_sources(&v);
    for change in changes() {
        fs::write(v.at("f"), [1; 5000]).unwrap();
        set_mode(&v.at("f"), 0o6777);
        as_nobody(&v, &change);
        assert_eq!(mode(&v.at("f")), 0o777, "{change}");
        // A change by root keeps the bits.
        set_mode(&v.at("f"), 0o6777);
        succeed(
            Command::new("sh")
                .args(["-c", &change])
                .current_dir(v.mnt()),
        );
        assert_eq!(mode(&v.at("f")), 0o6777, "{change} by root");
    }
}

#[test]
fn a_change_of_owner_drops_the_set_id_bits_except_of_a_directory() {
    let v = Volume::mounted();
    let script = python(
        "import socket; open('f', 'w'); os.mkfifo('fifo'); os.mknod('null', 0o020666, os.makedev(1, 3)); \
         socket.socket(socket.AF_UNIX).bind('socket')",
    );
    succeed(
        Command::new("sh")
            .args(["-c", &script])
            .current_dir(v.mnt()),
    );
    fs::create_dir(v.at("d")).unwrap();
    for (uid, gid) in [
        (Some(1), Some(1)),
        (Some(2), None),
        (None, Some(3)),
        (None, None),
    ] {
        for name in ["f", "fifo", "null", "socket"] {
            set_mode(&v.at(name), 0o6755);
            std::os::unix::fs::chown(v.at(name), uid, gid).unwrap();
            assert_eq!(mode(&v.at(name)), 0o755, "{name} to {uid:?}, {gid:?}");
        }
        set_mode(&v.at("d"), 0o6755);
        std::os::unix::fs::chown(v.at("d"), uid, gid).unwrap();
        assert_eq!(mode(&v.at("d")), 0o6755);
    }
}

#[test]
fn an_access_control_list_by_an_owner_outside_the_group_drops_set_group_id() {
    let v = Volume::mounted();
    open_to_all(&v.mnt());
    // Version 2; rwx for owner, uid 1, group, mask; r-x for others.
    let list = [
        (1, 7, !0),
        (2, 7, 1),
        (4, 7, !0),
        (0x10, 7, !0_u32),
        (0x20, 5, !0),
    ];
    let mut bytes = vec![2, 0, 0, 0];
    for (tag, perm, id) in list {
        bytes.extend([tag, 0, perm, 0]);
        bytes.extend(id.to_le_bytes());
    }
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let set = |name: &str| {
        python(&format!(
            "os.setxattr('{name}', 'system.posix_acl_access', bytes.fromhex('{hex}'))"
        ))
    };
    for (name, group, after) in [("inside", NOBODY, 0o2775), ("outside", 0, 0o775)] {
        fs::write(v.at(name), b"x").unwrap();
        std::os::unix::fs::chown(v.at(name), Some(NOBODY), Some(group)).unwrap();
        set_mode(&v.at(name), 0o2775);
        as_nobody(&v, &set(name));
        assert_eq!(mode(&v.at(name)), after, "{name}");
    }
}

#[test]
fn a_change_by_any_user_drops_the_capabilities_of_a_file() {
    let v = Volume::mounted();
    open_to_all(&v.mnt());
    make_sources(&v);
    // Version 2, effective; CAP_NET_RAW is permitted.
    let mut capability = [0; 20];
    capability[..5].copy_from_slice(&[1, 0, 0, 2, 0]);
    capability[5] = 0x20;
    let has = || match getxattr(v.at("f"), CAPABILITY, &mut [0; 64][..]) {
        Ok(len) => len > 0,
        Err(Errno::NODATA) => false,
        Err(error) => panic!("{error}"),
    };
    let give = || {
        fs::write(v.at("f"), [1; 5000]).unwrap();
        set_mode(&v.at("f"), 0o666);
        setxattr(v.at("f"), CAPABILITY, &capability, XattrFlags::empty()).unwrap();
        assert!(has());
    };
    let by_root = ["chown 1:1 f", "chown root f"].map(String::from);
    for change in changes().into_iter().chain(by_root) {
        give();
        succeed(
            Command::new("sh")
                .args(["-c", &change])
                .current_dir(v.mnt()),
        );
        assert!(!has(), "{change}");
    }
    for change in changes() {
        give();
        as_nobody(&v, &change);
        assert!(!has(), "{change} by another user");
    }
    // A write through a descriptor that was open before and may write inline.
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(v.at("f"))
        .unwrap();
    for _ in 0..2 {
        setxattr(v.at("f"), CAPABILITY, &capability, XattrFlags::empty()).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"new", 0).unwrap();
        assert!(!has(), "a write through a descriptor");
    }
    drop(file);
    // Changes other than of content and owner do not clear the attribute.
    setxattr(v.at("f"), CAPABILITY, &capability, XattrFlags::empty()).unwrap();
    set_mode(&v.at("f"), 0o600);
    fs::rename(v.at("f"), v.at("g")).unwrap();
    fs::rename(v.at("g"), v.at("f")).unwrap();
    v.remount();
    assert!(has());
}
