//! Extended attributes of paths.

use std::io;
use std::path::Path;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

/// The kernel's limit on a value (XATTR_SIZE_MAX); filesystems behind FUSE may ignore it.
const USUAL_BYTES_MAX: usize = 64 << 10;

/// The value of an attribute, `None` when the file has none of that name. A symbolic link is
/// followed when `follow`. Errors: ENOENT, EACCES, EOPNOTSUPP, ERANGE for a name too long.
pub fn get(path: &Path, name: &str, follow: bool) -> io::Result<Option<Vec<u8>>> {
    // Nearly all values fit; one that grows while it is read, or is larger, takes another round.
    let mut value = vec![0u8; 256];
    loop {
        let result = if follow {
            rustix::fs::getxattr(path, name, &mut value[..])
        } else {
            rustix::fs::lgetxattr(path, name, &mut value[..])
        };
        match result {
            Ok(len) => {
                value.truncate(len);
                return Ok(Some(value));
            }
            Err(Errno::NODATA) => return Ok(None),
            Err(Errno::RANGE) if value.len() <= USUAL_BYTES_MAX * 16 => {
                let larger = value.len() * 4;
                value.resize(larger, 0);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sets an attribute, new or not. Errors: ENOSPC, EACCES, EPERM, EOPNOTSUPP, E2BIG.
pub fn set(path: &Path, name: &str, value: &[u8], follow: bool) -> io::Result<()> {
    if follow {
        rustix::fs::setxattr(path, name, value, XattrFlags::empty())?;
    } else {
        rustix::fs::lsetxattr(path, name, value, XattrFlags::empty())?;
    }
    Ok(())
}

/// Removes an attribute. False when there was none.
pub fn remove(path: &Path, name: &str, follow: bool) -> io::Result<bool> {
    let removed = if follow {
        rustix::fs::removexattr(path, name)
    } else {
        rustix::fs::lremovexattr(path, name)
    };
    match removed {
        Ok(()) => Ok(true),
        Err(Errno::NODATA) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_of_any_size_is_read_as_it_was_set() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let name = "user.jericho.test";
        match set(file.path(), name, b"", true) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                eprintln!("SKIPPED: no user xattrs in the temporary directory");
                return;
            }
            result => result.unwrap(),
        }
        for len in [0, 1, 255, 256, 257, 3000] {
            let value = vec![b'v'; len];
            set(file.path(), name, &value, true).unwrap();
            assert_eq!(get(file.path(), name, true).unwrap(), Some(value));
        }
        assert!(remove(file.path(), name, true).unwrap());
        assert!(!remove(file.path(), name, true).unwrap());
        assert_eq!(get(file.path(), name, true).unwrap(), None);
    }

    #[test]
    fn a_link_is_followed_only_when_asked() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        let followed = get(&link, "user.jericho.test", true).unwrap_err();
        assert_eq!(followed.kind(), io::ErrorKind::NotFound);
        assert_eq!(get(&link, "user.jericho.test", false).unwrap(), None);
    }
}
