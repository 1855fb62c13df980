//! A volume that is open in this process, without a mount, as the files of a run of `jericho bench`.
//!
//! The volume is locked as by a mount, so a volume that is mounted is refused. A path is that of the volume's first device, with names behind it.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use jericho_daemon::{Handle, Mounted, OpenOptions, ThreadPolicy, WriteMode};
use jericho_fs::types::{Attr, Caller, Ino, Kind, ROOT, SetAttr};
use jericho_storage::{
    Asynchronous, Cause, Completion, Device, Direction, Finish, IoError, Transfer, gather, scatter,
};
use jericho_topology::{NodeId, Topology};
use jericho_workload::options::Migration;
use jericho_workload::reach::{
    Daemon, Files, Filesystem, InlinePages, MountFacts, OpenFile, Opening,
};
use jericho_workload::target::Target;

use crate::failure::{Context, Failure, both};
use crate::on_mounts::{devices_in, facts_in};

/// Unit of the counts of free space.
const BLOCK_BYTES: u64 = 4096;

/// The volumes of a run.
pub struct InProcess {
    volumes: Vec<(PathBuf, Arc<Mounted>)>,
}

impl InProcess {
    /// Opens volumes. Fails if one is mounted, or in use otherwise.
    pub fn open(paths: &[PathBuf], topology: &Topology) -> Result<InProcess, Failure> {
        let mut opened = InProcess {
            volumes: Vec::new(),
        };
        for path in paths {
            let mounted = Mounted::open(OpenOptions {
                volume: path.clone(),
                devices: Vec::new(),
                read_only: false,
                force: false,
                cache_bytes: None,
                spill_bytes: 0,
                topology: topology.clone(),
                // No kernel asks for threads to be moved.
                threads: ThreadPolicy::Never,
                with_parent: false,
                move_costs: Default::default(),
                fast_path: Default::default(),
                keeper: None,
            });
            match mounted.context(path.display()) {
                Ok(mounted) => opened.volumes.push((path.clone(), mounted)),
                Err(failure) => {
                    // Opening may have replayed the journals of the others, so their close may fail, too.
                    return both(Err(failure), opened.close());
                }
            }
        }
        Ok(opened)
    }

    /// Returns the volumes as targets of a run.
    pub fn targets(&self) -> Vec<Target> {
        let target = |(path, _): &(PathBuf, Arc<Mounted>)| Target {
            path: path.clone(),
            is_directory: true,
            is_jericho: true,
            node: self.home_of(path),
        };
        self.volumes.iter().map(target).collect()
    }

    /// Writes everything back and releases the volumes.
    pub fn close(&self) -> Result<(), Failure> {
        let closed = self.volumes.iter().map(|(path, mounted)| {
            let closed = mounted.close();
            closed.context(format_args!(
                "{}: cannot write everything back",
                path.display()
            ))
        });
        // Closes all, and reports all failures.
        closed.fold(Ok(()), both)
    }

    /// Returns the volume of a path and the names behind it.
    fn volume<'a>(&self, path: &'a Path) -> io::Result<(&Arc<Mounted>, Vec<&'a [u8]>)> {
        let mut found = self.volumes.iter().filter_map(|(volume, mounted)| {
            let names = path.strip_prefix(volume).ok()?;
            Some((mounted, names.iter().map(OsStrExt::as_bytes).collect()))
        });
        found.next().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Returns the inode of a path.
    fn inode(&self, path: &Path) -> io::Result<(&Arc<Mounted>, Ino)> {
        let (mounted, names) = self.volume(path)?;
        let walked = names
            .iter()
            .try_fold(ROOT, |dir, name| lookup(mounted, dir, name));
        Ok((mounted, walked?))
    }

    /// Returns the inode of the directory that has the last name of a path, and the name.
    fn parent<'a>(&self, path: &'a Path) -> io::Result<(&Arc<Mounted>, Ino, &'a [u8])> {
        let (parent, name) = match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) => (parent, name),
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let (mounted, dir) = self.inode(parent)?;
        Ok((mounted, dir, name.as_bytes()))
    }

    fn open_file(&self, path: &Path, opening: Opening) -> io::Result<Opened> {
        let (mounted, dir, name) = self.parent(path)?;
        let ino = match lookup(mounted, dir, name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && opening != Opening::Read => {
                create(mounted, dir, name)?
            }
            found => found?,
        };
        if opening == Opening::Empty {
            let empty = SetAttr {
                size: Some(0),
                ..SetAttr::default()
            };
            mounted.setattr(ino, empty, caller()).map_err(errno)?;
        }
        let handle = mounted.open_file(ino, opening != Opening::Read);
        Ok(Opened {
            handle: handle.map_err(errno)?,
            mounted: mounted.clone(),
        })
    }
}

