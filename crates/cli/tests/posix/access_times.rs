//! Mount options that control when a read changes the access time.
//!
//! The kernel notifies the daemon of changed options with a delay, so the tests wait up to a minute for the change.

use std::fs::{self, File, FileTimes};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;
use rustix::mount::{MountFlags, mount_remount};

use super::support::{Volume, succeed};

fn accessed(v: &Volume) -> SystemTime {
    fs::metadata(v.at("f")).unwrap().accessed().unwrap()
}

/// Sets the file's times, reads the file, and returns its access time.
fn read_after(v: &Volume, access: SystemTime, change: SystemTime) -> SystemTime {
    let times = FileTimes::new().set_accessed(access).set_modified(change);
    File::options()
        .write(true)
        .open(v.at("f"))
        .unwrap()
        .set_times(times)
        .unwrap();
    succeed(Command::new("cat").arg(v.at("f")));
    accessed(v)
}

fn at_last(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < limit, "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn reads_of_a_descriptor_with_o_noatime_leave_the_access_time() {
    let v = Volume::mounted();
    fs::write(v.at("f"), b"x").unwrap();
    let old = UNIX_EPOCH + Duration::from_secs(86_400);
    let mut options = File::options();
    let file = options.read(true).write(true).custom_flags(libc::O_NOATIME);
    let file = file.open(v.at("f")).unwrap();
    file.set_times(FileTimes::new().set_accessed(old)).unwrap();
    let read = || file.read_exact_at(&mut [0], 0).unwrap();
    read();
    assert_eq!(accessed(&v), old);
    rustix::fs::fcntl_setfl(&file, OFlags::empty()).unwrap();
    read();
    assert!(accessed(&v) > old);
    file.set_times(FileTimes::new().set_accessed(old)).unwrap();
    rustix::fs::fcntl_setfl(&file, OFlags::NOATIME).unwrap();
    read();
    assert_eq!(accessed(&v), old);
}

#[test]
fn changed_access_time_options_take_effect() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not tested: needs root (to remount)");
        return;
    }
    let v = Volume::mounted();
    fs::write(v.at("f"), b"x").unwrap();
    let remount = |flags| mount_remount(v.mnt(), MountFlags::BIND | flags, c"").unwrap();
    let day = Duration::from_secs(86_400);
    let (old, now) = (UNIX_EPOCH + day, SystemTime::now());

    // The default is relatime.
    assert!(
        read_after(&v, old, now) >= now,
        "relatime: a read must update an access time that is older than the last change"
    );
    for round in 0..2 {
        remount(MountFlags::NOATIME);
        at_last("noatime", || read_after(&v, old, now) == old);
        for _ in 0..5 {
            assert_eq!(read_after(&v, old, now), old, "round {round}");
        }
        remount(MountFlags::STRICTATIME);
        // This access time is newer than the change and less than a day old, so relatime would leave it.
        let later = SystemTime::now() + day;
        at_last("strictatime", || read_after(&v, later, now) != later);
        for _ in 0..5 {
            assert!(read_after(&v, later, now) < later, "round {round}");
        }
        remount(MountFlags::RELATIME);
        at_last("relatime", || read_after(&v, later, now) == later);
        assert!(read_after(&v, old, now) > old);
    }
}
