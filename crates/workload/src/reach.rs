//! How a run reaches the files of its targets: through the kernel, or in this process.
//!
//! The workloads use [`Files`] only. So they run unchanged on a volume that the caller of this crate has opened in its own process. This crate knows no
//! volume: the caller also tells what a volume's daemon knows ([`Daemon`]).

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_storage::{Device, open_device};
use jericho_topology::NodeId;
use rustix::fs::{Advice, Mode, OFlags, fadvise};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::options::Migration;

/// The way to the cached pages of a Jericho volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// System calls on the mount.
    Kernel,
    /// The mount, with hits inline in the thread that reads or writes: this process runs with the library of `jericho run`.
    Fast,
    /// The volume is open in this process, and not mounted.
    Process,
}

/// A filesystem that holds a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filesystem {
    /// A number of it, for example the kernel's.
    pub device: u64,
    /// Free bytes for this user.
    pub free_bytes: u64,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// For reading.
    Read,
    /// For reading and writing. Creates it if it does not exist.
    Write,
    /// For reading and writing. Creates it, or empties it.
    Empty,
}

/// The files of the targets. A path is that of a target, with names behind it.
pub trait Files: Send + Sync {
    /// Creates a directory that only this user may use. Fails if the name exists.
    fn make_own_dir(&self, path: &Path) -> io::Result<()>;
    /// Opens a directory, and no link in its place. `None`: it is in a volume that this process has opened, so no other user can replace it.
    fn open_dir(&self, path: &Path) -> io::Result<Option<File>>;
    /// Creates a directory, and the directories above it that do not exist.
    fn make_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes a directory with everything in it.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Opens a file.
    fn open(&self, path: &Path, opening: Opening) -> io::Result<Box<dyn OpenFile>>;
    /// Creates a file of `bytes` bytes, for direct transfers.
    fn create_direct(&self, path: &Path, bytes: u64) -> Result<Arc<dyn Device>>;
    /// Asks for the filesystem that holds a path.
    fn filesystem(&self, path: &Path) -> io::Result<Filesystem>;
}

/// An open file. Offsets are those of the call.
pub trait OpenFile: Send {
    /// Reads up to `buffer.len()` bytes; fewer at the end of the file.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes up to `bytes.len()` bytes.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;
    /// Returns the length of the file.
    fn size(&self) -> io::Result<u64>;
    /// Makes the file's data durable.
    fn sync(&self) -> io::Result<()>;
    /// Drops clean pages of a part of the file from the kernel's page cache, if it has some.
    fn drop_pages(&self, part: Range<u64>) -> io::Result<()>;
    /// Returns the kernel's descriptor, if there is one.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// Fills the buffer. Fails if the file ends before.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            match self.read_at(&mut buffer[done..], offset + done as u64)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => done += read,
            }
        }
        Ok(())
    }

    /// Writes all bytes.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match self.write_at(&bytes[done..], offset + done as u64)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                written => done += written,
            }
        }
        Ok(())
    }
}

/// Pages that a process accessed inline, as Jericho counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InlinePages {
    /// By threads on the node of the page.
    pub local: u64,
    /// By threads on other nodes.
    pub remote: u64,
}

impl InlinePages {
    /// Returns how many there are more than before.
    pub(crate) fn since(self, before: InlinePages) -> InlinePages {
        InlinePages {
            local: self.local.saturating_sub(before.local),
            remote: self.remote.saturating_sub(before.remote),
        }
    }
}

/// How a volume is mounted, or open in this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountFacts {
    /// How the kernel sends requests to the daemon. `None`: there is no mount.
    pub transport: Option<String>,
    /// Size of the cache. `None`: the daemon does not tell.
    pub cache_bytes: Option<u64>,
    /// Build of the daemon. `None`: unknown.
    pub build: Option<String>,
}

/// What the daemon of a Jericho volume tells.
pub trait Daemon: Send + Sync {
    /// Returns the home node of the slice of a file or directory. `None`: the path is on no Jericho volume.
    fn home_of(&self, path: &Path) -> Option<NodeId>;
    /// Sets when threads migrate that use files that will be created below a directory.
    fn set_migration(&self, dir: &Path, migration: Migration) -> Result<()>;
    /// Returns how many pages this process has accessed inline so far. `None`: no volume is mounted.
    fn inline_pages(&self) -> Option<InlinePages>;
    /// Returns the devices of the volume of a path. `None`: the path is on no Jericho volume, or its daemon does not tell.
    fn devices_of(&self, path: &Path) -> Option<Vec<PathBuf>>;
    /// Returns how the volume of a path is mounted. `None`: the path is on no Jericho volume, or its daemon does not tell.
    fn mount_of(&self, path: &Path) -> Option<MountFacts>;
}

/// The way of a run to its files, and who tells about them.
#[derive(Clone)]
pub struct Reach {
    /// The way to volumes.
    pub route: Route,
    /// The files.
    pub files: Arc<dyn Files>,
    /// What is known about volumes.
    pub daemon: Arc<dyn Daemon>,
}

