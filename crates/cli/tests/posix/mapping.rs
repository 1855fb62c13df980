//! Memory mappings, and programs that run from the mount.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use super::support::{Volume, pattern, succeed};

fn python(v: &Volume, script: &str) {
    succeed(
        Command::new("python3")
            .args(["-c", script])
            .current_dir(v.mnt()),
    );
}

#[test]
fn a_shared_mapping_changes_the_file() {
    let v = Volume::mounted();
    fs::write(v.at("f"), pattern(1, 100_000)).unwrap();
    python(
        &v,
        "import mmap\n\
         f = open('f', 'r+b')\n\
         m = mmap.mmap(f.fileno(), 0)\n\
         m[5000:5005] = b'hello'\n\
         m[99990:100000] = b'0123456789'\n\
         m.flush()\n\
         m.close()\n",
    );
    let mut expected = pattern(1, 100_000);
    expected[5000..5005].copy_from_slice(b"hello");
    expected[99_990..].copy_from_slice(b"0123456789");
    assert!(fs::read(v.at("f")).unwrap() == expected);
    v.remount();
    assert!(fs::read(v.at("f")).unwrap() == expected);
}

#[test]
fn a_shared_mapping_and_writes_see_each_other() {
    let v = Volume::mounted();
    fs::write(v.at("f"), vec![b'.'; 16_384]).unwrap();
    python(
        &v,
        "import mmap, os\n\
         f = os.open('f', os.O_RDWR)\n\
         m = mmap.mmap(f, 0)\n\
         assert m[0:4] == b'....'\n\
         m[0:4] = b'mmap'\n\
         assert os.pread(f, 4, 0) == b'mmap', 'read after a store'\n\
         os.pwrite(f, b'write', 8192)\n\
         assert m[8192:8197] == b'write', 'load after a write'\n\
         m[8197:8200] = b'!!!'\n\
         assert os.pread(f, 8, 8192) == b'write!!!'\n",
    );
}

#[test]
fn a_private_mapping_leaves_the_file_alone() {
    let v = Volume::mounted();
    fs::write(v.at("f"), b"unchanged").unwrap();
    python(
        &v,
        "import mmap\n\
         f = open('f', 'r+b')\n\
         m = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE)\n\
         m[0:2] = b'XX'\n\
         assert m[0:9] == b'XXchanged'\n",
    );
    assert_eq!(fs::read(v.at("f")).unwrap(), b"unchanged");
}

#[test]
fn programs_run_from_the_mount_and_again_after_they_were_replaced() {
    let v = Volume::mounted();
    fs::copy("/bin/ls", v.at("program")).unwrap();
    fs::set_permissions(v.at("program"), fs::Permissions::from_mode(0o755)).unwrap();
    assert!(succeed(Command::new(v.at("program")).arg(v.mnt())).contains("program"));
    fs::remove_file(v.at("program")).unwrap();
    fs::copy("/bin/echo", v.at("program")).unwrap();
    assert_eq!(
        succeed(Command::new(v.at("program")).arg("hello")),
        "hello\n"
    );
    fs::write(v.at("script"), "#!/bin/sh\necho from a script\n").unwrap();
    fs::set_permissions(v.at("script"), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(
        succeed(&mut Command::new(v.at("script"))),
        "from a script\n"
    );
    v.remount();
    assert_eq!(
        succeed(Command::new(v.at("program")).arg("again")),
        "again\n"
    );
}
