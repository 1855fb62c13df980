//! Devices of other hosts, which have the name `tyche://HOST/NAME` instead of a path.
//!
//! A program says once, at its start, how it opens them. So each function that takes the path of a device takes such a name as well, and only
//! the program knows the network.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use crate::Device;
use crate::opening::{OpenError, OpenOptions};

/// What names of devices of other hosts begin with.
const SCHEME: &str = "tyche://";

static REMOTES: OnceLock<Box<dyn Remotes>> = OnceLock::new();

/// Opens devices of other hosts.
pub trait Remotes: Send + Sync {
    /// Opens a device. Returns the same device again if this process has it open, unless that device refuses writes and `options` ask for writes.
    fn open(&self, name: &str, options: OpenOptions) -> Result<Arc<dyn Device>, OpenError>;
    /// Returns the process of this host that uses the device, if one does and can be seen.
    fn holder(&self, name: &str) -> Option<u32>;
}

/// Says how this process opens devices of other hosts. Only the first call counts.
pub fn set_remotes(remotes: Box<dyn Remotes>) {
    if REMOTES.set(remotes).is_err() {
        tracing::debug!("this process already knows how to open devices of other hosts");
    }
}

/// Returns whether a path is the name of a device of another host.
pub fn is_remote(path: &Path) -> bool {
    path.as_os_str()
        .as_encoded_bytes()
        .starts_with(SCHEME.as_bytes())
}

/// Returns the host in the name of a device of another host.
pub fn remote_host(path: &Path) -> Option<&str> {
    let rest = path.to_str()?.strip_prefix(SCHEME)?;
    rest.split('/').next()
}

/// Returns the process of this host that uses a device of another host, if one does and can be seen.
pub fn remote_holder(path: &Path) -> Option<u32> {
    REMOTES.get()?.holder(path.to_str()?)
}

/// Opens a device of another host.
pub(crate) fn open(path: &Path, options: OpenOptions) -> Result<Arc<dyn Device>, OpenError> {
    let refused = |why: &str| OpenError::Refused {
        why: format!("{}: {why}", path.display()),
    };
    let name = path.to_str();
    let name = name.ok_or_else(|| refused("the name of a remote device is not valid text"))?;
    let remotes = REMOTES.get();
    let remotes =
        remotes.ok_or_else(|| refused("this program uses only the devices of its own host"))?;
    let device = remotes.open(name, options)?;
    let (size_bytes, required_bytes) = (device.size_bytes(), options.create_size.unwrap_or(1));
    if device.is_read_only() && !options.read_only {
        return Err(refused("its host offers it for reading only"));
    }
    if size_bytes < required_bytes {
        return Err(OpenError::TooSmall {
            path: path.into(),
            size_bytes,
            required_bytes,
        });
    }
    Ok(device)
}