fn errno(error: jericho_fs::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

fn caller() -> Caller {
    Caller {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        umask: 0o022,
    }
}

/// Looks up a name. Keeps no reference: an inode that has a name stays.
fn lookup(mounted: &Mounted, dir: Ino, name: &[u8]) -> io::Result<Ino> {
    let found = mounted.lookup(dir, name).map_err(errno)?;
    mounted.fs().forget(found.ino, 1);
    Ok(found.ino)
}

/// Creates a file. Another thread may be faster.
fn create(mounted: &Mounted, dir: Ino, name: &[u8]) -> io::Result<Ino> {
    let made = mounted
        .fs()
        .mknod(dir, name, Kind::File, 0o644, 0, caller());
    made_or_found(mounted, dir, name, made)
}

/// Returns the inode that an operation has made. If the name was there already, returns the inode that has it.
fn made_or_found(
    mounted: &Mounted,
    dir: Ino,
    name: &[u8],
    made: jericho_fs::Result<Attr>,
) -> io::Result<Ino> {
    match made.map_err(errno) {
        Ok(made) => {
            mounted.fs().forget(made.ino, 1);
            Ok(made.ino)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => lookup(mounted, dir, name),
        Err(error) => Err(error),
    }
}

/// Removes an entry of a directory, with everything in it.
fn remove(mounted: &Mounted, dir: Ino, name: &[u8]) -> io::Result<()> {
    let ino = lookup(mounted, dir, name)?;
    let fs = mounted.fs();
    if fs.getattr(ino).map_err(errno)?.kind != Kind::Directory {
        return fs.unlink(dir, name).map_err(errno);
    }
    let mut names = Vec::new();
    fs.readdir(ino, 0, &mut |entry| {
        if entry.name != b"." && entry.name != b".." {
            names.push(entry.name);
        }
        true
    })
    .map_err(errno)?;
    for name in &names {
        remove(mounted, ino, name)?;
    }
    fs.rmdir(dir, name).map_err(errno)
}

impl Files for InProcess {
    fn make_own_dir(&self, path: &Path) -> io::Result<()> {
        let (mounted, dir, name) = self.parent(path)?;
        let made = mounted.fs().mkdir(dir, name, 0o700, caller());
        mounted.fs().forget(made.map_err(errno)?.ino, 1);
        Ok(())
    }

    fn open_dir(&self, _path: &Path) -> io::Result<Option<File>> {
        Ok(None)
    }

    fn make_dir(&self, path: &Path) -> io::Result<()> {
        let (mounted, names) = self.volume(path)?;
        let mut dir = ROOT;
        for name in names {
            let made = mounted.fs().mkdir(dir, name, 0o755, caller());
            dir = made_or_found(mounted, dir, name, made)?;
        }
        Ok(())
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        let (mounted, dir, name) = self.parent(path)?;
        remove(mounted, dir, name)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let (mounted, dir, name) = self.parent(path)?;
        mounted.fs().unlink(dir, name).map_err(errno)
    }

    fn open(&self, path: &Path, opening: Opening) -> io::Result<Box<dyn OpenFile>> {
        Ok(Box::new(self.open_file(path, opening)?))
    }

    fn create_direct(&self, path: &Path, bytes: u64) -> jericho_workload::Result<Arc<dyn Device>> {
        let file = self.open_file(path, Opening::Empty).map_err(|error| {
            jericho_workload::Error::new(format!("{}: cannot create it: {error}", path.display()))
        })?;
        Ok(Arc::new(Direct {
            file,
            name: path.display().to_string().into(),
            bytes,
        }))
    }

    fn filesystem(&self, path: &Path) -> io::Result<Filesystem> {
        let (mounted, _) = self.volume(path)?;
        let stat = mounted.fs().statfs().map_err(errno)?;
        let number = self
            .volumes
            .iter()
            .position(|(_, one)| Arc::ptr_eq(one, mounted));
        Ok(Filesystem {
            device: number.unwrap_or(0) as u64,
            free_bytes: stat.free.saturating_mul(BLOCK_BYTES),
        })
    }
}

impl Daemon for InProcess {
    fn home_of(&self, path: &Path) -> Option<NodeId> {
        let (mounted, ino) = self.inode(path).ok()?;
        let (slice, _) = mounted.fs().placement(ino).ok()?;
        Some(mounted.node_of_slice(slice))
    }

    fn set_migration(&self, _dir: &Path, _migration: Migration) -> jericho_workload::Result<()> {
        Ok(())
    }

    fn inline_pages(&self) -> Option<InlinePages> {
        None
    }

    fn devices_of(&self, path: &Path) -> Option<Vec<PathBuf>> {
        let (mounted, _) = self.volume(path).ok()?;
        devices_in(&mounted.stat())
    }

    fn mount_of(&self, path: &Path) -> Option<MountFacts> {
        let (mounted, _) = self.volume(path).ok()?;
        Some(facts_in(&mounted.stat()))
    }
}

/// An open file of a volume.
struct Opened {
    mounted: Arc<Mounted>,
    handle: Arc<Handle>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.mounted.close_file(&self.handle);
    }
}

/// Begins an operation, and waits for its answer. Fails with EIO if there is none, because the volume is being closed.
fn wait_for<T>(begin: impl FnOnce(mpsc::Sender<T>)) -> io::Result<T> {
    let (tell, told) = mpsc::channel();
    begin(tell);
    told.recv()
        .map_err(|_| io::Error::from_raw_os_error(libc::EIO))
}

impl OpenFile for Opened {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let (length, bytes) = (buffer.len() as u32, vec![0; buffer.len()]);
        let (read, bytes) = wait_for(|tell| {
            let reply = move |read: jericho_fs::Result<usize>, bytes: Vec<u8>| {
                drop(tell.send((read, bytes)));
            };
            (self.mounted).read(&self.handle, offset, length, false, bytes, reply);
        })?;
        let read = read.map_err(errno)?;
        buffer[..read].copy_from_slice(&bytes[..read]);
        Ok(read)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let written = wait_for(|tell| {
            let reply = move |written: jericho_fs::Result<u32>| drop(tell.send(written));
            (self.mounted).write(&self.handle, offset, bytes, WriteMode::PLAIN, reply);
        })?;
        Ok(written.map_err(errno)? as usize)
    }

    fn sync(&self) -> io::Result<()> {
        let synced = wait_for(|tell| {
            let done = Box::new(move |synced: jericho_fs::Result<()>| drop(tell.send(synced)));
            self.mounted.fsync(&self.handle, true, done);
        })?;
        synced.map_err(errno)
    }

    fn size(&self) -> io::Result<u64> {
        let file = self.mounted.file(&self.handle);
        Ok(file.size())
    }

    fn drop_pages(&self, _part: Range<u64>) -> io::Result<()> {
        // The kernel has none.
        Ok(())
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A file of a volume as a device: several transfers at the same time.
struct Direct {
    file: Opened,
    name: Arc<str>,
    bytes: u64,
}

impl Direct {
    fn error(
        name: &Arc<str>,
        operation: &'static str,
        (offset_bytes, length_bytes): (u64, u64),
        errno: i32,
    ) -> IoError {
        IoError {
            operation,
            device: name.clone(),
            offset_bytes,
            length_bytes,
            cause: Cause::Errno(errno),
        }
    }

    fn failed(&self, operation: &'static str, range: (u64, u64), error: &io::Error) -> IoError {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        Direct::error(&self.name, operation, range, errno)
    }
}

impl Device for Direct {
    fn name(&self) -> Arc<str> {
        self.name.clone()
    }

    fn size_bytes(&self) -> u64 {
        self.bytes
    }

    fn home_node(&self) -> Option<u32> {
        None
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        let range = (offset_bytes, buf.len() as u64);
        let read = self.file.read_exact_at(buf, offset_bytes);
        read.map_err(|error| self.failed("read", range, &error))
    }

    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        let range = (offset_bytes, buf.len() as u64);
        let written = self.file.write_all_at(buf, offset_bytes);
        written.map_err(|error| self.failed("write", range, &error))
    }

    fn flush(&self) -> Result<(), IoError> {
        let synced = self.file.sync();
        synced.map_err(|error| self.failed("flush", (0, 0), &error))
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        let range = (offset_bytes, length_bytes);
        Err(Direct::error(
            &self.name,
            "discard",
            range,
            libc::EOPNOTSUPP,
        ))
    }

    fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn asynchronous(&self) -> Option<&dyn Asynchronous> {
        Some(self)
    }

    fn describe(&self) -> String {
        format!("{}: a file of a volume in this process", self.name)
    }
}

impl Asynchronous for Direct {
    fn begin(&self, transfer: Transfer, end: Arc<dyn Finish>) {
        let length = transfer.segments.iter().map(|segment| segment.len).sum();
        let (offset, tag, name) = (transfer.offset_bytes, transfer.tag, self.name.clone());
        let range = (offset, length as u64);
        let finish = move |operation, moved: jericho_fs::Result<usize>| {
            let result = match moved {
                Ok(moved) if moved == length => Ok(()),
                Ok(_) => Err(Direct::error(&name, operation, range, libc::EIO)),
                Err(error) => Err(Direct::error(&name, operation, range, error.errno())),
            };
            end.finish(Completion { tag, result });
        };
        let Opened { mounted, handle } = &self.file;
        let segments = transfer.segments;
        match transfer.direction {
            Direction::Read => {
                let reply = move |read: jericho_fs::Result<usize>, bytes: Vec<u8>| {
                    if let Ok(read) = &read {
                        scatter(&segments, 0, &bytes[..*read]);
                    }
                    finish("read", read);
                };
                mounted.read(handle, offset, length as u32, false, Vec::new(), reply);
            }
            Direction::Write => {
                let mut bytes = vec![0; length];
                gather(&segments, 0, &mut bytes);
                let reply = move |written: jericho_fs::Result<u32>| {
                    finish("write", written.map(|written| written as usize));
                };
                mounted.write(handle, offset, &bytes, WriteMode::PLAIN, reply);
            }
        }
    }
}
