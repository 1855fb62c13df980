//! Formats a volume on files and block devices that are given by their paths.
//!
//! All checks end before the first byte changes. If format fails, it removes the files that it created. Existing files that are
//! refused keep their bytes and length.

use std::cell::Cell;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::superblock::FLAG_PREALLOCATED;
use jericho_storage::{AlignedBuffer, Device, IoError, OpenOptions, is_remote, remote_host};
use jericho_sys::block::{holes, punch_hole};

use crate::add::{self, AddError, Added};
use crate::device::{OpenMode, inspect, open_path, open_with};
use crate::error::VolumeError;
use crate::foreign;
use crate::format::{FormatOptions, Summary, check_counts, check_plan, prepare, write};
use crate::layout::Space;
use crate::lock::VolumeLock;
use crate::volume::Volume;

/// Bytes rewritten at once on hosts that allocate space only by writing.
const PIECE_BYTES: usize = 4 << 20;

/// Unit of `st_blocks` of stat(2).
const STAT_BLOCK_BYTES: u64 = 512;

/// State of a path before formatting.
struct Target {
    path: PathBuf,
    /// The file did not exist.
    new: bool,
    /// The file did not exist, and this process has created it. Another process may have been first.
    is_created: Cell<bool>,
    is_file: bool,
    /// Earlier length of a file.
    old_bytes: u64,
    /// Space that a file had on its host before, and its parts that had no space.
    old_stored_bytes: u64,
    old_holes: Vec<Range<u64>>,
    /// New length of a file, or size of a block device.
    bytes: u64,
    node: Option<u32>,
}

/// Formats a volume on files (created if missing) and block devices. `make_contents` writes the first contents, before the labels
/// make the files and devices a volume.
pub fn format(
    paths: &[PathBuf],
    options: &FormatOptions,
    make_contents: impl FnOnce(&Volume) -> Result<(), VolumeError>,
) -> Result<Summary, VolumeError> {
    check_counts(paths.len(), options)?;
    let mut targets = Vec::new();
    let mut locks: Vec<VolumeLock> = Vec::new();
    let mut seen = Vec::new();
    for path in paths {
        if is_remote(path) {
            if targets.iter().any(|t: &Target| t.path == *path) {
                return Err(VolumeError::Twice(path.clone()));
            }
            let (lock, locked) = lock_target(path, options)?;
            locks.push(lock);
            targets.push(locked);
            continue;
        }
        let mut target = inspect_target(path, options)?;
        if !target.new {
            let identity = std::fs::metadata(path).map(|m| (m.dev(), m.ino()));
            let identity = identity.map_err(system("inspect", path))?;
            if seen.contains(&identity) {
                return Err(VolumeError::Twice(path.clone()));
            }
            seen.push(identity);
            let (lock, locked) = lock_target(path, options)?;
            locks.push(lock);
            target = locked;
        } else if targets.iter().any(|t: &Target| t.path == *path) {
            return Err(VolumeError::Twice(path.clone()));
        }
        targets.push(target);
    }
    let spaces: Vec<Space> = targets
        .iter()
        .enumerate()
        .map(|(index, target)| target.space(options, index))
        .collect();
    check_plan(&spaces, options)?;
    let result = open_and_write(&targets, options, make_contents);
    if result.is_err() {
        for target in &targets {
            undo(target);
        }
    }
    result
}

fn system<'p>(
    action: &'static str,
    path: &'p Path,
) -> impl FnOnce(std::io::Error) -> VolumeError + 'p {
    move |cause| VolumeError::System {
        action,
        path: path.into(),
        cause,
    }
}

/// Checks the file or device at a path, without changing it.
fn inspect_target(path: &Path, options: &FormatOptions) -> Result<Target, VolumeError> {
    if is_remote(path) {
        return inspect_remote(path, options);
    }
    let no_size = || VolumeError::NoSize(path.into());
    let metadata = match inspect(path) {
        Err(VolumeError::Missing(_)) => {
            let bytes = options.size_bytes.ok_or_else(no_size)?;
            return Ok(Target {
                path: path.into(),
                new: true,
                is_created: Cell::new(false),
                is_file: true,
                old_bytes: 0,
                old_stored_bytes: 0,
                old_holes: vec![],
                bytes,
                node: None,
            });
        }
        other => other?,
    };
    let is_file = metadata.is_file();
    if is_file && metadata.permissions().readonly() {
        return Err(VolumeError::ReadOnly(path.into()));
    }
    let mut bytes = metadata.len();
    let mut node = None;
    // Data smaller than a block cannot be a volume, but even a few bytes of text may be of value to the user.
    if is_file && bytes > 0 && bytes < PAGE_BYTES && !options.force {
        return Err(VolumeError::InUse {
            path: path.to_string_lossy().into(),
            what: "data that is not a volume".into(),
        });
    }
    if !is_file || bytes >= PAGE_BYTES {
        let read_only = OpenOptions {
            read_only: true,
            ..OpenOptions::default()
        };
        let device = open_with(path, read_only)?;
        node = device.home_node();
        bytes = device.size_bytes();
        if !options.force {
            refuse_contents(path, &*device, is_file)?;
        }
    }
    let old_bytes = metadata.len();
    let mut old_holes = vec![];
    if is_file {
        let file = File::open(path).and_then(|file| holes(&file));
        old_holes = file.map_err(system("find the holes of", path))?;
        bytes = options.size_bytes.unwrap_or(bytes);
        if bytes == 0 {
            return Err(no_size());
        }
    }
    Ok(Target {
        path: path.into(),
        new: false,
        is_created: Cell::new(false),
        is_file,
        old_bytes,
        old_stored_bytes: metadata.blocks() * STAT_BLOCK_BYTES,
        old_holes,
        bytes,
        node,
    })
}