/// The files of the kernel. Calls go through the C library, so the library of `jericho run` sees them.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelFiles;

impl Files for KernelFiles {
    fn make_own_dir(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().mode(0o700).create(path)
    }

    fn open_dir(&self, path: &Path) -> io::Result<Option<File>> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Some(File::from(opened)))
    }

    fn make_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn open(&self, path: &Path, opening: Opening) -> io::Result<Box<dyn OpenFile>> {
        let writes = opening != Opening::Read;
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(writes)
            .create(writes)
            .truncate(opening == Opening::Empty);
        Ok(Box::new(options.open(path)?))
    }

    fn create_direct(&self, path: &Path, bytes: u64) -> Result<Arc<dyn Device>> {
        let options = jericho_storage::OpenOptions {
            create_size: Some(bytes),
            ..jericho_storage::OpenOptions::default()
        };
        open_device(path, options).map_err(|error| Error::new(error.to_string()))
    }

    fn filesystem(&self, path: &Path) -> io::Result<Filesystem> {
        let stat = rustix::fs::statvfs(path)?;
        Ok(Filesystem {
            device: fs::metadata(path)?.dev(),
            free_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
        })
    }
}

impl OpenFile for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        retry(|| FileExt::read_at(self, buffer, offset))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        retry(|| FileExt::write_at(self, bytes, offset))
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn drop_pages(&self, part: Range<u64>) -> io::Result<()> {
        // The kernel counts in signed numbers, and takes 0 for the end of the file.
        let bytes = part.end.min(i64::MAX as u64).saturating_sub(part.start);
        let advice = Advice::DontNeed;
        Ok(fadvise(self, part.start, NonZeroU64::new(bytes), advice)?)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}

/// Repeats a call that a signal has interrupted.
fn retry(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Writes bytes one after the other.
pub(crate) struct Appender {
    file: Box<dyn OpenFile>,
    at: u64,
}

impl Appender {
    pub(crate) fn new(file: Box<dyn OpenFile>) -> Appender {
        Appender { file, at: 0 }
    }

    /// Returns the file.
    pub(crate) fn file(&self) -> &dyn OpenFile {
        &*self.file
    }
}

impl io::Write for Appender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write_at(bytes, self.at)?;
        self.at += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// No volume.
    pub(crate) struct NoDaemon;

    impl Daemon for NoDaemon {
        fn home_of(&self, _path: &Path) -> Option<NodeId> {
            None
        }

        fn set_migration(&self, _dir: &Path, _migration: Migration) -> Result<()> {
            Ok(())
        }

        fn inline_pages(&self) -> Option<InlinePages> {
            None
        }

        fn devices_of(&self, _path: &Path) -> Option<Vec<PathBuf>> {
            None
        }

        fn mount_of(&self, _path: &Path) -> Option<MountFacts> {
            None
        }
    }

    pub(crate) fn kernel() -> Reach {
        Reach {
            route: Route::Kernel,
            files: Arc::new(KernelFiles),
            daemon: Arc::new(NoDaemon),
        }
    }

    /// A file that moves one byte a call.
    struct Slow(File);

    impl OpenFile for Slow {
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
            let end = buffer.len().min(1);
            OpenFile::read_at(&self.0, &mut buffer[..end], offset)
        }

        fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
            OpenFile::write_at(&self.0, &bytes[..bytes.len().min(1)], offset)
        }

        fn size(&self) -> io::Result<u64> {
            OpenFile::size(&self.0)
        }

        fn sync(&self) -> io::Result<()> {
            self.0.sync_data()
        }

        fn drop_pages(&self, part: Range<u64>) -> io::Result<()> {
            OpenFile::drop_pages(&self.0, part)
        }

        fn descriptor(&self) -> Option<BorrowedFd<'_>> {
            None
        }
    }

    #[test]
    fn short_reads_and_writes_go_on_and_the_end_of_the_file_is_an_error() {
        let file = Slow(tempfile::tempfile().unwrap());
        file.write_all_at(b"abcd", 2).unwrap();
        let mut bytes = [1; 6];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"\0\0abcd");
        let ended = file.read_exact_at(&mut bytes, 1).unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_file_is_emptied_only_on_request() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let open = |opening| KernelFiles.open(&path, opening);
        assert!(open(Opening::Read).is_err());
        open(Opening::Write)
            .unwrap()
            .write_all_at(b"ab", 0)
            .unwrap();
        let mut bytes = [0; 2];
        open(Opening::Write)
            .unwrap()
            .read_exact_at(&mut bytes, 0)
            .unwrap();
        assert_eq!(&bytes, b"ab");
        assert!(open(Opening::Read).unwrap().write_at(b"c", 0).is_err());
        assert_eq!(
            open(Opening::Empty)
                .unwrap()
                .read_at(&mut bytes, 0)
                .unwrap(),
            0
        );
    }
}
