//! Times, owners, modes, extended attributes, access control lists.

use std::fs::{self, File, FileTimes};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{XattrFlags, getxattr, listxattr, removexattr, setxattr};
use rustix::io::Errno;

use super::support::{Volume, output, succeed};

#[test]
fn times_keep_their_nanoseconds_also_before_1970() {
    let v = Volume::mounted();
    let file = File::create(v.at("f")).unwrap();
    let early = UNIX_EPOCH - Duration::new(1_000, 250_000_000);
    let late = UNIX_EPOCH + Duration::new(9_000_000_000, 123_456_789);
    file.set_times(FileTimes::new().set_accessed(late).set_modified(early))
        .unwrap();
    drop(file);
    for _ in 0..2 {
        let metadata = fs::metadata(v.at("f")).unwrap();
        assert_eq!(metadata.modified().unwrap(), early);
        assert_eq!(metadata.accessed().unwrap(), late);
        v.remount();
    }
}

#[test]
fn the_time_of_birth_is_shown_and_stays() {
    let v = Volume::mounted();
    let before = SystemTime::now() - Duration::from_secs(60);
    fs::write(v.at("f"), b"x").unwrap();
    fs::create_dir(v.at("d")).unwrap();
    let born = ["f", "d"].map(|name| fs::metadata(v.at(name)).unwrap().created().unwrap());
    assert!(
        born.iter()
            .all(|born| *born >= before && *born <= SystemTime::now())
    );
    File::options()
        .write(true)
        .open(v.at("f"))
        .unwrap()
        .set_times(
            FileTimes::new()
                .set_modified(UNIX_EPOCH)
                .set_accessed(UNIX_EPOCH),
        )
        .unwrap();
    v.remount();
    for (name, born) in ["f", "d"].into_iter().zip(born) {
        assert_eq!(fs::metadata(v.at(name)).unwrap().created().unwrap(), born);
    }
}

#[test]
fn changes_of_a_directory_show_in_its_times() {
    let v = Volume::mounted();
    fs::create_dir(v.at("d")).unwrap();
    File::open(v.at("d"))
        .unwrap()
        .set_modified(UNIX_EPOCH)
        .unwrap();
    let modified = || fs::metadata(v.at("d")).unwrap().modified().unwrap();
    assert_eq!(modified(), UNIX_EPOCH);
    fs::write(v.at("d/f"), b"x").unwrap();
    let recent = SystemTime::now() - Duration::from_secs(600);
    assert!(modified() > recent);
    File::open(v.at("d"))
        .unwrap()
        .set_modified(UNIX_EPOCH)
        .unwrap();
    fs::remove_file(v.at("d/f")).unwrap();
    assert!(modified() > recent);
}

#[test]
fn owner_and_mode_are_kept_and_a_change_of_owner_drops_set_id() {
    let v = Volume::mounted();
    fs::write(v.at("f"), b"x").unwrap();
    let mode = || fs::metadata(v.at("f")).unwrap().mode() & 0o7777;
    fs::set_permissions(v.at("f"), fs::Permissions::from_mode(0o6755)).unwrap();
    assert_eq!(mode(), 0o6755);
    std::os::unix::fs::chown(v.at("f"), Some(1234), Some(4321)).unwrap();
    assert_eq!(mode(), 0o755);
    v.remount();
    let metadata = fs::metadata(v.at("f")).unwrap();
    assert_eq!((metadata.uid(), metadata.gid()), (1234, 4321));
}

#[test]
fn a_write_by_another_user_drops_set_id() {
    let v = Volume::mounted();
    fs::write(v.at("f"), b"x").unwrap();
    fs::set_permissions(v.at("f"), fs::Permissions::from_mode(0o6777)).unwrap();
    let mode = || fs::metadata(v.at("f")).unwrap().mode() & 0o7777;
    let as_nobody = |script: &str| {
        let mut command = Command::new("setpriv");
        command.args([
            "--reuid",
            "65534",
            "--regid",
            "65534",
            "--clear-groups",
            "sh",
            "-c",
            script,
        ]);
        command.current_dir(v.mnt());
        succeed(&mut command)
    };
    super::support::open_to_all(&v.mnt());
    as_nobody("echo y >> f");
    assert_eq!(mode(), 0o777);
    fs::set_permissions(v.at("f"), fs::Permissions::from_mode(0o6777)).unwrap();
    as_nobody(": > f");
    assert_eq!(mode(), 0o777, "truncation is a change too");
}

