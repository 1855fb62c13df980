//! format allocates all space of the volume on the host, also if the host can allocate only by writes. If the host has too little
//! space, format fails and keeps none.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::support::loops::Loop;
use super::support::{fail, jericho, succeed};

const MIB: u64 = 1 << 20;

/// A mounted filesystem on a loop device.
struct Host {
    dir: tempfile::TempDir,
    _device: Loop,
}

impl Host {
    /// Makes and mounts a filesystem. Returns `None` and prints a message if this user or machine has no loop devices.
    fn new(make: &str, mib: u64) -> Option<Host> {
        let dir = tempfile::tempdir().expect("a directory");
        let image = dir.path().join("image");
        File::create(&image)
            .and_then(|file| file.set_len(mib * MIB))
            .expect("an image");
        let device = Loop::over(&image)?;
        let host = Host {
            dir,
            _device: device,
        };
        succeed(Command::new(make).arg("-q").arg(&host._device.0));
        fs::create_dir(host.disk()).expect("mkdir");
        succeed(Command::new("mount").arg(&host._device.0).arg(host.disk()));
        Some(host)
    }

    fn disk(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    fn volume(&self) -> PathBuf {
        self.disk().join("volume")
    }

    fn free_bytes(&self) -> u64 {
        rustix::fs::syncfs(File::open(self.disk()).expect("open")).expect("syncfs");
        let stat = rustix::fs::statvfs(self.disk()).expect("statvfs");
        stat.f_bfree * stat.f_frsize
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.disk()).output();
    }
}

fn stored_bytes(path: &Path) -> u64 {
    fs::metadata(path).expect("metadata").blocks() * 512
}

/// A filesystem that allocates without writing, and one that cannot.
const HOSTS: [&str; 2] = ["mkfs.ext4", "mkfs.ext2"];

#[test]
fn format_writes_the_space_on_a_host_that_cannot_allocate_it() {
    let Some(host) = Host::new(HOSTS[1], 64) else {
        return;
    };
    let file = File::create(host.disk().join("file")).expect("create");
    let refused = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 4096);
    assert_eq!(refused, Err(rustix::io::Errno::OPNOTSUPP));
    succeed(jericho(["format", "--size", "32M"]).arg(host.volume()));
    assert!(stored_bytes(&host.volume()) >= 32 * MIB);
    succeed(jericho(["check"]).arg(host.volume()));
}

#[test]
fn a_new_volume_without_space_on_the_host_leaves_no_file() {
    for make in HOSTS {
        let Some(host) = Host::new(make, 48) else {
            return;
        };
        let free = host.free_bytes();
        let said = fail(jericho(["format", "--size", "64M"]).arg(host.volume()), 1);
        assert!(said.contains("--sparse"), "{make}: {said}");
        assert!(!host.volume().exists(), "{make}");
        assert_eq!(host.free_bytes(), free, "{make}");
    }
}

#[test]
fn a_sparse_volume_without_space_on_the_host_is_not_changed() {
    for make in HOSTS {
        let Some(host) = Host::new(make, 48) else {
            return;
        };
        succeed(jericho(["format", "--size", "64M", "--sparse"]).arg(host.volume()));
        let (free, bytes) = (host.free_bytes(), fs::read(host.volume()).expect("read"));
        for size in [&[][..], &["--size", "80M"]] {
            let mut format = jericho(["format", "--force"]);
            let said = fail(format.args(size).arg(host.volume()), 1);
            assert!(said.contains("--sparse"), "{make}: {said}");
            assert_eq!(host.free_bytes(), free, "{make}, {size:?}");
            assert!(
                fs::read(host.volume()).expect("read") == bytes,
                "{make}, {size:?}: the refused format changed the file"
            );
            succeed(jericho(["check"]).arg(host.volume()));
        }
    }
}
