//! What a workload runs on: a directory, or a device.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use jericho_storage::is_remote;
use jericho_topology::{NodeId, Topology};

use crate::error::{Context, Error, Result};

/// A directory or device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its path, or the URL of a device of another host.
    pub path: PathBuf,
    /// Whether it is a directory.
    pub is_directory: bool,
    /// Whether the directory is on a Jericho mount.
    pub is_jericho: bool,
    /// The home node of the device. `None`: unknown.
    pub node: Option<NodeId>,
}

/// Returns the home node of a file on a Jericho mount. `None`: the path is on no Jericho mount.
pub type HomeOf<'a> = &'a (dyn Fn(&Path) -> Option<NodeId> + Sync);

impl Target {
    /// Looks at the path. Fails if there is nothing.
    pub fn of(path: &Path, topology: &Topology, home_of: HomeOf) -> Result<Target> {
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
        let home = kind.is_dir().then(|| home_of(path)).flatten();
        Ok(Target {
            path: path.to_owned(),
            is_directory: kind.is_dir(),
            is_jericho: home.is_some(),
            node: home.or_else(|| topology.node_of_block_device(path)),
        })
    }
}

/// Directories that one run makes, one for each instance, and removes at its end.
#[derive(Debug)]
pub struct Scratch {
    dirs: Vec<PathBuf>,
}

impl Scratch {
    /// Makes `count` directories, instance `i` in target `i % len`. They are direct children of the targets: on a Jericho volume those in the root
    /// are in the slices in turn.
    pub fn make(targets: &[Target], count: usize) -> Result<Scratch> {
        let mut scratch = Scratch { dirs: Vec::new() };
        let pid = std::process::id();
        for index in 0..count {
            let Some(target) = targets.get(index % targets.len().max(1)) else {
                break;
            };
            let dir = target.path.join(format!("jericho-bench.{pid}.{index}"));
            fs::create_dir(&dir).at(&dir, "make the directory of the run")?;
            scratch.dirs.push(dir);
        }
        Ok(scratch)
    }

    /// Returns the directory of an instance.
    pub fn dir(&self, index: usize) -> &Path {
        &self.dirs[index % self.dirs.len()]
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        for dir in &self.dirs {
            if let Err(error) = fs::remove_dir_all(dir) {
                eprintln!(
                    "jericho bench: {}: cannot remove the directory of the run: {error}; remove it by hand",
                    dir.display()
                );
            }
        }
    }
}

/// A filesystem that holds a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filesystem {
    /// The kernel's number of it.
    pub device: u64,
    /// Free bytes for this user.
    pub free_bytes: u64,
}

impl Filesystem {
    /// Asks for the filesystem that holds a path: stat(2), statvfs(3).
    pub fn of(path: &Path) -> Result<Filesystem> {
        let metadata = fs::metadata(path).at(path, "ask for its filesystem")?;
        let stat = rustix::fs::statvfs(path).map_err(std::io::Error::from);
        let stat = stat.at(path, "ask for the free space")?;
        Ok(Filesystem {
            device: metadata.dev(),
            free_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_leaves_no_directory_behind() {
        let root = tempfile::tempdir().unwrap();
        let topology = Topology::from_spec("virtual:1").unwrap();
        let target = Target::of(root.path(), &topology, &|_| None).unwrap();
        assert!(target.is_directory && !target.is_jericho);
        let scratch = Scratch::make(&[target], 2).unwrap();
        fs::write(scratch.dir(1).join("file"), "x").unwrap();
        assert_ne!(scratch.dir(0), scratch.dir(1));
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
        drop(scratch);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_target_that_does_not_exist_is_named() {
        let topology = Topology::from_spec("virtual:1").unwrap();
        let missing = Target::of(Path::new("/does/not/exist"), &topology, &|_| None);
        assert!(
            missing
                .unwrap_err()
                .to_string()
                .starts_with("/does/not/exist: ")
        );
        let pipe = Target::of(Path::new("/dev/null"), &topology, &|_| None);
        assert!(pipe.unwrap_err().to_string().contains("neither"));
    }
}
