//! What a workload runs on: a directory, or a device.

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_storage::is_remote;
use jericho_topology::{NodeId, Topology};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use crate::error::{Context, Error, Result, warn};
use crate::reach::{Daemon, Files};

/// A directory or device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its path, or the URL of a device of another host.
    pub path: PathBuf,
    /// Whether it is a directory.
    pub is_directory: bool,
    /// Whether the directory is on a Jericho volume.
    pub is_jericho: bool,
    /// The home node of the device. `None`: unknown.
    pub node: Option<NodeId>,
}

impl Target {
    /// Returns whether both are the same device or directory.
    pub(crate) fn is_same(&self, other: &Target) -> bool {
        let identity = |target: &Target| {
            let metadata = fs::metadata(&target.path).ok()?;
            Some(match metadata.file_type().is_block_device() {
                true => (metadata.rdev(), None),
                false => (metadata.dev(), Some(metadata.ino())),
            })
        };
        match (identity(self), identity(other)) {
            (Some(one), Some(two)) => one == two,
            // Devices of other hosts.
            _ => self.path == other.path,
        }
    }

    /// Looks at the path. Fails if there is nothing.
    pub fn of(path: &Path, topology: &Topology, daemon: &dyn Daemon) -> Result<Target> {
        if is_remote(path) {
            return Ok(Target {
                path: path.to_owned(),
                is_directory: false,
                is_jericho: false,
                node: None,
            });
        }
        let metadata = fs::metadata(path).at(path, "use it as a target")?;
        let kind = metadata.file_type();
        if !(kind.is_dir() || kind.is_file() || kind.is_block_device()) {
            return Err(Error::new(format!(
                "{}: is neither a directory nor a file nor a block device; name one of these",
                path.display()
            )));
        }
        let home = kind.is_dir().then(|| daemon.home_of(path)).flatten();
        Ok(Target {
            path: path.to_owned(),
            is_directory: kind.is_dir(),
            is_jericho: home.is_some(),
            node: home.or_else(|| topology.node_of_block_device(path)),
        })
    }
}

/// Returns the type of the filesystem that holds a file or directory, as the kernel names it: proc_pid_mountinfo(5). `None`: the path is a device, or the
/// kernel does not tell.
pub(crate) fn filesystem_of(path: &Path) -> Option<String> {
    let metadata = fs::metadata(path).ok()?;
    if metadata.file_type().is_block_device() {
        return None;
    }
    let file = statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID).ok()?;
    // A kernel that does not know the flag leaves 0.
    let mount = Some(file.stx_mnt_id).filter(|id| *id != 0)?;
    let mounts = fs::read("/proc/self/mountinfo").ok()?;
    filesystem_in(&String::from_utf8_lossy(&mounts), mount)
}

/// Returns the type of the mount with this number in the kernel's table.
fn filesystem_in(mounts: &str, mount: u64) -> Option<String> {
    let mut types = mounts.lines().filter_map(|line| {
        let (fields, filesystem) = line.split_once(" - ")?;
        let number: u64 = fields.split(' ').next()?.parse().ok()?;
        (number == mount).then(|| filesystem.split(' ').next().map(str::to_owned))
    });
    types.next().flatten()
}

/// Directories that one run makes, one for each instance, and removes at its end.
///
/// Other users may be able to write to the target. So they could rename a directory of the run and put another one, or a link, in its place. The run
/// therefore opens each directory once, and reaches its files through the descriptor.
pub struct Scratch {
    files: Arc<dyn Files>,
    dirs: Vec<Dir>,
}

#[derive(Debug)]
struct Dir {
    /// The path for users.
    shown: PathBuf,
    /// The directory. `None`: it is in a volume that this process has opened, and no other process uses.
    opened: Option<File>,
    /// The path of the descriptor, also for programs that this one starts: proc_pid_fd(5).
    path: PathBuf,
}

/// How many names a directory tries. Names are random, so that those of a process that was killed do not stop a later run, also in a container, where process
/// ids repeat.
const NAMES_MAX: u32 = 100;

/// Returns the path of an open file or directory, also for programs that this process starts: proc_pid_fd(5).
pub(crate) fn path_of(file: &File) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}

