//! What a mount checks before anything is touched.

use std::path::{Path, PathBuf};

use jericho_daemon::Trusted;
use jericho_fuse::attach;

use crate::args::MountOptions;
use crate::failure::Failure;
use crate::{mounts, remote};

/// The checked volume and directory of a mount.
pub struct Checked {
    /// Absolute path of the volume, or the name of a remote device.
    pub volume: PathBuf,
    /// Absolute path of the directory, which is empty and not a mount point.
    pub dir: PathBuf,
}

/// Checks a mount before anything is touched. Changes nothing, except that it detaches from `dir` a mount whose daemon has died.
pub fn check(volume: &Path, dir: &Path, options: &MountOptions) -> Result<Checked, Failure> {
    let canonical = match remote::named(volume)? {
        Some(_) => Ok(volume.to_owned()),
        None => std::fs::canonicalize(volume),
    };
    let volume = canonical.map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Failure::new(format!(
            "{0} does not exist; make a volume there with: jericho format {0} --size 1G",
            volume.display()
        )),
        _ => Failure::new(format!("cannot open {}: {e}", volume.display())),
    })?;
    jericho_topology::Topology::from_spec(&options.topology)
        .map_err(|e| Failure::new(e.to_string()))?;
    trusted(options)?;
    attach::check_available(dir).map_err(|e| Failure::new(e.to_string()))?;
    let dir = check_dir(dir)?;
    Ok(Checked { volume, dir })
}

fn check_dir(dir: &Path) -> Result<PathBuf, Failure> {
    let shown = dir.display();
    let missing = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => Failure::new(format!(
            "{shown} does not exist; make it with: mkdir -p {shown}"
        )),
        _ => Failure::new(format!("cannot mount on {shown}: {e}")),
    };
    if mounts::is_dead(dir) {
        let dir = mounts::resolve(dir)?;
        if mounts::at(&dir)?.is_some_and(|m| m.filesystem == mounts::FILESYSTEM) {
            attach::unmount(&dir, true).map_err(|e| Failure::new(e.to_string()))?;
            eprintln!("jericho: removed the mount on {shown}, whose daemon is dead");
        }
        return check_dir(&dir);
    }
    std::fs::metadata(dir).map_err(missing)?;
    let dir = mounts::resolve(dir)?;
    if let Some(mount) = mounts::at(&dir)? {
        return Err(Failure::new(format!(
            "{shown} is already a mount (of {}, type {}); unmount it first or choose another \
             directory",
            mount.source.display(),
            mount.filesystem
        )));
    }
    let mut entries = std::fs::read_dir(&dir).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotADirectory => Failure::new(format!(
            "{shown} is not a directory; choose an empty directory"
        )),
        _ => missing(e),
    })?;
    match entries.next() {
        None => Ok(dir),
        Some(_) => Err(Failure::new(format!(
            "{shown} is not empty: what is in it would be hidden; choose an empty directory"
        ))),
    }
}

/// Returns the users and groups that --fast-path names.
pub fn trusted(options: &MountOptions) -> Result<Trusted, Failure> {
    Trusted::from_names(&options.fast_path).map_err(|e| Failure::new(format!("--fast-path: {e}")))
}