#[test]
fn permissions_are_checked_by_the_kernel() {
    let v = Volume::mounted();
    fs::write(v.at("secret"), b"x").unwrap();
    fs::set_permissions(v.at("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    let mut command = Command::new("setpriv");
    command.args([
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        "cat",
        "secret",
    ]);
    let output = output(command.current_dir(v.mnt()));
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("Permission denied"));
}

#[test]
fn extended_attributes_are_set_listed_replaced_and_removed() {
    let v = Volume::mounted();
    let path = v.at("f");
    fs::write(&path, b"x").unwrap();
    let set = |value: &[u8], flags| setxattr(&path, "user.name", value, flags);
    assert_eq!(set(b"v", XattrFlags::REPLACE), Err(Errno::NODATA));
    set(b"v", XattrFlags::CREATE).unwrap();
    assert_eq!(set(b"v", XattrFlags::CREATE), Err(Errno::EXIST));
    let large = vec![7u8; 4000];
    set(&large, XattrFlags::REPLACE).unwrap();
    v.remount();
    let mut value = vec![0u8; 5000];
    assert_eq!(getxattr(&path, "user.name", &mut value[..]), Ok(4000));
    assert_eq!(value[..4000], large);
    assert_eq!(
        getxattr(&path, "user.name", &mut value[..10]),
        Err(Errno::RANGE)
    );
    let mut names = [0u8; 100];
    let length = listxattr(&path, &mut names[..]).unwrap();
    assert_eq!(&names[..length], b"user.name\0");
    removexattr(&path, "user.name").unwrap();
    assert_eq!(
        getxattr(&path, "user.name", &mut value[..]),
        Err(Errno::NODATA)
    );
    assert_eq!(removexattr(&path, "user.name"), Err(Errno::NODATA));
}

#[test]
fn access_control_lists_grant_deny_and_are_inherited() {
    let v = Volume::mounted();
    super::support::open_to_all(&v.mnt());
    fs::write(v.at("f"), b"for nobody too").unwrap();
    fs::set_permissions(v.at("f"), fs::Permissions::from_mode(0o600)).unwrap();
    let mnt = v.mnt();
    let sh = |script: &str| output(Command::new("sh").args(["-c", script]).current_dir(&mnt));
    let nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups";
    assert!(!sh(&format!("{nobody} cat f")).status.success());
    succeed(
        Command::new("setfacl")
            .args(["-m", "u:65534:r", "f"])
            .current_dir(&mnt),
    );
    assert!(sh(&format!("{nobody} cat f")).status.success());
    assert!(
        !sh(&format!("{nobody} sh -c 'echo x >> f'"))
            .status
            .success()
    );
    let listed = succeed(Command::new("getfacl").args(["-n", "f"]).current_dir(&mnt));
    assert!(
        listed.contains("user:65534:r--") && listed.contains("mask::r--"),
        "{listed}"
    );
    // chmod changes the mask, and the mask limits the granted rights.
    fs::set_permissions(v.at("f"), fs::Permissions::from_mode(0o600)).unwrap();
    assert!(!sh(&format!("{nobody} cat f")).status.success());

    fs::create_dir(v.at("d")).unwrap();
    succeed(
        Command::new("setfacl")
            .args(["-d", "-m", "u:65534:rw", "d"])
            .current_dir(&mnt),
    );
    fs::write(v.at("d/new"), b"x").unwrap();
    fs::create_dir(v.at("d/sub")).unwrap();
    let listed = succeed(
        Command::new("getfacl")
            .args(["-n", "d/new", "d/sub"])
            .current_dir(&mnt),
    );
    assert!(
        listed.contains("user:65534:rw-") && listed.contains("default:user:65534:rw-"),
        "{listed}"
    );
}

#[test]
fn the_umask_applies_where_there_is_no_default_list() {
    let v = Volume::mounted();
    let mnt = v.mnt();
    succeed(
        Command::new("sh")
            .args(["-c", "umask 027; : > f; mkdir d"])
            .current_dir(&mnt),
    );
    assert_eq!(fs::metadata(v.at("f")).unwrap().mode() & 0o7777, 0o640);
    assert_eq!(fs::metadata(v.at("d")).unwrap().mode() & 0o7777, 0o750);
}

#[test]
fn a_set_group_id_directory_hands_its_group_down() {
    let v = Volume::mounted();
    fs::create_dir(v.at("d")).unwrap();
    std::os::unix::fs::chown(v.at("d"), None, Some(4321)).unwrap();
    fs::set_permissions(v.at("d"), fs::Permissions::from_mode(0o2775)).unwrap();
    fs::write(v.at("d/f"), b"x").unwrap();
    fs::create_dir(v.at("d/sub")).unwrap();
    assert_eq!(fs::metadata(v.at("d/f")).unwrap().gid(), 4321);
    let sub = fs::metadata(v.at("d/sub")).unwrap();
    assert_eq!((sub.gid(), sub.mode() & 0o2000), (4321, 0o2000));
}