/// Checks a device of another host, without changing it.
fn inspect_remote(path: &Path, options: &FormatOptions) -> Result<Target, VolumeError> {
    let device = open_path(path, OpenMode::READ)?;
    if !options.force {
        refuse_contents(path, &*device, false)?;
    }
    Ok(Target {
        path: path.into(),
        new: false,
        is_created: Cell::new(false),
        is_file: false,
        old_bytes: 0,
        old_stored_bytes: 0,
        old_holes: vec![],
        bytes: device.size_bytes(),
        node: device.home_node(),
    })
}

/// Refuses a device that holds something.
fn refuse_contents(path: &Path, device: &dyn Device, is_file: bool) -> Result<(), VolumeError> {
    let mut what = foreign::recognise(device)?;
    if what.is_none() && is_file && foreign::holds_data(device)? {
        what = Some("data that is not a volume".into());
    }
    match what {
        None => Ok(()),
        Some(what) => Err(VolumeError::InUse {
            path: path.to_string_lossy().into(),
            what,
        }),
    }
}

/// Locks an existing target, and inspects it again: another process may have formatted it before.
fn lock_target(path: &Path, options: &FormatOptions) -> Result<(VolumeLock, Target), VolumeError> {
    let lock = Volume::lock(path, OpenMode::WRITE)?;
    Ok((lock, inspect_target(path, options)?))
}

fn open_and_write(
    targets: &[Target],
    options: &FormatOptions,
    make_contents: impl FnOnce(&Volume) -> Result<(), VolumeError>,
) -> Result<Summary, VolumeError> {
    let mut devices: Vec<Arc<dyn Device>> = Vec::new();
    let mut locks = Vec::new();
    let mut paths = Vec::new();
    for (index, target) in targets.iter().enumerate() {
        let open = open_target(target, options, index)?;
        locks.extend(open.lock);
        devices.push(open.device);
        paths.push(open.path);
    }
    // The contents of the targets were already checked, so `prepare` must not check them again.
    let options = FormatOptions {
        force: true,
        ..options.clone()
    };
    let mut superblock = prepare(&devices, &paths, &options)?;
    let files = targets.iter().zip(&devices).filter(|(t, _)| t.is_file);
    if options.preallocate && files.clone().count() > 0 {
        for (target, device) in files {
            preallocate_target(target, &**device, &options)?;
        }
        superblock.head.flags |= FLAG_PREALLOCATED;
    }
    write(&devices, superblock, make_contents)
}

/// A target that is open.
struct OpenTarget {
    device: Arc<dyn Device>,
    /// The path at which to find it again.
    path: PathBuf,
    /// The lock of a new file.
    lock: Option<VolumeLock>,
}

/// Opens a target, at its new length.
fn open_target(
    target: &Target,
    options: &FormatOptions,
    index: usize,
) -> Result<OpenTarget, VolumeError> {
    let open = OpenOptions {
        create_size: target
            .is_file
            .then_some(target.bytes / PAGE_BYTES * PAGE_BYTES),
        create_new: target.new,
        home_node: options.device_nodes.get(index).copied().flatten(),
        ..OpenOptions::default()
    };
    let device = open_with(&target.path, open)?;
    let lock = target.new.then(|| lock_new(&target.path, &*device));
    let lock = lock.transpose();
    let is_ours = !matches!(
        lock,
        Err(VolumeError::Locked { .. } | VolumeError::InUse { .. })
    );
    target.is_created.set(target.new && is_ours);
    // Stores the path of a link instead of its target: a link in /dev/disk/by-id stays valid, while the device name that it
    // points to may change.
    let path = match is_remote(&target.path) {
        true => target.path.clone(),
        false => std::path::absolute(&target.path).map_err(system("find", &target.path))?,
    };
    Ok(OpenTarget {
        device,
        path,
        lock: lock?,
    })
}

/// Locks a file that this process has created. Fails with `Locked` or `InUse` if another process has locked it before, and so has it.
fn lock_new(path: &Path, device: &dyn Device) -> Result<VolumeLock, VolumeError> {
    let lock = Volume::lock(path, OpenMode::WRITE)?;
    match foreign::recognise(device)? {
        None => Ok(lock),
        Some(what) => Err(VolumeError::InUse {
            path: device.name(),
            what,
        }),
    }
}

