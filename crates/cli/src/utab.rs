//! Tells umount(8) which helper unmounts a Jericho volume.
//!
//! umount(8) gets the type of a FUSE mount from statfs, which does not know the subtype, so it would search for a helper of all
//! FUSE mounts. Its own table, /run/mount/utab, overrides that. The daemon adds an entry only as root and if the helper is
//! installed, and removes it when it ends.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::FlockOperation;

const HELPER: &str = "/sbin/umount.fuse.jericho";
const DIRECTORY: &str = "/run/mount";

/// The table's entry of a mount. Dropping it removes the entry.
pub struct Entry {
    line: Option<Line>,
}

/// Contents of an entry.
struct Line {
    source: String,
    target: String,
    options: &'static str,
}

/// Adds the entry of a mount. A failure is only logged: the mount then works without the helper.
pub fn enter(volume: &Path, dir: &Path) -> Entry {
    let needed = rustix::process::geteuid().is_root() && Path::new(HELPER).exists();
    let line = Line {
        source: format!("SRC={}", escaped(volume)),
        target: format!("TARGET={}", escaped(dir)),
        options: "OPTS=uhelper=fuse.jericho",
    };
    let entered = needed && logged(rewrite(&line, true));
    Entry {
        line: entered.then_some(line),
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(line) = &self.line {
            logged(rewrite(line, false));
        }
    }
}

impl Line {
    /// Returns whether a line of the table is this entry, perhaps with more fields. Other lines of the same directory belong to
    /// other mounts there.
    fn is(&self, line: &str) -> bool {
        let has = |field: &str| line.split(' ').any(|f| f == field);
        has(&self.source) && has(&self.target) && has(self.options)
    }
}

fn logged(result: io::Result<()>) -> bool {
    if let Err(error) = &result {
        tracing::warn!(%error, "umount(8) does not know of its helper");
    }
    result.is_ok()
}

/// Adds a line to the table, or removes it.
fn rewrite(line: &Line, put: bool) -> io::Result<()> {
    let directory = Path::new(DIRECTORY);
    if !directory.exists() {
        fs::create_dir_all(directory)?;
        fs::set_permissions(directory, Permissions::from_mode(0o755))?;
    }
    let mut options = File::options();
    let lock = options.create(true).truncate(false).write(true);
    let lock = lock.open(directory.join("utab.lock"))?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
    let table = directory.join("utab");
    let old = match fs::read_to_string(&table) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        other => other?,
    };
    let mut new: String = (old.lines().filter(|other| !line.is(other)))
        .map(|other| format!("{other}\n"))
        .collect();
    if put {
        new += &format!("{} {} ROOT=/ {}\n", line.source, line.target, line.options);
    }
    let temporary = directory.join("utab.jericho");
    fs::write(&temporary, new)?;
    // All users read the table, independent of the daemon's umask.
    fs::set_permissions(&temporary, Permissions::from_mode(0o644))?;
    fs::rename(temporary, table)
}

/// Returns a path in the table's notation: blanks and backslashes in octal.
fn escaped(path: &Path) -> String {
    let bytes = path.as_os_str().as_bytes();
    let text = String::from_utf8_lossy(bytes);
    let escape = |c: char| match c {
        ' ' | '\t' | '\n' | '\\' => format!("\\{:03o}", c as u32),
        c => c.to_string(),
    };
    text.chars().map(escape).collect()
}
