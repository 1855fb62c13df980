//! Copies of whole trees into the volume and out of it keep all metadata.

use std::path::Path;

use crate::program::{command, run_in, shell_in, succeed};
use crate::volume::Volume;

/// Makes a tree with every kind of file and attribute that a backup has to keep.
fn make_tree(dir: &Path) {
    shell_in(
        dir,
        "mkdir -p tree/a/b/c tree/empty
         cd tree
         for n in $(seq 200); do seq $n > a/b/file$n; done
         ln a/b/file1 hard
         ln -s a/b/file2 soft
         ln -s /nonexistent dangling
         mkfifo pipe
         truncate -s 64M sparse
         printf data | dd of=sparse bs=1 seek=33554432 conv=notrunc status=none
         touch -d '1999-12-31 23:59:59.123456789' a/b/file3
         touch -d '2061-07-28 00:00:00.000000001' a/b
         chmod 4755 a/b/file4
         chmod 2770 a/b/c
         chmod 000 a/b/file5
         setfattr -n user.note -v 'a value' a/b/file6
         setfattr -n user.note -v 'of a directory' a
         setfacl -m u:12345:rw,g:54321:r a/b/file7
         setfacl -d -m u:12345:rwx a/b/c
         printf 'name with spaces' > 'a name with spaces'
         printf 'not UTF-8' > \"$(printf 'caf\\351')\"
         head -c 300000 /dev/urandom > random",
    );
    if is_root() {
        shell_in(
            dir,
            "cd tree
             chown 1234:4321 a/b/file8
             mknod null c 1 3
             mknod block b 7 0
             setcap=$(command -v setcap || true)
             if [ -n \"$setcap\" ]; then cp /bin/true capable && setcap cap_net_raw+ep capable; fi",
        );
    }
}

fn is_root() -> bool {
    succeed(command("id").arg("-u")).trim() == "0"
}

/// Asserts that two trees have the same content and metadata, with times equal to the nanosecond.
fn assert_same(dir: &Path, from: &Path, to: &Path) {
    let (from, to) = (format!("{}/", from.display()), format!("{}/", to.display()));
    let differences = run_in(
        dir,
        "rsync",
        &[
            "-aHAXn",
            "--delete",
            "--checksum",
            "--modify-window=-1",
            "--itemize-changes",
            &from,
            &to,
        ],
    );
    assert_eq!(
        differences.trim(),
        "",
        "differences between {from} and {to}"
    );
}

#[test]
fn a_tree_copied_by_tar_keeps_its_metadata() {
    let volume = Volume::mounted("512M", 2, "16M");
    let outside = volume.outside("outside");
    std::fs::create_dir(&outside).expect("mkdir");
    make_tree(&outside);
    let dir = volume.make_dir("tar");
    shell_in(
        &dir,
        &format!(
            "tar -C {} --xattrs --acls --sparse -cf - tree | tar --xattrs --xattrs-include='*' --acls -xpf -",
            outside.display()
        ),
    );
    assert_same(&dir, &outside.join("tree"), &dir.join("tree"));
    let blocks = succeed(
        command("stat")
            .args(["-c", "%b"])
            .arg(dir.join("tree/sparse")),
    );
    assert!(
        blocks.trim().parse::<u64>().expect("a number") < 2048,
        "the copy of the sparse file takes {blocks} sectors"
    );
    volume.remount();
    assert_same(&dir, &outside.join("tree"), &dir.join("tree"));
    volume.finish();
}

#[test]
fn a_tree_copied_by_rsync_into_the_volume_and_back_is_unchanged() {
    let volume = Volume::mounted("512M", 2, "16M");
    let outside = volume.outside("outside");
    std::fs::create_dir(&outside).expect("mkdir");
    make_tree(&outside);
    let dir = volume.make_dir("rsync");
    let copy = |from: &Path, to: &Path| {
        let (from, to) = (format!("{}/", from.display()), format!("{}/", to.display()));
        run_in(
            &dir,
            "rsync",
            &["-aHAX", "--sparse", "--modify-window=-1", &from, &to],
        );
    };
    copy(&outside.join("tree"), &dir.join("tree"));
    assert_same(&dir, &outside.join("tree"), &dir.join("tree"));
    volume.remount();
    copy(&dir.join("tree"), &outside.join("back"));
    assert_same(&dir, &outside.join("tree"), &outside.join("back"));
    volume.finish();
}
