//! The mount: passes the kernel's requests to the filesystem and the data path.
//!
//! Knows the kernel's protocol and nothing of slices or extents: for a volume it calls `jericho_daemon::Mounted` for bytes and
//! `jericho_fs::Fs` for names. `disk` is another filesystem, with one file, whose bytes are those of a device. Reading order: [`attach`] (how a directory becomes a mount), `protocol` (parses the kernel's
//! messages and encodes answers), `device` and `ring` (how requests arrive), `reply` (how answers leave), `server` (what answers), `filesystem`
//! (dispatches requests), then `names`, `attributes`, `open`, `bytes`, `listing` and `xattrs` (serve requests), `handles`
//! (descriptors), `control` and `addition` (the `jericho.*` attributes through which the command talks to the daemon), `crew` (threads, and
//! further ones while requests hang), `workers` (where threads run) and `helpers`.
#![forbid(unsafe_code)]

mod access_times;
pub mod addition;
pub mod attach;
mod attributes;
mod backlog;
mod bytes;
mod caches;
mod config;
pub mod control;
mod convert;
mod crew;
mod device;
pub mod disk;
mod endable;
mod filesystem;
mod handles;
mod helpers;
mod interrupts;
mod listing;
mod names;
mod open;
mod protocol;
mod reply;
mod ring;
mod ring_binding;
mod ring_polling;
mod ring_requests;
mod ring_syncs;
mod scratch;
mod server;
mod workers;
mod xattrs;

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_daemon::Mounted;
use jericho_export::Disk;
use parking_lot::Mutex;

pub use attach::MountError;
pub use config::{MountConfig, Transport};

/// Regular number of threads of a disk: as many requests are at the device at once.
const DISK_WORKERS: usize = 32;

/// Parses any bytes as messages of the kernel, from the device and from the FUSE ring, and discards the result. For fuzzers.
pub fn parse_any(bytes: &[u8]) {
    let agreed = protocol::init::Agreed::all();
    let (header, _) = protocol::request::parse_message(bytes, &agreed);
    if let Some(header) = header {
        let (arguments, rest) = bytes.split_at(bytes.len() / 2);
        let _ = protocol::request::parse(&header, arguments, rest, &agreed);
    }
}

/// A mount that serves requests. Dropping it does not unmount: its owner decides how the mount ends.
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
    /// Returns the mount's directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Detaches the mount from its directory. With `lazy`, also detaches a busy mount: programs keep the files that they have
    /// open, and no program can open others. Fails when the mount is busy, or when the user may not unmount it.
    pub fn unmount(&self, lazy: bool) -> Result<(), MountError> {
        attach::unmount(&self.dir, lazy)
    }

    /// Waits until the kernel has ended the mount, for whatever reason. Fails with the first error of a worker.
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

/// Mounts an open volume on `dir` and serves it in threads of this process. The mount answers requests when this returns. `dir`
/// must be an existing directory; the mount hides its contents.
pub fn mount(
    mounted: Arc<Mounted>,
    dir: &Path,
    config: MountConfig,
) -> Result<Running, MountError> {
    let dir = absolute(dir)?;
    let nodes = Arc::new(workers::WorkerNodes::new(mounted.topology()));
    let workers = config
        .workers
        .unwrap_or_else(|| nodes.default_workers())
        .max(1);
    let rings = rings(&mounted, &dir, config.transport)?;

    let channel: reply::Channel = Arc::new(attach::attach(&dir, &config)?);
    // A channel for each thread needs the right to open the device. The helper for ordinary users does not grant it, so their
    // threads share one channel.
    let own_channels = workers > 1 && attach::may_open_device();
    tracing::info!(dir = %dir.display(), workers, own_channels, "mounting");
    // From here on the directory is a mount, and an error must unmount it.
    let undo = |cause| undo(&dir, cause);
    let wanted = protocol::init::Wanted {
        features: protocol::init::VOLUME,
        request_bytes_max: server::REQUEST_BYTES_MAX,
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
            let serving = ring::Serving::start(rings, &channel, filesystem, workers, &nodes);
            Some(serving.map_err(undo)?)
        }
        None => None,
    };
    let count = (workers, device::workers_max(workers));
    let workers = device::Workers::start(
        "mount-worker",
        &channel,
        count,
        own_channels,
        &filesystem,
        &nodes,
    )
    .map_err(undo)?;
    tracing::info!(ring = ring.is_some(), "the kernel is ready");
    // Without the fast path, the mount works too, but slower.
    if let Err(error) = mounted.serve_clients(Arc::new(caches::Caches(channel))) {
        tracing::warn!(%error, "the fast path is off: programs use the kernel");
    }
    let options = access_times::Watch::start(mounted, &dir)
        .inspect_err(|error| tracing::warn!(%error, "cannot watch the mount's options; access times follow relatime"));
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

/// Returns the path of an existing directory, absolute and without links.
fn absolute(dir: &Path) -> Result<PathBuf, MountError> {
    std::fs::canonicalize(dir).map_err(|cause| MountError::Directory {
        dir: dir.to_owned(),
        cause,
    })
}

/// Mounts a disk on `dir` as the file `name`, and serves it in threads of this process. The file answers requests when this returns.
pub fn mount_disk(
    disk: Disk,
    name: &OsStr,
    dir: &Path,
    config: MountConfig,
) -> Result<Running, MountError> {
    let dir = absolute(dir)?;
    let channel: reply::Channel = Arc::new(attach::attach(&dir, &config)?);
    let undo = |cause| undo(&dir, cause);
    let wanted = protocol::init::Wanted {
        features: protocol::init::DISK,
        request_bytes_max: server::REQUEST_BYTES_MAX,
        background_requests: filesystem::BACKGROUND_REQUESTS,
        ring: false,
    };
    let agreed = device::handshake(&channel, &wanted).map_err(undo)?;
    let server = disk::DiskServer::new(disk, name, agreed);
    // While the device hangs, further threads answer what needs no device, such as the question for the server's process.
    let workers = config.workers.unwrap_or(DISK_WORKERS).max(1);
    let most = device::workers_max(workers);
    let workers = device::Workers::start(
        "disk-worker",
        &channel,
        (workers, most),
        attach::may_open_device(),
        &server,
        &Arc::new(workers::WorkerNodes::anywhere()),
    )
    .map_err(undo)?;
    let serving = Serving {
        workers,
        ring: None,
        options: None,
    };
    Ok(Running {
        dir,
        serving: Mutex::new(Some(serving)),
    })
}

/// Removes a mount that cannot be served.
fn undo(dir: &Path, cause: io::Error) -> MountError {
    if let Err(error) = attach::unmount(dir, true) {
        tracing::error!(%error, "cannot unmount the failed mount");
    }
    MountError::Session {
        dir: dir.to_owned(),
        cause,
    }
}

/// Creates FUSE rings if the transport allows them and the kernel offers them.
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
            .inspect_err(|error| tracing::warn!(%error, "cannot use the FUSE ring; requests come through the device"))
            .ok()),
        (Transport::Ring, true) => ring::Rings::new(mounted.topology())
            .map(Some)
            .map_err(failed),
    }
}
