//! An operation whose caller was interrupted changes nothing, and one that changes something is not interrupted any more.

mod mount;

use std::sync::Arc;

use jericho_fs::types::{Attr, Caller, Ino, Kind, ROOT, SetAttr};
use jericho_fs::{Fs, Interruption, Result, with_interruption};

use mount::Mount;

const EINTR: i32 = 4;
const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    umask: 0,
};

type Operation = (&'static str, fn(&Fs, Ino) -> Result<()>);

/// Each operation on names and attributes, with the inode of the file `file`. All succeed, one after the other.
const OPERATIONS: [Operation; 14] = [
    ("mkdir", |fs, _| {
        made(fs.mkdir(ROOT, b"made", 0o755, CALLER))
    }),
    ("mknod", |fs, _| {
        made(fs.mknod(ROOT, b"fifo", Kind::Fifo, 0o644, 0, CALLER))
    }),
    ("symlink", |fs, _| {
        made(fs.symlink(ROOT, b"symlink", b"target", CALLER))
    }),
    ("tmpfile", |fs, _| made(fs.tmpfile(ROOT, 0o644, CALLER))),
    ("link", |fs, file| made(fs.link(file, ROOT, b"link"))),
    ("rename to a new name", |fs, _| {
        fs.rename(ROOT, b"link", ROOT, b"moved", 0)
    }),
    ("rename over a file", |fs, _| {
        fs.rename(ROOT, b"symlink", ROOT, b"fifo", 0)
    }),
    ("exchange", |fs, _| {
        fs.rename(ROOT, b"made", ROOT, b"fifo", 2)
    }),
    ("unlink", |fs, _| fs.unlink(ROOT, b"moved")),
    ("rmdir", |fs, _| fs.rmdir(ROOT, b"fifo")),
    ("setxattr", |fs, file| fs.setxattr(file, b"user.a", b"1", 0)),
    ("removexattr", |fs, file| fs.removexattr(file, b"user.a")),
    ("chmod", |fs, file| {
        let perm = Some(0o4600);
        let set = SetAttr {
            perm,
            ..SetAttr::default()
        };
        fs.setattr(file, set, CALLER).map(drop)
    }),
    ("truncate", |fs, file| {
        let size = Some(10_000);
        let set = SetAttr {
            size,
            ..SetAttr::default()
        };
        fs.setattr(file, set, CALLER).map(drop)
    }),
];

fn made(result: Result<Attr>) -> Result<()> {
    result.map(drop)
}

/// Returns everything that the operations may change.
fn state(fs: &Fs, file: Ino) -> String {
    let mut names = Vec::new();
    let mut add = |entry: jericho_fs::types::DirEntry| {
        names.push((entry.name, entry.ino, entry.kind));
        true
    };
    fs.readdir(ROOT, 0, &mut add).unwrap();
    let attributes = (fs.getattr(ROOT).unwrap(), fs.getattr(file).unwrap());
    let inodes = fs.statfs().unwrap().files_free;
    let (all, xattrs) = ((names, attributes, inodes), fs.listxattr(file).unwrap());
    format!("{all:?} {xattrs:?}")
}

#[test]
fn an_interrupted_operation_changes_nothing_and_one_that_changes_something_is_not_interrupted() {
    let mut mount = Mount::new(64 << 20);
    mount.up();
    let (file, open) = mount.create("file");
    let fs = mount.fs().clone();
    for (name, operation) in OPERATIONS {
        let before = state(&fs, file);
        let interruption = Arc::new(Interruption::default());
        assert_eq!(interruption.interrupt(), Some(0));
        let run = || operation(&fs, file);
        let ended = with_interruption(Some(interruption), run);
        assert_eq!(ended.map_err(|error| error.errno()), Err(EINTR), "{name}");
        assert_eq!(state(&fs, file), before, "{name}");
        let interruption = Arc::new(Interruption::default());
        with_interruption(Some(interruption.clone()), run).unwrap();
        assert_ne!(state(&fs, file), before, "{name}");
        assert_eq!(
            interruption.interrupt(),
            None,
            "{name} has changed something"
        );
    }
    drop((open, fs));
    mount.down();
    mount.assert_sound();
}

#[test]
fn an_interrupted_change_of_contents_keeps_the_privileges_of_a_file() {
    let mut mount = Mount::new(64 << 20);
    mount.up();
    let (file, _open) = mount.create("file");
    let fs = mount.fs();
    fs.setxattr(file, jericho_fs::CAPABILITY, b"x", 0).unwrap();
    let interruption = Arc::new(Interruption::default());
    interruption.interrupt();
    let ended = with_interruption(Some(interruption), || fs.drop_privileges(file, false));
    assert_eq!(ended.map_err(|error| error.errno()), Err(EINTR));
    assert!(fs.has_privileges(file).unwrap());
}
