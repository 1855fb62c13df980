//! Tells umount(8) which helper unmounts a Jericho volume.
//!
//! umount(8) takes the type of a FUSE mount from statfs, which does not know the subtype: it would look for a helper of
//! all FUSE mounts. Its own table, /run/mount/utab, has the last word. An entry is made only as root and where the helper
//! is installed, and is gone with the daemon.

use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

const HELPER: &str = "/sbin/umount.fuse.jericho";
const DIRECTORY: &str = "/run/mount";

/// The entry of a mount, taken out when this is dropped.
pub struct Entry {
    target: Option<PathBuf>,
}

/// Enters a mount of a volume. A failure is logged: it costs a volume nothing but the helper.
pub fn enter(volume: &Path, dir: &Path) -> Entry {
    let wanted = rustix::process::geteuid().is_root() && Path::new(HELPER).exists();
    let line = format!(
        "SRC={} TARGET={} ROOT=/ OPTS=uhelper=fuse.jericho\n",
        escaped(volume),
        escaped(dir)
    );
    let entered = wanted && logged(rewrite(dir, &line));
    Entry {
        target: entered.then(|| dir.to_owned()),
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(target) = &self.target {
            logged(rewrite(target, ""));
        }
    }
}

fn logged(result: io::Result<()>) -> bool {
    if let Err(error) = &result {
        tracing::warn!(%error, "umount(8) does not know of its helper");
    }
    result.is_ok()
}

/// Replaces the entries of a directory by a line, perhaps an empty one.
fn rewrite(dir: &Path, line: &str) -> io::Result<()> {
    let directory = Path::new(DIRECTORY);
    fs::create_dir_all(directory)?;
    let mut options = File::options();
    let lock = options.create(true).truncate(false).write(true);
    let lock = lock.open(directory.join("utab.lock"))?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
    let table = directory.join("utab");
    let old = match fs::read_to_string(&table) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        other => other?,
    };
    let target = format!("TARGET={}", escaped(dir));
    let others = old.lines().filter(|l| !l.split(' ').any(|f| f == target));
    let mut new: String = others.map(|l| format!("{l}\n")).collect();
    new += line;
    let temporary = directory.join("utab.jericho");
    fs::write(&temporary, new)?;
    fs::rename(temporary, table)
}

/// A path in the table: blanks and backslashes in octal.
fn escaped(path: &Path) -> String {
    let bytes = path.as_os_str().as_bytes();
    let text = String::from_utf8_lossy(bytes);
    let escape = |c: char| match c {
        ' ' | '\t' | '\n' | '\\' => format!("\\{:03o}", c as u32),
        c => c.to_string(),
    };
    text.chars().map(escape).collect()
}