fn preallocate_target(
    target: &Target,
    device: &dyn Device,
    options: &FormatOptions,
) -> Result<(), VolumeError> {
    preallocate(device, &target.holes(), options.progress).map_err(|cause| VolumeError::NoRoom {
        path: target.path.clone(),
        bytes: device.size_bytes(),
        cause,
    })
}

/// Adds a file (created if missing) or a block device to an open volume, with `options.slices` new slices (1 if `None`). Also returns the
/// lock of the device, which the caller keeps as long as the volume is open. See `add_device`.
pub fn add(
    volume: &Volume,
    path: &Path,
    options: &FormatOptions,
    make_contents: impl FnOnce(&Volume, Range<usize>) -> Result<(), VolumeError>,
) -> Result<(Added, VolumeLock), AddError> {
    let slices = options.slices.unwrap_or(1).into();
    add::check(volume, slices)?;
    // Of a device of the volume itself, the lock tells more.
    if !options.force
        && let Ok(device) = open_path(path, OpenMode::READ)
    {
        add::check_label(volume, &*device)?;
    }
    let (mut target, mut lock) = (inspect_target(path, options)?, None);
    if !target.new {
        let (held, locked) = lock_target(path, options)?;
        (lock, target) = (Some(held), locked);
    }
    add::check_plan(volume, &target.space(options, 0), slices)?;
    let result = (|| {
        let open = open_target(&target, options, 0)?;
        let mut lock = match open.lock.or(lock) {
            Some(lock) => lock,
            None => Volume::lock(&target.path, OpenMode::WRITE)?,
        };
        let device = open.device;
        lock.keep(device.clone());
        let allocates = volume.superblocks().with(|s| s.head.flags.get()) & FLAG_PREALLOCATED != 0;
        if target.is_file && allocates {
            preallocate_target(&target, &*device, options)?;
        }
        let added = add::add_device(volume, device, &open.path, slices, make_contents)?;
        Ok((added, lock))
    })();
    match &result {
        // The volume may have the device.
        Ok(_) | Err(AddError::Last(_)) => {}
        Err(_) => undo(&target),
    }
    result
}

/// Allocates the space of a whole file on its host. Keeps the file's contents, because a later failure must leave them
/// unchanged.
fn preallocate(
    device: &dyn Device,
    holes: &[Range<u64>],
    progress: Option<fn(u64, u64)>,
) -> Result<(), IoError> {
    let size = device.size_bytes();
    match device.provision(0, size) {
        Err(error) if error.is_unsupported() => {}
        other => return other,
    }
    let mut buffer = AlignedBuffer::new(PIECE_BYTES.min(size as usize));
    let (mut done, mut holes) = (0, holes.iter().peekable());
    while done < size {
        let run = PIECE_BYTES.min((size - done) as usize);
        let end = done + run as u64;
        while holes.next_if(|hole| hole.end <= done).is_some() {}
        if holes.peek().is_some_and(|hole| hole.start < end) {
            let piece = &mut buffer.as_mut_slice()[..run];
            device.read_at(done, piece)?;
            device.write_at(done, piece)?;
        }
        done = end;
        if let Some(progress) = progress {
            progress(done, size);
        }
    }
    device.flush()
}

impl Target {
    /// Returns the space that the target has as device number `index` of those in the options.
    fn space(&self, options: &FormatOptions, index: usize) -> Space {
        let node = options.device_nodes.get(index).copied().flatten();
        Space {
            name: self.path.to_string_lossy().into(),
            blocks: self.bytes / PAGE_BYTES,
            node: node.or(self.node),
            host: remote_host(&self.path).map(Into::into),
        }
    }

    /// Returns the parts of the file without space on the host after it has its new length.
    fn holes(&self) -> Vec<Range<u64>> {
        let beyond = self.old_bytes..self.bytes;
        let beyond = Some(beyond).filter(|range| !range.is_empty());
        self.old_holes.iter().cloned().chain(beyond).collect()
    }
}

/// Undoes the changes after a failure. Removes a file that format created. Gives an existing file its earlier length, and gives
/// the host back the space that the file did not have before.
fn undo(target: &Target) {
    let result = if target.new && !target.is_created.get() {
        Ok(())
    } else if target.new {
        match std::fs::remove_file(&target.path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    } else if target.is_file {
        shrink(target)
    } else {
        Ok(())
    };
    if let Err(error) = result {
        tracing::warn!(
            "{}: cannot undo the changes: {error}",
            target.path.display()
        );
    }
}

fn shrink(target: &Target) -> std::io::Result<()> {
    let file = File::options().write(true).open(&target.path)?;
    if target.old_bytes < target.bytes {
        file.set_len(target.old_bytes)?;
    }
    // `old_holes` also names space that was allocated earlier and never written. Punches no hole if format has added no space, so
    // that the file keeps such space.
    if file.metadata()?.blocks() * STAT_BLOCK_BYTES > target.old_stored_bytes {
        for hole in &target.old_holes {
            punch_hole(&file, hole.start, hole.end - hole.start)?;
        }
    }
    Ok(())
}