impl Dir {
    /// Makes a directory that only this user may use, with a new name, and opens it.
    fn make(files: &dyn Files, target: &Path) -> Result<Dir> {
        let mut names = 0;
        let shown = loop {
            names += 1;
            let random = RandomState::new().build_hasher().finish();
            let name = format!("jericho-bench.{}.{random:016x}", std::process::id());
            let shown = target.join(name);
            match files.make_own_dir(&shown) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists && names < NAMES_MAX => {}
                made => {
                    made.at(&shown, "make the directory of the run")?;
                    break shown;
                }
            }
        };
        let opened = files.open_dir(&shown);
        let opened = opened.at(&shown, "open the directory of the run")?;
        let dir = Dir {
            path: opened.as_ref().map_or_else(|| shown.clone(), path_of),
            shown,
            opened,
        };
        dir.check(target)?;
        Ok(dir)
    }

    /// Fails if another user may have replaced the run's directory by this one. Only a user with write permission for the target can do that.
    fn check(&self, target: &Path) -> Result<()> {
        let Some(opened) = &self.opened else {
            return Ok(());
        };
        let own = opened.metadata().at(&self.shown, "examine it")?;
        let parent = fs::metadata(target).at(target, "examine it")?;
        let is_shared = parent.mode() & 0o022 != 0;
        let is_ours = own.uid() == rustix::process::geteuid().as_raw() && own.mode() & 0o022 == 0;
        match is_shared && !is_ours {
            true => Err(Error::new(format!(
                "{}: another user owns the directory of the run or may write to it; use a target that only you may write to",
                self.shown.display()
            ))),
            false => Ok(()),
        }
    }

    fn remove(&self, files: &dyn Files) -> io::Result<()> {
        let Some(opened) = &self.opened else {
            return files.remove_dir(&self.shown);
        };
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => fs::remove_dir_all(entry.path())?,
                false => fs::remove_file(entry.path())?,
            }
        }
        let (own, named) = (opened.metadata()?, fs::symlink_metadata(&self.shown)?);
        if (own.dev(), own.ino()) != (named.dev(), named.ino()) {
            return Err(io::Error::other("somebody has renamed it"));
        }
        fs::remove_dir(&self.shown)
    }
}

impl Scratch {
    /// Makes `count` directories, instance `i` in target `i % len`. They are direct children of the targets: on a Jericho volume those in the root
    /// are in the slices in turn.
    pub fn make(files: &Arc<dyn Files>, targets: &[Target], count: usize) -> Result<Scratch> {
        let mut scratch = Scratch {
            files: files.clone(),
            dirs: Vec::new(),
        };
        for index in 0..count {
            let Some(target) = targets.get(index % targets.len().max(1)) else {
                break;
            };
            scratch.dirs.push(Dir::make(&**files, &target.path)?);
        }
        Ok(scratch)
    }

    /// Returns the directory of an instance, as a path that leads there whatever others rename.
    pub fn dir(&self, index: usize) -> &Path {
        &self.dirs[index % self.dirs.len()].path
    }

    /// Returns the path of the directory of an instance for users and their mounts.
    pub fn shown(&self, index: usize) -> &Path {
        &self.dirs[index % self.dirs.len()].shown
    }

    /// Returns the paths of all directories for users and their mounts.
    pub fn all_shown(&self) -> impl Iterator<Item = &Path> {
        self.dirs.iter().map(|dir| &*dir.shown)
    }

