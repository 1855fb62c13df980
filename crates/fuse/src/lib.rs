//! The mount: kernel requests to filesystem and data path.
//!
//! Knows the kernel's protocol and nothing of slices, extents or devices: it calls
//! `jericho_daemon::Mounted` for bytes and `jericho_fs::fs::Fs` for names. Reading order:
//! [`attach`] (how a directory becomes a mount), `protocol` (bytes of the kernel to requests, answers to bytes), `device` and
//! `ring` (the two ways in), `reply` (the way back), `filesystem` (which request is what), then `names`, `attributes`, `open`,
//! `bytes`, `listing` and `xattrs` (what is done), `handles` (descriptors), `control` (the `jericho.*` attributes through which
//! the command talks to the daemon), `workers` and `helpers` (which thread serves where).
#![forbid(unsafe_code)]

mod access_times;
pub mod attach;
mod attributes;
mod bytes;
mod caches;
pub mod control;
mod convert;
mod device;
mod filesystem;
mod handles;
mod helpers;
mod listing;
mod names;
mod open;
mod protocol;
mod reply;
mod ring;
mod workers;
mod xattrs;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_daemon::Mounted;
use parking_lot::Mutex;

pub use attach::MountError;

/// Parses any bytes as messages of the kernel, from the device and from the ring, and does nothing: for fuzzers.
pub fn parse_any(bytes: &[u8]) {
    let agreed = protocol::init::Agreed::all();
    let (header, _) = protocol::request::parse_message(bytes, &agreed);
    if let Some(header) = header {
        let (arguments, rest) = bytes.split_at(bytes.len() / 2);
        let _ = protocol::request::parse(&header, arguments, rest, &agreed);
    }
}

/// How requests come from the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Through its ring where it offers one, else by the device.
    #[default]
    Auto,
    /// By `/dev/fuse`.
    Device,
    /// Through its ring (FUSE over io_uring).
    Ring,
}

impl std::str::FromStr for Transport {
    type Err = String;

    fn from_str(name: &str) -> Result<Transport, String> {
        [Transport::Auto, Transport::Device, Transport::Ring]
            .into_iter()
            .find(|transport| transport.name() == name)
            .ok_or_else(|| "a transport is auto, device or ring".into())
    }
}

impl Transport {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Auto => "auto",
            Transport::Device => "device",
            Transport::Ring => "ring",
        }
    }
}

/// How a volume is mounted.
#[derive(Clone, Debug)]
pub struct MountConfig {
    /// What `mount` and `/proc/mounts` show as the source: the path of the volume.
    pub source: String,
    /// The kernel refuses every change.
    pub read_only: bool,
    /// Other users may enter (the kernel checks their permissions). An ordinary user needs
    /// `user_allow_other` in /etc/fuse.conf for it.
    pub allow_other: bool,
    /// Honour set-id bits and device files, as a mount by root does.
    pub privileged: bool,
    /// Threads that serve requests; `None`: one per CPU, at least four, at most 32.
    pub workers: Option<usize>,
    /// How requests come.
    pub transport: Transport,
}

impl MountConfig {
    /// What fits the user who mounts: root mounts for everybody, others for themselves.
    pub fn for_this_user(source: String, read_only: bool) -> MountConfig {
        let root = rustix::process::geteuid().is_root();
        MountConfig {
            source,
            read_only,
            allow_other: root,
            privileged: root,
            workers: None,
            transport: Transport::Auto,
        }
    }
}

/// A mount that serves. Dropping it does not unmount: whoever holds it decides how it ends.
pub struct Running {
    dir: PathBuf,
    serving: Mutex<Option<Serving>>,
}

/// The threads of a mount.
struct Serving {
    workers: device::Workers,
    ring: Option<ring::Serving>,
    options: Option<access_times::Watch>,
}

impl Running {
    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Detaches the mount from its directory. With `lazy` also when it is busy: who has files open
    /// keeps them, nobody new can enter. Errors: busy, not permitted.
    pub fn unmount(&self, lazy: bool) -> Result<(), MountError> {
        attach::unmount(&self.dir, lazy)
    }

