//! The kernel's list of mounts.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use jericho_fuse::control::STAT;
use jericho_storage::is_remote;

use crate::failure::{Context, Failure};

/// Type of Jericho's mounts in the kernel's list.
pub const FILESYSTEM: &str = "fuse.jericho";

/// One line of /proc/self/mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// st_dev of files on the mount, as (major, minor).
    pub device: (u32, u32),
    /// The mount point.
    pub dir: PathBuf,
    /// Type, for example ext4 or fuse.jericho.
    pub filesystem: String,
    /// The mounted device or directory; for Jericho, the path or name of the volume.
    pub source: PathBuf,
    /// The user that made a FUSE mount. `None` for other types.
    pub user: Option<u32>,
}

/// Returns all mounts that this process sees. Of several mounts on one directory, the last one is visible.
pub fn list() -> Result<Vec<Mount>, Failure> {
    let path = Path::new("/proc/self/mountinfo");
    seen_by(path).context(format_args!("cannot read {}", path.display()))
}

/// Returns the mounts in a process's file `mountinfo`.
pub fn seen_by(mountinfo: &Path) -> std::io::Result<Vec<Mount>> {
    let text = std::fs::read(mountinfo)?;
    Ok(text.split(|b| *b == b'\n').filter_map(parse).collect())
}

/// Returns the visible mount on exactly this directory (absolute, without links).
pub fn at(dir: &Path) -> Result<Option<Mount>, Failure> {
    Ok(list()?.into_iter().rfind(|m| m.dir == dir))
}

/// Returns the directory through which the daemon of a mounted volume is asked: `path` itself if it is a directory, else the mount
/// of the volume whose first device it is. Returns `None` if the volume is not mounted here.
pub fn of_volume(path: &Path) -> Result<Option<PathBuf>, Failure> {
    let mounts = || Ok(list()?.into_iter().filter(|m| m.filesystem == FILESYSTEM));
    if is_remote(path) {
        return Ok(mounts()?.find(|mount| mount.source == path).map(|m| m.dir));
    }
    let wanted = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Ok(Some(path.into())),
        // The request tells the user what to do.
        Err(error) if says_dead(&error) => return Ok(Some(path.into())),
        Ok(metadata) => metadata,
        // The error of opening the volume is better.
        Err(_) => return Ok(None),
    };
    let is_it = |source: &Path| {
        std::fs::metadata(source).is_ok_and(|metadata| {
            match wanted.file_type().is_block_device() && metadata.file_type().is_block_device() {
                true => metadata.rdev() == wanted.rdev(),
                false => (metadata.dev(), metadata.ino()) == (wanted.dev(), wanted.ino()),
            }
        })
    };
    Ok(mounts()?
        .find(|mount| is_it(&mount.source))
        .map(|mount| mount.dir))
}

fn parse(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|b| *b == b' ');
    let device = std::str::from_utf8(fields.nth(2)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let dir = fields.nth(1)?;
    let mut rest = fields.skip_while(|f| *f != b"-").skip(1);
    let filesystem = String::from_utf8(rest.next()?.to_vec()).ok()?;
    let source = rest.next()?;
    let options = std::str::from_utf8(rest.next().unwrap_or_default()).unwrap_or_default();
    let user = (filesystem == "fuse" || filesystem.starts_with("fuse."))
        .then(|| options.split(',').find_map(|o| o.strip_prefix("user_id=")))
        .flatten();
    Some(Mount {
        device: (major.parse().ok()?, minor.parse().ok()?),
        dir: unescape(dir),
        filesystem,
        source: unescape(source),
        user: user.and_then(|user| user.parse().ok()),
    })
}

/// Decodes a field. The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut i = 0;
    while i < field.len() {
        let octal = field.get(i + 1..i + 4).filter(|d| {
            field[i] == b'\\' && d.iter().all(|c| (b'0'..=b'7').contains(c)) && d[0] <= b'3'
        });
        if let Some(d) = octal {
            out.push((d[0] - b'0') << 6 | (d[1] - b'0') << 3 | (d[2] - b'0'));
            i += 4;
        } else {
            out.push(field[i]);
            i += 1;
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

/// Returns the absolute path of a directory. The directory may be a mount whose daemon has died and that answers nothing; then
/// only its parent is resolved.
pub fn resolve(dir: &Path) -> Result<PathBuf, Failure> {
    match std::fs::canonicalize(dir) {
        Ok(path) => Ok(path),
        Err(e) if says_dead(&e) => {
            let trimmed = OsString::from_vec(trim_slashes(dir.as_os_str().as_bytes()).to_vec());
            let path = std::path::absolute(PathBuf::from(trimmed))
                .context(format_args!("cannot find {}", dir.display()))?;
            let parent = path.parent().unwrap_or(Path::new("/"));
            let parent = std::fs::canonicalize(parent)
                .context(format_args!("cannot find {}", parent.display()))?;
            Ok(parent.join(path.file_name().unwrap_or_default()))
        }
        Err(e) => Err(Failure::new(format!("cannot find {}: {e}", dir.display()))),
    }
}

/// Returns whether a directory is a mount whose daemon has died. The kernel may answer stat(2) from its cache then, so this asks the daemon.
pub fn is_dead(dir: &Path) -> bool {
    let asked = rustix::fs::lgetxattr(dir, STAT, &mut [] as &mut [u8]);
    asked.is_err_and(|errno| says_dead(&errno.into()))
}

/// Returns whether an error means that a mount's daemon has died: ENOTCONN, or for a moment ECONNABORTED or ECANCELED, when the
/// daemon served the mount over the FUSE ring.
pub fn says_dead(error: &std::io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOTCONN | libc::ECONNABORTED | libc::ECANCELED)
    )
}

fn trim_slashes(path: &[u8]) -> &[u8] {
    let end = path
        .iter()
        .rposition(|b| *b != b'/')
        .map_or(path.len().min(1), |p| p + 1);
    &path[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_mountinfo_is_parsed_with_its_escapes() {
        let line = b"36 35 0:52 / /mnt/my\\040dir rw,noatime shared:1 - fuse.jericho /a\\134b rw";
        assert_eq!(
            parse(line),
            Some(Mount {
                device: (0, 52),
                dir: "/mnt/my dir".into(),
                filesystem: FILESYSTEM.into(),
                source: "/a\\b".into(),
                user: None,
            })
        );
        let user = |line: &[u8]| parse(line).unwrap().user;
        let options = b"36 35 0:52 / /mnt rw - fuse.x user_id=7 rw,user_id=1000,group_id=5";
        assert_eq!(user(options), Some(1000));
        assert_eq!(user(b"36 35 0:52 / /mnt rw - ext4 /a rw,user_id=0"), None);
        assert_eq!(parse(b""), None);
        assert_eq!(parse(b"36 35 0:52 / /mnt"), None);
    }

    #[test]
    fn every_error_of_a_dead_mount_is_known() {
        let says_dead = |errno| says_dead(&std::io::Error::from_raw_os_error(errno));
        for errno in [libc::ENOTCONN, libc::ECONNABORTED, libc::ECANCELED] {
            assert!(says_dead(errno));
        }
        assert!(!says_dead(libc::ENOENT));
    }

    #[test]
    fn trailing_slashes_do_not_change_the_directory() {
        assert_eq!(trim_slashes(b"/mnt//"), b"/mnt");
        assert_eq!(trim_slashes(b"/"), b"/");
        assert_eq!(trim_slashes(b"a"), b"a");
    }
}