    /// Returns the error with paths that a user knows.
    pub fn named(&self, error: Error) -> Error {
        self.dirs.iter().fold(error, |error, dir| {
            let from = format!("{}/", dir.path.display());
            error.renamed(&from, &format!("{}/", dir.shown.display()))
        })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        for dir in &self.dirs {
            if let Err(error) = dir.remove(&*self.files) {
                warn(format_args!(
                    "{}: cannot remove the directory of the run: {error}; remove it by hand",
                    dir.shown.display()
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;
    use crate::reach::KernelFiles;
    use crate::reach::tests::{NoDaemon, kernel};

    #[test]
    fn a_run_leaves_no_directory_behind() {
        let root = tempfile::tempdir().unwrap();
        let topology = Topology::from_spec("virtual:1").unwrap();
        let target = Target::of(root.path(), &topology, &NoDaemon).unwrap();
        assert!(target.is_directory && !target.is_jericho);
        let scratch = Scratch::make(&kernel().files, &[target], 2).unwrap();
        fs::write(scratch.dir(1).join("file"), "x").unwrap();
        assert_ne!(scratch.dir(0), scratch.dir(1));
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
        drop(scratch);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn others_can_neither_use_the_directories_nor_lead_the_run_elsewhere() {
        let root = tempfile::tempdir().unwrap();
        let victim = tempfile::tempdir().unwrap();
        let topology = Topology::from_spec("virtual:1").unwrap();
        let target = Target::of(root.path(), &topology, &NoDaemon).unwrap();
        let scratch = Scratch::make(&kernel().files, slice::from_ref(&target), 1).unwrap();
        let shown = scratch.shown(0).to_owned();
        assert_eq!(fs::metadata(&shown).unwrap().mode() & 0o777, 0o700);
        // Another user with write permission for the target can do this.
        let moved = root.path().join("moved");
        fs::rename(&shown, &moved).unwrap();
        std::os::unix::fs::symlink(victim.path(), &shown).unwrap();
        fs::write(victim.path().join("kept"), "x").unwrap();
        fs::write(scratch.dir(0).join("file"), "x").unwrap();
        assert!(moved.join("file").exists());
        drop(scratch);
        assert_eq!(fs::read_dir(victim.path()).unwrap().count(), 1);
        assert_eq!(fs::read_dir(&moved).unwrap().count(), 0);
        assert!(shown.is_symlink());

        // A directory of another kind in its place is noticed where others may write.
        let dir = Dir::make(&KernelFiles, &target.path).unwrap();
        let set_mode = |path: &Path, mode| {
            fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        };
        set_mode(&dir.shown, 0o777);
        dir.check(root.path()).unwrap();
        set_mode(root.path(), 0o777);
        assert!(
            dir.check(root.path())
                .unwrap_err()
                .to_string()
                .contains("another user")
        );
    }

    #[test]
    fn what_a_process_with_the_same_id_has_left_does_not_stop_a_run() {
        let root = tempfile::tempdir().unwrap();
        let topology = Topology::from_spec("virtual:1").unwrap();
        let target = Target::of(root.path(), &topology, &NoDaemon).unwrap();
        let left = Scratch::make(&kernel().files, slice::from_ref(&target), 2).unwrap();
        Scratch::make(&kernel().files, &[target], 2).unwrap();
        assert_ne!(left.shown(0), left.shown(1));
    }

    #[test]
    fn errors_have_the_paths_of_users() {
        let root = tempfile::tempdir().unwrap();
        let topology = Topology::from_spec("virtual:1").unwrap();
        let target = Target::of(root.path(), &topology, &NoDaemon).unwrap();
        let scratch = Scratch::make(&kernel().files, &[target], 1).unwrap();
        let path = scratch.dir(0).join("file");
        let error = fs::read(&path).at(&path, "read it").unwrap_err();
        let expected = scratch.shown(0).join("file");
        let error = scratch.named(error).to_string();
        assert!(error.starts_with(expected.to_str().unwrap()), "{error}");
    }

    #[test]
    fn a_target_that_does_not_exist_is_named() {
        let topology = Topology::from_spec("virtual:1").unwrap();
        let missing = Target::of(Path::new("/does/not/exist"), &topology, &NoDaemon);
        assert!(
            missing
                .unwrap_err()
                .to_string()
                .starts_with("/does/not/exist: ")
        );
        let pipe = Target::of(Path::new("/dev/null"), &topology, &NoDaemon);
        assert!(pipe.unwrap_err().to_string().contains("neither"));
    }

    #[test]
    fn the_filesystem_of_a_path_is_the_type_of_its_mount() {
        let mounts = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:31 /a\\040b /mnt rw shared:1 - fuse.jericho v rw\nbroken\n";
        assert_eq!(filesystem_in(mounts, 22).as_deref(), Some("ext4"));
        assert_eq!(filesystem_in(mounts, 30).as_deref(), Some("fuse.jericho"));
        assert_eq!(filesystem_in(mounts, 31), None);
        assert_eq!(filesystem_of(Path::new("/proc")).as_deref(), Some("proc"));
        assert_eq!(filesystem_of(Path::new("/does/not/exist")), None);
    }
}
