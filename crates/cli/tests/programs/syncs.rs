//! sync(2) and syncfs(2) under `jericho run`; the kernel does not tell a FUSE daemon about them.

use crate::program::{outcome, succeed, under_run};
use crate::volume::Volume;

#[test]
fn data_written_before_a_sync_under_run_survives_a_killed_daemon() {
    for arguments in [&[][..], &["-f", "written"]] {
        let volume = Volume::mounted("256M", 2, "32M");
        let dir = volume.make_dir("dir");
        // A program that does not sync writes several megabytes, inline and through the mount.
        let write =
            "head -c 3000000 /dev/zero | tr '\\0' x > written && head -c 1000 written > small";
        succeed(under_run("sh").args(["-e", "-c", write]).current_dir(&dir));
        succeed(under_run("sync").args(arguments).current_dir(&dir));
        volume.crash();
        volume.mount();
        let written = std::fs::read(dir.join("written")).expect("the file was synced");
        assert!(written.len() == 3_000_000 && written.iter().all(|byte| *byte == b'x'));
        let small = std::fs::read(dir.join("small")).expect("the file was synced");
        assert_eq!(small, [b'x'; 1000]);
        volume.finish();
    }
}

#[test]
fn a_sync_of_a_file_outside_the_mount_works_as_usual() {
    let volume = Volume::mounted("256M", 1, "32M");
    let file = volume.outside("elsewhere");
    std::fs::write(&file, "x").expect("a file");
    succeed(under_run("sync").arg("-f").arg(&file));
    let failed = outcome(under_run("sync").arg("-f").arg(volume.at("missing")));
    assert!(!failed.status.success());
    volume.finish();
}
