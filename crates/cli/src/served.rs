//! Opens a device that a command serves to others.

use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use jericho_storage::{Access, Claim, ClaimError, Device, OpenOptions, open_device};
use jericho_sys::block;

use crate::failure::{Context, Failure};
use crate::{loops, mounts, remote};

/// Opens a device, and claims it for as long as the caller holds the claim. A device of another host is claimed there.
pub fn open(path: &Path, read_only: bool) -> Result<(Arc<dyn Device>, Option<Claim>), Failure> {
    let claim = match remote::named(path)? {
        Some(_) => None,
        None => Some(claim(path, read_only, "serve")?),
    };
    let options = OpenOptions {
        read_only,
        ..OpenOptions::default()
    };
    let device = open_device(path, options).context("cannot serve")?;
    warn_of_rest(path, device.size_bytes());
    Ok((device, claim))
}

/// Claims the device against all other processes. `verb`: what the command does with it, for the message.
pub fn claim(path: &Path, read_only: bool, verb: &str) -> Result<Claim, Failure> {
    let access = match read_only {
        true => Access::Shared,
        false => Access::Exclusive,
    };
    let claim = Claim::take(path, access, false).map_err(|error| match error {
        ClaimError::Held { .. } => Failure::new(format!("{error}; {}", remedy(path, read_only))),
        error => Failure::new(format!("cannot {verb} {}: {error}", path.display())),
    })?;
    match loops::over_file(path).filter(|_| !read_only) {
        None => Ok(claim),
        Some(device) => {
            let (shown, device) = (path.display(), device.display());
            Err(Failure::new(format!(
                "{shown} is in use by the loop device {device}; remove it with: losetup -d {device}"
            )))
        }
    }
}

/// Returns what to do about a device in use.
fn remedy(path: &Path, read_only: bool) -> String {
    let mounted = mounts::of_volume(path).ok().flatten();
    match mounted.filter(|_| !path.is_dir()) {
        Some(dir) => format!("unmount the volume first: jericho umount {}", dir.display()),
        None if read_only => "end the process that writes to it first".into(),
        None => "end that process first, or use another device".into(),
    }
}

/// Warns of bytes after the last whole block, which clients cannot reach.
fn warn_of_rest(path: &Path, served_bytes: u64) {
    let present_bytes =
        std::fs::metadata(path).and_then(|metadata| match metadata.file_type().is_block_device() {
            true => block::device_size_bytes(File::open(path)?),
            false => Ok(metadata.len()),
        });
    if let Ok(present_bytes) = present_bytes
        && present_bytes > served_bytes
    {
        tracing::warn!(
            "the last {} bytes of {} are not served, because they are no whole block of 4096 bytes",
            present_bytes - served_bytes,
            path.display()
        );
    }
}
