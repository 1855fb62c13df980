//! The marker of an attached disk: a file in the disk's directory, below the mount, which says that not everything is durable.
//!
//! The server makes the marker before the mount, holds a lock on it, and removes it when everything is durable. So a server that is killed
//! leaves it. The directory may belong to another user than the server, so a marker is reached by descriptor only, without links, and must be a
//! regular file of the calling user.

use std::fs::{File, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags};

/// The name of the file.
pub const NAME: &str = "not-durable";
/// The start of the file. After it comes the message. An empty file says that everything is durable.
const HEAD: &str = "jericho disk\n";
const KILLED: &str = "the server was killed before everything was durable";
/// Maximum size of a marker.
const BYTES_MAX: u64 = 64 << 10;

/// The marker of this process's disk.
pub struct Marker {
    dir: File,
    file: File,
}

impl Marker {
    /// Makes the marker in a directory. Fails with EEXIST if there is a file of its name.
    pub fn make(dir: &File) -> io::Result<Marker> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let file = open_at(dir, flags)?;
        file.try_lock()?;
        let marker = Marker {
            dir: dir.try_clone()?,
            file,
        };
        if marker.file.metadata()?.nlink() == 0 {
            // Another server has found it before it had a lock.
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        match marker.leave(KILLED) {
            Ok(()) => Ok(marker),
            Err(error) => {
                marker.remove();
                Err(error)
            }
        }
    }

    /// Replaces the message.
    pub fn leave(&self, message: &str) -> io::Result<()> {
        let text = format!("{HEAD}{message}");
        self.file.write_all_at(text.as_bytes(), 0)?;
        self.file.set_len(text.len() as u64)
    }

    /// Says that everything is durable: empties the marker and removes it.
    pub fn remove(&self) {
        let removed = self.file.set_len(0).and_then(|()| unlink(&self.dir));
        if let Err(error) = removed {
            tracing::warn!(%error, "cannot remove the file {NAME}");
        }
    }
}

/// A marker that a server has made.
pub struct Found {
    dir: File,
    file: File,
}

/// Opens a directory in which there may be a marker. Returns `None` if it does not exist.
pub fn directory(dir: &Path) -> io::Result<Option<File>> {
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
    match File::options().read(true).custom_flags(flags).open(dir) {
        Ok(dir) => Ok(Some(dir)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Opens the marker in a directory. Returns `None` if there is none. Fails if the file is no marker of this user.
pub fn find(dir: &File) -> io::Result<Option<Found>> {
    let file = match open_at(dir, OFlags::RDONLY | OFlags::NONBLOCK) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let metadata = file.metadata()?;
    let is_own = metadata.uid() == rustix::process::geteuid().as_raw();
    let found = Found {
        dir: dir.try_clone()?,
        file,
    };
    match metadata.is_file() && is_own && found.text()?.is_none_or(|text| text.starts_with(HEAD)) {
        true => Ok(Some(found)),
        false => Err(io::Error::other(format!(
            "{NAME} is not the file of a server of this user"
        ))),
    }
}

impl Found {
    /// Waits until the server has ended, and removes the marker. Returns the message of the server, or `None` if everything is durable.
    pub fn take_when_ended(self) -> io::Result<Option<String>> {
        self.file.lock_shared()?;
        self.take()
    }

    /// Removes the marker of a server that has ended. Fails while the server runs. Returns as `take_when_ended`.
    pub fn take_now(self) -> io::Result<Option<String>> {
        match self.file.try_lock_shared() {
            Ok(()) => self.take(),
            Err(TryLockError::WouldBlock) => Err(io::Error::other(
                "another disk is being attached or detached there, or programs still use one that was unmounted",
            )),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn take(self) -> io::Result<Option<String>> {
        let text = self.text()?;
        let named = rustix::fs::statat(&self.dir, NAME, AtFlags::SYMLINK_NOFOLLOW);
        let own = self.file.metadata()?;
        // Another server may have made a new one.
        if named.is_ok_and(|named| (named.st_dev, named.st_ino) == (own.dev(), own.ino())) {
            unlink(&self.dir)?;
        }
        Ok(text.map(|text| text.strip_prefix(HEAD).unwrap_or(&text).to_owned()))
    }

    /// Returns the contents, or `None` for an empty file.
    fn text(&self) -> io::Result<Option<String>> {
        let mut bytes = vec![];
        let file = File::from(rustix::io::dup(&self.file)?);
        rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
        file.take(BYTES_MAX).read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Ok((!text.is_empty()).then_some(text))
    }
}

fn open_at(dir: &File, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(dir, NAME, flags, Mode::RUSR | Mode::WUSR)?;
    Ok(file.into())
}

fn unlink(dir: &File) -> io::Result<()> {
    Ok(rustix::fs::unlinkat(dir, NAME, AtFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_stays_unless_everything_is_durable() {
        let dir = tempfile::tempdir().unwrap();
        let open = || directory(dir.path()).unwrap().unwrap();
        let find = || find(&open()).unwrap();
        assert!(find().is_none());
        let marker = Marker::make(&open()).unwrap();
        assert!(Marker::make(&open()).is_err());
        assert!(find().unwrap().take_now().is_err(), "its server runs");
        drop(marker);
        assert_eq!(find().unwrap().take_now().unwrap().unwrap(), KILLED);
        assert!(find().is_none());
        let marker = Marker::make(&open()).unwrap();
        marker.leave("no").unwrap();
        drop(marker);
        assert_eq!(find().unwrap().take_when_ended().unwrap().unwrap(), "no");
        let marker = Marker::make(&open()).unwrap();
        let found = find().unwrap();
        marker.remove();
        // A later server has nothing to do with it.
        let later = Marker::make(&open()).unwrap();
        drop(marker);
        assert_eq!(found.take_when_ended().unwrap(), None);
        drop(later);
        assert_eq!(find().unwrap().take_now().unwrap().unwrap(), KILLED);
        assert!(directory(&dir.path().join("none")).unwrap().is_none());
    }

    #[test]
    fn no_other_file_is_taken_for_a_marker() {
        let dir = tempfile::tempdir().unwrap();
        let open = || directory(dir.path()).unwrap().unwrap();
        let (path, other) = (dir.path().join(NAME), dir.path().join("other"));
        std::fs::write(&path, "mine").unwrap();
        assert!(find(&open()).is_err());
        std::fs::rename(&path, &other).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        assert!(find(&open()).is_err());
        assert!(Marker::make(&open()).is_err());
        assert_eq!(std::fs::read(&other).unwrap(), b"mine");
    }
}
