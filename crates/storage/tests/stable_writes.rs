//! Filesystems on which the memory of a direct write must stay unchanged.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use jericho_storage::{OpenOptions, open_device};

/// A mount below a temporary directory; ends when dropped.
struct Mount<'d>(&'d Path);

impl<'d> Mount<'d> {
    fn new(what: &str, options: &str, at: &'d Path) -> Mount<'d> {
        std::fs::create_dir_all(at).expect("mkdir");
        let mut mount = Command::new("mount");
        let mount = mount.args(["-o", options]).arg(what).arg(at);
        run(mount);
        Mount(at)
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).output();
    }
}

fn run(command: &mut Command) {
    let output = command.output().expect("the program runs");
    assert!(output.status.success(), "{command:?}: {output:?}");
}

fn needs_stable_writes(dir: &Path) -> bool {
    let options = OpenOptions {
        create_size: Some(1 << 20),
        ..OpenOptions::default()
    };
    let device = open_device(&dir.join("volume"), options).expect("a device");
    device.needs_stable_writes()
}

#[test]
fn a_filesystem_that_checksums_data_and_one_that_may_hide_it_need_stable_writes() {
    if jericho_sys::process::effective_uid() != 0 || !Path::new("/dev/loop-control").exists() {
        eprintln!("SKIPPED: filesystems cannot be mounted here (root, /dev/loop-control)");
        return;
    }
    for (make, needs) in [("mkfs.ext4", false), ("mkfs.btrfs", true)] {
        let dir = tempfile::tempdir().expect("a directory");
        let image = dir.path().join("image");
        let made = File::create(&image).and_then(|file| file.set_len(256 << 20));
        made.expect("an image");
        run(Command::new(make).arg("-q").arg(&image));
        let below = dir.path().join("below");
        let _below = Mount::new(&image.display().to_string(), "loop", &below);
        assert_eq!(needs_stable_writes(&below), needs, "{make}");

        for name in ["lower", "upper", "work"] {
            std::fs::create_dir(below.join(name)).expect("mkdir");
        }
        let part = |name| below.join(name).display().to_string();
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            part("lower"),
            part("upper"),
            part("work")
        );
        let over = dir.path().join("over");
        std::fs::create_dir(&over).expect("mkdir");
        run(Command::new("mount")
            .args(["-t", "overlay", "-o", &options, "none"])
            .arg(&over));
        let _over = Mount(&over);
        assert!(needs_stable_writes(&over), "overlayfs over {make}");
    }
}