    /// Waits until the kernel has ended the mount, whoever asked for that. Error: what a worker met.
    pub fn wait(&self) -> io::Result<()> {
        let Some(serving) = self.serving.lock().take() else {
            return Ok(());
        };
        let result = serving.workers.wait();
        if let Some(ring) = serving.ring {
            ring.wait();
        }
        if let Some(options) = serving.options {
            options.end();
        }
        result
    }
}

/// Mounts a volume that is up on `dir` and serves it in threads of this process. When it returns,
/// the mount answers. `dir` must be an existing directory; what is in it is hidden.
pub fn mount(
    mounted: Arc<Mounted>,
    dir: &Path,
    config: MountConfig,
) -> Result<Running, MountError> {
    let dir = std::fs::canonicalize(dir).map_err(|cause| MountError::Directory {
        dir: dir.to_owned(),
        cause,
    })?;
    let placement = Arc::new(workers::Placement::new(mounted.topology()));
    let workers = config
        .workers
        .unwrap_or_else(|| placement.default_workers())
        .max(1);
    let rings = rings(&mounted, &dir, config.transport)?;

    let channel: reply::Channel = Arc::new(attach::attach(&dir, &config)?);
    // A channel of its own needs the right to open the device. The helper for ordinary users does not give it, so their
    // threads share one channel.
    let own_channels = workers > 1 && attach::may_open_device();
    tracing::info!(dir = %dir.display(), workers, own_channels, "mounting");
    // From here on the directory is a mount: an error must take it away again.
    let undo = |cause: io::Error| {
        if let Err(error) = attach::unmount(&dir, true) {
            tracing::error!(%error, "cannot take the failed mount away");
        }
        MountError::Session {
            dir: dir.clone(),
            cause,
        }
    };
    let wanted = protocol::init::Wanted {
        request_bytes_max: filesystem::REQUEST_BYTES_MAX,
        background_requests: filesystem::BACKGROUND_REQUESTS,
        ring: rings.is_some(),
    };
    let agreed = device::handshake(&channel, &wanted).map_err(undo)?;
    let filesystem = filesystem::Jericho::new(mounted.clone(), agreed);
    if config.transport == Transport::Ring && !agreed.ring() {
        return Err(undo(io::Error::other(ring::NOT_OFFERED)));
    }
    let ring = match rings.filter(|_| agreed.ring()) {
        Some(rings) => {
            let filesystem = filesystem.clone();
            let serving = ring::Serving::start(rings, &channel, filesystem, workers, &placement);
            Some(serving.map_err(undo)?)
        }
        None => None,
    };
    let workers = device::Workers::start(&channel, workers, own_channels, &filesystem, &placement)
        .map_err(undo)?;
    tracing::info!(ring = ring.is_some(), "the kernel is ready");
    // Without it the mount works as well, only slower.
    if let Err(error) = mounted.serve_clients(Arc::new(caches::Caches(channel))) {
        tracing::warn!(%error, "programs get no fast path");
    }
    let options = access_times::Watch::start(mounted, &dir)
        .inspect_err(|error| tracing::warn!(%error, "access times are kept as relatime says"));
    let serving = Serving {
        workers,
        ring,
        options: options.ok(),
    };
    Ok(Running {
        dir,
        serving: Mutex::new(Some(serving)),
    })
}

/// Rings, where they are wanted and can be had.
fn rings(
    mounted: &Mounted,
    dir: &Path,
    transport: Transport,
) -> Result<Option<ring::Rings>, MountError> {
    let failed = |cause: io::Error| MountError::Session {
        dir: dir.to_owned(),
        cause,
    };
    match (transport, ring::is_offered()) {
        (Transport::Device, _) | (Transport::Auto, false) => Ok(None),
        (Transport::Ring, false) => Err(failed(io::Error::other(ring::NOT_OFFERED))),
        (Transport::Auto, true) => Ok(ring::Rings::new(mounted.topology())
            .inspect_err(|error| tracing::warn!(%error, "no ring; requests come by the device"))
            .ok()),
        (Transport::Ring, true) => ring::Rings::new(mounted.topology())
            .map(Some)
            .map_err(failed),
    }
}
